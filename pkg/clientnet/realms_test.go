package clientnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// beyond are the destinations of all routers. Each router has them for itself, so that a flow that comes to another
// router than before is reset there.
var beyond = []string{"192.0.2.0/24", "2001:db8::/32"}

const beyondPort = 7

// beyondAddr is one of its addresses.
func beyondAddr(f dataplane.Family, n int) string {
	if f == dataplane.IPv4 {
		return fmt.Sprintf("192.0.2.%d", n)
	}
	return fmt.Sprintf("2001:db8::%x", n)
}

// realms are Links whose other ends are in network namespaces, one for each router, where a
// server answers.
type realms struct {
	*clientnettest.Pod
	*clientnettest.Links
	of map[netip.Addr]*netnstest.NS
}

// router makes what is behind a router.
func (w realms) router(n int) {
	t := w.T
	ns := netnstest.New(t)
	for _, prefix := range beyond {
		ns.IP(t, "route", "add", "local", prefix, "dev", "lo")
	}
	var l net.Listener
	testkit.Check(t, ns.Do(func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf(":%d", beyondPort))
		return err
	}))
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			go answer(c, byte(n))
		}
	}()
	for _, a := range routerAddrs(n) {
		w.of[a] = ns
	}
}

// answer sends, for each byte that comes, the number of the router.
func answer(c net.Conn, router byte) {
	defer c.Close()
	for b := make([]byte, 1); ; {
		if _, err := c.Read(b); err != nil {
			return
		}
		if _, err := c.Write([]byte{router}); err != nil {
			return
		}
	}
}

func routerAddrs(n int) []netip.Addr {
	return []netip.Addr{netip.AddrFrom4([4]byte{10, 1, 1, byte(n)}), netip.MustParseAddr(fmt.Sprintf("fd01::1:%d", n))}
}

// Make implements Tunnels. The two ends of a link have one address, so that nobody asks for it.
func (w realms) Make(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error) {
	var result dataplane.Result
	for _, t := range want {
		router, name := w.of[t.Remote], dataplane.TunnelName(t.Remote, 0)
		if _, err := h.IndexByName(name); err == nil || router == nil || w.Links.Broken[t.Remote] {
			continue
		}
		const mac = "02:00:00:00:00:01"
		other := "x" + name[4:]
		w.NS.IP(w.T, "link", "add", name, "address", mac, "type", "veth", "peer", "name", other, "address", mac, "netns", router.Path)
		for in, link := range map[*netnstest.NS]string{router: other, w.NS: name} {
			in.IP(w.T, "link", "set", link, "addrgenmode", "none", "arp", "off", "up")
		}
		router.IP(w.T, "route", "add", t.Local.String(), "dev", other)
		result.Added++
	}
	links, more, err := w.Links.Make(ctx, ns, h, port, want)
	return links, result.Plus(more), err
}

// newDirectPod is a pod whose tunnels lead to so many routers.
func newDirectPod(t *testing.T, routers int) *pod {
	p := newPod(t)
	p.Client.Idle = 20 * time.Millisecond
	w := realms{p.Pod, p.Links, map[netip.Addr]*netnstest.NS{}}
	for n := range routers {
		w.router(n + 1)
	}
	p.network = New(dataplane.ProtocolNode, w, nil)
	return p
}

// directly is an Egress with routers, as "1 live, 2 draining".
func directly(routers string, destinations ...string) client.Egress {
	e := clientnettest.Gateway("net/a", 0, destinations...)
	e.Direct = true
	for text := range strings.SplitSeq(routers, ", ") {
		var n int
		var state string
		if _, err := fmt.Sscan(text, &n, &state); err != nil {
			continue
		}
		for _, a := range routerAddrs(n) {
			e.Routers = append(e.Routers, client.Router{Addr: a, State: map[string]client.RouterState{
				"live": client.RouterLive, "draining": client.RouterDraining, "dead": client.RouterDead,
			}[state]})
		}
	}
	return e
}

// flow is a TCP connection of the pod, and the router that it goes by.
type flow struct {
	net.Conn
	router int
}

// connect opens flows of both families to the addresses of some numbers.
func (p *pod) connect(first, last int) []flow {
	p.T.Helper()
	var all []flow
	for i := first; i <= last; i++ {
		for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
			all = append(all, p.dial(beyondAddr(f, i)))
		}
	}
	return all
}

