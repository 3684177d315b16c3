package floating

import "github.com/prometheus/client_golang/prometheus"

// metrics tell how the node holds addresses.
type metrics struct {
	requests, failures *prometheus.CounterVec
	lost               prometheus.Counter
}

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
	r.MustRegister(m.requests, m.failures, m.lost)
	return m
}

func (m *metrics) request(kind string, done bool) {
	result := "failed"
	if done {
		result = "done"
	}
	m.requests.WithLabelValues(kind, result).Inc()
}
