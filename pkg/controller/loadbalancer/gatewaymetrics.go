package loadbalancer

import (
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/keepalived"
)

// Reasons of gateways beside those of their condition Applied.
const (
	silentGateway = "Silent"
	behindGateway = "Behind"
)

// gatewayCollector tells what gateways tell: nobody else may reach their own metrics, since they are machines outside of the cluster.
type gatewayCollector struct {
	*Controller
	gateway, masters *prometheus.Desc
}

func newGatewayCollector(c *Controller) *gatewayCollector {
	return &gatewayCollector{
		c,
		prometheus.NewDesc("coil_lb_gateway_reason",
			"1 for each LoadBalancerGateway, by the reason of its condition Applied; Silent if nothing was heard of it for a minute, Behind while it does what a former spec says, Pending before it tells anything. Only the leader exports it.",
			[]string{"gateway", "reason"}, nil),
		prometheus.NewDesc("coil_lb_gateway_masters",
			"Gateways that say that they are the master of an election by VRRP, without those of which nothing was heard for a minute. Only the leader exports it.",
			[]string{"pool", "router_id", "family"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *gatewayCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.gateway; ch <- c.masters }

// election is one by which gateways agree who has addresses of a pool.
type election struct {
	pool   string
	id     int32
	family corev1.IPFamily
}

// Collect implements prometheus.Collector.
func (c *gatewayCollector) Collect(ch chan<- prometheus.Metric) {
	if !c.Controller.metrics.leading.Load() {
		return
	}
	masters := map[election]int{}
	for _, g := range c.gateways.All() {
		c.mu.Lock()
		silent := c.heard.contacts[g.Name].silent
		c.mu.Unlock()
		ch <- prometheus.MustNewConstMetric(c.gateway, prometheus.GaugeValue, 1, g.Name, gatewayReason(g, silent))
		for _, v := range g.Status.VRRP {
			e := election{c.poolOf(g, v.RouterID), v.RouterID, v.Family}
			masters[e] += 0
			if !silent && v.State == string(keepalived.Master) {
				masters[e]++
			}
		}
	}
	for e, n := range masters {
		ch <- prometheus.MustNewConstMetric(c.masters, prometheus.GaugeValue, float64(n), e.pool, strconv.Itoa(int(e.id)), string(e.family))
	}
}

// gatewayReason says how a gateway is.
func gatewayReason(g *v2.LoadBalancerGateway, silent bool) string {
	does := meta.FindStatusCondition(g.Status.Conditions, v2.GatewayApplied)
	switch {
	case silent:
		return silentGateway
	case does == nil:
		return pending
	case does.ObservedGeneration < g.Generation:
		return behindGateway
	}
	return does.Reason
}

// poolOf is the pool of a gateway that has an election; empty for none.
func (c *gatewayCollector) poolOf(g *v2.LoadBalancerGateway, id int32) string {
	i := slices.IndexFunc(g.Spec.Pools, func(name string) bool {
		p := c.pools.Find(name)
		return p != nil && p.Spec.VRRP != nil && id >= p.Spec.VRRP.RouterID && id < p.Spec.VRRP.RouterID+p.Spec.VRRP.Instances
	})
	if i < 0 {
		return ""
	}
	return g.Spec.Pools[i]
}
