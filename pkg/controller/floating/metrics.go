package floating

import (
	"cmp"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// collector counts AddressClaims when it is asked.
type collector struct {
	controller *Controller
	// leading says that the claims' conditions are this process's.
	leading atomic.Bool
	claims  *prometheus.Desc
}

// pending stands for the reason of claims without the condition.
const pending = "Pending"

func newCollector(c *Controller) *collector {
	return &collector{controller: c, claims: prometheus.NewDesc("coil_floating_claims",
		"AddressClaims of an AddressPool, by the reason of their condition Ready: AddressesHeld if they have all addresses, Pending before they have one. "+
			"Those of pools that don't exist have no pool. Only the leader exports it.", []string{"pool", "reason"}, nil)}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) { ch <- c.claims }

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	if !c.leading.Load() {
		return
	}
	type row struct{ pool, reason string }
	count := map[row]int{}
	for _, p := range c.controller.pools.All() {
		// With 0 an alert sees that the pool isn't exhausted any more.
		count[row{p.Name, v2.ReasonPoolExhausted}] = 0
	}
	for _, claim := range c.controller.claims.All() {
		r := row{reason: pending}
		if c.controller.pools.Find(claim.Spec.Pool) != nil { // anybody may invent names
			r.pool = claim.Spec.Pool
		}
		if ready := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimReady); ready != nil {
			r.reason = cmp.Or(ready.Reason, pending)
		}
		count[r]++
	}
	for r, n := range count {
		ch <- prometheus.MustNewConstMetric(c.claims, prometheus.GaugeValue, float64(n), r.pool, r.reason)
	}
}
