// Package floatingtest has what tests of copies of connections share: two nodes, a and b, whose routers' tables are in memory or in the kernel, what the API
// server says of their floating addresses, and the wire between them.
package floatingtest

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/testkit"
)

// World is what the API server says of addresses, and two nodes.
type World struct {
	T    *testing.T
	A, B *Node

	mu     sync.Mutex
	blocks map[string]*v2.AddressBlock
}

// NewWorld has an address of both families, p-0, which node a has and is to hand over to node b.
func NewWorld(t *testing.T) *World {
	w := &World{T: t, blocks: map[string]*v2.AddressBlock{}}
	w.Block("p-0", "198.51.100.7", "2001:db8::7")
	w.A, w.B = newNode(t, "a"), newNode(t, "b")
	return w
}

// Block makes an AddressBlock.
func (w *World) Block(name, ipv4, ipv6 string) {
	w.Replace(name, &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid of " + name), ResourceVersion: "1", Labels: map[string]string{v2.LabelFloating: v2.FloatingValue}},
		IPv4:       new(ipv4 + "/32"), IPv6: new(ipv6 + "/128"),
		Floating: &v2.Floating{
			Successors: []v2.FloatingNode{{Node: "b", PodUID: "pod of b"}, {Node: "a", PodUID: "pod of a"}}, MovingTo: "b",
			Holding: v2.FloatingHolding{Holder: "a", PodUID: "pod of a"},
		},
	})
}

// Find returns an AddressBlock, nil if there is none.
func (w *World) Find(name string) *v2.AddressBlock {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.blocks[name]
}

// Replace puts another AddressBlock in the place of one; nil is none.
func (w *World) Replace(name string, b *v2.AddressBlock) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if delete(w.blocks, name); b != nil {
		w.blocks[name] = b
	}
}

// Change changes a block, and returns what it was and is.
func (w *World) Change(name string, change func(*v2.Floating)) (before, after *v2.AddressBlock) {
	before = w.Find(name)
	after = before.DeepCopy()
	change(after.Floating)
	w.Replace(name, after)
	return before, after
}

// Address is that of a block at a node.
func (w *World) Address(name, node string) floating.Address {
	b := w.Find(name)
	return floating.Address{
		ID: string(b.UID), Block: name, Pod: types.UID("pod of " + node),
		Address: ipam.Address{IPv4: netip.MustParsePrefix(*b.IPv4).Addr(), IPv6: netip.MustParsePrefix(*b.IPv6).Addr()},
	}
}

// Kept waits until the router of b has the same flows as that of a, for as long as a follower keeps them.
func (w *World) Kept(what string) {
	w.T.Helper()
	testkit.Eventually(w.T, 10*time.Second, what, func() error {
		want, got := w.A.All(), w.B.All()
		for id, f := range want {
			if have, ok := got[id]; !ok || have.Translated != f.Translated || have.TCP != f.TCP || have.Mark != f.Mark || have.Timeout < 300 {
				return fmt.Errorf("of %d and %d flows, %+v is %+v", len(want), len(got), f, have)
			}
		}
		if len(want) != len(got) {
			return fmt.Errorf("%d flows, want %d", len(got), len(want))
		}
		return nil
	})
}

// Flow is the i-th flow of an address, of either family by turns.
func Flow(a floating.Address, i int) conntrack.Flow {
	src, dst, as := netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("192.0.2.1"), a.IPv4
	if i%2 == 1 {
		src, dst, as = netip.MustParseAddr("fd00::9"), netip.MustParseAddr("2001:db8:1::1"), a.IPv6
	}
	port := uint16(i)
	return conntrack.Flow{
		Protocol: unix.IPPROTO_TCP, Src: netip.AddrPortFrom(src, port), Dst: netip.AddrPortFrom(dst, 443), Translated: netip.AddrPortFrom(as, port^1),
		Timeout: uint32(i), Mark: uint32(i) << 8, TCP: conntrack.TCP{State: 3, ScaleOrig: 7, ScaleReply: byte(i), FlagsOrig: 3, FlagsReply: 1},
	}
}
