package view

import (
	"cmp"
	"context"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/store"
)

// Floating gives the view the AddressBlocks of floating addresses: without them no router has any. It is for the time before the watches
// start.
func (e *Egresses) Floating(blocks kube.Cache[v2.AddressBlock]) { e.floating = blocks }

// Holder returns the UID of the router that has the floating address of an AddressBlock, empty if none has, and whether the node answers for that
// router yet.
func (e *Egresses) Holder(block string) (pod types.UID, settled bool) {
	if e.floating.Indexer == nil {
		return "", false
	}
	if b := e.floating.Find(block); b != nil {
		return plan.RouterWith(b), plan.Settled(b)
	}
	return "", false
}

// RouterServes says whether the Service of an Egress lists the router pod of a UID as one that can take packets. It may be ending.
func (e *Egresses) RouterServes(pod types.UID) bool {
	for _, s := range e.listing.Under(string(pod)) {
		for _, ep := range s.Endpoints {
			serves := cmp.Or(ep.Conditions.Serving, ep.Conditions.Ready) // which are the same unless the pod is ending
			if ep.TargetRef != nil && ep.TargetRef.UID == pod && (serves == nil || *serves) {
				return true
			}
		}
	}
	return false
}

// ListsRouter says whether the Service of an Egress lists the pod of a UID as its router, ready or not.
func (e *Egresses) ListsRouter(pod types.UID) bool { return len(e.listing.Under(string(pod))) > 0 }

// EgressOfRouter returns the Egress of which a pod of the node is a router, nil if it is none as far as known.
func (e *Egresses) EgressOfRouter(ctx context.Context, pod store.Pod) *v2.Egress {
	p, err := e.Pod(ctx, pod, false)
	if err != nil {
		return nil // it isn't there, or not yet
	}
	name, ok := plan.RouterOf(p.Labels)
	if !ok {
		return nil
	}
	return e.egresses.Find(cache.NewObjectName(p.Namespace, name).String())
}

// podsOfSlice are the UIDs of the pods that a slice lists.
func podsOfSlice(s *discoveryv1.EndpointSlice) (uids []string) {
	for _, ep := range s.Endpoints {
		if ep.TargetRef != nil {
			uids = append(uids, string(ep.TargetRef.UID))
		}
	}
	return uids
}
