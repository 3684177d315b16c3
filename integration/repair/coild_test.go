package repair

import (
	"fmt"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// losses are what others can do to each kind of object; %[1]s is the host's end of a pod's
// link, %[2]s the pod's container, %[3]s and %[4]s its addresses.
var losses = []struct {
	name, script string
	kinds        []string // that count
}{
	{"pod route, IPv4", "ip route del %[3]s table 116", []string{"pod_route"}},
	{"pod route, IPv6", "ip -6 route del %[4]s table 116", []string{"pod_route"}},
	{"all pod routes", "ip route flush table 116 proto 30; ip -6 route flush table 116 proto 30", []string{"pod_route"}},
	{"rule to pods, IPv4", "ip rule del priority 2000", []string{"rule"}},
	{"rule to pods, IPv6", "ip -6 rule del priority 2000", []string{"rule"}},
	{"rule to unassigned addresses", "ip rule del priority 2001; ip -6 rule del priority 2001", []string{"rule"}},
	{"exported blocks, IPv4", "ip route flush table 119 proto 30", []string{"block_route"}},
	{"exported blocks, IPv6", "ip -6 route flush table 119 proto 30", []string{"block_route"}},
	{"unreachable blocks, IPv4", "ip route flush table 120 proto 30", []string{"unreachable_route"}},
	{"unreachable blocks, IPv6", "ip -6 route flush table 120 proto 30", []string{"unreachable_route"}},
	{"gateway, IPv4", "ip address del 169.254.1.1/32 dev %[1]s", []string{"link_address"}},
	{"gateway, IPv6", "ip address del fe80::1/64 dev %[1]s", []string{"link_address"}},
	{"link down", "ip link set %[1]s down", []string{"link", "link_address", "pod_route"}},
	{"alias", `ip link set %[1]s alias ""`, []string{"link"}},
	{"alternative name", "ip link property del dev %[1]s altname coil-%[2]s-eth0", []string{"link"}},
	{"group", "ip link set %[1]s group default", []string{"link"}},
	{"rp_filter", "echo 1 > /proc/sys/net/ipv4/conf/%[1]s/rp_filter", []string{"sysctl"}},
	{"forwarding of the link", "echo 0 > /proc/sys/net/ipv4/conf/%[1]s/forwarding", []string{"sysctl"}},
	{"IPv6 of the link", "echo 1 > /proc/sys/net/ipv6/conf/%[1]s/disable_ipv6", []string{"sysctl", "link_address", "pod_route"}},
	{"ruleset of nftables", "nft flush ruleset", []string{"source_guard"}},
	{"table of nftables", "nft delete table inet coil", []string{"source_guard"}},
	{"rule of the source guard", "nft flush chain inet coil prerouting", []string{"source_guard"}},
	{"hooks of the table", "nft add table inet coil '{ flags dormant; }'", []string{"source_guard"}},
	{"forwarding, IPv4", "echo 0 > /proc/sys/net/ipv4/ip_forward", []string{"sysctl"}},
	{"forwarding, IPv6", "echo 0 > /proc/sys/net/ipv6/conf/all/forwarding", []string{"sysctl"}},
}

// foreign is what isn't Coil's, though it is beside it.
const foreign = `
	ip route add 198.51.100.1 dev lo table 116 proto 99
	ip -6 route add 2001:db8:f::1 dev lo table 116 proto 99
	ip route add 198.51.100.0/24 dev lo table 119 proto 99
	ip route add unreachable 198.51.100.0/24 table 120 proto 99
	ip rule add priority 2000 to 198.51.100.0/24 lookup 99 protocol 99
	ip -6 rule add priority 2001 to 2001:db8:f::/48 lookup 99
	ip link add vethforeign type veth peer vethforeign2
	ip link set vethforeign group 77 alias not-coils`

// spoil does what a loss says to the first pod.
func (f *fixture) spoil(script string) {
	f.t.Helper()
	p := f.pods[0]
	addrs := f.Ledger.Live()[p]
	v4, v6 := addrs[0], addrs[1]
	if v4.Is6() {
		v4, v6 = v6, v4
	}
	// The comment mentions all, since not every script does.
	f.sh(fmt.Sprintf(script+" # %[1]s %[2]s %[3]s %[4]s", f.hostEnd(p), p.ContainerID, v4, v6))
}

// Each object comes back within seconds while coild runs, is counted by its kind, and nothing
// of others changes.
func TestRestoredWhileRunning(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2, rig.NodeOptions{})
	f.sh(foreign)
	want := f.kernel()
	for _, l := range losses {
		before := f.repairs()
		f.spoil(l.script)
		took := f.awaitKernel(want, within)
		t.Logf("%s: back after %s", l.name, took.Round(time.Millisecond))
		if took > testkit.Limit(within) {
			t.Errorf("%s: back only after %s", l.name, took)
		}
		for _, kind := range l.kinds {
			before[kind]++
			f.awaitCounted(map[string]float64{kind: before[kind]})
		}
		for _, p := range f.pods {
			f.check(p.Check(t.Context()))
		}
	}
}

// Kernel objects that are lost while coild is down are there again when ADD is served.
func TestRestoredAtStart(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2, rig.NodeOptions{})
	f.sh(foreign)
	want := f.kernel()
	for _, l := range losses {
		t.Run(l.name, func(t *testing.T) {
			f.Coild.Kill()
			f.spoil(l.script)
			f.check(f.Start(t.Context()))
			if d := difference(want, f.kernel()); d != "" {
				t.Errorf("not restored at the start (- missing, + too much):\n%s", d)
			}
			for _, kind := range l.kinds {
				f.awaitCounted(map[string]float64{kind: 1})
			}
			for _, p := range f.pods {
				f.check(p.Check(t.Context()))
			}
		})
	}
	t.Run("nothing was lost", func(t *testing.T) {
		f.check(f.Restart(t.Context()))
		for kind, n := range f.repairs() {
			if n != 0 {
				t.Errorf("%v repairs of %s", n, kind)
			}
		}
	})
}

// The kernel takes IPv4 routes by lo away without a word when it goes down.
func TestLoopbackDown(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1, rig.NodeOptions{})
	want := f.kernel()
	f.sh("ip link set lo down; ip link set lo up")
	f.awaitKernel(want, within)
	f.awaitCounted(map[string]float64{"block_route": 1})
}
