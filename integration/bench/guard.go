package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/podnet"
)

// Guard is the cost of the source guard: the median difference of pairs, with and without it in turns.
type Guard struct {
	Pairs int `json:"pairs"`
	// Throughput and RoundTrips are ratios of TCP between two pods with the guard to TCP without, by
	// family.
	Throughput map[string]float64 `json:"throughput"`
	RoundTrips map[string]float64 `json:"round_trips"`
	// Gigabits and Microseconds are what these are without it.
	Gigabits     map[string]float64 `json:"gigabits_per_second"`
	Microseconds map[string]float64 `json:"round_trip_us"`
	// Attach is how much longer the wiring of a pod takes, in ms.
	Attach float64 `json:"attach_ms"`
}

// guardSpan is how long each half of a pair takes: so short that others who use the machine hit both.
// Whatever is measured takes far less, so that the median of a span leaves out when others interrupt.
const guardSpan = 20 * time.Millisecond

// piece is so many bytes that they are several packets, each as large as the kernel makes them, and fit the
// buffers of a connection, which are large from the start.
const (
	piece  = 256 << 10
	buffer = 8 << 20
)

// guarded is a node with two pods, and with or without the guard.
type guarded struct {
	node    *space
	pods    spaces
	network map[bool]*podnet.Network
	numbers int
}

