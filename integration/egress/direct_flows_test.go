package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	gosync "sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// Flows stay where they are while routers come, drain, lose their power and come back, and while
// all of them are replaced.
func testDirect(t *testing.T) { directly(t, both...) }

// The same with one family.
func testDirectSingle(t *testing.T) {
	for _, f := range both {
		t.Run(f.String(), func(t *testing.T) { directly(t, f) })
	}
}

func directly(t *testing.T, families ...dataplane.Family) {
	d := newDirect(t, families...)
	if _, err := d.open(families[0], 1, time.Second); err == nil {
		t.Error("there is a way without a router")
	}
	d.list(2, 3)
	d.awaitRouters(2)
	flows := d.flows("two routers", 2, 3)
	d.list(2, 3, 4)
	d.awaitRouters(3)
	d.live("a router came", flows)
	if testkit.EgressForm.Long() { // when nothing else wants the processors
		d.answers(2)
	}
	d.list(-2, 3, 4)
	d.awaitRouters(2)
	d.live("a router drains", flows)
	flows = append(flows, d.flows("a router drains", 3, 4)...)
	d.live("a router drains, and there are more", flows)

	// Power-off: its link is gone at once, and nobody tells.
	off := time.Now()
	machine.Configure(t, "link set router3 down")
	d.judge([]time.Duration{d.recovery(off)})
	d.awaitRouters(1)
	d.live("a router lost its power", flows, 3)
	machine.Configure(t, "link set router3 up")
	d.awaitRouters(2)
	d.live("it came back", flows, 3)
	// For IPv6 the way to a destination is that of its other flows, which the router doesn't get.
	d.flowsTo(perFamily, perFamily+further, "it came back", 3, 4)

	d.list(3, 4)
	d.awaitGone(2)
	d.awaitRouters(2)
	d.live("a router is gone", flows, 2, 3)
	d.list(-4)
	testkit.Eventually(t, 10*time.Second, "no router takes flows", func() error {
		flow, err := d.open(families[0], 1, time.Second)
		if err == nil {
			return errors.Join(errors.New("one does"), flow.Close())
		}
		return nil
	})
	d.live("all drain", flows, 2, 3)
	if !brief(t) { // of the kernel it asks nothing that wasn't done above
		d.replace(t)
	}
}

// answers wants that it costs a router little to say that it lives. Each node asks it once a second in
// each family, and the nodes of 5,000 clients are as many as have 110 pods each, the kubelet's default.
func (d *direct) answers(router int) {
	d.t.Helper()
	const batches, atOnce, nodes, limit = 20, 50, (5000 + 109) / 110, 0.02
	kernel := clientnet.New(dataplane.ProtocolNode, clientnet.FoU{}, nil)
	pod := store.Netns{Path: d.pod.Path, Inode: d.pod.Inode()}
	var questions []echo.Question
	for i, a := range d.addrsOf(router) {
		var link int
		testkit.Check(d.t, d.pod.Do(func() error {
			l, err := net.InterfaceByName(dataplane.TunnelName(a, 0))
			if err == nil {
				link = l.Index
			}
			return err
		}))
		for range atOnce {
			questions = append(questions, echo.Question{Link: link, From: d.addrsOf(podHost)[i], To: a})
		}
	}
	// All is done by this machine, one after the other: the router's part is less.
	asked, answered, start := 0, 0, time.Now()
	for range batches {
		got, err := kernel.Ask(d.t.Context(), pod, testkit.Timeout(time.Second), questions)
		testkit.Check(d.t, err)
		asked += len(got)
		for _, a := range got {
			if a == echo.Given {
				answered++
			}
		}
	}
	each := time.Since(start) / time.Duration(asked)
	share := float64(each) * float64(nodes*len(d.families)) / float64(time.Second)
	d.t.Attr("answers", fmt.Sprintf("a question and its answer take %s, those of %d nodes' each second %.2f %% of a processor", each, nodes, 100*share))
	if answered < asked || share > limit*float64(testkit.Limit(time.Second))/float64(time.Second) {
		d.t.Errorf("%d of %d questions were answered; the answers take %.4f of a processor, and may %.2f, or more where it is emulated", answered, asked, share, limit)
	}
}

// judge compares how long new flows failed after a power-off with the target.
func (d *direct) judge(failed []time.Duration) {
	d.t.Helper()
	at := func(q float64) time.Duration { return figures.NearestRank(failed, q).Round(time.Millisecond) }
	d.t.Logf("of %d times that a router lost its power, new flows failed for %s (median), %s (p99)", len(failed), at(0.5), at(0.99))
	if limit := testkit.Limit(5 * time.Second); at(0.99) > limit {
		d.t.Errorf("p99 is longer than %s", limit)
	}
}

