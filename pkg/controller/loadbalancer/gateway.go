package loadbalancer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/reconcile"
)

// silence is after how long a gateway of which nothing was heard counts as silent: three times it should have written its status.
const silence = time.Minute

// heard is what is known of gateways. The controller's mu guards it.
type heard struct {
	contacts map[string]contact // by gateway
	// waiting are Services that no gateway serves yet.
	waiting map[types.NamespacedName]bool
}

// contact is when a gateway was heard of.
type contact struct {
	told   metav1.Time // by the gateway's clock
	seen   time.Time   // by this one
	silent bool
}

// ofGateways says whether gateways have the address of a block.
func ofGateways(b *v2.AddressBlock) bool {
	return b.Labels[v2.LabelAnnounce] == string(v2.AnnounceGateway)
}

// gatewayChanged looks at the Services of a gateway: at those that wait for it, and at those that it can't serve, unless it serves other pools than before.
func (c *Controller) gatewayChanged(before, after *v2.LoadBalancerGateway) {
	if before == nil || after == nil || !slices.Equal(before.Spec.Pools, after.Spec.Pools) {
		c.stepAll()
	}
	keys := map[types.NamespacedName]bool{}
	for _, g := range []*v2.LoadBalancerGateway{before, after} {
		if g == nil {
			continue
		}
		c.contacts.Add(g.Name)
		for _, e := range g.Status.Errors {
			namespace, name, _ := strings.Cut(e.Service, "/")
			keys[types.NamespacedName{Namespace: namespace, Name: name}] = true
		}
	}
	c.mu.Lock()
	for key := range c.heard.waiting {
		keys[key] = true
	}
	c.mu.Unlock()
	for key := range keys {
		c.steps.Add(key)
	}
}

// stepAll looks at all Services.
func (c *Controller) stepAll() {
	for _, s := range c.services.All() {
		c.steps.Add(keyOf(s))
	}
}

// contact notes whether a gateway is silent.
func (c *Controller) contact(_ context.Context, name string) error {
	g := c.gateways.Find(name)
	c.mu.Lock()
	was, known := c.heard.contacts[name]
	is := was
	switch now := c.now().Time; {
	case g == nil:
		delete(c.heard.contacts, name)
	case !known || g.Status.LastContact != nil && !g.Status.LastContact.Equal(&was.told):
		is = contact{seen: now}
		if g.Status.LastContact != nil {
			is.told = *g.Status.LastContact
		}
	default:
		is.silent = now.Sub(was.seen) >= silence
	}
	if g != nil {
		c.heard.contacts[name] = is
	}
	c.mu.Unlock()
	if is.silent != was.silent {
		c.stepAll()
	}
	if g == nil || is.silent {
		return nil
	}
	return reconcile.Later(max(time.Second, silence-c.now().Sub(is.seen)))
}

// servedByGateways says whether gateways serve a Service at the address of a block: all of which was heard, since any of them may have the address.
func (c *Controller) servedByGateways(s *corev1.Service, b *v2.AddressBlock) (reason, message string) {
	pool := b.Labels[v2.LabelPool]
	var can, silent, refused []string
	behind := false
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range slices.SortedFunc(slices.Values(c.gateways.All()), func(a, b *v2.LoadBalancerGateway) int { return cmp.Compare(a.Name, b.Name) }) {
		if !slices.Contains(g.Spec.Pools, pool) {
			continue
		}
		i := slices.IndexFunc(g.Status.Errors, func(e v2.GatewayError) bool { return e.Service == s.Namespace+"/"+s.Name })
		does := meta.FindStatusCondition(g.Status.Conditions, v2.GatewayApplied)
		switch {
		case i >= 0:
			refused = append(refused, fmt.Sprintf("gateway %s: %s", g.Name, g.Status.Errors[i].Message))
		case does != nil && (does.Reason == v2.ReasonKernelRefused || does.Reason == v2.ReasonVRRPFailed):
			refused = append(refused, fmt.Sprintf("gateway %s: %s", g.Name, does.Message))
		case c.heard.contacts[g.Name].silent:
			silent = append(silent, g.Name)
		default:
			can = append(can, g.Name)
			behind = behind || !applied(g, b)
		}
	}
	key := keyOf(s)
	delete(c.heard.waiting, key)
	also := ""
	if len(silent) > 0 {
		also = fmt.Sprintf("; nothing was heard for a minute of %s", strings.Join(silent, ", "))
	}
	if len(refused) > 0 {
		also += "; " + strings.Join(refused, "; ")
	}
	switch {
	case len(can) > 0 && !behind:
		return reasonServed, fmt.Sprintf("Gateways serve the address: %s%s", strings.Join(can, ", "), also)
	case len(can) > 0:
		c.heard.waiting[key] = true
		return reasonGateway, fmt.Sprintf("Not all gateways serve the address yet: it waits for %s%s", strings.Join(can, ", "), also)
	case len(refused) > 0:
		return reasonRefused, "No gateway serves the Service" + also
	case len(silent) > 0:
		return reasonSilent, fmt.Sprintf("The gateways of AddressPool %s may serve the address, and don't reach the API server: see whether coil-lb-agent runs there%s", pool, also)
	}
	return reasonNoGateway, fmt.Sprintf("No LoadBalancerGateway names AddressPool %s in its spec.pools", pool)
}

// applied says whether a gateway does what a block says.
func applied(g *v2.LoadBalancerGateway, b *v2.AddressBlock) bool {
	order, err := resourceversion.CompareResourceVersion(g.Status.Applied.Blocks, b.ResourceVersion)
	return err == nil && order >= 0
}
