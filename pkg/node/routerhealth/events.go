package routerhealth

import (
	"context"
	"hash/maphash"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/client"
)

// Reasons of Events on Egresses.
const (
	// RouterDead: a router doesn't answer, and pods of the node with peering Direct send it no new flow.
	RouterDead = "RouterDead"
	// RouterBack: a router answers again.
	RouterBack = "RouterBack"
)

// tell tells people of a router that died or came back, on some nodes.
func (c *Checker) tell(ctx context.Context, r routerKey, dead bool) {
	name := r.name()
	klog.FromContext(ctx).Info("A router of an Egress died or came back", "egress", klog.KRef(name.Namespace, name.Name), "router", r.addr, "dead", dead)
	ref := &corev1.ObjectReference{APIVersion: v2.GroupVersion.String(), Kind: "Egress", Namespace: name.Namespace, Name: name.Name}
	clients := 0
	if e, err := c.egresses.Egress(ctx, name, false); err == nil {
		ref.UID, clients = e.UID, int(e.Status.Clients)
	}
	switch {
	case !c.tells(r, clients):
	case dead:
		c.recorder.Eventf(ref, nil, corev1.EventTypeWarning, RouterDead, RouterDead, "router %s doesn't answer: pods of the node send no new flow to it", r.addr)
	default:
		c.recorder.Eventf(ref, nil, corev1.EventTypeNormal, RouterBack, RouterBack, "router %s answers again", r.addr)
	}
}

// name is that of the Egress.
func (k routerKey) name() types.NamespacedName {
	namespace, name, _ := strings.Cut(k.egress, "/")
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// tells says whether an Event on this node tells of a router: by one of the Egress's pods here that speaks. clients is how
// many pods of the whole cluster use the Egress.
func (c *Checker) tells(r routerKey, clients int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		if slices.ContainsFunc(p.groups, func(g client.Group) bool { return g.Egress == r.egress }) && speaks(r.addr, p.ContainerID, clients) {
			return true
		}
	}
	return false
}

// spokesmen is of how many clients of an Egress, in the whole cluster, the nodes tell of a router that
// died: without sampling one router makes an Event on each node. It is a mean; that of none with
// clients speaks happens to one router of 3000.
const spokesmen = 8

// speaks says whether the node of a client tells of a router of an Egress with so many clients. Each
// node finds out alone, by a hash that is even over clients and other for each router.
func speaks(router netip.Addr, container string, clients int) bool {
	if clients <= spokesmen {
		return true
	}
	client := struct {
		router    netip.Addr
		container string
	}{router, container}
	return float64(maphash.Comparable(seed, client)) < spokesmen/float64(clients)*math.MaxUint64
}