// Time after time a router loses its power, each time before a coild that has just started.
func testDirectFailover(t *testing.T) {
	d := newDirect(t, both...)
	d.list(2, 3, 4)
	var failed []time.Duration
	for i := range 20 {
		d.awaitRouters(3)
		n := 2 + i%3
		off := time.Now()
		machine.Configure(t, fmt.Sprintf("link set router%d down", n))
		failed = append(failed, d.recovery(off))
		d.awaitRouters(2)
		d.stop()
		machine.Configure(t, fmt.Sprintf("link set router%d up", n))
		d.manage()
	}
	d.judge(failed)
}

// replace updates the routers 2, 3 and 4, one after the other, while flows go on and new ones come.
func (d *direct) replace(t *testing.T) {
	d.list(2, 3, 4)
	d.awaitRouters(3)
	flows := d.flows("before the update", 2, 3, 4)
	load := d.newLoad()
	updates := testkit.EgressForm.Times(1, 3)
	defer load.end(updates)
	routers, former := []int{2, 3, 4}, []int{}
	for i, n := range routers[:updates] {
		d.newRouter(n + 3)
		routers[i] = -n
		d.list(append(routers, n+3)...)
		d.awaitRouters(3)
		d.programs[n].Stop() // which drains
		d.live(fmt.Sprintf("router %d drained", n), flows, former...)
		former = append(former, n)
		routers[i] = n + 3
		d.list(routers...)
		d.awaitGone(n)
		d.live(fmt.Sprintf("router %d is gone", n), flows, former...)
		machine.Configure(t, fmt.Sprintf("link set router%d down", n))
		flows = append(flows, d.flows("with a new router", routers...)...)
	}
	d.live("after the update", flows, former...)
}

// awaitGone waits until the pod has no tunnel to a router.
func (d *direct) awaitGone(n int) {
	d.t.Helper()
	testkit.Eventually(d.t, 10*time.Second, fmt.Sprintf("there is no tunnel to router %d", n), func() error {
		for _, a := range d.addrsOf(n) {
			if name := dataplane.TunnelName(a, 0); hasLink(d.pod, name, "") == nil {
				return fmt.Errorf("%s is there", name)
			}
		}
		return nil
	})
}

// load is what a pod sends all the time: packets of UDP, and new connections of TCP.
type load struct {
	*direct
	done    chan struct{}
	running gosync.WaitGroup

	mu                 gosync.Mutex
	sent, lost, opened int
	problems           []error
	// late is when packets of UDP were on their way for long, but not lost: then the machine stood still.
	late []span
	// again is, by family, when connections were opened whose first packet was sent again.
	again map[dataplane.Family][]span
}

// span is from one time until another.
type span struct{ from, to time.Time }

func (s span) String() string {
	return fmt.Sprintf("%s for %s", s.from.Format("15:04:05.000"), s.to.Sub(s.from))
}

// meets says whether two spans have a time in common.
func (s span) meets(other span) bool { return s.from.Before(other.to) && other.from.Before(s.to) }

// newLoad starts flows of UDP, more than there are routers, and in each family one new connection of
// TCP after the other.
func (d *direct) newLoad() *load {
	d.t.Helper()
	l := &load{direct: d, done: make(chan struct{}), again: map[dataplane.Family][]span{}}
	for i := range 8 {
		to := serverAddr(d.families[i%len(d.families)], i)
		d.echo(to)
		conn := testkit.Must(d.pod.Lab().Dial(d.t.Context(), "udp", at(to, "80")))(d.t)
		l.running.Go(func() { defer conn.Close(); l.send(conn) })
	}
	for _, f := range d.families {
		l.running.Go(func() { l.connect(f) })
	}
	return l
}

// echo lets the server send datagrams back that come to one of its addresses.
func (d *direct) echo(addr netip.Addr) {
	conn := testkit.Must(netns.In(d.server.NS, func() (*net.UDPConn, error) {
		return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 80)))
	}))(d.t)
	d.t.Cleanup(func() { conn.Close() })
	go func() {
		for b := make([]byte, 100); ; {
			n, from, err := conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = conn.WriteToUDPAddrPort(b[:n], from)
		}
	}()
}

