package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// network is two clients, three routers and a server around a namespace that forwards. One client is Coil's; the other has
// nothing of Coil. Each router is on a node of its own; that of the last one holds the floating addresses that its clients have.
//
//	client, plain -- fabric -- server
//	                /  |  \
//	 hand -- hand-node |   floating-node -- floating
//	               coil-node
//	                   |
//	                 coil
var network = `
netns add fabric
netns add client
netns add server
netns add plain
` + attached("client", 1) + onNode("hand", 2) + onNode("coil", 3) + attached("server", 4) + attached("plain", 5) + onNode("floating", 6) + `
-n server addr add 192.0.2.1/32 dev lo
-n server addr add 192.0.2.2/32 dev lo
-n server addr add 192.0.2.3/32 dev lo
-n server addr add 192.0.2.4/32 dev lo
-n server addr add 2001:db8::1/128 dev lo
-n server addr add 2001:db8::2/128 dev lo
-n server addr add 2001:db8::3/128 dev lo
-n server addr add 2001:db8::4/128 dev lo
-n fabric route add 192.0.2.0/24 via 10.0.4.2
-n fabric route add 2001:db8::/64 via fd00:4::2
-n fabric route add ` + held.IPv4.String() + ` via 10.1.6.2
-n fabric route add ` + held.IPv6.String() + ` via fd01:6::2
-n floating-node route add ` + held.IPv4.String() + ` via 10.0.6.2
-n floating-node route add ` + held.IPv6.String() + ` via fd00:6::2
`

// onNode makes a namespace and its node, and connects them: by the nth subnet with each other, and the node with the fabric by another one.
func onNode(name string, n int) string {
	return fmt.Sprintf(`
netns add %[1]s
netns add %[1]s-node
link add %[1]s netns fabric type veth peer name eth0 netns %[1]s-node
-n fabric addr add 10.1.%[2]d.1/24 dev %[1]s
-n fabric addr add fd01:%[2]d::1/64 dev %[1]s nodad
-n fabric link set %[1]s up
-n fabric route add 10.0.%[2]d.0/24 via 10.1.%[2]d.2
-n %[1]s-node addr add 10.1.%[2]d.2/24 dev eth0
-n %[1]s-node addr add fd01:%[2]d::2/64 dev eth0 nodad
-n %[1]s-node link set eth0 up
-n fabric route add fd00:%[2]d::/64 via fd01:%[2]d::2
-n %[1]s-node route add default via 10.1.%[2]d.1
-n %[1]s-node route add default via fd01:%[2]d::1
`, name, n) + joined(name, n, name+"-node")
}

// attached connects a namespace to the fabric by the nth subnet.
func attached(name string, n int) string { return joined(name, n, "fabric") }

// joined connects a namespace to another one, its way to everything, by the nth subnet.
func joined(name string, n int, to string) string {
	return fmt.Sprintf(`
link add %[1]s netns %[3]s type veth peer name eth0 netns %[1]s
-n %[3]s addr add 10.0.%[2]d.1/24 dev %[1]s
-n %[3]s addr add fd00:%[2]d::1/64 dev %[1]s nodad
-n %[3]s link set %[1]s up
-n %[1]s addr add 10.0.%[2]d.2/24 dev eth0
-n %[1]s addr add fd00:%[2]d::2/64 dev eth0 nodad
-n %[1]s link set eth0 up
-n %[1]s link set lo up
-n %[1]s route add default via 10.0.%[2]d.1
-n %[1]s route add default via fd00:%[2]d::1
`, name, n, to)
}

// byHand is the way to the server's first addresses: FoU and masquerade as ip and nft make it. The UDP port is another
// one than Coil's, at which a client hears only routers of its Egresses.
var byHand = `
-n hand fou add port 5556 ipproto 4
-n hand fou add port 5556 ipproto 41 -6
-n hand rule add iif eth0 lookup 100 pref 100
-n hand -6 rule add iif eth0 lookup 100 pref 100
` + tunnelled("client", 1) + tunnelled("plain", 5)

