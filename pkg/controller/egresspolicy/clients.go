package egresspolicy

import (
	"cmp"
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/policy"
)

// syncClients makes the EndpointSlices of a policy those of the pods that it selects.
func (c *Controller) syncClients(ctx context.Context, key types.NamespacedName) error {
	defer c.changed(chooser{policy: key})
	have := c.slices.Under(key.String())
	s := c.policies.find(key)
	if s == nil {
		c.keeping.Delete(key)
		c.left.Delete(key)
		if len(have) == 0 {
			c.keeper.Forget(key)
			return nil
		}
		return c.keeper.Clear(ctx, key, have)
	}
	if !s.observed() {
		return nil // its status is an event
	}
	e := c.egresses.Find(s.Egress.String())
	decides := e != nil && policy.Decides(s.status, e)
	if decides && e.DeletionTimestamp != nil {
		return nil
	}
	want, wait := c.leaving(s, have)
	if !decides {
		c.keeping.Delete(key)
		if len(want) == 0 {
			return c.keeper.Clear(ctx, key, have)
		}
	}
	if err := c.keeper.Ready(key, have); err != nil {
		return err
	}
	if decides {
		// A selector that can't be used, and pods that aren't allowed, are told by the status.
		clients, _, _ := egress.Clients(egress.ClientFacts{Egress: e, Pods: c.selected(s.Policy, s.Name.Namespace), Namespaces: c.namespaceLabels})
		clients, inTurn := c.inTurn(s, e, have, clients)
		want, wait = append(want, egress.PolicyListOf(e, s.told()).With(clients)), soonest(wait, inTurn)
	}
	return cmp.Or(c.keeper.Write(ctx, key, have, want...), again(wait))
}

// selected returns the pods of a namespace, or of all of them, that a policy selects and that may be clients.
func (c *Controller) selected(p policy.Policy, namespace string) (all []*corev1.Pod) {
	if namespace == "" {
		for _, ns := range c.namespaces.All() {
			all = append(all, c.selected(p, ns.Name)...)
		}
		return all
	}
	ns := c.namespaceLabels(namespace)
	for _, pod := range c.pods.In(namespace) {
		if egress.MayBeClient(pod) && p.Selects(podOf(pod, ns)) && !c.isRouter(pod) {
			all = append(all, pod)
		}
	}
	return all
}

// isRouter says whether a pod is a router of an Egress of its namespace. Anybody may give labels.
func (c *Controller) isRouter(p *corev1.Pod) bool {
	name, labelled := plan.RouterOf(p.Labels)
	return labelled && c.egresses.Find(p.Namespace+"/"+name) != nil
}

func (c *Controller) namespaceLabels(name string) labels.Set {
	if ns := c.namespaces.Find(name); ns != nil {
		return ns.Labels
	}
	return nil
}
