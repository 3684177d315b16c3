package egress

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const mebibyte = 1 << 20

// A client's data arrives complete and with the router's address, in both families, with
// source ports that are fixed, then the kernel's choice, changed under way, then fixed again.
func testNAT(t *testing.T, top *topology) {
	c, uplink := top.a, top.uplink
	repeat := testkit.EgressForm.Times(1, 100)
	for _, auto := range []bool{false, true, false} {
		top.api.setEgress(namespace, auto, destinations...)
		want := map[bool]string{false: "encap-sport 5555", true: "encap-sport auto"}[auto]
		testkit.Eventually(t, 5*time.Second, "source ports change", func() error {
			if shown := top.router.IP(t, "-d", "link", "show"); strings.Count(shown, want) != 2 {
				return fmt.Errorf("tunnels are:\n%s", shown)
			}
			return nil
		})
		uplink.forget()
		for range repeat {
			for _, server := range []netip.Addr{server4, server6} {
				if err := c.transfer(server, mebibyte); err != nil {
					t.Errorf("auto %t, %s: %v", auto, server, err)
				}
			}
		}
		uplink.sound()
		for f, own := range map[dataplane.Family]netip.Addr{dataplane.IPv4: router4, dataplane.IPv6: router6} {
			outer := uplink.All(func(p netlab.Packet) bool { return p.Src == own && isFoU(p) })
			if len(outer) == 0 {
				t.Errorf("%s: nothing came back by the tunnel", f)
			}
			for _, p := range outer {
				if p.Checksum == 0 {
					t.Errorf("%s has no checksum", p)
					break
				}
				if fixed := p.SPort == 5555; fixed == auto {
					t.Errorf("%s, and source ports are chosen: %t", p, auto)
					break
				}
			}
		}
	}
	// The names and labels that dashboards rely on.
	labels := []string{`namespace="internet"`, `egress="nat"`}
	if n := top.metric("coil_egress_client_pod_count", labels...); n != 1 {
		t.Errorf("%v clients, want 1", n)
	}
	info := []string{`egress="nat"`, `egress_namespace="internet"`, `namespace="clients"`, `pod="pod-` + c.members[0].uid + `"`}
	for _, m := range c.members {
		name := dataplane.TunnelName(m.addr, 0)
		if n := top.metric("coil_egress_client_pod_info", append(info, fmt.Sprintf(`pod_ip=%q`, m.addr), fmt.Sprintf(`interface=%q`, name))...); n != 1 {
			t.Errorf("no information about %s", m.addr)
		}
	}
	labels = append(labels, `pod="router-0"`)
	for _, protocol := range []string{`protocol="ipv4"`, `protocol="ipv6"`} {
		if n := top.metric("coil_egress_nftables_masqueraded_packets_total", append(labels, protocol)...); n < 100 {
			t.Errorf("%s: %v packets were masqueraded", protocol, n)
		}
		if n := top.metric("coil_egress_nftables_masqueraded_bytes_total", append(labels, protocol)...); n < 3*mebibyte {
			t.Errorf("%s: %v bytes were masqueraded", protocol, n)
		}
		if n := top.metric("coil_egress_tunnels", protocol); n != 1 {
			t.Errorf("%s: %v tunnels", protocol, n)
		}
	}
	// Packets that go back into a tunnel aren't a client's.
	const pings = 20
	for protocol, server := range map[string]netip.Addr{`protocol="ipv4"`: server4, `protocol="ipv6"`: server6} {
		sent := func() float64 {
			return top.metric("coil_egress_nftables_masqueraded_packets_total", append(labels, protocol)...)
		}
		before := sent()
		for range pings {
			testkit.Check(t, c.Ping(server, testkit.Timeout(time.Second)))
		}
		if n := sent() - before; n < pings || n >= 1.5*pings {
			t.Errorf("%s: a client sent %d packets, and %v are counted", protocol, pings, n)
		}
	}
	if n, limit := top.metric("coil_egress_nf_conntrack_entries_count", labels...), top.metric("coil_egress_nf_conntrack_entries_limit", labels...); n < 1 || limit < 1000 {
		t.Errorf("%v of %v connections", n, limit)
	}
	if n := top.metric("coil_egress_snat_ports_used", `protocol="tcp"`, `port="80"`); n < 1 {
		t.Errorf("no port is used")
	}
}

