package egress

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// machine is the machine's own namespace, which is the fabric: a bridge to which routers and clients are
// attached, with the API server, and the way to the server.
var machine = &netnstest.NS{}

const (
	bridge    = "fabric"
	fabric4   = "10.0.0.254"
	fabric6   = "fd00::fe"
	namespace = "internet"
)

// programEnv is where the program coil-egress is: it is built before the machine boots.
const programEnv = "COIL_EGRESS_PROGRAM"

var (
	router4, router6 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	server4, server6 = netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")
	// outside are addresses of the server that no Egress leads to.
	outside4, outside6 = netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("2001:db8:ff::2")
	destinations       = []string{"192.0.2.0/24", "2001:db8::/64"}
	both               = []dataplane.Family{dataplane.IPv4, dataplane.IPv6}
	fabricAddr         = map[dataplane.Family]string{dataplane.IPv4: fabric4, dataplane.IPv6: fabric6}
)

// of chooses by family.
func of(f dataplane.Family, a4, a6 netip.Addr) netip.Addr {
	if f == dataplane.IPv4 {
		return a4
	}
	return a6
}

// topology is a router, clients and a server around the fabric.
type topology struct {
	t              *testing.T
	api            *api
	router, server *netnstest.NS
	program        *rig.Program
	kubeconfig     string
	// uplink sees what enters and leaves the router.
	uplink *capture
	// a and b are made when they are first needed; none is registered.
	a, b    *sender
	clients int
}

// newTopology makes one whose router isn't started; families are those that it has.
func newTopology(t *testing.T, families ...dataplane.Family) *topology {
	t.Helper()
	top := &topology{t: t}
	machine.Configure(t, netlab.AddBridge(bridge, netip.MustParsePrefix(fabric4+"/24"), netip.MustParsePrefix(fabric6+"/64"))...)
	t.Cleanup(func() { machine.IP(t, "link", "del", bridge) })
	testkit.Check(t, machine.Lab().Forward())
	top.api = newAPI(t)
	top.api.setEgress(namespace, false, destinations...)
	top.router = top.attach("router", 1, families...)
	top.uplink = newCapture(t, "router")
	// As coild does it when the pod starts.
	testkit.Check(t, top.router.Lab().Forward(), top.router.Lab().RPFilter(0, "eth0"))
	top.server = netnstest.New(t)
	machine.Configure(t, "link add server type veth peer name eth0 netns "+top.server.Path)
	t.Cleanup(func() { machine.IP(t, "link", "del", "server") })
	machine.Configure(t, "addr add 192.0.2.1/24 dev server", "addr add 2001:db8::1/64 dev server nodad", "link set server up",
		"route add "+outside4.String()+" via 192.0.2.2", "route add "+outside6.String()+" via 2001:db8::2")
	top.server.Configure(t, "addr add 192.0.2.2/24 dev eth0", "addr add 2001:db8::2/64 dev eth0 nodad", "link set eth0 up",
		"addr add "+outside4.String()+"/32 dev lo", "addr add "+outside6.String()+"/128 dev lo",
		"route add default via 192.0.2.1", "route add default via 2001:db8::1")
	top.serve()
	var addrs []string
	for _, f := range families {
		addrs = append(addrs, of(f, router4, router6).String())
	}
	dir := t.TempDir()
	top.kubeconfig = dir + "/kubeconfig"
	top.api.kubeconfig(t, top.kubeconfig, fabricAddr[families[0]])
	// As in its container: no right but NET_ADMIN.
	top.program = &rig.Program{
		Path: "setpriv", Netns: top.router.Path, Log: dir + "/coil-egress.log",
		Args: []string{"--bounding-set=-all,+net_admin", "--inh-caps=-all,+net_admin", "--",
			os.Getenv(programEnv), "--kubeconfig=" + top.kubeconfig, "--drain-period=2s", "--debug-socket=", "-v=2"},
		Env: []string{"COIL_POD_ADDRESSES=" + strings.Join(addrs, ","), "COIL_NODE_ADDRESSES=" + fabric4 + "," + fabric6, "COIL_POD_NAMESPACE=" + namespace, "COIL_POD_NAME=router-0",
			"COIL_EGRESS_NAME=" + egressName},
	}
	t.Cleanup(func() {
		top.program.Kill()
		if t.Failed() {
			t.Logf("the end of coil-egress's log:\n%s", top.program.Logs(40))
		}
	})
	return top
}