func newGuarded(ctx context.Context) (_ *guarded, err error) {
	g := &guarded{network: map[bool]*podnet.Network{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
		}
	}()
	if g.node, err = newSpace(); err != nil {
		return nil, err
	}
	for _, guard := range []bool{false, true} {
		g.network[guard], err = podnet.New(podnet.Options{
			PodTable: dataplane.TablePods, RulePriority: dataplane.PriorityPods, Protocol: dataplane.ProtocolNode,
			SourceGuard: guard, Netns: g.node.path(),
		})
		if err != nil {
			return nil, err
		}
	}
	_, forwardErr := g.network[true].Forward(ctx)
	_, ruleErr := g.network[true].Rules(ctx)
	if err := errors.Join(forwardErr, ruleErr, g.pods.grow(3)); err != nil {
		return nil, err
	}
	for _, s := range g.pods[:2] {
		if _, err := g.network[true].Attach(ctx, g.pod(s), nil); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// pod is one that wasn't there before.
func (g *guarded) pod(s *space) podnet.Pod {
	g.numbers++
	return podnet.Pod{
		ContainerID: fmt.Sprintf("%064x", g.numbers), IfName: ifName, Netns: s.path(), Pool: "default",
		Namespace: "bench", Name: fmt.Sprintf("pod-%d", g.numbers),
		Address: ipam.Address{IPv4: v4Of(g.numbers), IPv6: v6Of(g.numbers)},
	}
}

func (g *guarded) close() error {
	var errs []error
	for _, n := range g.network {
		errs = append(errs, n.Close())
	}
	errs = append(errs, g.pods.close())
	if g.node != nil {
		errs = append(errs, g.node.close())
	}
	return errors.Join(errs...)
}

// connection is one of TCP between the two pods; each end is blocking, since Go's own waiting varies
// more than what is measured.
type connection struct{ client, server int }

func (g *guarded) connect(ctx context.Context, to netip.Addr) (*connection, error) {
	var listener net.Listener
	err := g.pods[1].Do(func() (err error) {
		listener, err = (&net.ListenConfig{Control: large}).Listen(ctx, "tcp", netip.AddrPortFrom(to, 0).String())
		return err
	})
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	var client net.Conn
	err = g.pods[0].Do(func() (err error) {
		client, err = (&net.Dialer{Timeout: 10 * time.Second, Control: large}).DialContext(ctx, "tcp", listener.Addr().String())
		return err
	})
	if err != nil {
		return nil, err
	}
	defer client.Close()
	server, err := listener.Accept()
	if err != nil {
		return nil, err
	}
	defer server.Close()
	c := &connection{-1, -1}
	if c.client, err = blocking(client); err == nil {
		c.server, err = blocking(server)
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// large gives a socket buffers beyond the limit for users.
func large(_, _ string, c syscall.RawConn) error {
	var err error
	control := c.Control(func(fd uintptr) {
		err = errors.Join(
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, buffer),
		)
	})
	return errors.Join(control, err)
}

// blocking returns a descriptor of a connection, which may be closed then.
func blocking(c net.Conn) (int, error) {
	f, err := c.(*net.TCPConn).File()
	if err != nil {
		return -1, err
	}
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return fd, unix.SetNonblock(fd, false)
}

func (c *connection) close() error {
	var errs []error
	for _, fd := range []int{c.client, c.server} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// urgent locks a goroutine to a thread that the kernel prefers to those of others, which then hardly
// change what is measured.
func urgent() error {
	runtime.LockOSThread() // until the goroutine ends, and the thread with it
	return unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
}

// write and read move all of a buffer.
func write(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func read(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := unix.Read(fd, b)
		if err != nil || n == 0 {
			return errors.Join(err, io.ErrUnexpectedEOF)
		}
		b = b[n:]
	}
	return nil
}

// stream returns how many seconds it takes to send a piece, both ends in one thread, so that a processor that
// others use costs no more than those spans that it is in.
func (c *connection) stream() (float64, error) {
	b := make([]byte, piece)
	return medianOf(func() error { return errors.Join(write(c.client, b), read(c.server, b)) })
}

// echo answers each byte until the connection ends.
func (c *connection) echo() error {
	err := urgent()
	for b := make([]byte, 1); err == nil; {
		if err = read(c.server, b); err == nil {
			err = write(c.server, b)
		}
	}
	return err
}

// turn returns how many seconds it takes to send a byte there and back, each end in a thread of its own.
func (c *connection) turn() (float64, error) {
	b := make([]byte, 1)
	return medianOf(func() error { return errors.Join(write(c.client, b), read(c.client, b)) })
}

// medianOf is the median of how many seconds something takes, again and again.
func medianOf(do func() error) (float64, error) {
	var took []float64
	for begin := time.Now(); time.Since(begin) < guardSpan; {
		at := time.Now()
		if err := do(); err != nil {
			return 0, err
		}
		took = append(took, time.Since(at).Seconds())
	}
	return median(took), nil
}

// compare measures with and without the guard in turns.
func (g *guarded) compare(ctx context.Context, pairs int, measure func() (float64, error)) (with, without []float64, err error) {
	done := make(chan error)
	values := map[bool][]float64{}
	go func() {
		err := urgent()
		_, warm := measure()
		err = errors.Join(err, warm)
		for i := 0; i < pairs && err == nil; i++ {
			for _, guard := range []bool{i%2 == 0, i%2 != 0} {
				var took float64
				if _, err = g.network[guard].Guard(ctx); err == nil {
					took, err = measure()
				}
				values[guard] = append(values[guard], took)
			}
		}
		done <- err
	}()
	err = <-done
	return values[true], values[false], err
}

// attach wires pods with and without the guard in turns, and returns how long each took, in seconds. They
// are removed together, which takes longer than to wire them.
func (g *guarded) attach(ctx context.Context, pairs int) (with, without []float64, err error) {
	const together = 20
	if err := g.pods.grow(2 + 2*together); err != nil {
		return nil, nil, err
	}
	values := map[bool][]float64{}
	for i := 0; i < pairs; {
		var targets []podnet.Target
		for ; i < pairs && len(targets) < 2*together; i++ {
			for _, guard := range []bool{i%2 == 0, i%2 != 0} {
				p := g.pod(g.pods[2+len(targets)])
				begin := time.Now()
				a, err := g.network[guard].Attach(ctx, p, nil)
				if err != nil {
					return nil, nil, err
				}
				values[guard] = append(values[guard], time.Since(begin).Seconds())
				targets = append(targets, podnet.Target{ID: p.ID(), HostIfIndex: a.HostIfIndex})
			}
		}
		if err := errors.Join(g.network[true].RemoveAll(ctx, targets...)...); err != nil {
			return nil, nil, err
		}
	}
	return values[true], values[false], nil
}

// traffic measures a connection to an address of the second pod.
func (g *guarded) traffic(ctx context.Context, pairs int, to netip.Addr, r *Guard) error {
	c, err := g.connect(ctx, to)
	if err != nil {
		return err
	}
	family := dataplane.FamilyOf(to).String()
	with, without, err := g.compare(ctx, pairs, c.stream)
	if err == nil {
		r.Throughput[family], r.Gigabits[family] = medianOfRatios(without, with), figures.Round(8*piece/median(without)/1e9, 2)
		ended := make(chan error)
		go func() { ended <- c.echo() }()
		if with, without, err = g.compare(ctx, pairs, c.turn); err == nil {
			r.RoundTrips[family], r.Microseconds[family] = medianOfRatios(without, with), figures.Round(1e6*median(without), 2)
		}
		_ = unix.Shutdown(c.client, unix.SHUT_RDWR)
		if end := <-ended; !errors.Is(end, io.ErrUnexpectedEOF) {
			err = errors.Join(err, end)
		}
	}
	return errors.Join(err, c.close())
}

// measureGuard measures the source guard with so many pairs of each kind.
func measureGuard(ctx context.Context, pairs int) (r Guard, err error) {
	r = Guard{
		Pairs: pairs, Throughput: map[string]float64{}, RoundTrips: map[string]float64{},
		Gigabits: map[string]float64{}, Microseconds: map[string]float64{},
	}
	g, err := newGuarded(ctx)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	for _, to := range []netip.Addr{v4Of(2), v6Of(2)} {
		if err := g.traffic(ctx, pairs, to, &r); err != nil {
			return r, err
		}
	}
	with, without, err := g.attach(ctx, pairs)
	if err != nil {
		return r, err
	}
	more := make([]float64, len(with))
	for i := range with {
		more[i] = 1000 * (with[i] - without[i])
	}
	r.Attach = median(more)
	return r, nil
}

func median(values []float64) float64 { return slices.Sorted(slices.Values(values))[len(values)/2] }

// medianOfRatios is that of each pair.
func medianOfRatios(dividends, divisors []float64) float64 {
	ratios := make([]float64, len(dividends))
	for i := range dividends {
		ratios[i] = dividends[i] / divisors[i]
	}
	return median(ratios)
}

// targets holds the guard's figures against what they have to reach.
//
// Round trips don't reach it on Linux 6.18. Two pods of an idle node take some 10 us for one. A chain in prerouting
// that only compares the link's group costs 1 % of that. The lookup of the route to the source costs 2 % in IPv4 and 7 %
// in IPv6, where the kernel makes and frees a route entry for each lookup. A set of sources that were looked up
// before would let a packet through after its source has moved away.
func (r Guard) targets(all *figures.Figures) {
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		family := f.String()
		all.AtLeast(fmt.Sprintf("TCP from pod to pod, %s, with the source guard by without", family), "", r.Throughput[family], 0.98)
		all.AtLeast(fmt.Sprintf("round trips from pod to pod, %s, with the source guard by without", family), "", r.RoundTrips[family], 0.98)
	}
	all.AtMost("wiring of a pod, median, with the source guard more than without", "ms", r.Attach, 0.1)
}
