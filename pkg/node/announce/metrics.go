package announce

import (
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/dataplane"
)

var families = []dataplane.Family{dataplane.IPv4, dataplane.IPv6}

func newGauge(name, help string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{"family"})
	count(g, nil)
	return g
}

func newCounter(name, help string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"family"})
	for _, f := range families {
		c.WithLabelValues(f.String())
	}
	return c
}

// count sets a gauge to the numbers of different addresses.
func count(g *prometheus.GaugeVec, addrs map[netip.Addr]bool) {
	n := map[dataplane.Family]int{}
	for a := range addrs {
		n[dataplane.FamilyOf(a)]++
	}
	for _, f := range families {
		g.WithLabelValues(f.String()).Set(float64(n[f]))
	}
}

// addrs are those for which the node answers.
func (k *Keeper) addrs() map[netip.Addr]bool {
	all := map[netip.Addr]bool{}
	for s := range k.held {
		all[s.addr] = true
	}
	return all
}

func addrsOf(as []Address) map[netip.Addr]bool {
	all := map[netip.Addr]bool{}
	for _, a := range as {
		all[a.Addr] = true
	}
	return all
}

// Describe implements prometheus.Collector.
func (k *Keeper) Describe(ch chan<- *prometheus.Desc) {
	k.answered.Describe(ch)
	k.homeless.Describe(ch)
	k.rivals.Describe(ch)
}

// Collect implements prometheus.Collector.
func (k *Keeper) Collect(ch chan<- prometheus.Metric) {
	k.answered.Collect(ch)
	k.homeless.Collect(ch)
	k.rivals.Collect(ch)
}
