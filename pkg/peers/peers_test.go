package peers

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/testkit"
)

var (
	oldKey, newKey = []byte("the key of yesterday"), []byte("the key of today")
	heartbeat      = holding.Message{Kind: holding.Heartbeat, Stamp: holding.Stamp{Life: 1, Sent: 2}}
)

// node is one with Peers that run.
type node struct {
	*Peers
	addr netip.Addr
	got  chan string

	mu    sync.Mutex
	addrs []netip.Addr
	keys  [][]byte
}

func (n *node) set(change func(*node)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(n)
}

// start runs a node at an address until the test ends.
func start(t *testing.T, name string, port int, addr string) *node {
	n := &node{addr: netip.MustParseAddr(addr), got: make(chan string, 10000), keys: [][]byte{newKey}}
	n.addrs = []netip.Addr{n.addr}
	n.Peers = New(Config{
		Node: name, Port: port,
		Addrs: func() []netip.Addr {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.addrs
		},
		Keys: func() [][]byte {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.keys
		},
		Receive: func(from string, m holding.Message) { n.got <- fmt.Sprintf("%s %d", from, m.Kind) },
		Accept:  echo,
	}, prometheus.NewRegistry())
	testkit.Background(t.Context(), t, n.Run)
	return n
}

// hears waits until a node has a message, which is sent again since it may be lost.
func (n *node) hears(t *testing.T, send func()) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "a message", func() error {
		send()
		select {
		case <-n.got:
			return nil
		case <-time.After(10 * time.Millisecond):
			return errors.New("none")
		}
	})
}

// counts waits until a node has counted at least so many datagrams of a result.
func (n *node) counts(t *testing.T, result string, want float64) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "datagrams", func() error {
		if got := testutil.ToFloat64(n.datagrams.WithLabelValues(result)); got < want {
			return fmt.Errorf("%v %s, want %v", got, result, want)
		}
		return nil
	})
}

// pair are two nodes that know each other.
func pair(t *testing.T) (a, b *node, port int) {
	port = testkit.FreeUDPPort(t)
	a, b = start(t, "a", port, "127.8.0.1"), start(t, "b", port, "127.8.0.2")
	where := map[string][]netip.Addr{"a": {a.addr}, "b": {b.addr}}
	a.Peers.Peers(where)
	b.Peers.Peers(where)
	b.hears(t, func() { a.Send("b", heartbeat) })
	return a, b, port
}

func TestKeysAreChanged(t *testing.T) {
	a, b, _ := pair(t)
	a.set(func(n *node) { n.keys = [][]byte{oldKey} })
	a.Send("b", heartbeat)
	b.counts(t, "foreign", 1)
	b.set(func(n *node) { n.keys = [][]byte{newKey, oldKey} })
	b.hears(t, func() { a.Send("b", heartbeat) })
	a.set(func(n *node) { n.keys = nil })
	a.Send("b", heartbeat)
	a.counts(t, "unsent", 1)
}

// A node of two families is asked at the first address that this node can send to.
func TestFamilies(t *testing.T) {
	port := testkit.FreeUDPPort(t)
	a, b := start(t, "a", port, "::1"), start(t, "b", port, "127.8.0.2")
	a.set(func(n *node) { n.addrs = append(n.addrs, netip.MustParseAddr("127.8.0.1")) })
	a.Moved()
	where := map[string][]netip.Addr{"a": {netip.MustParseAddr("::1"), netip.MustParseAddr("127.8.0.1")}, "b": {b.addr}}
	a.Peers.Peers(where)
	b.Peers.Peers(where)
	b.hears(t, func() { a.Send("b", heartbeat) })
	a.hears(t, func() { b.Send("a", heartbeat) })
}

// The sockets are those of the node's addresses.
func TestAddressesChange(t *testing.T) {
	a, b, port := pair(t)
	next := netip.MustParseAddr("127.8.0.3")
	b.set(func(n *node) { n.addrs = []netip.Addr{next} })
	b.Moved()
	a.Peers.Peers(map[string][]netip.Addr{"b": {next}})
	b.hears(t, func() { a.Send("b", heartbeat) })
	testkit.Eventually(t, 5*time.Second, "the old socket is closed", func() error {
		conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(b.addr, uint16(port))))
		if err == nil {
			err = conn.Close()
		}
		return err
	})
}

// A port that another program has is tried again.
func TestPortIsTaken(t *testing.T) {
	port := testkit.FreeUDPPort(t)
	taken := testkit.Must(net.ListenPacket("udp4", fmt.Sprintf("127.8.0.4:%d", port)))(t)
	a, b := start(t, "a", port, "127.8.0.4"), start(t, "b", port, "127.8.0.5")
	where := map[string][]netip.Addr{"a": {a.addr}, "b": {b.addr}}
	a.Peers.Peers(where)
	b.Peers.Peers(where)
	a.Send("b", heartbeat)
	a.counts(t, "unsent", 1)
	testkit.Check(t, taken.Close())
	b.hears(t, func() { a.Send("b", heartbeat) })
}

// Datagrams of strangers aren't looked at, and of forged ones only some.
func TestFloods(t *testing.T) {
	a, b, port := pair(t)
	_ = a
	at := netip.AddrPortFrom(b.addr, uint16(port))
	flood := func(from string, n int) {
		conn := testkit.Must(net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0))))(t)
		defer conn.Close()
		for i := range n {
			testkit.Must(conn.WriteToUDPAddrPort(make([]byte, i%(holding.MaxDatagram+100)), at))(t)
		}
	}
	flood("127.8.0.9", 100)
	b.counts(t, "stranger", 1)
	if n := testutil.ToFloat64(b.datagrams.WithLabelValues("foreign")); n != 0 {
		t.Errorf("%v datagrams of a stranger were looked at", n)
	}
	testkit.Eventually(t, 20*time.Second, "forged datagrams are refused", func() error {
		flood("127.8.0.1", mostForeign)
		if testutil.ToFloat64(b.datagrams.WithLabelValues("refused")) == 0 {
			return errors.New("none is")
		}
		return nil
	})
	b.hears(t, func() { a.Send("b", heartbeat) }) // the second ends
}

func TestEndsWithoutSockets(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Run("", func(t *testing.T) {
		start(t, "a", testkit.FreeUDPPort(t), "192.0.2.1") // which this machine hasn't
		pair(t)
	})
	testkit.Eventually(t, 5*time.Second, "no goroutine is left", func() error {
		if n := runtime.NumGoroutine(); n > before {
			return fmt.Errorf("%d, before %d", n, before)
		}
		return nil
	})
}