// tunnelled connects the client of the nth subnet to the router that is made by hand.
func tunnelled(name string, n int) string {
	return fmt.Sprintf(`
-n hand link add t4-%[1]s type ipip local 10.0.2.2 remote 10.0.%[2]d.2 ttl 225 encap fou encap-sport 5556 encap-dport 5556 encap-csum
-n hand link add t6-%[1]s type ip6tnl mode ip6ip6 local fd00:2::2 remote fd00:%[2]d::2 hoplimit 225 encaplimit none encap fou encap-sport 5556 encap-dport 5556 encap-udp6-csum
-n hand link set t4-%[1]s mtu 1472 up
-n hand link set t6-%[1]s mtu 1452 up
-n hand route add 10.0.%[2]d.2 dev t4-%[1]s table 100
-n hand route add fd00:%[2]d::2 dev t6-%[1]s table 100
-n %[1]s fou add port 5556 ipproto 4
-n %[1]s fou add port 5556 ipproto 41 -6
-n %[1]s link add t4 type ipip local 10.0.%[2]d.2 remote 10.0.2.2 ttl 225 encap fou encap-sport 5556 encap-dport 5556 encap-csum
-n %[1]s link add t6 type ip6tnl mode ip6ip6 local fd00:%[2]d::2 remote fd00:2::2 hoplimit 225 encaplimit none encap fou encap-sport 5556 encap-dport 5556 encap-udp6-csum
-n %[1]s link set t4 mtu 1472 up
-n %[1]s link set t6 mtu 1452 up
-n %[1]s route add 192.0.2.1 dev t4 src 10.0.%[2]d.2
-n %[1]s route add 2001:db8::1 dev t6 src fd00:%[2]d::2
`, name, n)
}

const masquerade = `
table inet hand {
	chain postrouting { type nat hook postrouting priority srcnat; oifname "eth0" ip saddr 10.0.0.0/16 masquerade fully-random; oifname "eth0" ip6 saddr fd00::/16 masquerade fully-random; }
	chain forward { type filter hook forward priority filter; tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu; }
}
`

// kubeProxy has the chains of kube-proxy (mode nftables, Kubernetes 1.36) that packets meet which a node forwards, in a cluster without Services.
// With these a node tracks connections.
const kubeProxy = `
table %[1]s kube-proxy {
	chain firewall-check { }
	chain service-endpoints-check { }
	chain cluster-ips-check { }
	chain services { }
	chain masquerading { meta mark and 0x4000 == 0 return; masquerade fully-random; }
	chain filter-prerouting { type filter hook prerouting priority dstnat - 10; ct state new jump firewall-check; }
	chain filter-forward { type filter hook forward priority filter; ct state new jump service-endpoints-check; ct state new jump cluster-ips-check; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
}
`

// Paths take turns in this order: the path made by hand, Coil's with either peering, Coil's with floating addresses, and the path made by
// hand from a client without Coil. All but the last are from one client; those of either peering share router and tunnel.
const (
	viaHand = iota
	viaService
	viaDirect
	viaFloating
	viaPlain
	paths
)

// targets are the server's addresses that the paths lead to.
var targets = map[dataplane.Family][paths]netip.Addr{dataplane.IPv4: targetsIn(dataplane.IPv4), dataplane.IPv6: targetsIn(dataplane.IPv6)}

func targetsIn(f dataplane.Family) (all [paths]netip.Addr) {
	for via := range viaPlain {
		all[via] = server(f, via)
	}
	all[viaPlain] = server(f, viaHand)
	return all
}

// senders are the namespaces that send by the paths.
var senders = [paths]string{viaHand: "client", viaService: "client", viaDirect: "client", viaFloating: "client", viaPlain: "plain"}

// inNamed calls do with a namespace.
func inNamed(name string, do func(*netlab.NS) error) error {
	ns, err := netlab.Named(name)
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := do(ns); err != nil {
		return fmt.Errorf("in %s: %w", name, err)
	}
	return nil
}

// in runs a program in a namespace.
func in(ctx context.Context, netns string, args ...string) (out string, err error) {
	err = inNamed(netns, func(ns *netlab.NS) error {
		out, err = ns.Run(ctx, args[0], args[1:]...)
		return err
	})
	return out, err
}

// measure makes the network and measures in it.
func (o *options) measure(ctx context.Context) error {
	r := Report{Conditions: figures.Now()}
	if err := prepare(ctx); err != nil {
		return err
	}
	servers, err := serve(ctx)
	defer func() {
		for _, s := range servers {
			_ = s.Process.Kill()
			_ = s.Wait()
		}
	}()
	if err != nil {
		return err
	}
	c, err := newCoil(ctx)
	if err != nil {
		return err
	}
	addressed, err := newFloating(ctx)
	if err != nil {
		return err
	}
	for _, n := range o.clients {
		s, err := c.resize(ctx, n)
		if err != nil {
			return fmt.Errorf("%d clients: %w", n, err)
		}
		if _, err := addressed.resize(ctx, n); err != nil {
			return fmt.Errorf("%d clients with floating addresses: %w", n, err)
		}
		r.Syncs = append(r.Syncs, s)
		for _, f := range families {
			fmt.Fprintf(os.Stderr, "%d clients, %s\n", n, f)
			p, err := o.compare(ctx, f)
			if err != nil {
				return err
			}
			p.Clients = n
			r.Paths = append(r.Paths, p)
		}
	}
	r.Conditions.LoadAtEnd = figures.Load()
	return json.NewEncoder(os.Stdout).Encode(r)
}

