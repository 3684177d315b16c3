package neighbours

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	packets "github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/node/announce"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// wiring is a kind of link between a node and hosts. The commands are those of ip, in which NODE and HOST are the namespaces.
type wiring struct {
	name       string
	node, host []string
	// uplinks are the links of the node that have its addresses, 192.0.2.2 and so on; that of each is the host's end.
	uplinks []string
	ends    []string
}

// here are those that each machine's kernel has.
var here = []wiring{
	{"Ethernet", []string{"link add eth0 type veth peer name eth0 netns HOST", "link set eth0 up"}, []string{"link set eth0 up"}, []string{"eth0"}, []string{"eth0"}},
	{"bridge", []string{"link add eth0 type veth peer name eth0 netns HOST", "link add br0 type bridge", "link set eth0 master br0", "link set eth0 up", "link set br0 up"},
		[]string{"link set eth0 up"}, []string{"br0"}, []string{"eth0"}},
	{"macvlan", []string{"link add eth0 type veth peer name eth0 netns HOST", "link set eth0 up", "link add mac0 link eth0 type macvlan mode bridge", "link set mac0 up"},
		[]string{"link set eth0 up"}, []string{"mac0"}, []string{"eth0"}},
	{"two uplinks", []string{"link add eth0 type veth peer name eth0 netns HOST", "link add eth1 type veth peer name eth1 netns HOST", "link set eth0 up", "link set eth1 up"},
		[]string{"link set eth0 up", "link set eth1 up"}, []string{"eth0", "eth1"}, []string{"eth0", "eth1"}},
}

// elsewhere are those that need modules.
var elsewhere = []wiring{
	{"VLAN", []string{"link add eth0 type veth peer name eth0 netns HOST", "link set eth0 up", "link add link eth0 name eth0.10 type vlan id 10", "link set eth0.10 up"},
		[]string{"link set eth0 up", "link add link eth0 name eth0.10 type vlan id 10", "link set eth0.10 up"}, []string{"eth0.10"}, []string{"eth0.10"}},
	{"bond", []string{"link add eth0 type veth peer name eth0 netns HOST", "link add eth1 type veth peer name eth1 netns HOST",
		"link add bond0 type bond mode active-backup miimon 100", "link set eth0 master bond0", "link set eth1 master bond0", "link set bond0 up"},
		[]string{"link add br0 type bridge", "link set eth0 master br0", "link set eth1 master br0", "link set eth0 up", "link set eth1 up", "link set br0 up"},
		[]string{"bond0"}, []string{"br0"}},
	{"VLAN of a bond", []string{"link add eth0 type veth peer name eth0 netns HOST", "link add bond0 type bond mode active-backup miimon 100", "link set eth0 master bond0", "link set bond0 up",
		"link add link bond0 name bond0.10 type vlan id 10", "link set bond0.10 up"},
		[]string{"link set eth0 up", "link add link eth0 name eth0.10 type vlan id 10", "link set eth0.10 up"}, []string{"bond0.10"}, []string{"eth0.10"}},
}

func TestLinks(t *testing.T) {
	t.Parallel()
	testkit.Need(t, testkit.Netns)
	for _, w := range here {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			w.test(t)
		})
	}
}

func TestLinksOfModules(t *testing.T) {
	t.Parallel()
	if vmtest.Reexec(t, vm.Options{Kernel: "6.12"}, "veth", "8021q", "bonding", "bridge") {
		for _, w := range elsewhere {
			t.Run(w.name, func(t *testing.T) {
				t.Parallel() // they wait most of the time
				w.test(t)
			})
		}
	}
}

// lan is a node between hosts and a pod.
type lan struct {
	host, node, pod *netnstest.NS
	keeper          *announce.Keeper
	has             []announce.Address
	// end is the host's end of the uplink in whose subnet an address of the pod is.
	end map[netip.Addr]string
}

