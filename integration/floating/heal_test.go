package floating

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// healed is for how long what others have destroyed may be away.
const healed = 5 * time.Second

// losses are what others can do to what a node has for a floating address; %[1]s and %[2]s are the addresses.
var losses = []struct {
	name, script string
	kind         string // of coil_repairs_total
	long         bool   // only the long form has it
}{
	{"route to the router, IPv4", "ip route del %[1]s table 116 proto 32", "floating_route", false},
	{"route to the router, IPv6", "ip -6 route del %[2]s table 116 proto 32", "floating_route", true},
	{"route to the router leads elsewhere", "ip route replace %[1]s dev lo table 116 proto 32", "floating_route", true},
	{"routes for routing daemons", "ip route flush table 119 proto 32; ip -6 route flush table 119 proto 32", "floating_route", false},
	{"rules", "ip rule del priority 2000 protocol 30; ip -6 rule del priority 2000 protocol 30", "rule", false},
	{"entry of neighbours, IPv4", "ip neigh del proxy %[1]s dev eth0", "neighbour_proxy", true},
	{"entry of neighbours, IPv6", "ip neigh del proxy %[2]s dev eth0", "neighbour_proxy", false},
	{"parameter", "echo 0 > /proc/sys/net/ipv6/conf/all/proxy_ndp", "sysctl", false},
	{"a chain", "nft flush chain ip coil_floating prerouting", "floating_rules", true},
	{"a foreign rule", "nft insert rule ip6 coil_floating prerouting accept", "floating_rules", false},
	{"hooks", "nft add table ip coil_floating '{ flags dormant; }'", "floating_rules", true},
	{"the table for ARP", "nft delete table arp coil_floating", "floating_rules", false},
	{"all of nftables", "nft flush ruleset", "floating_rules", false},
}

// repairs is coil_repairs_total of a node by kind.
func repairs(t *testing.T, n *rig.Node) map[string]float64 {
	t.Helper()
	text := testkit.Must(n.Get(t.Context(), "/metrics"))(t)
	values := map[string]float64{}
	for _, m := range regexp.MustCompile(`(?m)^coil_repairs_total\{.*?kind="([^"]*)".*\} (\S+)$`).FindAllStringSubmatch(text, -1) {
		values[m[1]] = testkit.Must(strconv.ParseFloat(m[2], 64))(t)
	}
	return values
}

// ofCoil is what a node has for floating addresses, but for how long it answers.
func ofCoil(t *testing.T, n *rig.Node) []string {
	t.Helper()
	out := rigtest.Sh(t, n, `
		for family in -4 -6; do
			ip -N $family rule show priority 2000
			for table in 116 119 255; do ip -N $family route show table $table proto 32 2>/dev/null || true; done # one that never had routes isn't there
			ip -N $family neigh show proxy
		done
		cat /proc/sys/net/ipv6/conf/all/proxy_ndp
		nft -s list table ip coil_floating 2>&1 || true; nft -s list table ip6 coil_floating 2>&1 || true; nft -s list table arp coil_floating 2>&1 || true`)
	out = regexp.MustCompile(`(timeout|expires) \S+`).ReplaceAllString(out, "")
	var lines []string
	for line := range strings.Lines(out) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	slices.Sort(lines) // what was made anew comes last
	return lines
}

// What others delete or change of an address that a node holds comes back soon, is counted and logged, and the address stays where it is.
func TestHeals(t *testing.T) {
	// Not beside the others: it measures.
	f := newFixture(t, "healed", 2)
	f.held(0)
	n, before := f.Candidates[0], f.holding()
	want := ofCoil(t, n)
	for _, l := range losses {
		if l.long && !testkit.FloatingForm.Long() {
			continue
		}
		counted := repairs(t, n)
		began := time.Now()
		rigtest.Sh(t, n, fmt.Sprintf(l.script+" # %[1]s %[2]s", f.Addrs[0], f.Addrs[1]))
		testkit.Eventually(t, 2*healed, l.name+" is back", func() error {
			if now := repairs(t, n)[l.kind]; now <= counted[l.kind] {
				return fmt.Errorf("%v repairs of %s, as before", now, l.kind)
			}
			if now := ofCoil(t, n); !slices.Equal(now, want) {
				return fmt.Errorf("there is\n%s\nwant\n%s", strings.Join(now, "\n"), strings.Join(want, "\n"))
			}
			return f.found()
		})
		took := time.Since(began)
		t.Logf("%s: back after %s", l.name, took.Round(10*time.Millisecond))
		if took > testkit.Limit(healed) {
			t.Errorf("%s: back only after %s", l.name, took)
		}
		if n.Coild.CountLogs(`kind="`+l.kind+`"`) == 0 {
			t.Errorf("%s: the log has nothing of it", l.name)
		}
	}
	if now := f.holding(); now.Epoch != before.Epoch || now.Holder != before.Holder {
		t.Errorf("the address has moved: %+v, then %+v", before, now)
	}
}

// What others have made of the address while coild was away is gone when it has the address again.
func TestHealsAtStart(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "restarted", 1)
	f.held(0)
	n := f.Candidates[0]
	want := ofCoil(t, n)
	n.Coild.Kill()
	for _, l := range losses {
		rigtest.Sh(t, n, fmt.Sprintf("("+l.script+") 2>/dev/null || true # %[1]s %[2]s", f.Addrs[0], f.Addrs[1]))
	}
	testkit.Check(t, n.Start(t.Context()))
	f.held(0)
	testkit.Eventually(t, 2*healed, "all is back", func() error {
		// A newer epoch is another metric.
		metric := regexp.MustCompile(`metric \d+`)
		now, was := metric.ReplaceAllString(strings.Join(ofCoil(t, n), "\n"), ""), metric.ReplaceAllString(strings.Join(want, "\n"), "")
		if now != was {
			return errors.New(now + "\nwant\n" + was)
		}
		return f.found()
	})
}
