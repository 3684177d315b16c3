package native

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// client is a pod that sends to the servers all the time: a datagram each fifth of a second, and a connection each half second.
type client struct {
	*pod
	*subject
	oracle *oracle
	ns     *netlab.NS
	end    context.CancelFunc
	done   sync.WaitGroup
}

// newClient adds a pod of a namespace that sends from when it is added.
func (w *world) newClient(o *oracle, n *rig.Node, namespace string, labels map[string]string) *client {
	w.t.Helper()
	c := &client{oracle: o, pod: &pod{Sandbox: testkit.Must(n.NewSandbox(w.t.Context(), rig.SandboxOptions{Namespace: namespace, Labels: labels}))(w.t)}}
	c.subject = &subject{
		name: types.NamespacedName{Namespace: namespace, Name: c.Sandbox.Name}, labels: maps.Clone(labels), history: map[netip.Addr][]moment{},
		sent: map[netip.Addr]int{}, arrived: map[netip.Addr]int{},
	}
	o.change(func() {
		c.number = len(o.subjects)
		o.subjects = append(o.subjects, c.subject)
	})
	w.attach(c.pod)
	o.change(func() { c.subject.addrs = c.pod.addrs })
	c.ns = testkit.Must(netlab.Open(c.Path))(w.t)
	ctx, end := context.WithCancel(context.WithoutCancel(w.t.Context()))
	c.end = end
	c.done.Go(func() { c.repeat(ctx, 200*time.Millisecond, c.datagram) })
	c.done.Go(func() { c.repeat(ctx, 500*time.Millisecond, c.connection) })
	return c
}

// silence ends what the pod sends, and leaves its namespace.
func (c *client) silence() error {
	c.end()
	c.done.Wait()
	return c.ns.Close()
}

// repeat calls a function for each server again and again. Each time has a local port of its own, so that no flow goes on by what was
// allowed when it began.
func (c *client) repeat(ctx context.Context, every time.Duration, send func(ctx context.Context, local int, to netip.Addr)) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for i := 0; ; i++ {
		for _, to := range servers {
			send(ctx, 1024+i%60000, to)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// port is where the pod sends to.
func (c *client) port(to netip.Addr) netip.AddrPort {
	return netip.AddrPortFrom(to, uint16(firstPort+c.number))
}

// datagram sends one that names the pod. Whether that succeeds is seen outside.
func (c *client) datagram(ctx context.Context, local int, to netip.Addr) {
	conn, err := c.ns.ListenPacket(ctx, "udp", fmt.Sprint(":", local))
	if err != nil {
		return
	}
	defer conn.Close()
	c.oracle.mu.Lock()
	if h := c.history[to]; h[len(h)-1].source.IsValid() {
		c.sent[to]++
	}
	c.oracle.mu.Unlock()
	_, _ = fmt.Fprintf(writer{conn, net.UDPAddrFromAddrPort(c.port(to))}, "%d %d", c.number, local)
}

// writer writes datagrams to an address.
type writer struct {
	net.PacketConn
	to net.Addr
}

func (w writer) Write(b []byte) (int, error) { return w.WriteTo(b, w.to) }

// connection opens one, sends what names the pod, reads it, and resets the connection: nothing of it is sent afterwards.
func (c *client) connection(ctx context.Context, local int, to netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	conn, err := netns.In(c.ns.NS, func() (net.Conn, error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: local}}
		return d.DialContext(ctx, "tcp", c.port(to).String())
	})
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetLinger(0)
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := fmt.Fprintf(conn, "%d %d", c.number, local); err == nil {
		_, _ = conn.Read(make([]byte, 100))
	}
}

// listen lets the server take datagrams and connections at all ports of pods, and count the datagrams of each.
func (w *world) listen(o *oracle) {
	t := w.t
	testkit.Must(w.server.Run(t.Context(), "nft", fmt.Sprintf("add table inet ports; add chain inet ports in { type nat hook prerouting priority -100; }; "+
		"add rule inet ports in meta l4proto { tcp, udp } th dport >= %d redirect to :%d", firstPort, serverPort)))(t)
	conn := testkit.Must(w.server.ListenPacket(t.Context(), "udp", fmt.Sprint(":", serverPort)))(t)
	ended := make(chan struct{})
	t.Cleanup(func() { conn.Close(); <-ended })
	go func() {
		defer close(ended)
		buf := make([]byte, 100)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var number, local int
			if _, err := fmt.Fscan(strings.NewReader(string(buf[:n])), &number, &local); err != nil {
				continue
			}
			o.mu.Lock()
			if a := from.(*net.UDPAddr).AddrPort().Addr().Unmap(); number < len(o.subjects) {
				o.subjects[number].arrived[servers[map[bool]int{true: 0, false: 1}[a.Is4()]]]++
			}
			o.mu.Unlock()
		}
	}()
}