// subnets of the uplinks: the node is the second address of each, the host the first.
var subnets = [][]netip.Prefix{
	{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")},
	{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:1::/64")},
}

// newLAN wires all, up to the routes that coild makes to a pod. The pod has an address of each subnet.
func (w wiring) newLAN(t *testing.T) *lan {
	t.Helper()
	l := &lan{host: netnstest.New(t), node: netnstest.New(t), pod: netnstest.New(t), end: map[netip.Addr]string{}}
	in := func(ns *netnstest.NS, commands ...string) {
		for i, c := range commands {
			commands[i] = strings.ReplaceAll(c, "HOST", l.host.Path)
		}
		ns.Configure(t, commands...)
	}
	in(l.node, slices.Clone(w.node)...)
	in(l.host, slices.Clone(w.host)...)
	in(l.node, "link add veth0 type veth peer name eth0 netns "+l.pod.Path, "link set veth0 up", "addr add 169.254.1.1/32 dev veth0", "addr add fe80::1/64 dev veth0 nodad",
		"rule add priority 2000 lookup 116", "-6 rule add priority 2000 lookup 116")
	in(l.pod, "link set eth0 up", "route add 169.254.1.1 dev eth0 scope link", "route add default via 169.254.1.1", "-6 route add default via fe80::1 dev eth0")
	for i, uplink := range w.uplinks {
		for _, p := range subnets[i] {
			host := p.Addr().Next()
			node := host.Next()
			nodad := map[bool]string{false: "", true: " nodad"}[node.Is6()]
			in(l.host, fmt.Sprintf("addr add %s/%d dev %s%s", host, p.Bits(), w.ends[i], nodad))
			in(l.node, fmt.Sprintf("addr add %s/%d dev %s%s", node, p.Bits(), uplink, nodad))
			a := node
			for range 198 {
				a = a.Next()
			}
			in(l.pod, fmt.Sprintf("addr add %s/%d dev eth0%s", a, a.BitLen(), nodad))
			in(l.node, fmt.Sprintf("route add %s dev veth0 table 116", a))
			l.has = append(l.has, announce.Address{Addr: a, Pool: "lan"})
			l.end[a] = w.ends[i]
		}
	}
	testkit.Check(t, l.node.Lab().Forward())
	l.begin(t)
	return l
}

// begin lets the node answer for what it has.
func (l *lan) begin(t *testing.T) {
	t.Helper()
	h := testkit.Must(rtnl.New(l.node.NS))(t)
	t.Cleanup(h.Close)
	l.keeper = announce.New(announce.Config{
		Addresses: func(context.Context) ([]announce.Address, error) { return l.has, nil },
		Handle:    h, Protocol: 30, Repairs: uncounted{},
		Set:  func(all ...sysctl.Setting) (bool, error) { return sysctl.Set(l.node.NS, all...) },
		Send: func(all []packets.Announcement) error { return packets.Send(l.node.NS, all) },
		Warn: func(reason, format string, args ...any) { t.Errorf(reason+": "+format, args...) },
		Watch: func(ctx context.Context, link int, seen func(packets.Claim)) error {
			return packets.Watch(ctx, l.node.NS, link, seen)
		},
		Rival: func(r announce.Rival) { t.Errorf("the node takes itself, or a host, for a rival: %+v", r) },
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.keeper.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		testkit.Check(t, <-ended)
	})
}

type uncounted struct{}

func (uncounted) Done(context.Context, string, int) {}
func (uncounted) Saw(string, string)                {}

// reaches waits until the host, which has forgotten where the address is, reaches it or doesn't.
func (l *lan) reaches(t *testing.T, a netip.Addr, want bool) {
	t.Helper()
	testkit.Eventually(t, 15*time.Second, fmt.Sprintf("%s is reached: %t", a, want), func() error {
		l.host.IP(t, "neigh", "flush", "dev", l.end[a])
		err := l.host.Ping(a, testkit.Timeout(time.Second))
		if want {
			return err
		}
		if err == nil {
			return errors.New("it is")
		}
		return nil
	})
}

// state is what the host knows about an address: "192.0.2.200 dev eth0 lladdr 02:... REACHABLE".
func (l *lan) state(t *testing.T, a netip.Addr) string {
	t.Helper()
	return strings.TrimSpace(l.host.IP(t, "neigh", "show", a.String(), "dev", l.end[a]))
}

func (w wiring) test(t *testing.T) {
	l := w.newLAN(t)
	for _, a := range l.has {
		l.reaches(t, a.Addr, false)
	}
	// The hosts believe that the addresses are elsewhere, where nobody is: they are told.
	const nowhere = "02:00:5e:00:53:99"
	for _, a := range l.has {
		l.host.IP(t, "neigh", "replace", a.Addr.String(), "lladdr", nowhere, "dev", l.end[a.Addr], "nud", "reachable")
	}
	testkit.Check(t, l.keeper.Sync(t.Context()))
	for _, a := range l.has {
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("the host is told where %s is", a.Addr), func() error {
			if s := l.state(t, a.Addr); strings.Contains(s, nowhere) || !strings.Contains(s, "lladdr") {
				return errors.New(s)
			}
			return l.host.Ping(a.Addr, testkit.Timeout(time.Second))
		})
	}
	for _, a := range l.has {
		l.reaches(t, a.Addr, true)
	}
	// A host that isn't sure any more asks the one that it knows, which answers, too.
	for _, a := range l.has {
		family := map[bool]string{true: "ipv4", false: "ipv6"}[a.Is4()]
		testkit.Check(t, l.host.Lab().Sysctl(family+"/neigh/"+l.end[a.Addr]+"/delay_first_probe_time=1"))
		l.reaches(t, a.Addr, true)
		mac := strings.Fields(l.state(t, a.Addr))[2]
		l.host.IP(t, "neigh", "replace", a.Addr.String(), "lladdr", mac, "dev", l.end[a.Addr], "nud", "stale")
		testkit.Check(t, l.host.Ping(a.Addr, testkit.Timeout(time.Second)))
		testkit.Eventually(t, 15*time.Second, fmt.Sprintf("the entry of %s is confirmed", a.Addr), func() error {
			if s := l.state(t, a.Addr); !strings.HasSuffix(s, "REACHABLE") {
				return errors.New(s)
			}
			return nil
		})
		testkit.Check(t, l.host.Ping(a.Addr, testkit.Timeout(time.Second)))
	}
	// One goes, the others stay.
	gone := l.has[0].Addr
	l.has = l.has[1:]
	testkit.Check(t, l.keeper.Withdraw(t.Context(), gone))
	l.reaches(t, gone, false)
	for _, a := range l.has {
		l.reaches(t, a.Addr, true)
	}
	l.has = nil
	testkit.Check(t, l.keeper.Sync(t.Context()))
	for a := range l.end {
		l.reaches(t, a, false)
	}
}