func (p *pod) dial(addr string) flow {
	p.T.Helper()
	c := testkit.Must(p.tryDial(addr))(p.T)
	p.T.Cleanup(func() { c.Close() })
	router, err := flow{Conn: c}.ask()
	if err != nil {
		p.T.Fatalf("a new flow: %v", err)
	}
	f := flow{c, router}
	if by := p.routerOf(f); by != router {
		p.T.Errorf("a flow to %s goes by router %d, and seems to go by %d", addr, router, by)
	}
	return f
}

func (p *pod) tryDial(addr string) (c net.Conn, err error) {
	err = p.NS.Do(func() (err error) {
		d := net.Dialer{Timeout: testkit.Timeout(5 * time.Second)}
		c, err = d.DialContext(p.T.Context(), "tcp", netip.AddrPortFrom(netip.MustParseAddr(addr), beyondPort).String())
		return err
	})
	return c, err
}

// useOnce opens a flow, and wants it to stay where it is for a while.
func (p *pod) useOnce(addr string) error {
	c, err := p.tryDial(addr)
	if err != nil {
		return err
	}
	defer c.Close()
	first := 0
	for range 5 {
		router, err := flow{Conn: c}.ask()
		if err != nil {
			return fmt.Errorf("from %s to %s: %w", c.LocalAddr(), addr, err)
		}
		if first == 0 {
			first = router
		}
		if router != first {
			return fmt.Errorf("from %s to %s by router %d, and then by %d", c.LocalAddr(), addr, first, router)
		}
	}
	return nil
}

// ask returns the router by which something comes back over a flow.
func (f flow) ask() (router int, err error) {
	if err := f.SetDeadline(time.Now().Add(testkit.Timeout(5 * time.Second))); err != nil {
		return 0, err
	}
	if _, err := f.Write([]byte("x")); err != nil {
		return 0, err
	}
	b := make([]byte, 1)
	_, err = io.ReadFull(f, b)
	return int(b[0]), err
}

// routerOf returns the router that a flow goes by; 0 for none.
func (p *pod) routerOf(c net.Conn) int {
	p.T.Helper()
	local, remote := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(c.RemoteAddr().String())
	link, err := p.Handle.LinkOf(p.T.Context(), 6, local, remote)
	if errors.Is(err, rtnl.ErrNotExist) {
		return 0
	}
	l := testkit.Must(p.Handle.LinkByIndex(p.T.Context(), link))(p.T)
	for n := range 9 {
		for _, a := range routerAddrs(n) {
			if dataplane.TunnelName(a, 0) == l.Name {
				return n
			}
		}
	}
	return 0
}

// idle waits until all buckets of the pod's groups may move.
func (p *pod) idle() {
	p.T.Helper()
	testkit.Eventually(p.T, 10*time.Second, "buckets become idle", func() error {
		for _, n := range testkit.Must(p.Handle.Nexthops(p.T.Context()))(p.T) {
			if len(n.Group.Members) == 0 {
				continue
			}
			for i, b := range testkit.Must(p.Handle.Buckets(p.T.Context(), n.ID))(p.T) {
				if b.Idle <= p.Client.Idle {
					return fmt.Errorf("bucket %d of %#x is idle for %s", i, n.ID, b.Idle)
				}
			}
		}
		return nil
	})
}

// share counts flows by their routers.
func share(flows []flow) map[int]int {
	n := map[int]int{}
	for _, f := range flows {
		n[f.router]++
	}
	return n
}

// must fails unless all flows work, by the routers by which they went.
func (p *pod) must(what string, flows []flow) {
	p.T.Helper()
	broken := 0
	for _, f := range flows {
		if _, err := f.ask(); err != nil {
			broken++
			p.T.Logf("%s > %s by router %d: %v", f.LocalAddr(), f.RemoteAddr(), f.router, err)
		}
	}
	if broken > 0 {
		p.T.Errorf("%s: %d of %d flows broke", what, broken, len(flows))
	}
}

// tunnels are the routers that the pod has tunnels to in both families.
func (p *pod) tunnels() []int {
	p.T.Helper()
	out := p.NS.IP(p.T, "-o", "link", "show", "type", "veth")
	var all []int
	for n := range 9 {
		a := routerAddrs(n)
		if strings.Contains(out, dataplane.TunnelName(a[0], 0)+"@") && strings.Contains(out, dataplane.TunnelName(a[1], 0)+"@") {
			all = append(all, n)
		}
	}
	return all
}

func (p *pod) pinned() int {
	p.T.Helper()
	n := 0
	for _, family := range []string{"-4", "-6"} {
		n += strings.Count(p.NS.IP(p.T, family, "rule"), "1850:")
	}
	return n
}
