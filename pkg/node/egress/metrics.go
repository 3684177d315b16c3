package egress

import (
	"net/netip"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/client"
)

var (
	clientsDesc = prometheus.NewDesc("coil_egress_node_client_pods",
		"Pods of the node that use an Egress, or would if it existed, by Egress.", []string{"namespace", "egress"}, nil)
	tunnelsDesc = prometheus.NewDesc("coil_egress_node_tunnels",
		"Tunnels that pods of the node should have to the Services and routers of Egresses.", nil, nil)
	routersDesc = prometheus.NewDesc("coil_egress_node_routers",
		"Routers that pods of the node send to directly, by Egress, address family and state: live, draining, dead.",
		[]string{"namespace", "egress", "family", "state"}, nil)
	pinnedDesc = prometheus.NewDesc("coil_egress_node_pinned_flows",
		"Flows of pods of the node that stay with their router whatever becomes of its group.", nil, nil)
)

// counts are metrics of what happened.
type counts struct {
	moved, unpinned prometheus.Counter
	failover        prometheus.Histogram
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
		failover: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "coil_egress_node_failover_duration_seconds",
			Help:    "Time from the last answer of a router that died until a pod sends new flows to others.",
			Buckets: []float64{1, 2, 3, 4, 5, 7, 10, 20, 60},
		}),
	}
}

func (c counts) all() []prometheus.Collector {
	return []prometheus.Collector{c.moved, c.unpinned, c.failover}
}

// Describe implements prometheus.Collector.
func (m *Manager) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{clientsDesc, tunnelsDesc, routersDesc, pinnedDesc} {
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
	var groups []client.Group
	m.mu.Lock()
	for _, s := range m.known {
		tunnels += s.tunnels
		for _, n := range s.pinned {
			pinned += n
		}
		for _, e := range s.egresses {
			if !e.Former {
				clients[e.Name]++
			}
		}
		groups = append(groups, s.groups...)
	}
	m.mu.Unlock()
	routers := map[routerLabels]map[netip.Addr]bool{}
	for _, g := range groups {
		if !g.Direct {
			continue
		}
		for state, addrs := range map[string][]netip.Addr{"live": g.Members, "draining": g.Draining, "dead": g.Dead} {
			labels := routerLabels{g.Egress, g.Family, state}
			if routers[labels] == nil {
				routers[labels] = map[netip.Addr]bool{}
			}
			for _, a := range addrs {
				routers[labels][a] = true
			}
		}
	}
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	for name, n := range clients {
		namespace, egress, _ := strings.Cut(name, "/")
		gauge(clientsDesc, n, namespace, egress)
	}
	for l, addrs := range routers {
		namespace, egress, _ := strings.Cut(l.egress, "/")
		gauge(routersDesc, len(addrs), namespace, egress, l.family.String(), l.state)
	}
	gauge(tunnelsDesc, tunnels)
	gauge(pinnedDesc, pinned)
}

type routerLabels struct {
	egress string
	family dataplane.Family
	state  string
}
