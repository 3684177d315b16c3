package peers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/coil-net/coil/pkg/testkit"
)

// echo answers each byte by the name of the other end, and then waits until that closes the connection.
func echo(_ context.Context, from string, conn net.Conn) {
	b := make([]byte, 1)
	for {
		if _, err := io.ReadFull(conn, b); err != nil {
			return
		}
		if _, err := fmt.Fprintf(conn, "%-8s", from); err != nil {
			return
		}
	}
}

// dial opens a connection as soon as there is a listener.
func dial(t *testing.T, from *node, to string) net.Conn {
	t.Helper()
	var conn net.Conn
	testkit.Eventually(t, 10*time.Second, "a connection", func() (err error) {
		conn, err = from.Dial(t.Context(), to)
		return err
	})
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func ask(t *testing.T, conn net.Conn) string {
	t.Helper()
	b := make([]byte, 8)
	testkit.Must(conn.Write([]byte{1}))(t)
	testkit.Must(io.ReadFull(conn, b))(t)
	return strings.TrimSpace(string(b))
}

// became waits until a node has counted so many connections of a result.
func (n *node) became(t *testing.T, result string, want float64) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "connections", func() error {
		if got := testutil.ToFloat64(n.connections.WithLabelValues(result)); got != want {
			return fmt.Errorf("%v %s, want %v", got, result, want)
		}
		return nil
	})
}

func TestConnections(t *testing.T) {
	a, b, _ := pair(t)
	conn := dial(t, a, "b")
	if got := ask(t, conn); got != "a" {
		t.Errorf("the other end is known as %q", got)
	}
	back := dial(t, b, "a")
	if got := ask(t, back); got != "b" {
		t.Errorf("the other end is known as %q", got)
	}
	_ = conn.Close()
	b.became(t, "accepted", 1)

	// While the keys change, one side has the next one only among others.
	a.set(func(n *node) { n.keys = [][]byte{oldKey, newKey} })
	b.set(func(n *node) { n.keys = [][]byte{newKey, oldKey} })
	if got := ask(t, dial(t, a, "b")); got != "a" {
		t.Errorf("the other end is known as %q", got)
	}
	a.set(func(n *node) { n.keys = nil })
	if _, err := a.Dial(t.Context(), "b"); err == nil {
		t.Error("without a key there is a connection")
	}
	if _, err := b.Dial(t.Context(), "c"); err == nil {
		t.Error("there is a connection to an unknown node")
	}
}

func TestConnectionsAreOfNodes(t *testing.T) {
	a, b, port := pair(t)
	dial(t, a, "b")
	refuses := func(t *testing.T, result string, by *node, dial func() error) {
		t.Helper()
		before := testutil.ToFloat64(by.connections.WithLabelValues(result))
		if err := dial(); err == nil {
			t.Error("there is a connection")
		}
		by.became(t, result, before+1)
	}
	t.Run("another key", func(t *testing.T) {
		a.set(func(n *node) { n.keys = [][]byte{oldKey} })
		defer a.set(func(n *node) { n.keys = [][]byte{newKey} })
		refuses(t, "foreign", b, func() error { _, err := a.Dial(t.Context(), "b"); return err })
	})
	t.Run("for another node", func(t *testing.T) {
		a.Peers.Peers(map[string][]netip.Addr{"b": {b.addr}, "c": {b.addr}})
		refuses(t, "foreign", b, func() error { _, err := a.Dial(t.Context(), "c"); return err })
	})
	t.Run("no node's address", func(t *testing.T) {
		b.Peers.Peers(map[string][]netip.Addr{"a": {netip.MustParseAddr("127.8.0.9")}})
		defer b.Peers.Peers(map[string][]netip.Addr{"a": {a.addr}})
		refuses(t, "stranger", b, func() error { _, err := a.Dial(t.Context(), "b"); return err })
	})
	t.Run("silent, and then too many", func(t *testing.T) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: a.addr.AsSlice()}}
		to := netip.AddrPortFrom(b.addr, uint16(port)).String()
		refused := testutil.ToFloat64(b.connections.WithLabelValues("refused"))
		for range MostOfOne {
			conn := testkit.Must(d.DialContext(t.Context(), "tcp", to))(t)
			defer conn.Close()
		}
		// One of a is open since the beginning.
		b.became(t, "refused", refused+1)
		if _, err := a.Dial(t.Context(), "b"); err == nil {
			t.Error("there is a connection beside too many")
		}
		testkit.Eventually(t, 10*time.Second, "room", func() error { _, err := a.Dial(t.Context(), "b"); return err })
	})
}