// attach makes a namespace whose eth0 is on the fabric, as host number n, by the port name.
func (top *topology) attach(port string, n int, families ...dataplane.Family) *netnstest.NS {
	top.t.Helper()
	ns := netnstest.New(top.t)
	machine.Configure(top.t, fmt.Sprintf("link add %s type veth peer name eth0 netns %s", port, ns.Path), "link set "+port+" master "+bridge+" up")
	// The namespace may outlive the test for a moment.
	top.t.Cleanup(func() { machine.IP(top.t, "link", "del", port) })
	var commands []string
	for _, f := range families {
		if f == dataplane.IPv4 {
			commands = append(commands, fmt.Sprintf("addr add 10.0.0.%d/24 dev eth0", n))
		} else {
			commands = append(commands, fmt.Sprintf("addr add fd00::%x/64 dev eth0 nodad", n))
		}
	}
	commands = append(commands, "link set eth0 up")
	for _, f := range families {
		commands = append(commands, "route add default via "+of(f, netip.MustParseAddr(fabric4), netip.MustParseAddr(fabric6)).String())
	}
	ns.Configure(top.t, commands...)
	return ns
}

// sender is a pod that sends through the router.
type sender struct {
	*netnstest.NS
	n       int
	members []member
	addr4   netip.Addr
	addr6   netip.Addr
}

// newClient makes a client of the router, with tunnels made by hand; it isn't registered.
func (top *topology) newClient(sport string) *sender {
	t := top.t
	t.Helper()
	top.clients++
	n := 10 + top.clients
	c := &sender{NS: top.attach(fmt.Sprintf("client%d", top.clients), n, both...), n: n}
	c.addr4, c.addr6 = netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), netip.MustParseAddr(fmt.Sprintf("fd00::%x", n))
	uid := fmt.Sprintf("uid-%d", top.clients)
	c.members = []member{{uid, c.addr4}, {uid, c.addr6}}
	testkit.Check(t, c.Lab().RPFilter(0))
	commands := []string{"fou add port 5555 ipproto 4", "-6 fou add port 5555 ipproto 41",
		fmt.Sprintf("link add fou4 mtu 1472 type ipip local %s remote %s ttl 225 encap fou encap-sport %s encap-dport 5555 encap-csum", c.addr4, router4, sport),
		fmt.Sprintf("link add fou6 mtu 1452 type ip6tnl mode ip6ip6 local %s remote %s hoplimit 225 encaplimit none encap fou encap-sport %s encap-dport 5555 encap-udp6-csum", c.addr6, router6, sport),
		"link set fou4 up", "link set fou6 up"}
	for _, a := range []netip.Addr{server4, outside4} {
		commands = append(commands, fmt.Sprintf("route add %s dev fou4 src %s", a, c.addr4))
	}
	for _, a := range []netip.Addr{server6, outside6} {
		commands = append(commands, fmt.Sprintf("route add %s dev fou6 src %s", a, c.addr6))
	}
	c.Configure(t, commands...)
	return c
}

// register makes these the clients of the Egress.
func (top *topology) register(clients ...*sender) {
	top.t.Helper()
	var all []member
	for _, c := range clients {
		all = append(all, c.members...)
	}
	top.api.publish(namespace, all...)
}

// fails checks that a client doesn't reach the server.
func (c *sender) fails(t *testing.T, to netip.Addr) {
	t.Helper()
	if err := c.Ping(to, testkit.Timeout(100*time.Millisecond)); err == nil {
		t.Errorf("there is an answer from %s", to)
	}
}

