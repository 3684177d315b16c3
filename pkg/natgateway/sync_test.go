package natgateway

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

const (
	first = "filter of 0, "
	turn  = "listen, tunnels, rules, routes, "
)

func TestClientsComeAndGo(t *testing.T) {
	run(t, func(f *fixture) {
		f.list(map[string]string{"a": "10.0.0.2", "b": "10.0.0.3"})
		if err := f.condition(Clients); err == nil {
			t.Error("clients are served before the start")
		}
		f.start()
		// The filter is there before the first tunnel, and lets clients in last.
		f.expect(moment, first+turn+"filter of 2, prune")
		if err := errors.Join(f.condition(Clients), f.condition(Environment)); err != nil {
			t.Errorf("after the start: %v", err)
		}
		// Nothing is read for who comes or leaves.
		f.list(map[string]string{"a": "10.0.0.2", "b": "10.0.0.3", "c": "10.0.0.4"})
		f.expect(moment, "add 1, route 1, unroute 0, filter of 3, remove 0")
		f.list(map[string]string{"a": "10.0.0.2", "c": "10.0.0.4"})
		f.expect(moment, "add 0, route 0, unroute 1, filter of 2, remove 1, forget")
		if !slices.Equal(f.forgotten, []netip.Addr{netip.MustParseAddr("10.0.0.3")}) {
			t.Errorf("forgot %v", f.forgotten)
		}
		// Another pod has the address: the tunnel stays.
		link := f.made[netip.MustParseAddr("10.0.0.2")]
		f.list(map[string]string{"d": "10.0.0.2", "c": "10.0.0.4"})
		f.expect(moment, turn+"filter of 2, prune, forget")
		if now := f.made[netip.MustParseAddr("10.0.0.2")]; now != link || len(f.made) != 2 {
			t.Errorf("links are %v, and it was %v", f.made, link)
		}
		// Nothing happens, but that all is compared once a minute, and finds nothing to do.
		f.expect(58*time.Second, "")
		f.expect(5*time.Second, turn+"filter of 2, prune")
		if err := testutil.GatherAndCompare(f.registry, strings.NewReader(`
# HELP coil_egress_client_pod_count Pods that use the router.
# TYPE coil_egress_client_pod_count gauge
coil_egress_client_pod_count{egress="nat",namespace="internet"} 2
# HELP coil_egress_client_pod_info A pod that uses the router, with each of its addresses: 1.
# TYPE coil_egress_client_pod_info gauge
coil_egress_client_pod_info{egress="nat",egress_namespace="internet",interface="to 10.0.0.2",namespace="ns",pod="d",pod_ip="10.0.0.2"} 1
coil_egress_client_pod_info{egress="nat",egress_namespace="internet",interface="to 10.0.0.4",namespace="ns",pod="c",pod_ip="10.0.0.4"} 1
# HELP coil_egress_tunnels Tunnels to clients that are as they should be, by the protocol of packets.
# TYPE coil_egress_tunnels gauge
coil_egress_tunnels{egress="nat",namespace="internet",pod="nat-0",protocol="ipv4"} 2
`), "coil_egress_client_pod_count", "coil_egress_client_pod_info", "coil_egress_tunnels"); err != nil {
			t.Error(err)
		}
		if len(f.made) != 2 || len(f.routes) != 2 {
			t.Errorf("made are %v, with routes %v", f.made, f.routes)
		}
	})
}

// Many changes are one sync.
func TestChangesAreCollected(t *testing.T) {
	run(t, func(f *fixture) {
		f.start()
		f.did(moment)
		for range 100 {
			f.list(map[string]string{"a": "10.0.0.2"})
		}
		f.expect(moment, "add 1, route 1, unroute 0, filter of 1, remove 0")
	})
}

