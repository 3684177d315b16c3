package egress

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// syncClients makes the EndpointSlices of an Egress those of its clients.
func (c *Controller) syncClients(ctx context.Context, key types.NamespacedName) error {
	e := c.egresses.Find(key.String())
	if e == nil {
		c.refused.Delete(key)
		c.lists.Forget(key)
		return nil
	}
	if e.DeletionTimestamp != nil {
		return nil
	}
	have := c.slices.Under(key.String())
	if err := c.lists.Ready(key, have); err != nil {
		return err
	}
	// A selector that can't be used is told by the status.
	clients, refused, _ := egress.Clients(egress.ClientFacts{Egress: e, Pods: c.naming.Under(key.String()), Namespaces: c.namespaceLabels})
	for _, p := range c.newlyRefused(key, refused) {
		c.cfg.Recorder.Eventf(podReference(p), nil, corev1.EventTypeWarning, "EgressNotAllowed", "Reconcile",
			"Egress %s doesn't allow this namespace (spec.allowedNamespaces): what the pod sends to its destinations is dropped", key)
	}
	return c.lists.Write(ctx, key, have, egress.ListOf(e).With(clients))
}

// newlyRefused returns the pods that an Egress refuses now and didn't refuse before.
func (c *Controller) newlyRefused(key types.NamespacedName, refused []*corev1.Pod) []*corev1.Pod {
	before, now := c.refused.Get(key), sets.Set[types.UID]{}
	for _, p := range refused {
		now.Insert(p.UID)
	}
	c.refused.Set(key, now)
	return slices.DeleteFunc(refused, func(p *corev1.Pod) bool { return before.Has(p.UID) })
}

// podReference is an object that Events can be about: pods of the cache lack their kind.
func podReference(p *corev1.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: p.Namespace, Name: p.Name, UID: p.UID}
}

func (c *Controller) namespaceLabels(name string) labels.Set {
	if ns := kube.CacheOf[metav1.PartialObjectMetadata](c.cfg.Namespaces).Find(name); ns != nil {
		return ns.Labels
	}
	return nil
}