func prepare(ctx context.Context) error {
	if err := netlab.Lines(ctx, network+byHand); err != nil {
		return err
	}
	for _, n := range []string{"fabric", "hand-node", "hand", "coil-node", "coil", "floating-node", "floating", "client", "plain"} {
		links := []string{"eth0"}
		if n == "fabric" {
			links = nil
		}
		err := inNamed(n, func(ns *netlab.NS) error {
			if err := ns.RPFilter(0, links...); err != nil || slices.Contains(senders[:], n) {
				return err
			}
			return ns.Forward()
		})
		if err != nil {
			return err
		}
	}
	for _, node := range []string{"hand-node", "coil-node", "floating-node"} {
		if _, err := in(ctx, node, "nft", fmt.Sprintf(kubeProxy, "ip")+fmt.Sprintf(kubeProxy, "ip6")); err != nil {
			return err
		}
	}
	_, err := in(ctx, "hand", "nft", masquerade)
	return err
}

// serve starts a server of iperf3 at each address.
func serve(ctx context.Context) ([]*exec.Cmd, error) {
	var all []*exec.Cmd
	for _, addrs := range targets {
		for _, a := range addrs[:viaPlain] {
			cmd := exec.CommandContext(ctx, "iperf3", "-s", "-B", a.String())
			if err := inNamed("server", func(ns *netlab.NS) error { return ns.Start(cmd) }); err != nil {
				return all, fmt.Errorf("iperf3 for %s: %w", a, err)
			}
			all = append(all, cmd)
		}
	}
	return all, nil
}

// compare gives the paths their turns; which is first rotates.
func (o *options) compare(ctx context.Context, f dataplane.Family) (Path, error) {
	p := Path{Family: f.String()}
	for via := range paths {
		if _, err := o.tcp(ctx, f, via); err != nil { // caches, and a server that is just starting
			return p, err
		}
	}
	for i := range o.pairs {
		for j := range paths {
			via := (i + j) % paths
			v, err := o.turn(ctx, f, via)
			if err != nil {
				return p, err
			}
			p.TCP.add(via, v[0])
			p.RTT.add(via, v[1])
		}
	}
	return p, nil
}

// turn measures Mbit/s and the round trip in milliseconds.
func (o *options) turn(ctx context.Context, f dataplane.Family, via int) (v [2]float64, err error) {
	if v[0], err = o.tcp(ctx, f, via); err != nil {
		return v, err
	}
	v[1], err = roundTrip(ctx, f, via)
	return v, err
}

// tcp returns what arrives by one connection, in Mbit/s.
func (o *options) tcp(ctx context.Context, f dataplane.Family, via int) (float64, error) {
	var out string
	var err error
	// The server may be starting, or still at the connection before.
	for range 10 {
		if out, err = in(ctx, senders[via], "iperf3", "-J", "-t", strconv.Itoa(o.seconds), "-c", targets[f][via].String()); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
	if err != nil {
		return 0, err
	}
	var r struct {
		End struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return 0, fmt.Errorf("iperf3 to %s: %w", targets[f][via], err)
	}
	if r.End.Received.BitsPerSecond == 0 {
		return 0, fmt.Errorf("iperf3 to %s: nothing arrived: %s", targets[f][via], out)
	}
	return r.End.Received.BitsPerSecond / 1e6, nil
}

var pingTime = regexp.MustCompile(`time=([0-9.]+) ms`)

// roundTrip returns the median of some pings, in milliseconds.
func roundTrip(ctx context.Context, f dataplane.Family, via int) (float64, error) {
	out, err := in(ctx, senders[via], "ping", "-n", "-i", "0.005", "-c", "100", targets[f][via].String())
	if err != nil {
		return 0, err
	}
	var times []float64
	for _, m := range pingTime.FindAllStringSubmatch(out, -1) {
		ms, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return 0, err
		}
		times = append(times, ms)
	}
	if len(times) < 90 {
		return 0, fmt.Errorf("ping %s: %d answers of 100: %s", targets[f][via], len(times), out)
	}
	return median(times), nil
}
