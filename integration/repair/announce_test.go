package repair

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// proxyLosses are what others can do to addresses that are announced to neighbours; %[3]s and %[4]s are those of the first pod.
var proxyLosses = []struct {
	name, script string
	kind         string
	counted      float64
}{
	{"entry, IPv4", "ip neigh del proxy %[3]s dev eth0", "neighbour_proxy", 1},
	{"entry, IPv6", "ip neigh del proxy %[4]s dev eth0", "neighbour_proxy", 1},
	{"both entries of a pod", "ip neigh del proxy %[3]s dev eth0; ip neigh del proxy %[4]s dev eth0", "neighbour_proxy", 2},
	{"proxy NDP", "echo 0 > /proc/sys/net/ipv6/conf/all/proxy_ndp", "sysctl", 1},
}

// What makes the node answer for pods by ARP and NDP comes back within seconds while coild runs, is counted, and entries of others stay. It is
// there again when coild has started.
func TestAnnouncedAddresses(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 0, rig.NodeOptions{})
	ctx := t.Context()
	f.check(f.AddPool(ctx, "lan", 3, rig.Dual("10.255.64.0/24", "fd00:255::1:0/120")), f.Announce(ctx, "lan", v2.AnnounceNeighbor), f.AddNamespace(ctx, "lan", "lan"))
	for range 2 {
		s := testkit.Must(f.NewSandbox(ctx, rig.SandboxOptions{Namespace: "lan"}))(t)
		testkit.Must(s.Add(ctx))(t)
		f.pods = append(f.pods, s)
	}
	f.sh("ip neigh add proxy 10.255.64.200 dev eth0; ip neigh add proxy fd00:255::1:c8 dev eth0 protocol 99")
	state := func() string {
		return f.sh("ip -4 -N neigh show proxy | sort; ip -6 -N neigh show proxy | sort; cat /proc/sys/net/ipv6/conf/all/proxy_ndp")
	}
	// await waits for a state.
	await := func(want string) (took time.Duration) {
		t.Helper()
		start := time.Now()
		testkit.Eventually(t, 2*within, "all is back", func() error {
			if got := state(); got != want {
				return fmt.Errorf("there are\n%swant\n%s", got, want)
			}
			return nil
		})
		return time.Since(start)
	}
	var want string
	testkit.Eventually(t, within, "the node answers for the pods", func() error {
		if want = state(); strings.Count(want, "proto 30") != 4 {
			return fmt.Errorf("there are %s", want)
		}
		return nil
	})
	for _, l := range proxyLosses {
		before := f.repairs()[l.kind]
		f.spoil(l.script)
		took := await(want)
		t.Logf("%s: back after %s", l.name, took.Round(time.Millisecond))
		if took > testkit.Limit(within) {
			t.Errorf("%s: back only after %s", l.name, took)
		}
		f.awaitCounted(map[string]float64{l.kind: before + l.counted})
	}
	// The kernel forgets the entries of a link that goes down.
	f.sh("ip link set eth0 down; ip link set eth0 up; ip -6 address add " + f.Addr6.String() + "/64 dev eth0 nodad")
	testkit.Eventually(t, 2*within, "the entries are back", func() error {
		if got := strings.Count(state(), "proto 30"); got != 4 {
			return fmt.Errorf("%d are", got)
		}
		return nil
	})
	for _, l := range proxyLosses {
		f.Coild.Kill()
		f.spoil(l.script)
		f.check(f.Start(ctx))
		testkit.Eventually(t, within, l.name+" is back after a start", func() error {
			if got := state(); strings.Count(got, "proto 30") != 4 || !strings.HasSuffix(got, "\n1\n") {
				return fmt.Errorf("there are %s", got)
			}
			return nil
		})
	}
	f.check(f.Restart(ctx))
	for kind, n := range f.repairs() {
		if n != 0 {
			t.Errorf("%v repairs of %s after a restart in which nothing was lost", n, kind)
		}
	}
}