// Whatever fails when clients come and leave, or may have changed behind the router's back,
// all is compared, and nothing is left over.
func TestFollowing(t *testing.T) {
	const compared = turn + "filter of 2, prune, forget"
	for name, c := range map[string]struct {
		doubt func(*fixture)
		did   string
	}{
		"add":     {func(f *fixture) { f.failOnce("add 1") }, "add 1, " + compared},
		"route":   {func(f *fixture) { f.failOnce("route 1") }, "add 1, route 1, unroute 1, " + compared},
		"unroute": {func(f *fixture) { f.failOnce("unroute 1") }, "add 1, route 1, unroute 1, " + compared},
		"remove":  {func(f *fixture) { f.failOnce("remove 1") }, "add 1, route 1, unroute 1, filter of 2, remove 1, " + compared},
		"filter": {func(f *fixture) { f.failOnce("filter of 2") },
			"add 1, route 1, unroute 1, filter of 2, " + compared},
		"a link that is there already": {func(f *fixture) {
			f.set(func(k *kernel) { k.made[netip.MustParseAddr("10.0.0.4")] = dataplane.TunnelLink{Index: 7, Name: "old"} })
		}, "add 1, " + compared},
		"the uplink's MTU": {func(f *fixture) { f.set(func(k *kernel) { k.mtu = 1400 }) }, compared},
		"a minute":         {func(f *fixture) { f.compared = f.compared.Add(-2 * time.Minute) }, compared},
		"nothing":          {func(*fixture) {}, "add 1, route 1, unroute 1, filter of 2, remove 1, forget"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(f *fixture) {
				f.list(map[string]string{"a": "10.0.0.2", "b": "10.0.0.3"})
				f.start()
				f.did(moment)
				c.doubt(f)
				f.list(map[string]string{"a": "10.0.0.2", "c": "10.0.0.4"})
				f.expect(moment, c.did)
				if len(f.made) != 2 || len(f.routes) != 2 || len(f.filter.Clients) != 2 {
					t.Errorf("links %v, routes %v, clients %v", f.made, f.routes, f.filter.Clients)
				}
			})
		})
	}
}

// One client's failure is nobody else's, and is tried again.
func TestOneClientFails(t *testing.T) {
	run(t, func(f *fixture) {
		bad := netip.MustParseAddr("10.0.0.3")
		f.set(func(k *kernel) { k.refuse[bad] = true })
		f.list(map[string]string{"a": "10.0.0.2", "b": "10.0.0.3"})
		f.start()
		if did := f.did(10 * time.Second); !strings.HasPrefix(did, first+turn+"filter of 1, prune, "+turn) {
			t.Errorf("it did %s", did)
		}
		if err := f.condition(Clients); err != nil {
			t.Errorf("the router isn't ready: %v", err)
		}
		if n := testutil.ToFloat64(f.metrics.failed); n != 1 {
			t.Errorf("%v clients failed", n)
		}
		// A new one doesn't wait for the retry.
		f.list(map[string]string{"a": "10.0.0.2", "b": "10.0.0.3", "c": "10.0.0.4"})
		if f.did(moment); len(f.filter.Clients) != 2 {
			t.Errorf("clients are %v", f.filter.Clients)
		}
		f.set(func(k *kernel) { k.refuse[bad] = false })
		if f.did(time.Minute); len(f.filter.Clients) != 3 || testutil.ToFloat64(f.metrics.failed) != 0 {
			t.Errorf("clients are %v", f.filter.Clients)
		}
	})
}

// The router isn't ready before all is done, and says what is missing.
func TestNotReadyBeforeAllIsDone(t *testing.T) {
	for _, step := range []string{"uplink", "filter of 0", "listen", "tunnels", "rules", "routes", "filter of 1"} {
		t.Run(step, func(t *testing.T) {
			run(t, func(f *fixture) {
				failure := errors.New("no memory")
				f.set(func(k *kernel) { k.fail[step] = failure })
				f.list(map[string]string{"a": "10.0.0.2"})
				f.start()
				f.did(time.Second)
				if err := f.condition(Clients); !errors.Is(err, failure) {
					t.Errorf("clients: %v", err)
				}
				f.set(func(k *kernel) { delete(k.fail, step) })
				f.did(time.Minute)
				if err := f.condition(Clients); err != nil {
					t.Errorf("clients: %v", err)
				}
				// Once ready, what fails later costs only who came meanwhile.
				f.set(func(k *kernel) { k.fail["routes"] = failure })
				f.list(map[string]string{"b": "10.0.0.3"})
				f.did(time.Second)
				if err := f.condition(Clients); err != nil {
					t.Errorf("clients, later: %v", err)
				}
			})
		})
	}
}

