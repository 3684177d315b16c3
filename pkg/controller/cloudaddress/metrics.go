package cloudaddress

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/openstack"
)

// Metrics counts the calls of clouds.
type Metrics struct {
	calls   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

// NewMetrics returns metrics registered at r.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_lb_openstack_calls_total", Help: "Calls of OpenStack's API by method, resource and the code of the answer; the code 0 is no answer.",
		}, []string{"method", "resource", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "coil_lb_openstack_call_duration_seconds", Help: "How long calls of OpenStack's API took, by resource.",
			Buckets: prometheus.ExponentialBuckets(0.025, 2, 12),
		}, []string{"resource"}),
	}
	r.MustRegister(m.calls, m.seconds)
	return m
}

// Observe counts a call.
func (m *Metrics) Observe(c openstack.Call) {
	m.calls.WithLabelValues(c.Method, c.Resource, strconv.Itoa(c.Code)).Inc()
	m.seconds.WithLabelValues(c.Resource).Observe(c.Took.Seconds())
}
