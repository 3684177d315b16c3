package floating

import "github.com/prometheus/client_golang/prometheus"

// metrics tell how the node holds addresses.
type metrics struct {
	requests, failures *prometheus.CounterVec
	lost               prometheus.Counter
	taken              *prometheus.CounterVec
}

// Reasons of metrics.taken.
const (
	takenFirst  = "first"
	takenGiven  = "given"
	takenFailed = "failed"
)

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_requests_total",
			Help: "Requests to the API server about the holders of floating addresses, by kind (read, write) and result (done, failed).",
		}, []string{"kind", "result"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_kernel_failures_total",
			Help: "Attempts to make the kernel answer for a floating address, or stop, that failed.",
		}, []string{"order"}),
		lost: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coil_floating_messages_lost_total",
			Help: "Messages of other nodes that were lost since too many waited.",
		}),
	}
	m.taken = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "coil_floating_taken_total",
		Help: "Times that this node has got a floating address, by the AddressBlock and why: the first one to have it, given by the holder of before, or taken since that one had failed.",
	}, []string{"block", "reason"})
	r.MustRegister(m.requests, m.failures, m.lost, m.taken)
	return m
}

// changed counts that a node has got an address, as its record says that was another one's before.
func (m *metrics) changed(node string, before, after known) {
	if before.block == nil || after.record.Holder != node || after.record.Epoch == before.record.Epoch {
		return
	}
	reason := takenFailed
	switch {
	case before.record.Epoch == 0:
		reason = takenFirst
	case after.record.HandedOver:
		reason = takenGiven
	}
	m.taken.WithLabelValues(after.block.Name, reason).Inc()
}

// gone forgets an address.
func (m *metrics) gone(k known) {
	if k.block != nil {
		m.taken.DeletePartialMatch(prometheus.Labels{"block": k.block.Name})
	}
}

func (m *metrics) request(kind string, done bool) {
	result := "failed"
	if done {
		result = "done"
	}
	m.requests.WithLabelValues(kind, result).Inc()
}
