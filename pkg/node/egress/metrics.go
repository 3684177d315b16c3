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

// Describe implements prometheus.Collector.
func (m *Manager) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{clientsDesc, tunnelsDesc, pinnedDesc, m.moved.Desc(), m.unpinned.Desc()} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Manager) Collect(out chan<- prometheus.Metric) {
	out <- m.moved
	out <- m.unpinned
	tunnels, pinned := 0, 0
	clients := map[string]int{}
	m.mu.Lock()
	for _, s := range m.known {
		tunnels += s.tunnels
		pinned += s.pinned
		counted := map[string]bool{}
		for _, e := range s.egresses {
			if !e.Former && !counted[e.Name] { // several policies may let a pod use one Egress
				counted[e.Name] = true
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
