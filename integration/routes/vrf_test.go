package routes

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// FRR imports both families by a VRF, which the machine's kernel may not have: what coild
// makes in the kernel is announced, its copy in the main table leads no packet, and all of
// it goes with the block. There is no Kubernetes in the virtual machine.
func TestFRRWithVRF(t *testing.T) {
	if vmtest.Reexec(t, vm.Options{}, "veth", "vrf") {
		testVRF(t)
	}
}

// vrfNetwork is a router, a node and a pod; the node has what coild makes, but for table
// 119, and the VRF.
const vrfNetwork = `
netns add router
netns add node
netns add pod
link add port1 netns router type veth peer name eth0 netns node
link add veth1 netns node type veth peer name eth0 netns pod
-n router addr add 10.254.1.1/24 dev port1
-n router addr add fd00:254:1::1/64 dev port1 nodad
-n router link set port1 up
-n router link set lo up
-n node addr add 10.254.1.2/24 dev eth0
-n node addr add fd00:254:1::2/64 dev eth0 nodad
-n node link set eth0 up
-n node link set lo up
-n node link set veth1 up
-n node route add default via 10.254.1.1
-n node route add default via fd00:254:1::1
-n node addr add 169.254.1.1/32 dev veth1
-n node addr add fe80::1/64 dev veth1 nodad
-n pod addr add 10.1.0.1/32 dev eth0
-n pod addr add fd00:1::1/128 dev eth0 nodad
-n pod link set eth0 up
-n pod route add 169.254.1.1 dev eth0 scope link
-n pod route add default via 169.254.1.1
-n pod route add default via fe80::1 dev eth0
-n node route add 10.1.0.1 dev veth1 table 116 proto 30
-n node route add fd00:1::1 dev veth1 table 116 proto 30
-n node route add unreachable 10.1.0.0/27 table 120 proto 30
-n node route add unreachable fd00:1::/123 table 120 proto 30
-n node -4 rule add pref 2000 lookup 116 protocol 30
-n node -6 rule add pref 2000 lookup 116 protocol 30
-n node -4 rule add pref 2001 lookup 120 protocol 30
-n node -6 rule add pref 2001 lookup 120 protocol 30
-n node link add coil type vrf table 119
-n node link set coil up
`

func testVRF(t *testing.T) {
	ctx := t.Context()
	testkit.Check(t, netlab.Lines(ctx, vrfNetwork))
	atNode := testkit.Must(netlab.Named("node"))(t)
	defer atNode.Close()
	testkit.Check(t, atNode.Forward())
	n := &node{
		Node:    &rig.Node{Addr4: netip.MustParseAddr("10.254.1.2"), Addr6: netip.MustParseAddr("fd00:254:1::2")},
		number:  1,
		as:      routerAS + 1,
		routers: map[rig.Family]netip.Addr{rig.IPv4: netip.MustParseAddr("10.254.1.1"), rig.IPv6: netip.MustParseAddr("fd00:254:1::1")},
	}
	inNetns := func(name string) func() string { return func() string { return "/run/netns/" + name } }
	router := newBIRD(t.TempDir(), inNetns("router"), routerConf([]*node{n}))
	frr := newFRR(t.TempDir(), inNetns("node"), fill(t, "frr-vrf.conf", n), fill(t, "daemons", n))
	c := &network{t: t, router: router}
	for _, d := range []daemon{router, frr} {
		t.Cleanup(func() {
			d.kill()
			if t.Failed() {
				t.Logf("the end of a daemon's log:\n%s", d.logs(40))
			}
		})
		c.check(d.start(context.WithoutCancel(ctx)))
	}
	c.watcher = watch(t, router.announced)

	block4, block6 := netip.MustParsePrefix("10.1.0.0/27"), netip.MustParsePrefix("fd00:1::/123")
	for range 2 {
		testkit.Check(t, atNode.IP(ctx, "route add 10.1.0.0/27 dev lo table 119 proto 30", "route add fd00:1::/123 dev lo table 119 proto 30"))
		c.announced(n, block4, block6)
		for family, block := range map[string]netip.Prefix{"-4": block4, "-6": block6} {
			out, err := atNode.Run(ctx, "ip", family, "route", "show", "table", "main", "proto", "bgp")
			if err != nil || !strings.Contains(out, block.String()+" ") {
				t.Errorf("the main table has no copy of %s: %v\n%s", block, err, out)
			}
		}
		for _, a := range []string{"10.1.0.30", "fd00:1::1f"} {
			c.refused(inNetns("router")(), netip.MustParseAddr(a), n)
		}
		for _, a := range []string{"10.1.0.1", "fd00:1::1"} {
			pod := netip.MustParseAddr(a)
			c.eventually(10*time.Second, "an answer from "+a, func() error {
				got, err := probe(inNetns("router")(), pod, testkit.Timeout(200*time.Millisecond))
				if err == nil && !slices.Equal(got, []netlab.Answer{{From: pod, Kind: netlab.Reached}}) {
					err = fmt.Errorf("answers are %v", got)
				}
				return err
			})
		}
		testkit.Check(t, atNode.IP(ctx, "route del 10.1.0.0/27 dev lo table 119", "route del fd00:1::/123 dev lo table 119"))
		c.announced(nil, block4, block6)
	}
}
