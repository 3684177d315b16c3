package routerhealth

import (
	"net/netip"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/client"
)

var routersDesc = prometheus.NewDesc("coil_egress_node_routers",
	"Routers that pods of the node send to directly, by Egress, address family and state: live, draining, dead.",
	[]string{"namespace", "egress", "family", "state"}, nil)

// Describe implements prometheus.Collector.
func (c *Checker) Describe(out chan<- *prometheus.Desc) {
	out <- routersDesc
	c.failover.Describe(out)
}

type routerLabels struct {
	egress string
	family dataplane.Family
	state  string
}

// Collect implements prometheus.Collector.
func (c *Checker) Collect(out chan<- prometheus.Metric) {
	c.failover.Collect(out)
	var groups []client.Group
	c.mu.Lock()
	for _, p := range c.pods {
		groups = append(groups, p.groups...)
	}
	c.mu.Unlock()
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
	for l, addrs := range routers {
		namespace, egress, _ := strings.Cut(l.egress, "/")
		out <- prometheus.MustNewConstMetric(routersDesc, prometheus.GaugeValue, float64(len(addrs)), namespace, egress, l.family.String(), l.state)
	}
}
