package podnet_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// wireLegacy makes the i-th pod of a node as Coil 2.x did, of IPv4: the gateway is the node's own address, and the
// host's end has an alias alone.
func (n node) wireLegacy(t *testing.T, i int) (podnet.Pod, *netnstest.NS) {
	t.Helper()
	p, pod := newPod(t, i, true, false)
	_ = testkit.Must(n.host.Run("sh", "-ec", fmt.Sprintf(`
		ip link add legacy%[1]d type veth peer name eth0 netns %[2]s
		ip link set legacy%[1]d alias COIL:default:%[3]s:eth0
		ip address add %[4]s/32 dev legacy%[1]d scope link
		ip link set legacy%[1]d up
		ip route add %[5]s dev legacy%[1]d scope link table 116 proto 30`, i, pod.Path, p.ContainerID, nodeAddrs.IPv4, p.Address.IPv4)))(t)
	_ = testkit.Must(pod.Run("sh", "-ec", fmt.Sprintf(`
		ip link set eth0 up
		ip address add %[1]s/32 dev eth0
		ip route add %[2]s dev eth0 scope link
		ip route add default via %[2]s dev eth0`, p.Address.IPv4, nodeAddrs.IPv4)))(t)
	// The kernel notices carriers a moment later.
	testkit.Eventually(t, 10*time.Second, "the pod has a link", func() error { return pod.Ping(nodeAddrs.IPv4, testkit.Timeout(time.Second)) })
	return p, pod
}

// Pods that 2.x wired are guarded when they are adopted. If 2.x comes back it knows nothing of the rule, which
// stays: its new pods work, and aren't guarded until they are adopted, too. Nothing has to be made again then.
func TestGuardOfPodsOf2x(t *testing.T) {
	foreign := netip.MustParseAddr("203.0.113.1")
	eachGuard(t, func(t *testing.T, n node, guard bool) {
		receiver, other := newPod(t, 9, true, true)
		n.mustAttach(t, receiver)
		works := func(pod *netnstest.NS, p podnet.Pod) {
			t.Helper()
			mustPing(t, pod, nodeAddrs.IPv4)
			mustPing(t, pod, receiver.Address.IPv4)
			mustPing(t, n.host, p.Address.IPv4)
			mustPing(t, other, p.Address.IPv4)
		}
		forges := func(pod *netnstest.NS, who string, want bool) {
			t.Helper()
			if got := speaks(t, pod, other, foreign, receiver.Address.IPv4); got != want {
				t.Errorf("%s: the packet from another address arrives: %t", who, got)
			}
		}
		adopt := func(want int) {
			t.Helper()
			var wired []podnet.Wired
			unlabelled := 0
			for _, f := range testkit.Must(n.List(t.Context()))(t) {
				if f.Unlabelled {
					unlabelled++
					testkit.Check(t, n.Label(t.Context(), f))
				}
				p := podnet.Pod{ID: f.ID, Pool: f.Pool, NodeAddrs: nodeAddrs, Namespace: "test"}
				p.Address.IPv4 = f.Addresses[0]
				if f.ContainerID == receiver.ContainerID {
					p = receiver
				}
				wired = append(wired, podnet.Wired{Pod: p, HostIfIndex: f.HostIfIndex})
			}
			if unlabelled != want {
				t.Errorf("%d links had to be adopted, not %d", unlabelled, want)
			}
			_ = testkit.Must(n.MendLinks(t.Context(), func(context.Context) ([]podnet.Wired, error) { return wired, nil }))(t)
		}
		p1, pod1 := n.wireLegacy(t, 1)
		pod1.IP(t, "address", "add", foreign.String()+"/32", "dev", "eth0")
		works(pod1, p1)
		forges(pod1, "not adopted", true)
		adopt(1)
		works(pod1, p1)
		forges(pod1, "adopted", !guard)

		// 2.x is back, and wires another one.
		p2, pod2 := n.wireLegacy(t, 2)
		pod2.IP(t, "address", "add", foreign.String()+"/32", "dev", "eth0")
		works(pod2, p2)
		works(pod1, p1)
		forges(pod2, "of 2.x again", true)
		forges(pod1, "adopted, with 2.x", !guard)

		if got := testkit.Must(n.Guard(t.Context()))(t); got.Changed() {
			t.Errorf("the rule was made again: %+v", got)
		}
		adopt(1)
		works(pod2, p2)
		forges(pod2, "adopted later", !guard)
		forges(pod1, "adopted before", !guard)
	})
}
