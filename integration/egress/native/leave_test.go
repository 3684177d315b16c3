package native

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// The packets of pods that a policy chooses leave by the policy's address, whatever node the pod is on, and whichever has the address; those of
// others don't. A capture outside sees all of them.
func TestLeave(t *testing.T) {
	w := newWorld(t, 3, 2, nil)
	outside := testkit.Must(w.server.NewCapture("eth0", func(p netlab.Packet) bool {
		return slices.Contains(servers, p.Dst) && (p.Protocol == unix.IPPROTO_TCP || p.Protocol == unix.IPPROTO_UDP) && !p.Out
	}))(t)
	w.choose("shop", "shop")
	w.choose("bank", "bank")
	sources := map[string][]netip.Addr{"shop": w.sources("shop"), "bank": w.sources("bank")}
	if slices.Equal(sources["shop"], sources["bank"]) {
		t.Fatalf("both policies have %v", sources["shop"])
	}
	pods := map[*pod][]netip.Addr{}
	for app, addrs := range sources {
		for _, n := range w.nodes {
			pods[w.newPod(n, app)] = addrs
		}
	}
	// TCP's source is what the server says, and UDP's port says which pod sent.
	want := map[uint16]netip.Addr{}
	port := uint16(20000)
	for p, addrs := range pods {
		for _, to := range servers {
			allowed := family(addrs, to)
			testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%s leaves by %s to %s", p, allowed, to), func() error {
				got, err := p.seen(t.Context(), to)
				if err == nil && got != allowed {
					t.Fatalf("%s leaves by %s, not %s", p, got, allowed)
				}
				return err
			})
			port++
			want[port] = allowed
			conn := testkit.Must(p.Dial(t.Context(), "udp", netip.AddrPortFrom(to, port).String()))(t)
			testkit.Must(conn.Write([]byte("x")))(t)
			testkit.Check(t, conn.Close())
		}
	}
	others := w.newPod(w.nodes[0], "none")
	for _, to := range servers {
		port++
		want[port] = family(others.addrs, to)
		conn := testkit.Must(others.Dial(t.Context(), "udp", netip.AddrPortFrom(to, port).String()))(t)
		testkit.Must(conn.Write([]byte("x")))(t)
		testkit.Check(t, conn.Close())
	}
	all := slices.Concat(sources["shop"], sources["bank"])
	testkit.Eventually(t, 10*time.Second, "all datagrams have arrived", func() error {
		for port, source := range want {
			if len(outside.All(func(p netlab.Packet) bool { return p.DPort == port && p.Src == source })) == 0 {
				return fmt.Errorf("none to port %d from %s", port, source)
			}
		}
		return nil
	})
	if missed := testkit.Must(outside.Close())(t); missed > 0 {
		t.Errorf("the capture missed %d packets", missed)
	}
	for _, p := range outside.Take() {
		if source, udp := want[p.DPort]; udp && p.Src != source || !udp && !slices.Contains(all, p.Src) {
			t.Errorf("%s left, and %s is the source", p, source)
		}
	}
}