func TestEnvironment(t *testing.T) {
	run(t, func(f *fixture) {
		failure := errors.New("it doesn't forward")
		f.set(func(k *kernel) { k.check = failure })
		f.start()
		f.did(moment)
		if err := f.condition(Environment); !errors.Is(err, failure) {
			t.Errorf("environment: %v", err)
		}
		f.set(func(k *kernel) { k.check = nil })
		f.did(2 * time.Second)
		if err := f.condition(Environment); err != nil {
			t.Errorf("environment: %v", err)
		}
		// Nobody may reach anything through an Egress that is gone.
		if len(f.filter.Destinations) == 0 {
			t.Errorf("destinations are %v", f.filter.Destinations)
		}
		f.check(f.egresses.Replace(nil, ""))
		f.changed()
		f.did(2 * time.Second)
		if err := f.condition(Environment); err == nil || len(f.filter.Destinations) != 0 {
			t.Errorf("without the Egress: %v, destinations %v", err, f.filter.Destinations)
		}
	})
}

func TestRepair(t *testing.T) {
	run(t, func(f *fixture) {
		f.list(map[string]string{"a": "10.0.0.2"})
		f.start()
		f.did(moment)
		index := f.made[netip.MustParseAddr("10.0.0.2")].Index
		sound := &rtnl.Link{Index: index, Up: true, MTU: 1472}
		down := &rtnl.Link{Index: index, MTU: 1472}
		all := turn + "filter of 1, prune"
		for _, c := range []struct {
			name   string
			change rtnl.Change
			did    string
		}{
			{"route", rtnl.Change{Kind: rtnl.RouteLost}, all},
			{"rule", rtnl.Change{Kind: rtnl.RuleLost}, all},
			{"tunnel gone", rtnl.Change{Kind: rtnl.LinkLost, Link: index}, all},
			{"tunnel down", rtnl.Change{Kind: rtnl.LinkChanged, Link: index, State: down}, all},
			{"tunnel as it should be", rtnl.Change{Kind: rtnl.LinkChanged, Link: index, State: sound}, ""},
			{"another link", rtnl.Change{Kind: rtnl.LinkLost, Link: 7}, ""},
			{"uplink as it was", rtnl.Change{Kind: rtnl.LinkChanged, Link: 2, State: &rtnl.Link{Index: 2, MTU: 1500, Up: true}}, ""},
			{"notifications lost", rtnl.Change{}, all},
		} {
			f.changes <- []rtnl.Change{c.change}
			if got := f.did(time.Second); got != c.did {
				t.Errorf("%s: it did %s, not %s", c.name, got, c.did)
			}
		}
		f.set(func(k *kernel) { k.touched = true })
		f.expect(2*time.Second, all)

		// The tunnels follow the uplink's MTU.
		f.set(func(k *kernel) { k.mtu = 1400 })
		f.changes <- []rtnl.Change{{Kind: rtnl.LinkChanged, Link: 2, State: &rtnl.Link{Index: 2, MTU: 1400, Up: true}}}
		f.did(time.Second)
		if got, want := f.applied.Tunnels[0].MTU, dataplane.TunnelMTU(dataplane.IPv4, 1400); got != want {
			t.Errorf("MTU is %d, not %d", got, want)
		}
	})
}

// A program that starts again forgets the connections of pods that left meanwhile.
func TestStartForgets(t *testing.T) {
	run(t, func(f *fixture) {
		same, reused, gone, unknown := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.0.4"), netip.MustParseAddr("10.0.0.5")
		f.set(func(k *kernel) {
			for i, l := range []struct {
				addr  netip.Addr
				alias string
			}{{same, "a,old"}, {reused, "old"}, {gone, "c"}, {unknown, ""}} {
				k.made[l.addr] = dataplane.TunnelLink{Index: 7 + i, Name: l.addr.String(), Alias: l.alias}
			}
		})
		f.list(map[string]string{"a": "10.0.0.2", "b": "10.0.0.3", "d": "10.0.0.5"})
		f.start()
		f.did(moment)
		if want := []netip.Addr{reused, gone}; !slices.Equal(f.forgotten, want) {
			t.Errorf("forgot %v, want %v", f.forgotten, want)
		}
	})
}

// Connections that couldn't be forgotten are tried again.
func TestForgetIsTriedAgain(t *testing.T) {
	run(t, func(f *fixture) {
		f.list(map[string]string{"a": "10.0.0.2"})
		f.start()
		f.did(moment)
		f.set(func(k *kernel) { k.fail["forget"] = errors.New("no memory") })
		f.list(nil)
		f.did(time.Second)
		f.set(func(k *kernel) { delete(k.fail, "forget") })
		f.did(time.Minute)
		if !slices.Contains(f.forgotten, netip.MustParseAddr("10.0.0.2")) || len(f.released) != 0 {
			t.Errorf("forgot %v", f.forgotten)
		}
	})
}
