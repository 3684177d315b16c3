package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/testkit"
)

// Floating is a floating address, or a pair, that some nodes may have. A pod on each of them stands for a router of an Egress: it answers
// pings of the address.
type Floating struct {
	Candidates []*Node
	Routers    []*Sandbox // of each node
	Block      string
	Addrs      []netip.Addr

	rig *Rig
	// namespace is that of the routers. name is that of the AddressClaim, of its pool, and of the Service that lists the routers.
	namespace, name string
	// unready are routers that take no packets, and ending those that do until they have gone; by their UID.
	unready, ending map[string]bool
}

// NewFloating claims the only address of a pool for an Egress, which needn't exist. Nodes may have it in their order, and the first one has it
// at the return, by the votes of all. The routers are in a namespace.
func (r *Rig) NewFloating(ctx context.Context, namespace, pool string, nodes ...*Node) (*Floating, error) {
	f := &Floating{rig: r, namespace: namespace, name: pool, Candidates: nodes, Routers: make([]*Sandbox, len(nodes)), unready: map[string]bool{}, ending: map[string]bool{}}
	egress := metav1.OwnerReference{APIVersion: v2.GroupVersion.String(), Kind: "Egress", Name: pool, UID: types.UID(randomHex(16)), Controller: new(true)}
	claim := &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pool, OwnerReferences: []metav1.OwnerReference{egress}}, Spec: v2.AddressClaimSpec{Pool: pool, Count: new(int32(1))}}
	claims := r.Coil.CoilV2().AddressClaims(namespace)
	if _, err := claims.Create(ctx, claim, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	// After an outage of the API server coil-ipam-controller has to become the leader first.
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, testkit.Timeout(time.Minute), true, func(ctx context.Context) (bool, error) {
		c, err := claims.Get(ctx, pool, metav1.GetOptions{})
		if err != nil || len(c.Status.Addresses) == 0 {
			return false, err
		}
		a := c.Status.Addresses[0]
		f.Block = a.Block
		for _, text := range []string{a.IPv4, a.IPv6} {
			if addr, err := netip.ParseAddr(text); err == nil {
				f.Addrs = append(f.Addrs, addr)
			}
		}
		return true, nil
	})
	if err != nil {
		return nil, fmt.Errorf("AddressClaim %s: %w", pool, err)
	}
	var order []int
	for i := range nodes {
		order = append(order, i)
		if err := f.NewRouter(ctx, i); err != nil {
			return nil, err
		}
		f.unready[f.Routers[i].UID] = i > 0
	}
	// The other nodes vote only, at first: they would not wait long for the first one on a machine that is slow.
	if err := errors.Join(f.list(ctx), f.Place(ctx, "", order...)); err != nil {
		return nil, err
	}
	var holding v2.FloatingHolding
	err = wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, testkit.Timeout(time.Minute), true, func(ctx context.Context) (is bool, err error) {
		holding, err = f.Holding(ctx)
		return holding.Holder == nodes[0].Name && holding.Claims > 0, err
	})
	if err != nil {
		return nil, fmt.Errorf("%s doesn't have %s, its holding is %+v: %w", nodes[0].Name, f.Addrs, holding, err)
	}
	clear(f.unready)
	return f, f.list(ctx)
}

// NewRouter makes the router of a node, in place of one that there may have been.
func (f *Floating) NewRouter(ctx context.Context, i int) error {
	s, err := f.Candidates[i].NewSandbox(ctx, SandboxOptions{Namespace: f.namespace})
	if err != nil {
		return err
	}
	// As kubelet, it tries again: after an outage of the API server the watch of BlockRequests may come back later than others.
	var failed error
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, testkit.Timeout(time.Minute), true, func(ctx context.Context) (bool, error) {
		_, failed = s.Add(ctx)
		return failed == nil, nil
	})
	if err != nil {
		return errors.Join(err, failed)
	}
	for _, a := range f.Addrs {
		if _, err := s.Run(ctx, "ip", "address", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "lo"); err != nil {
			return err
		}
	}
	f.Routers[i] = s
	_, err = s.Run(ctx, "ip", "link", "set", "lo", "up")
	return errors.Join(err, f.list(ctx))
}

// SetReady says whether the router of a node is ready.
func (f *Floating) SetReady(ctx context.Context, i int, ready bool) error {
	f.unready[f.Routers[i].UID] = !ready
	return f.list(ctx)
}

// End says that the router of a node ends, and takes packets still.
func (f *Floating) End(ctx context.Context, i int) error {
	f.ending[f.Routers[i].UID] = true
	return f.list(ctx)
}

// list writes the EndpointSlice of the Egress's Service, as kube-controller-manager does.
func (f *Floating) list(ctx context.Context) error {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: f.name, Labels: plan.RouterLabels(f.name)}, AddressType: discoveryv1.AddressTypeIPv4}
	s.Labels[discoveryv1.LabelServiceName] = f.name
	for _, r := range f.Routers {
		if r == nil {
			continue
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{"10.0.0.1"}, // which matters to clients only
			Conditions: discoveryv1.EndpointConditions{
				Ready: new(!f.unready[r.UID] && !f.ending[r.UID]), Serving: new(!f.unready[r.UID]), Terminating: new(f.ending[r.UID]),
			},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: f.namespace, Name: r.Name, UID: types.UID(r.UID)},
		})
	}
	api := f.rig.Core.DiscoveryV1().EndpointSlices(f.namespace)
	_, err := api.Create(ctx, s, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = api.Update(ctx, s, metav1.UpdateOptions{})
	}
	return err
}

// Place says which nodes may have the address, in order, and to which it is to move, as the controller of an Egress does.
func (f *Floating) Place(ctx context.Context, movingTo string, order ...int) error {
	var successors []v2.FloatingNode
	for _, i := range order {
		n := f.Candidates[i]
		next := v2.FloatingNode{Node: n.Name, PodUID: types.UID(f.Routers[i].UID)}
		for _, a := range []netip.Addr{n.Addr4, n.Addr6} {
			if a.IsValid() {
				next.Addresses = append(next.Addresses, a.String())
			}
		}
		successors = append(successors, next)
	}
	patch, err := json.Marshal(map[string]any{"floating": map[string]any{"successors": successors, "movingTo": movingTo}})
	if err != nil {
		return err
	}
	_, err = f.rig.Coil.CoilV2().AddressBlocks().Patch(ctx, f.Block, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// Holding is what the API server says about who has the address.
func (f *Floating) Holding(ctx context.Context) (v2.FloatingHolding, error) {
	b, err := f.rig.Coil.CoilV2().AddressBlocks().Get(ctx, f.Block, metav1.GetOptions{})
	if err != nil {
		return v2.FloatingHolding{}, err
	}
	if got := b.Labels[v2.LabelFloatingHolder]; got != b.Floating.Holding.Holder {
		return b.Floating.Holding, fmt.Errorf("the label says %q, and the holder is %q", got, b.Floating.Holding.Holder)
	}
	return b.Floating.Holding, nil
}

// Release gives the address up.
func (f *Floating) Release(ctx context.Context) error {
	return f.rig.Coil.CoilV2().AddressClaims(f.namespace).Delete(ctx, f.name, metav1.DeleteOptions{})
}
