package repair

import (
	"fmt"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// translationLosses are what others can do to what lets clients leave by the node's address. router is done in the network namespace of the router.
var translationLosses = []struct {
	name, script, router string
}{
	{"routes to the router", "ip route flush table 116 proto 33; ip -6 route flush table 116 proto 33", ""},
	{"route that leads elsewhere", "ip -6 route replace $(ip -N -6 route show table 116 proto 33 | cut -d' ' -f1) dev lo table 116 proto 33", ""},
	{"all of nftables", "nft flush ruleset", ""},
	{"a chain", "nft flush chain inet coil_masquerade nat", ""},
	{"a foreign rule", "nft insert rule inet coil_masquerade last accept", ""},
	{"hooks", "nft add table inet coil_masquerade '{ flags dormant; }'", ""},
	{"the router's link in a set", "nft flush set inet coil_masquerade routers_ipv6", ""},
	{"addresses of the router", "", "ip -o address show dev lo | awk '$4 ~ /^(169.254|fd9c:41e7)/ {print $4}' | while read a; do ip address del $a dev lo; done"},
}

// What others take away of what lets clients leave by the node's address comes back within seconds while coild runs, and is counted. It is there
// again when coild has started.
func TestNodeAddressIsRestored(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 0, rig.NodeOptions{})
	ctx := t.Context()
	f.check(f.NewNodeAddressEgress(ctx, f.pool, "out"))
	router := testkit.Must(f.NewEgressRouter(ctx, f.pool, "out"))(t)
	state := func() string {
		t.Helper()
		return testkit.Must(f.NodeAddress(ctx, router))(t)
	}
	var want string
	testkit.Eventually(t, 2*within, "the node translates", func() error {
		want = state()
		if strings.Count(want, "lo ") != 2 || strings.Count(want, "proto 33") != 2 && strings.Count(want, "dev veth") != 2 || !strings.Contains(want, "masquerade") {
			return fmt.Errorf("there are\n%s", want)
		}
		return nil
	})
	spoil := func(script, inRouter string) {
		t.Helper()
		f.sh(script)
		testkit.Must(router.Run(ctx, "sh", "-ec", inRouter))(t)
	}
	back := func(name string) {
		t.Helper()
		testkit.Eventually(t, 2*within, name+" is back", func() error {
			if got := state(); got != want {
				return fmt.Errorf("there are\n%swant\n%s", got, want)
			}
			return nil
		})
	}
	const kind = "egress_node_address"
	for _, l := range translationLosses {
		before := f.repairs()[kind]
		spoil(l.script, l.router)
		back(l.name)
		f.awaitCounted(map[string]float64{kind: before + 1})
	}
	f.Coild.Kill()
	spoil("nft flush ruleset", "ip address flush dev lo")
	f.check(f.Start(ctx))
	back("all of it")
	f.check(f.Restart(ctx))
	back("what wasn't lost")
	if n := f.repairs()[kind]; n != 0 {
		t.Errorf("%v repairs after a restart in which nothing was lost", n)
	}
}
