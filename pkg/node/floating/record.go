package floating

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// Address is a floating address, or the pair of a dual-stack pool.
type Address struct {
	ipam.Address
	// ID is the UID of the AddressBlock, Block its name, and Pool that of its AddressPool.
	ID, Block, Pool string
	// Pod is the UID of the pod on this node to which packets for the address go: the one that has it or, on other nodes, that may have it. It is
	// empty if there is none.
	Pod types.UID
	// OfEgress says that the address belongs to an Egress, and its pod is a router.
	OfEgress bool
	// OfServices says that clients reach Services by the address: its packets go to the node itself, and not to a pod.
	OfServices bool
}

// known is an AddressBlock, and what it says.
type known struct {
	block   *v2.AddressBlock
	record  holding.Record
	address Address
}

// parse returns what a block says to a node.
func parse(node string, b *v2.AddressBlock) (known, error) {
	version, err := versionOf(b.ResourceVersion)
	if err != nil {
		return known{}, fmt.Errorf("AddressBlock %s: %w", b.Name, err)
	}
	prefixes, err := ipam.ParseBlock(b.IPv4, b.IPv6)
	if err != nil {
		return known{}, fmt.Errorf("AddressBlock %s: %w", b.Name, err)
	}
	if prefixes.Size() != 1 {
		return known{}, fmt.Errorf("AddressBlock %s: it has %d addresses: a floating one has a block of its own", b.Name, prefixes.Size())
	}
	id := string(b.UID)
	k := known{
		block:   b,
		record:  holding.Record{ID: id, Version: version},
		address: Address{ID: id, Block: b.Name, Pool: b.Labels[v2.LabelPool]},
	}
	for _, p := range prefixes.Prefixes() {
		if p.Addr().Is4() {
			k.address.IPv4 = p.Addr()
		} else {
			k.address.IPv6 = p.Addr()
		}
	}
	if b.Floating == nil {
		return k, nil
	}
	h := b.Floating.Holding
	k.record.Holder, k.record.Epoch, k.record.Claims, k.record.HandedOver = h.Holder, h.Epoch, h.Claims, h.HandedOver
	k.record.Voters, k.record.Contender = names(h.Voters), h.Contender
	k.address.OfEgress, k.address.OfServices = b.Floating.Owner.Kind == "Egress", len(b.Floating.Ports) > 0
	if !offered(b) {
		return k, nil
	}
	k.record.Successors = names(b.Floating.Successors)
	// The node that has got the address has nobody to hand it over to.
	if b.Floating.MovingTo != h.Holder {
		k.record.MovingTo = b.Floating.MovingTo
	}
	if k.address.OfServices {
		return k, nil
	}
	if entry := find(b.Floating.Successors, node); entry != nil {
		k.address.Pod = entry.PodUID
	}
	if h.Holder == node && h.PodUID != "" {
		k.address.Pod = h.PodUID // which has the connections, also when it isn't ready, or another pod here may have the address next
	}
	return k, nil
}

// OrderOf returns the order to answer for the address of a block, which lasts for no time, and whether a node may have the address.
func OrderOf(node string, b *v2.AddressBlock) (Order, bool, error) {
	k, err := parse(node, b)
	if err != nil {
		return Order{}, false, err
	}
	return Order{Address: k.address, Ports: PortsOf(b)}, offered(b), nil
}

// offered says whether a node may have the address. A holder gives up one that isn't offered.
func offered(b *v2.AddressBlock) bool {
	return b.Labels[v2.LabelFloating] == v2.FloatingValue && b.DeletionTimestamp == nil && b.Floating != nil && b.Floating.ReleasedAt == nil
}

// versionOf is the number of a resource version: those of one resource are decimal numbers that grow.
func versionOf(text string) (uint64, error) {
	v, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the resource version %q isn't a number: floating addresses need an API server whose versions can be compared", text)
	}
	return v, nil
}

// concerns says whether a node has something to do with the address.
func (k known) concerns(node string) bool {
	r := k.record
	return r.Holder == node || r.MovingTo == node || r.Contender == node || slices.Contains(r.Successors, node) || slices.Contains(r.Voters, node)
}

// mayHave says whether a node may have the address now.
func (k known) mayHave(node string) bool { return slices.Contains(k.record.Successors, node) }

func names(nodes []v2.FloatingNode) []string {
	var all []string
	for _, n := range nodes {
		all = append(all, n.Node)
	}
	return all
}

func find(nodes []v2.FloatingNode, name string) *v2.FloatingNode {
	if i := slices.IndexFunc(nodes, func(n v2.FloatingNode) bool { return n.Node == name }); i >= 0 {
		return &nodes[i]
	}
	return nil
}

// holdingOf is what a block is to say when it has a record, in place of what it says.
func holdingOf(b *v2.AddressBlock, r holding.Record, now metav1.Time) v2.FloatingHolding {
	before := b.Floating.Holding
	if r.Holder == before.Holder && r.Claims == before.Claims {
		before.Contender = r.Contender
		return before // all else is the holder's
	}
	h := v2.FloatingHolding{Holder: r.Holder, Epoch: r.Epoch, Claims: r.Claims, HandedOver: r.HandedOver, Contender: r.Contender}
	switch {
	case r.Holder == before.Holder:
		h.PodUID, h.Since = before.PodUID, before.Since
	case r.Holder != "":
		h.Since = &now
	}
	if entry := find(b.Floating.Successors, r.Holder); entry != nil {
		h.PodUID = entry.PodUID
	}
	for _, name := range r.Voters {
		voter := v2.FloatingNode{Node: name}
		for _, n := range []*v2.FloatingNode{find(before.Voters, name), find(b.Floating.Successors, name)} {
			if n != nil {
				voter.Addresses = n.Addresses
			}
		}
		h.Voters = append(h.Voters, voter)
	}
	return h
}

// change is a JSON merge patch (RFC 7386) of a block that makes it say so. With another holder a move is over, also one that came to
// nothing: the address would move again and again if the node to which it was to move can't keep it. All else stays as it is.
func change(b *v2.AddressBlock, h v2.FloatingHolding) map[string]any {
	floating := map[string]any{"holding": map[string]any{
		"holder": orNull(h.Holder), "podUID": orNull(h.PodUID), "epoch": orNull(h.Epoch), "since": orNull(h.Since), "claims": orNull(h.Claims),
		"handedOver": orNull(h.HandedOver), "voters": listOrNull(h.Voters), "contender": orNull(h.Contender),
	}}
	if h.Holder != b.Floating.Holding.Holder {
		floating["movingTo"] = nil
	}
	return map[string]any{
		"metadata": map[string]any{"labels": map[string]any{v2.LabelFloatingHolder: orNull(h.Holder)}},
		"floating": floating,
	}
}

// orNull returns null, by which a patch removes a field, in place of the zero value.
func orNull[T comparable](v T) any {
	if v == *new(T) {
		return nil
	}
	return v
}

func listOrNull[T any](l []T) any {
	if len(l) == 0 {
		return nil
	}
	return l
}

// PortsOf are the ports of Services at the address of a block.
func PortsOf(b *v2.AddressBlock) []Port {
	if b.Floating == nil {
		return nil
	}
	var all []Port
	for _, p := range b.Floating.Ports {
		if n, ok := plan.Protocols[p.Protocol]; ok {
			all = append(all, Port{n, uint16(p.Port)})
		}
	}
	slices.SortFunc(all, func(a, b Port) int { return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port)) })
	return slices.Compact(all)
}
