package loadbalancer

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// pending stands for the reason of Services without conditions.
const pending = "Pending"

// collector counts Services when it is asked.
type collector struct {
	services     kube.Cache[corev1.Service]
	withoutClass bool
	// leading says that the conditions are this process's.
	leading atomic.Bool
	count   *prometheus.Desc
}

func newCollector(services kube.Cache[corev1.Service], withoutClass bool) *collector {
	return &collector{
		services: services, withoutClass: withoutClass,
		count: prometheus.NewDesc("coil_lb_service_count",
			"Services that Coil serves, by why they have no address, else by the reason of their condition Served; Pending before they have one. Only the leader exports it.",
			[]string{"reason"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) { ch <- c.count }

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	if !c.leading.Load() {
		return
	}
	count := map[string]int{loadbalancer.ReasonServed: 0}
	for _, s := range c.services.All() {
		if loadbalancer.Managed(s, c.withoutClass) {
			count[reasonOf(s)]++
		}
	}
	for reason, n := range count {
		ch <- prometheus.MustNewConstMetric(c.count, prometheus.GaugeValue, float64(n), reason)
	}
}

// reasonOf says how far a Service is.
func reasonOf(s *corev1.Service) string {
	for _, kind := range []string{loadbalancer.ConditionAssigned, loadbalancer.ConditionServed} {
		c := meta.FindStatusCondition(s.Status.Conditions, kind)
		switch {
		case c == nil:
			return pending
		case c.Status != metav1.ConditionTrue:
			return c.Reason
		}
	}
	return loadbalancer.ReasonServed
}
