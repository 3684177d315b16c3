package egress

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	clientsDesc = prometheus.NewDesc("coil_egress_node_client_pods",
		"Pods of the node that use an Egress, or would if it existed, by Egress.", []string{"namespace", "egress"}, nil)
	tunnelsDesc = prometheus.NewDesc("coil_egress_node_tunnels",
		"Tunnels that pods of the node should have to the Services and routers of Egresses.", nil, nil)
	pinnedDesc = prometheus.NewDesc("coil_egress_node_pinned_flows",
		"Flows of pods of the node that stay with their router whatever becomes of its group.", nil, nil)
)

// counts are metrics of what happened.
type counts struct {
	moved, unpinned prometheus.Counter
}

func newCounts() counts {
	return counts{
		moved: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coil_egress_node_bucket_moves_total",
			Help: "Shares of new flows that went from one router to another, in all pods of the node.",
		}),
		unpinned: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coil_egress_node_unpinned_flows_total",
			Help: "Flows that could not be kept with their router when routers changed: a pod had too many.",
		}),
	}
}

func (c counts) all() []prometheus.Collector {
	return []prometheus.Collector{c.moved, c.unpinned}
}

// Describe implements prometheus.Collector.
func (m *Manager) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{clientsDesc, tunnelsDesc, pinnedDesc} {
		out <- d
	}
	for _, c := range m.counts.all() {
		c.Describe(out)
	}
}

// Collect implements prometheus.Collector.
func (m *Manager) Collect(out chan<- prometheus.Metric) {
	for _, c := range m.counts.all() {
		c.Collect(out)
	}
	tunnels, pinned := 0, 0
	clients := map[string]int{}
	m.mu.Lock()
	for _, s := range m.known {
		tunnels += s.tunnels
		pinned += s.pinned
		for _, e := range s.egresses {
			if !e.Former {
				clients[e.Name]++
			}
		}
	}
	m.mu.Unlock()
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	for name, n := range clients {
		namespace, egress, _ := strings.Cut(name, "/")
		gauge(clientsDesc, n, namespace, egress)
	}
	gauge(tunnelsDesc, tunnels)
	gauge(pinnedDesc, pinned)
}
