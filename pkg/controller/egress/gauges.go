package egress

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/types"
)

// gauges tell about each Egress. Only the leader exports them.
type gauges struct{ clients, slices, ready *prometheus.GaugeVec }

func newGauges(r prometheus.Registerer) gauges {
	vec := func(name, help string) *prometheus.GaugeVec {
		return promauto.With(r).NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help + " Only the leader exports it."}, []string{"namespace", "egress"})
	}
	return gauges{
		clients: vec("coil_controller_egress_clients", "Pods that are written into the EndpointSlices of an Egress."),
		slices:  vec("coil_controller_egress_client_slices", "EndpointSlices with clients of an Egress."),
		ready:   vec("coil_controller_egress_ready_routers", "Router pods of an Egress that are ready, as its Deployment says."),
	}
}

func (g gauges) all() []*prometheus.GaugeVec {
	return []*prometheus.GaugeVec{g.clients, g.slices, g.ready}
}

func (g gauges) set(key types.NamespacedName, clients, slices int, d *appsv1.Deployment) {
	g.clients.WithLabelValues(key.Namespace, key.Name).Set(float64(clients))
	g.slices.WithLabelValues(key.Namespace, key.Name).Set(float64(slices))
	ready := int32(0)
	if d != nil {
		ready = d.Status.ReadyReplicas
	}
	g.ready.WithLabelValues(key.Namespace, key.Name).Set(float64(ready))
}

func (g gauges) forget(key types.NamespacedName) {
	for _, v := range g.all() {
		v.DeleteLabelValues(key.Namespace, key.Name)
	}
}

func (g gauges) reset() {
	for _, v := range g.all() {
		v.Reset()
	}
}