// ended waits for a moment and says whether it is the end.
func (l *load) ended(moment time.Duration) bool {
	select {
	case <-l.done:
		return true
	case <-time.After(moment):
		return false
	}
}

// send sends packets with numbers, which are to come back.
func (l *load) send(conn net.Conn) {
	var mu gosync.Mutex
	away := map[uint64]time.Time{} // by number: when it was sent
	ended := false
	all := make(chan struct{})
	go func() { // until all have come back after the end, or until the deadline that is set below
		defer close(all)
		for b := make([]byte, 100); ; {
			n, err := conn.Read(b)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
			if err != nil || n != 8 {
				continue // an error of ICMP: what it is about is missing in the end
			}
			number, now := binary.BigEndian.Uint64(b), time.Now()
			mu.Lock()
			sent, ok := away[number]
			delete(away, number)
			complete := ended && len(away) == 0
			mu.Unlock()
			if ok && now.Sub(sent) > 500*time.Millisecond {
				l.mu.Lock()
				l.late = append(l.late, span{sent, now})
				l.mu.Unlock()
			}
			if complete {
				return
			}
		}
	}()
	sent := uint64(0)
	for ; !l.ended(testkit.Timeout(20 * time.Millisecond)); sent++ {
		mu.Lock()
		away[sent] = time.Now()
		mu.Unlock()
		b := binary.BigEndian.AppendUint64(nil, sent)
		if _, err := conn.Write(b); err != nil { // by ICMP, about one before
			_, _ = conn.Write(b)
		}
	}
	mu.Lock()
	ended = true
	patience := testkit.Timeout(time.Second)
	if len(away) == 0 {
		patience = 0
	}
	mu.Unlock()
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	<-all
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent += int(sent)
	l.lost += len(away)
	if len(away) > 1 {
		l.problems = append(l.problems, fmt.Errorf("UDP to %s lost %d packets of %d, sent at %v", conn.RemoteAddr(), len(away), sent, slices.Collect(maps.Values(away))))
	}
}

// connect opens connections.
func (l *load) connect(f dataplane.Family) {
	for n := 0; !l.ended(testkit.Timeout(5 * time.Millisecond)); n++ {
		start := time.Now()
		flow, err := l.open(f, n%perFamily, testkit.Timeout(2*time.Second))
		took := span{start, time.Now()}
		again := uint32(0)
		if err == nil {
			if again, err = sentAgain(flow); again > 1 {
				err = errors.Join(err, fmt.Errorf("lost %d packets", again))
			}
			err = errors.Join(err, flow.Close())
		}
		l.mu.Lock()
		l.opened++
		if err != nil {
			l.problems = append(l.problems, fmt.Errorf("TCP to %s, from %s: %w", serverAddr(f, n%perFamily), took, err))
		}
		if again > 0 {
			l.again[f] = append(l.again[f], took)
		}
		l.mu.Unlock()
	}
}

// sentAgain is how many segments a connection sent again.
func sentAgain(flow *directFlow) (segments uint32, err error) {
	raw, err := flow.Conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var info *unix.TCPInfo
	if ctlErr := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); ctlErr != nil || err != nil {
		return 0, errors.Join(ctlErr, err)
	}
	return info.Total_retrans, nil
}

// end stops the load, of which nearly nothing may have been lost: of the connections that were begun
// in the moment in which a router left, the first packet.
func (l *load) end(removed int) {
	l.t.Helper()
	close(l.done)
	l.running.Wait()
	for f, again := range l.again {
		lost := slices.DeleteFunc(slices.Clone(again), func(s span) bool { return slices.ContainsFunc(l.late, s.meets) })
		l.t.Logf("%s: %d connections sent their first packet again, %d of them while the machine stood still", f, len(again), len(again)-len(lost))
		if len(lost) > removed {
			l.problems = append(l.problems, fmt.Errorf("the first packets of %s connections were lost: %v; want at most one for each of %d routers", f, lost, removed))
		}
	}
	l.t.Logf("meanwhile %d packets of UDP were sent, of which %d were lost and %d late, and %d connections opened", l.sent, l.lost, len(l.late), l.opened)
	if err := errors.Join(l.problems...); err != nil || l.sent < 50 || l.opened < 20 {
		l.t.Errorf("of %d packets and %d connections: %v", l.sent, l.opened, err)
	}
}

// serverAddr is the nth address of the server in a family.
func serverAddr(f dataplane.Family, n int) netip.Addr {
	return of(f, netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + n)}), netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", 100+n)))
}
