package egress

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	gosync "sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/egress/onepod"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// direct is a pod that sends to routers directly, as coild makes it: coil-egress runs in each, and the
// API server's objects are in memory.
type direct struct {
	t *testing.T
	*topology
	families []dataplane.Family
	pod      *netnstest.NS
	// programs are the routers', by their numbers.
	programs map[int]*rig.Program
	client   *onepod.Pod

	mu      gosync.Mutex
	routers []client.Router
}

// perFamily is how many addresses the server has for this in each family; further ones are for flows to
// where nothing went yet.
var (
	perFamily = testkit.EgressForm.Times(16, 100)
	further   = testkit.EgressForm.Times(16, 50)
)

// podHost is the number of the pod on the fabric; routers have those from 2.
const podHost = 50

// addrsOf are the addresses of a host of the fabric, by its number.
func (d *direct) addrsOf(n int) []netip.Addr {
	var all []netip.Addr
	for _, f := range d.families {
		all = append(all, of(f, netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), netip.MustParseAddr(fmt.Sprintf("fd00::%x", n))))
	}
	return all
}

func newDirect(t *testing.T, families ...dataplane.Family) *direct {
	t.Helper()
	d := &direct{t: t, topology: newTopology(t, families...), families: families, programs: map[int]*rig.Program{}}
	var addrs []string
	for i := range perFamily + further {
		addrs = append(addrs, fmt.Sprintf("addr add %s/32 dev eth0", serverAddr(dataplane.IPv4, i)), fmt.Sprintf("addr add %s/128 dev eth0 nodad", serverAddr(dataplane.IPv6, i)))
	}
	d.server.Configure(t, addrs...)
	testkit.Check(t, machine.Lab().AgeRoutes(t.Context(), bridge))
	d.pod = d.attach("pod", podHost, families...)
	var members []member
	for _, a := range d.addrsOf(podHost) {
		members = append(members, member{"pod", a})
	}
	d.api.publish(namespace, members...)
	for _, n := range []int{2, 3, 4} {
		d.newRouter(n)
	}
	d.manage()
	t.Cleanup(d.stop)
	return d
}

// manage begins to manage the pod, as a coild does that knows nothing but what is recorded.
func (d *direct) manage() {
	d.t.Helper()
	o := onepod.Options{
		Name: "pod", Netns: store.Netns{Path: d.pod.Path, Inode: d.pod.Inode()}, Routers: d.listed, Event: func(format string, args ...any) { d.t.Logf("Event: "+format, args...) },
		Egress: &v2.Egress{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: egressName},
			Spec:       v2.EgressSpec{Destinations: destinations, Peering: v2.EgressPeeringDirect},
		},
		Repaired: func(out clientnet.Outcome) { d.t.Errorf("repaired %+v", out) },
	}
	for _, a := range d.addrsOf(podHost) {
		if a.Is4() {
			o.Address.IPv4 = a
		} else {
			o.Address.IPv6 = a
		}
	}
	d.client = testkit.Must(onepod.Start(d.t.Context(), o))(d.t)
}

// stop ends what manage began.
func (d *direct) stop() {
	d.t.Helper()
	testkit.Check(d.t, d.client.Stop())
}

// newRouter starts coil-egress in a router of its own, whose port on the fabric has its name.
func (d *direct) newRouter(n int) {
	t := d.t
	t.Helper()
	name := fmt.Sprintf("router%d", n)
	ns := d.attach(name, n, d.families...)
	testkit.Check(t, ns.Lab().Forward(), ns.Lab().RPFilter(0, "eth0"))
	var own []string
	for _, a := range d.addrsOf(n) {
		own = append(own, a.String())
	}
	p := &rig.Program{Path: d.program.Path, Args: d.program.Args, Netns: ns.Path, Log: t.TempDir() + "/coil-egress.log"}
	for _, e := range d.program.Env {
		if strings.HasPrefix(e, "COIL_POD_ADDRESSES=") {
			e = "COIL_POD_ADDRESSES=" + strings.Join(own, ",")
		}
		p.Env = append(p.Env, e)
	}
	d.programs[n] = p
	testkit.Check(t, p.Start())
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("the end of %s's log:\n%s", name, p.Logs(20))
		}
	})
	last := d.addrsOf(podHost)[len(d.families)-1]
	testkit.Eventually(t, 20*time.Second, name+" serves", func() error {
		out, err := ns.Run("nft", "list", "set", "inet", "coil", "clients_"+strings.ToLower(dataplane.FamilyOf(last).String()))
		if err == nil && !strings.Contains(out, last.String()) {
			err = errors.New("it has no client")
		}
		return err
	})
}

// listed returns the routers of the last list.
func (d *direct) listed() []client.Router {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.routers
}

// list makes these the routers; those with a minus drain.
func (d *direct) list(routers ...int) {
	d.mu.Lock()
	d.routers = nil
	for _, n := range routers {
		state := client.RouterLive
		if n < 0 {
			n, state = -n, client.RouterDraining
		}
		for _, a := range d.addrsOf(n) {
			d.routers = append(d.routers, client.Router{Addr: a, State: state})
		}
	}
	d.mu.Unlock()
	d.client.Changed()
}

