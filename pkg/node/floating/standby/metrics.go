package standby

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics tell of connections that are copied all the time.
type metrics struct {
	s                 *Standby
	flows, restarts   *prometheus.CounterVec
	full              prometheus.Counter
	addresses, behind *prometheus.Desc
}

const (
	sideSent     = "sent"
	sideReceived = "received"
)

func newMetrics(r prometheus.Registerer, s *Standby) *metrics {
	m := &metrics{
		s: s,
		flows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_standby_flows_total",
			Help: "Connections of floating addresses that were copied all the time to the node that takes the address when its holder fails, by side (sent, received) and what became of them: opened or ended.",
		}, []string{"side", "event"}),
		restarts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_standby_restarts_total",
			Help: "Times that all connections had to be copied anew, by reason: connection to the other node, events_lost by the kernel, or overflow, since more changed than the other node took.",
		}, []string{"reason"}),
		full: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coil_floating_standby_full_total",
			Help: "Connections of other nodes' floating addresses that a router here had no room for: three quarters of what it may track.",
		}),
		addresses: prometheus.NewDesc("coil_floating_standby_addresses",
			"Floating addresses of this node whose connections are to be copied all the time, by whether the other node has all of them: in_step or behind; alone without another node that may have the address.", []string{"state"}, nil),
		behind: prometheus.NewDesc("coil_floating_standby_behind_seconds",
			"For how long another node lacks connections of a floating address of this node, the longest; 0 if none does.", nil, nil),
	}
	r.MustRegister(m.flows, m.restarts, m.full, m)
	return m
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.addresses
	ch <- m.behind
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	var behind time.Duration
	count := map[string]int{"in_step": 0, "behind": 0, "alone": 0}
	now := time.Now()
	m.s.mu.Lock()
	for block, l := range m.s.leads {
		state := "in_step"
		if since, _ := m.s.streams[l.node].state(block); !since.IsZero() {
			state = "behind"
		}
		count[state]++
	}
	for name, b := range m.s.blocks {
		f := b.Floating
		if _, led := m.s.leads[name]; !led && f.Holding.Holder == m.s.cfg.Node && (f.MovingTo == "" || f.MovingTo == f.Holding.Holder) {
			count["alone"]++
		}
	}
	for _, st := range m.s.streams {
		behind = max(behind, st.behind(now))
	}
	m.s.mu.Unlock()
	for state, n := range count {
		ch <- prometheus.MustNewConstMetric(m.addresses, prometheus.GaugeValue, float64(n), state)
	}
	ch <- prometheus.MustNewConstMetric(m.behind, prometheus.GaugeValue, behind.Seconds())
}