// A router of one family serves that one.
func testSingleFamily(t *testing.T, top *topology) {
	// become stops the router and makes it one of other addresses, as of another pod.
	become := func(addrs, api string) {
		top.program.Kill()
		testkit.Must(top.router.Run("nft", "delete", "table", "inet", "coil"))(t)
		top.program.Env[0] = "COIL_POD_ADDRESSES=" + addrs
		top.api.kubeconfig(t, top.kubeconfig, api)
	}
	defer become(router4.String()+","+router6.String(), fabric4)
	for _, f := range both {
		become(of(f, router4, router6).String(), fabricAddr[f])
		top.start()
		for _, g := range both {
			server := of(g, server4, server6)
			if f == g {
				testkit.Check(t, top.a.transfer(server, 1000))
			} else {
				top.a.fails(t, server)
			}
		}
		if n := top.metric("coil_egress_tunnels"); n != 1 {
			t.Errorf("router of %s has %v tunnels", f, n)
		}
	}
	top.uplink.sound()
}

// Nobody but a client can use the router, and a client only as itself and to destinations: not
// one packet of it leaves by the uplink, and all are counted.
func testForged(t *testing.T, top *topology) {
	good, bad, uplink := top.a, top.b, top.uplink
	for _, f := range both {
		server, outside := of(f, server4, server6), of(f, outside4, outside6)
		protocol := `protocol="` + strings.ToLower(f.String()) + `"`
		for _, c := range []struct {
			name, reason string
			send         func() error
		}{
			{"not a client", "non_client", func() error { return bad.Ping(server, testkit.Timeout(100*time.Millisecond)) }},
			{"another source", "forged_source", func() error {
				forged := of(f, netip.MustParseAddr("10.0.0.99"), netip.MustParseAddr("fd00::99"))
				good.Configure(t, fmt.Sprintf("addr add %s dev lo", forged))
				defer good.Configure(t, fmt.Sprintf("addr del %s dev lo", forged))
				_, err := good.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", forged.String(), server.String())
				return err
			}},
			{"source of another client", "forged_source", func() error {
				top.register(good, bad)
				testkit.Eventually(t, 5*time.Second, "the other one is a client", func() error {
					return bad.Ping(server, testkit.Timeout(100*time.Millisecond))
				})
				forged := of(f, bad.addr4, bad.addr6)
				good.Configure(t, fmt.Sprintf("addr add %s dev lo", forged))
				defer good.Configure(t, fmt.Sprintf("addr del %s dev lo", forged))
				uplink.settle()
				uplink.forget()
				_, err := good.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", forged.String(), server.String())
				return err
			}},
			{"not a destination", "not_a_destination", func() error { return good.Ping(outside, testkit.Timeout(100*time.Millisecond)) }},
		} {
			t.Run(fmt.Sprint(f, " ", c.name), func(t *testing.T) {
				before := top.metric("coil_egress_nftables_dropped_packets_total", protocol, `reason="`+c.reason+`"`)
				uplink.forget()
				if err := c.send(); err == nil {
					t.Error("there was an answer")
				}
				uplink.settle()
				if left := uplink.All(func(p netlab.Packet) bool { return !p.Out && (p.Dst == server || p.Dst == outside) }); len(left) > 0 {
					t.Errorf("%d packets left, the first %s", len(left), left[0])
				}
				if after := top.metric("coil_egress_nftables_dropped_packets_total", protocol, `reason="`+c.reason+`"`); after <= before {
					t.Errorf("%s was %v and is %v", c.reason, before, after)
				}
			})
		}
		top.register(good)
		top.awaitTunnels(2)
	}
	uplink.sound()
}
