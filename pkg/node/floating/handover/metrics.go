package handover

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics tell of hand-overs.
type metrics struct {
	results *prometheus.CounterVec
	flows   *prometheus.CounterVec
	seconds prometheus.Histogram
}

// Sides of a hand-over.
const (
	sent     = "sent"
	received = "received"
)

// Results of a hand-over.
const (
	done    = "done"
	refused = "refused"
	failed  = "failed"
)

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_handover_total",
			Help: "Times that the connections of a floating address were to be copied to its next holder, by side (sent, received) and result: done, refused " +
				"by the receiver, or failed. The address moves whatever the result; connections that weren't copied end.",
		}, []string{"side", "result"}),
		flows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_handover_flows_total",
			Help: "Connections of floating addresses that were copied to their next holder, by side.",
		}, []string{"side"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "coil_floating_handover_seconds",
			Help:    "Time that the holder of a floating address has spent to copy its connections before the address moved.",
			Buckets: []float64{0.01, 0.03, 0.1, 0.3, 1, 3, 10},
		}),
	}
	for _, side := range []string{sent, received} { // what was never counted is 0, so that the first one is an increase
		m.flows.WithLabelValues(side)
		for _, result := range []string{done, refused, failed} {
			m.results.WithLabelValues(side, result)
		}
	}
	r.MustRegister(m.results, m.flows, m.seconds)
	return m
}

func (m *metrics) ended(side, result string, flows int) {
	m.results.WithLabelValues(side, result).Inc()
	m.flows.WithLabelValues(side).Add(float64(flows))
}

func (m *metrics) took(since time.Time) { m.seconds.Observe(time.Since(since).Seconds()) }
