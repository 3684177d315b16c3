package podnet_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	raw "github.com/coil-net/coil/pkg/kernel/datagram"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

var errStill = errors.New("a probe still passes")

// For a moment a router may send probes from an address that is at another node, and nothing else. No other pod may.
func TestLetProbe(t *testing.T) {
	n := newGuarded(t)
	p1, router := newPod(t, 1, true, true)
	p2, other := newPod(t, 2, true, true)
	a1, a2 := n.mustAttach(t, p1), n.mustAttach(t, p2)
	testkit.Must(n.Guard(t.Context()))(t)
	from := map[dataplane.Family]netip.Addr{dataplane.IPv4: netip.MustParseAddr("203.0.113.1"), dataplane.IPv6: netip.MustParseAddr("2001:db8:9::1")}
	forged := func(f dataplane.Family) uint64 { return testkit.Must(n.Dropped(t.Context()))(t)[ruleset.Forged][f] }
	// passes sends a datagram, and says whether the guard lets it pass: the pod's own link takes it to the node before the call returns.
	passes := func(f dataplane.Family, pod *netnstest.NS, mac, content string) bool {
		t.Helper()
		link := testkit.Must(netns.In(pod.NS, func() (*net.Interface, error) { return net.InterfaceByName("eth0") }))(t)
		before := forged(f)
		testkit.Check(t, raw.Send(pod.NS, link.Index, raw.Datagram{
			MAC: testkit.Must(net.ParseMAC(mac))(t), From: from[f], To: ruleset.ProbeTo[f], Hops: 2, Content: content,
		}))
		return forged(f) == before
	}
	for f, addr := range from {
		if passes(f, router, a1.HostMAC, ruleset.Probe) {
			t.Errorf("%s: a probe passes before it may", f)
		}
		testkit.Check(t, n.LetProbe(t.Context(), a1.HostIfIndex, addr))
		if !passes(f, router, a1.HostMAC, ruleset.Probe) {
			t.Errorf("%s: a probe doesn't pass", f)
		}
		if passes(f, router, a1.HostMAC, "no probe") {
			t.Errorf("%s: the router sends something else", f)
		}
		if passes(f, other, a2.HostMAC, ruleset.Probe) {
			t.Errorf("%s: another pod sends a probe", f)
		}
		testkit.Eventually(t, 5*time.Second, "it ends", func() error {
			if passes(f, router, a1.HostMAC, ruleset.Probe) {
				return errStill
			}
			return nil
		})
	}
}
