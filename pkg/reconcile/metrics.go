package reconcile

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts the work of loops.
type Metrics struct {
	total    *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// NewMetrics returns metrics registered at r; with a nil r they aren't exported.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_reconcile_total",
			Help: "Syncs by loop and result. A sync that has to be repeated later counts as success.",
		}, []string{"loop", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "coil_reconcile_duration_seconds",
			Help:    "Duration of syncs by loop, whatever their result.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 10),
		}, []string{"loop"}),
	}
	if r != nil {
		r.MustRegister(m.total, m.duration)
	}
	return m
}

func (m *Metrics) observe(loop string, err error, d time.Duration) {
	result := "success"
	var later *laterError
	if err != nil && (!errors.As(err, &later) || later.err != nil) {
		result = "error"
	}
	m.total.WithLabelValues(loop, result).Inc()
	m.duration.WithLabelValues(loop).Observe(d.Seconds())
}
