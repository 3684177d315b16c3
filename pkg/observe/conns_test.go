package observe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// client is a connection that is kept open.
type client struct {
	net.Conn
	r *bufio.Reader
	// refused is why there is no connection: the server may have closed it at once.
	refused error
}

// dial connects to a server from a loopback address.
func dial(t *testing.T, from string, to net.Addr) *client {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", to.String())
	if err != nil {
		return &client{refused: err}
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(testkit.Timeout(10 * time.Second))); err != nil {
		t.Fatal(err)
	}
	return &client{Conn: c, r: bufio.NewReader(c)}
}

// get asks the server and keeps the connection.
func (c *client) get() error {
	if c.refused != nil {
		return c.refused
	}
	if _, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s, %w", resp.Status, err)
	}
	return nil
}

// A pod may open all of its ports to a node's metrics: others are served on.
func TestConnectionsOfOneRemoteAreBounded(t *testing.T) {
	for _, network := range []string{"tcp4", "tcp"} { // the latter sees IPv4 as part of IPv6
		t.Run(network, func(t *testing.T) {
			l := testkit.Must(net.Listen(network, ":0"))(t)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				ended <- serve(ctx, l, newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
			}()
			to := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: l.Addr().(*net.TCPAddr).Port}
			var pod []*client
			for i := range maxConns {
				c := dial(t, "127.0.0.2", to)
				if err := c.get(); err != nil {
					t.Fatalf("connection %d: %v", i, err)
				}
				pod = append(pod, c)
			}
			const more = 3
			for range more { // kubelet's probes among others of its address
				c := dial(t, "127.0.0.2", to)
				if err := c.get(); err != nil {
					t.Errorf("one connection too many: %v, want it served", err)
				}
				pod = append(pod, c)
			}
			if err := dial(t, "127.0.0.1", to).get(); err != nil {
				t.Errorf("another remote address: %v", err)
			}
			for i, c := range pod {
				if err := c.get(); (err != nil) != (i < more) || err != nil && isTimeout(err) {
					t.Errorf("connection %d of %d: %v", i, len(pod), err)
				}
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// remote is a connection of which only the remote address matters.
type remote struct {
	net.Conn
	net.TCPAddr
}

func (r *remote) RemoteAddr() net.Addr { return &r.TCPAddr }

// A host has as many addresses of IPv6 as it likes.
func TestConnectionsOfAllAreBounded(t *testing.T) {
	var b bounded
	from := func(i int) *remote { return &remote{TCPAddr: net.TCPAddr{IP: net.IPv4(10, 0, byte(i>>8), byte(i))}} }
	first := from(0)
	for i := range maxOfAll {
		c := from(i)
		if i == 0 {
			c = first
		}
		if closed := b.add(c); closed != nil {
			t.Fatalf("connection %d closed that of %s", i, closed.RemoteAddr())
		}
	}
	if closed := b.add(from(maxOfAll)); closed != first {
		t.Errorf("one too many closed %v, want the oldest", closed)
	}
	if len(b.open) != maxOfAll {
		t.Errorf("%d are open", len(b.open))
	}
	b.state(b.open[0], http.StateClosed)
	if len(b.open) != maxOfAll-1 {
		t.Errorf("%d are open after the end of one", len(b.open))
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}
