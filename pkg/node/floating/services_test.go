package floating

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// A node answers for an address of Services without a pod, and copies nothing when the address moves.
func TestAddressOfServices(t *testing.T) {
	asked := make(moving, 1)
	w := newWorld(t, 2, 1, func(w *world) {
		for _, n := range w.nodes {
			n.mover, n.gone = asked, true
		}
		w.change(0, func(b *v2.AddressBlock) {
			f := b.Floating
			f.Owner.Kind = "AddressClaim"
			f.Ports = []v2.FloatingPort{{Protocol: corev1.ProtocolUDP, Port: 53}, {Protocol: corev1.ProtocolTCP, Port: 443}, {Protocol: corev1.ProtocolTCP, Port: 80}}
			for i := range f.Successors {
				f.Successors[i].PodUID = ""
			}
			f.Holding.PodUID = ""
		})
	})
	w.claimed()
	ports := func(n *node, want ...Port) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%s takes packets for %v", n.name, want), func() error {
			n.mu.Lock()
			defer n.mu.Unlock()
			if !slices.Equal(n.ports, want) {
				return fmt.Errorf("it takes those for %v", n.ports)
			}
			return nil
		})
	}
	ports(w.nodes[0], Port{unix.IPPROTO_TCP, 80}, Port{unix.IPPROTO_TCP, 443}, Port{unix.IPPROTO_UDP, 53})
	w.change(0, func(b *v2.AddressBlock) { b.Floating.Ports = b.Floating.Ports[:1] })
	ports(w.nodes[0], Port{unix.IPPROTO_UDP, 53})
	w.change(0, func(b *v2.AddressBlock) { b.Floating.MovingTo = "n1" })
	w.settled("it has moved", func(_ int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[1]) })
	ports(w.nodes[1], Port{unix.IPPROTO_UDP, 53})
	w.nodes[1].driver.Leave(t.Context())
	w.settled("its holder ends", func(_ int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[0]) })
	select {
	case what := <-asked:
		t.Errorf("connections of an address of Services are copied: %s", what)
	default:
	}
	w.change(0, func(b *v2.AddressBlock) { b.Floating.Ports = nil })
	w.settled("no Service has it any more", func(_ int, b *v2.AddressBlock) error {
		if who := w.answering(string(b.UID)); len(who) > 0 || b.Floating.Holding.Holder != "" {
			return fmt.Errorf("%v answer, and the holder is %q", who, b.Floating.Holding.Holder)
		}
		return nil
	})
}