// relay stands between a client and a server: it has a connection with each, and passes on what they say.
type relay struct {
	net.Listener
	heard chan []byte // what clients have said
}

func newRelay(t *testing.T, at string, port int, to string) *relay {
	t.Helper()
	certificate := testkit.Must(newCertificate())(t)
	config := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*certificate}}
	l := testkit.Must(tls.Listen("tcp", netip.AddrPortFrom(netip.MustParseAddr(at), uint16(port)).String(), config))(t)
	t.Cleanup(func() { _ = l.Close() })
	r := &relay{l, make(chan []byte, 10)}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				b := make([]byte, 1000)
				n, _ := conn.Read(b)
				r.heard <- b[:n]
				if answer, err := repeat(at, to, b[:n]); err == nil {
					_, _ = conn.Write(answer)
				}
			}()
		}
	}()
	return r
}

// repeat says something in a connection from one address to another, and returns the answer.
func repeat(from, to string, hello []byte) ([]byte, error) {
	d := &net.Dialer{LocalAddr: &net.TCPAddr{IP: netip.MustParseAddr(from).AsSlice()}, Timeout: 5 * time.Second}
	conn, err := tls.DialWithDialer(d, "tcp", to, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	answer := make([]byte, 1000)
	if _, err := conn.Write(hello); err != nil {
		return nil, err
	}
	n, err := conn.Read(answer)
	if n == 0 {
		return nil, errors.Join(err, errors.New("no answer"))
	}
	return answer[:n], nil
}

// What a node has proven in one connection proves nothing in another, whether it is passed on at once or later.
func TestProofsAreOfOneConnection(t *testing.T) {
	a, b, port := pair(t)
	dial(t, a, "b")
	to := netip.AddrPortFrom(b.addr, uint16(port)).String()
	r := newRelay(t, "127.8.0.7", port, to)
	a.Peers.Peers(map[string][]netip.Addr{"b": {netip.MustParseAddr("127.8.0.7")}})
	b.Peers.Peers(map[string][]netip.Addr{"a": {netip.MustParseAddr("127.8.0.7"), a.addr}})
	if _, err := a.Dial(t.Context(), "b"); err == nil {
		t.Error("somebody between them isn't noticed")
	}
	hello := <-r.heard
	if len(hello) < 32 {
		t.Fatalf("a has said %x", hello)
	}
	b.became(t, "foreign", 1)
	if answer, err := repeat("127.8.0.7", to, hello); err == nil {
		t.Errorf("what a said before is answered by %x", answer)
	}
	b.became(t, "foreign", 2)
	t.Run("a proof that is sent back", func(t *testing.T) {
		secret := []byte("secret")
		if proven([][]byte{newKey}, proof(newKey, secret, client, "a", "b"), secret, server, "a", "b") != nil {
			t.Error("the client's proof is that of the server")
		}
	})
	for name, p := range map[string][]byte{
		"names": proof(newKey, []byte("secret"), client, "ab", ""), "secret": proof(newKey, []byte("secreu"), client, "a", "b"),
	} {
		if proven([][]byte{newKey}, p, []byte("secret"), client, "a", "b") != nil {
			t.Errorf("a proof of other %s is taken", name)
		}
	}
}