// reset makes only client a a client, of a router that runs and is ready.
func (top *topology) reset(t *testing.T) {
	t.Helper()
	top.t, top.uplink.t = t, t
	top.api.setEgress(namespace, false, destinations...)
	top.register(top.a)
	if !top.program.Running() {
		testkit.Check(t, top.program.Start())
	}
	top.ready()
	top.awaitTunnels(2)
	testkit.Eventually(t, 5*time.Second, "the client is served", func() error { return top.a.transfer(server4, 100) })
	top.uplink.settle()
	top.uplink.forget()
}

// start starts coil-egress and waits until it is ready.
func (top *topology) start() {
	top.t.Helper()
	testkit.Check(top.t, top.program.Start())
	top.ready()
}

// ready waits until coil-egress says that it is.
func (top *topology) ready() {
	top.t.Helper()
	testkit.Eventually(top.t, 10*time.Second, "the router is ready", func() error {
		if !top.program.Running() {
			top.t.Fatal("coil-egress has ended")
		}
		_, err := top.get("8081", "/readyz")
		return err
	})
}

// get asks coil-egress.
func (top *topology) get(port, path string) (string, error) {
	a := router4
	if !strings.Contains(top.program.Env[0], router4.String()) {
		a = router6
	}
	client := &http.Client{Timeout: testkit.Timeout(2 * time.Second), Transport: &http.Transport{DisableKeepAlives: true}}
	return netlab.Get(context.Background(), client, "http://"+at(a, port)+path)
}

// metric is the sum of a metric's values over those with all the labels, such as reason="invalid".
func (top *topology) metric(name string, labels ...string) float64 {
	top.t.Helper()
	sum := 0.0
lines:
	for line := range strings.Lines(testkit.Must(top.get("8080", "/metrics"))(top.t)) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(rest, l) {
				continue lines
			}
		}
		fields := strings.Fields(rest)
		sum += testkit.Must(strconv.ParseFloat(fields[len(fields)-1], 64))(top.t)
	}
	return sum
}

// serve answers at port 80 of all the server's addresses: with who asks, then with what
// was sent.
func (top *topology) serve() {
	l := testkit.Must(top.server.Lab().Listen(top.t.Context(), "tcp", ":80"))(top.t)
	top.t.Cleanup(func() { l.Close() })
	go netlab.Serve(l, func(conn net.Conn) {
		fmt.Fprintln(conn, conn.RemoteAddr())
		_, _ = io.Copy(conn, conn)
	})
}

// errSource is wrapped by errors about a wrong source address.
var errSource = errors.New("wrong source")

// dial connects to port 80 of the server.
func (c *sender) dial(to netip.Addr, timeout time.Duration) (net.Conn, error) {
	return netns.In(c.NS.NS, func() (net.Conn, error) { return net.DialTimeout("tcp", at(to, "80"), timeout) })
}

// transfer sends size bytes to the server and back, and checks whom the server has seen.
func (c *sender) transfer(to netip.Addr, size int) error {
	conn, err := c.dial(to, testkit.Timeout(5*time.Second))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(testkit.Timeout(20 * time.Second))); err != nil {
		return err
	}
	sent := make([]byte, size)
	for i := range sent {
		sent[i] = byte(rand.Uint32())
	}
	failed := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		failed <- errors.Join(err, conn.(*net.TCPConn).CloseWrite())
	}()
	r := bufio.NewReader(conn)
	who, err := r.ReadString('\n')
	if err != nil {
		return fmt.Errorf("read the source: %w", err)
	}
	received, err := io.ReadAll(r)
	if err := errors.Join(err, <-failed); err != nil {
		return err
	}
	if !bytes.Equal(sent, received) {
		return fmt.Errorf("sent %d bytes and received %d others", len(sent), len(received))
	}
	want := of(dataplane.FamilyOf(to), router4, router6)
	if seen := netip.MustParseAddrPort(strings.TrimSpace(who)).Addr().Unmap(); seen != want {
		return fmt.Errorf("%w: the server sees %s, not %s", errSource, seen, want)
	}
	return nil
}
