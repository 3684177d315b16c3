package why

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/testkit"
)

// What another program takes from the kernel, or changes there, is found while coild doesn't repair it, and nothing is wrong when it has.
func TestKernel(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.showCoild(corev1.ConditionTrue)
	f.report(f.pod)
	healthy(t, f.walk(f.pool, f.pod.Name, 0))
	four := f.Ledger.Live()[f.pod][0].String()
	link := f.ask(f.pod).Attachments[0].HostLink
	for _, c := range []struct {
		name, spoil, wrong string
		says               []string
		undo               string // what isn't coild's to repair
	}{
		{"route", "ip route del " + four + " table 116", "routes", []string{"route to " + four + " is missing"}, ""},
		{"route elsewhere", "ip route replace " + four + " dev lo proto 30 scope link table 116", "routes", []string{"route to " + four}, ""},
		{"IPv6 route", "ip -6 route flush table 116 proto 30", "routes", []string{"route to fd00:"}, ""},
		{"rule", "ip rule del priority 2000", "rules", []string{"rule 2000 (IPv4) is missing"}, ""},
		{"rule of unassigned addresses", "ip -6 rule del priority 2001", "rules", []string{"rule 2001 (IPv6) is missing"}, ""},
		{"rule of another program", "ip rule add priority 7 to " + four + " blackhole", "routes", []string{"a rule or a route drops such packets", "ip rule"}, "ip rule del priority 7"},
		{"rule to another table", "ip rule add priority 7 to " + four + " lookup 99; ip route add default dev lo table 99", "routes", []string{"way to " + four, "table 99"},
			"ip rule del priority 7; ip route flush table 99"},
		{"link down", "ip link set " + link + " down", "veth", []string{"state of " + link + " is down, not up"}, ""},
		{"MTU", "ip link set " + link + " mtu 1300", "veth", []string{"MTU of " + link + " is 1300, not 1500"},
			"ip link set " + link + " mtu 1500"}, // coild is told of nothing, and looks after minutes
		{"alias", "ip link set " + link + " alias mine", "veth", []string{"alias of " + link + " is mine"}, ""},
		{"gateway", "ip -6 address del fe80::1/64 dev " + link, "veth", []string{"address of " + link + " is missing: it should be fe80::1"}, ""},
		{"table of nftables", "nft delete table inet coil", "guard", []string{"table coil of nftables is missing", "nftables.service"}, ""},
		{"rules of nftables", "nft flush chain inet coil forged", "guard", []string{"is missing"}, ""},
		{"group", "ip link set " + link + " group default", "veth guard", []string{"group of " + link}, ""},
		{"rp_filter", "echo 1 > /proc/sys/net/ipv4/conf/" + link + "/rp_filter", "sysctls", []string{"rp_filter is 1, not 2", "/etc/sysctl.d"}, ""},
		{"forwarding of IPv6", "echo 0 > /proc/sys/net/ipv6/conf/all/forwarding", "sysctls", []string{"net/ipv6/conf/all/forwarding is 0, not 1"}, ""},
		{"exported routes", "ip route flush table 119 proto 30", "export", []string{"exported route of 10.", "routing daemon"}, ""},
		{"unreachable routes", "ip route flush table 120 proto 30", "export", []string{"unreachable route of 10."}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			testkit.Check(t, f.HoldRepairs(true))
			f.sh(c.spoil)
			wants(t, f.walk(f.pool, f.pod.Name, 0), c.wrong, c.says...)
			if c.undo != "" {
				f.sh(c.undo)
			}
			testkit.Check(t, f.HoldRepairs(false))
			f.awaitHealthy(f.pod)
		})
	}
	// The walk about the node has the same faults, and that about the address.
	testkit.Check(t, f.HoldRepairs(true))
	f.sh("ip rule del priority 2000; ip route del " + four + " table 116")
	wants(t, f.examiner(0).Node(t.Context(), f.Name), "record rules", fmt.Sprintf("%s/%s", f.pool, f.pod.Name))
	wants(t, f.examiner(0).Address(t.Context(), f.Ledger.Live()[f.pod][0]), "rules routes", "rule 2000")
	testkit.Check(t, f.HoldRepairs(false))
	f.awaitHealthy(f.pod)
	healthy(t, f.examiner(0).Node(t.Context(), f.Name))
	healthy(t, f.examiner(0).Address(t.Context(), f.Ledger.Live()[f.pod][1]))
}

// What changes in a pod isn't repaired: the pod has to be made anew.
func TestInsideOfPods(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.showCoild(corev1.ConditionTrue)
	for _, c := range []struct {
		name, says string
		spoil      []string
	}{
		{"address", "address of eth0 is missing: it should be 10.", []string{"ip", "-4", "address", "flush", "dev", "eth0"}},
		{"default route", "route to 0.0.0.0/0", []string{"ip", "route", "del", "default"}},
		{"link down", "state of eth0 is down, not up", []string{"ip", "link", "set", "eth0", "down"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := f.add()
			f.report(s)
			healthy(t, f.walk(f.pool, s.Name, 0))
			testkit.Must(s.Run(t.Context(), c.spoil[0], c.spoil[1:]...))(t)
			wants(t, f.walk(f.pool, s.Name, 0), "veth", c.says, "kubectl -n "+f.pool+" delete pod "+s.Name)
			testkit.Check(t, s.Del(t.Context()))
		})
	}
}
