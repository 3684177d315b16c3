package loadbalancer

import (
	"context"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
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

// gatewayChanged looks at the Services of a gateway: at those that wait for it, and at those that it can't serve. All Services are looked at if the gateway's
// spec changes, or its reason to serve none of them.
func (c *Controller) gatewayChanged(before, after *v2.LoadBalancerGateway) {
	if before == nil || after == nil || !equality.Semantic.DeepEqual(before.Spec, after.Spec) || refusal(before) != refusal(after) {
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

// refusal is a gateway's reason to serve no Service; empty if it serves any. The kernel's words are left out: they name other Services each second.
func refusal(g *v2.LoadBalancerGateway) string {
	does := meta.FindStatusCondition(g.Status.Conditions, v2.GatewayApplied)
	if does != nil && does.Reason == v2.ReasonKernelRefused {
		return does.Reason
	}
	return loadbalancer.RefusalOfAll(g)
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

// silent says whether nothing was heard of a gateway for too long.
func (c *Controller) silent(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.heard.contacts[name].silent
}

// noteWaiting notes whether a Service waits for gateways.
func (c *Controller) noteWaiting(key types.NamespacedName, waits bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if waits {
		c.heard.waiting[key] = true
	} else {
		delete(c.heard.waiting, key)
	}
}