// directFlow is a connection, and the router by which it goes.
type directFlow struct {
	net.Conn
	lines *bufio.Reader
	by    int
}

// open opens a connection to the nth address of the server.
func (d *direct) open(f dataplane.Family, n int, timeout time.Duration) (*directFlow, error) {
	c := sender{NS: d.pod}
	conn, err := c.dial(serverAddr(f, n), timeout)
	if err != nil {
		return nil, err
	}
	flow := &directFlow{Conn: conn, lines: bufio.NewReader(conn)}
	seen, err := flow.line(timeout)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	for n := range d.programs {
		if slices.Contains(d.addrsOf(n), seen) {
			flow.by = n
		}
	}
	if flow.by == 0 {
		return nil, fmt.Errorf("%w: the server sees %s", errSource, seen)
	}
	return flow, nil
}

// line reads an address.
func (f *directFlow) line(timeout time.Duration) (netip.Addr, error) {
	if err := f.SetDeadline(time.Now().Add(timeout)); err != nil {
		return netip.Addr{}, err
	}
	text, err := f.lines.ReadString('\n')
	if err != nil {
		return netip.Addr{}, err
	}
	at, err := netip.ParseAddrPort(strings.TrimSpace(text))
	return at.Addr().Unmap(), err
}

// works sends something that comes back.
func (f *directFlow) works() error {
	if err := f.SetDeadline(time.Now().Add(testkit.Timeout(5 * time.Second))); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(f, "10.9.9.9:9"); err != nil {
		return err
	}
	_, err := f.line(testkit.Timeout(5 * time.Second))
	return err
}

// flows opens connections to all addresses; they must go by these routers, by each some.
func (d *direct) flows(what string, routers ...int) []*directFlow {
	d.t.Helper()
	return d.flowsTo(0, perFamily, what, routers...)
}

// flowsTo is flows, to the addresses from one on until another.
func (d *direct) flowsTo(from, to int, what string, routers ...int) []*directFlow {
	d.t.Helper()
	var all []*directFlow
	by := map[int]int{}
	for i := from; i < to; i++ {
		for _, f := range d.families {
			flow, err := d.open(f, i, testkit.Timeout(5*time.Second))
			if err != nil {
				d.t.Fatalf("%s: %v", what, err)
			}
			d.t.Cleanup(func() { flow.Close() })
			by[flow.by]++
			all = append(all, flow)
		}
	}
	for _, n := range routers {
		if by[n] == 0 {
			d.t.Errorf("%s: no flow goes by router %d: %v", what, n, by)
		}
	}
	if len(by) != len(routers) {
		d.t.Errorf("%s: flows go by routers %v, want %v", what, by, routers)
	}
	return all
}

// live wants all flows to work, except by some routers: flows by them may work or not, but mustn't hang.
func (d *direct) live(what string, flows []*directFlow, but ...int) {
	d.t.Helper()
	broken, hang := map[int]int{}, map[int]int{}
	for _, f := range flows {
		err := f.works()
		if err == nil {
			continue
		}
		if slices.Contains(but, f.by) {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				hang[f.by]++
			}
			continue
		}
		broken[f.by]++
		d.t.Logf("%s: by router %d: %s > %s: %v", what, f.by, f.LocalAddr(), f.RemoteAddr(), err)
	}
	if len(broken) > 0 || len(hang) > 0 {
		d.t.Errorf("%s: of %d flows broke, by router, %v; hang instead of ending %v", what, len(flows), broken, hang)
	}
}

// awaitRouters waits until new flows can go by so many routers of each family, and no more.
func (d *direct) awaitRouters(n int) {
	d.t.Helper()
	testkit.Eventually(d.t, 20*time.Second, fmt.Sprintf("there are %d routers", n), func() error {
		out := d.pod.IP(d.t, "nexthop")
		for line := range strings.Lines(out) {
			if members := strings.Count(line, "/"); strings.Contains(line, " group ") && members+1 != n {
				return fmt.Errorf("%s", out)
			}
		}
		if strings.Count(out, " group ") != len(d.families) {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
}

// recovery measures for how long new flows fail: until all of some in a row succeed.
func (d *direct) recovery(since time.Time) time.Duration {
	d.t.Helper()
	const (
		enough = 16 // addresses, among which are some of each router
		// patience is less than it takes for a second SYN (RFC 6298), by which a flow could recover.
		patience = 800 * time.Millisecond
	)
	last, good := since, 0
	for i := 0; good < len(d.families)*enough; i++ {
		flow, err := d.open(d.families[i%len(d.families)], i/len(d.families)%enough, patience)
		if err != nil {
			last, good = time.Now(), 0
			if time.Since(since) > testkit.Timeout(time.Minute) {
				d.t.Fatalf("new flows fail: %v", err)
			}
			continue
		}
		good++
		flow.Close()
	}
	return last.Sub(since)
}
