package loadbalancer

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
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

// Collect implements prometheus.Collector.
func (c *gatewayCollector) Collect(ch chan<- prometheus.Metric) {
	if !c.Controller.metrics.leading.Load() {
		return
	}
	all := c.gateways.All()
	for _, g := range all {
		ch <- prometheus.MustNewConstMetric(c.gateway, prometheus.GaugeValue, 1, g.Name, gatewayReason(g, c.silent(g.Name)))
	}
	for e, names := range loadbalancer.Masters(all, c.pools.Find, c.silent) {
		ch <- prometheus.MustNewConstMetric(c.masters, prometheus.GaugeValue, float64(len(names)), e.Pool, strconv.Itoa(int(e.ID)), string(e.Family))
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
