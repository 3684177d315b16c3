package servers

import (
	"context"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/testkit"
)

const clusterIP = "10.96.0.1:443"

// network is what dialers reach.
type network struct {
	// after is how long a connection to an address takes to be made; no other can be made.
	after map[string]time.Duration
	// refused are addresses that refuse at once.
	refused map[string]bool

	mu     sync.Mutex
	dialed []string
	made   map[string]*conn
}

// conn knows whether it is open.
type conn struct {
	net.Conn
	to   string
	open bool
}

func (c *conn) Close() error {
	c.open = false
	return nil
}

func (n *network) dial(ctx context.Context, _, to string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dialed = append(n.dialed, to)
	if n.refused[to] {
		return nil, syscall.ECONNREFUSED
	}
	after, there := n.after[to]
	if !there {
		after = time.Hour
	}
	n.mu.Unlock()
	timer := time.NewTimer(after)
	defer timer.Stop()
	var err error
	select {
	case <-timer.C:
	case <-ctx.Done():
		if after > 0 && !strings.HasSuffix(to, ":1") { // the port of a connection that is made nonetheless, as it may be
			err = ctx.Err()
		}
	}
	n.mu.Lock()
	if err != nil {
		return nil, err
	}
	if n.made == nil {
		n.made = map[string]*conn{}
	}
	n.made[to] = &conn{to: to, open: true}
	return n.made[to], nil
}

func addrs(all ...string) (parsed []netip.AddrPort) {
	for _, a := range all {
		parsed = append(parsed, netip.MustParseAddrPort(a))
	}
	return parsed
}

func TestDial(t *testing.T) {
	const one, two, late = "192.0.2.1:6443", "192.0.2.2:6443", "192.0.2.3:1"
	for _, tt := range []struct {
		name    string
		network *network
		known   []netip.AddrPort
		address string // the Service if empty
		to      string // empty if nothing is reached
		within  [2]time.Duration
		dialed  int
	}{
		{"the Service", &network{after: map[string]time.Duration{clusterIP: 900 * time.Millisecond, one: 0}}, addrs(one), "", clusterIP, [2]time.Duration{900 * time.Millisecond, 900 * time.Millisecond}, 1},
		{"the Service leads nowhere", &network{after: map[string]time.Duration{one: 0}}, addrs(one), "", one, [2]time.Duration{alone, alone}, 2},
		{"the Service refuses", &network{after: map[string]time.Duration{one: 0}, refused: map[string]bool{clusterIP: true}}, addrs(one), "", one, [2]time.Duration{0, 0}, 2},
		{"the Service is slow, and so is the server", &network{after: map[string]time.Duration{clusterIP: 1500 * time.Millisecond, one: time.Second}}, addrs(one), "", clusterIP, [2]time.Duration{1500 * time.Millisecond, 1500 * time.Millisecond}, 2},
		{"a server is gone", &network{after: map[string]time.Duration{two: 0}}, addrs(one, two), "", two, [2]time.Duration{alone, alone + apart}, -1},
		{"a server refuses", &network{after: map[string]time.Duration{two: 0}, refused: map[string]bool{one: true}}, addrs(one, two), "", two, [2]time.Duration{alone, alone}, -1},
		{"all refuse", &network{refused: map[string]bool{clusterIP: true, one: true, two: true}}, addrs(one, two), "", "", [2]time.Duration{0, 0}, 3},
		{"nothing answers", &network{}, addrs(one, two), "", "", [2]time.Duration{dialTimeout, dialTimeout}, 3},
		{"none is known", &network{refused: map[string]bool{clusterIP: true}}, nil, "", "", [2]time.Duration{0, 0}, 1},
		{"the Service has the only server's address", &network{refused: map[string]bool{clusterIP: true}}, addrs(clusterIP), "", "", [2]time.Duration{0, 0}, 1},
		{"another address", &network{after: map[string]time.Duration{one: 0}, refused: map[string]bool{"203.0.113.1:3128": true}}, addrs(one), "203.0.113.1:3128", "", [2]time.Duration{0, 0}, 1},
		{"two connections at once", &network{after: map[string]time.Duration{clusterIP: alone + 10*time.Millisecond, late: time.Second}}, addrs(late), "", clusterIP, [2]time.Duration{alone, alone + 10*time.Millisecond}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &Servers{host: clusterIP, dial: tt.network.dial, addrs: tt.known}
				began := time.Now()
				if tt.address == "" {
					tt.address = clusterIP
				}
				got, err := s.Dial(t.Context(), "tcp", tt.address)
				if took := time.Since(began); took < tt.within[0] || took > tt.within[1] {
					t.Errorf("it took %s, want %s", took, tt.within)
				}
				if to, ok := got.(*conn); tt.to == "" && err == nil || tt.to != "" && (!ok || to.to != tt.to || !to.open) {
					t.Errorf("reached %+v, %v, want %s", got, err, tt.to)
				}
				if tt.dialed >= 0 && len(tt.network.dialed) != tt.dialed {
					t.Errorf("dialed %v, want %d", tt.network.dialed, tt.dialed)
				}
				if tt.network.dialed[0] != tt.address {
					t.Errorf("dialed %v, want %s first", tt.network.dialed, tt.address)
				}
				if own := tt.to != "" && tt.to != tt.address; s.own.Load() != own {
					t.Errorf("it says %t about a server's own address, want %t", !own, own)
				}
				for to, c := range tt.network.made {
					if to != tt.to && c.open {
						t.Errorf("the connection to %s stays open", to)
					}
				}
				if _, tried := tt.network.made[late]; tt.name == "two connections at once" && !tried {
					t.Error("no second connection was made")
				}
			})
		})
	}
}

// A caller that gives up isn't held up.
func TestDialEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &network{}
		s := &Servers{host: clusterIP, dial: n.dial, addrs: addrs("192.0.2.1:6443")}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		began := time.Now()
		if _, err := s.Dial(ctx, "tcp", clusterIP); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 2*time.Second {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
	})
}

// One that leads elsewhere by now isn't always the first.
func TestServersAreMixed(t *testing.T) {
	s, first := &Servers{host: clusterIP, addrs: addrs("192.0.2.1:6443", "192.0.2.2:6443")}, map[string]bool{}
	for range 100 {
		first[s.others()[0]] = true
	}
	if len(first) != 2 {
		t.Errorf("the first ones are %v", first)
	}
}

// api is an API server that has nothing, and counts connections.
type api struct {
	*httptest.Server
	conns atomic.Int32
}

func newAPI(t *testing.T) *api {
	a := &api{}
	a.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"apiVersion":"v1","kind":"NodeList"}`)
	}))
	a.EnableHTTP2 = true
	a.Config.ErrorLog = log.New(io.Discard, "", 0) // handshakes fail on purpose
	a.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			a.conns.Add(1)
		}
	}
	a.StartTLS()
	t.Cleanup(a.Close)
	return a
}

// use returns clients for a host, which trust the server's certificate, and know its address from a file.
func (a *api) use(t *testing.T, host string) kube.Clients {
	t.Helper()
	file := filepath.Join(t.TempDir(), "servers")
	testkit.Check(t, os.WriteFile(file, []byte(`{"servers":["`+a.Listener.Addr().String()+`"]}`), 0o600))
	ca := pemOf(a.Certificate())
	cfg := &rest.Config{Host: "https://" + host, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: ca}}
	testkit.Must(Use(t.Context(), cfg, file))(t)
	return testkit.Must(kube.NewClients(cfg))(t)
}

// A server that is reached by its own address has to have a certificate for the configured host. All clients have one connection.
func TestCertificate(t *testing.T) {
	a := newAPI(t)
	_, port, _ := net.SplitHostPort(testkit.FreeAddr(t))
	c := a.use(t, net.JoinHostPort("127.0.0.1", port)) // which the certificate names
	for range 3 {
		for name, err := range map[string]error{
			"core": c.Core.Get().Resource("nodes").Do(t.Context()).Error(), "discovery": c.Discovery.Get().Resource("nodes").Do(t.Context()).Error(),
			"coil": c.Coil.RESTClient().Get().Resource("nodes").Do(t.Context()).Error(),
		} {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if n := a.conns.Load(); n != 1 {
		t.Errorf("the server has got %d connections, want 1", n)
	}
	var wrong x509.HostnameError
	err := a.use(t, net.JoinHostPort("127.0.0.2", port)).Core.Get().Resource("nodes").Do(t.Context()).Error()
	if !errors.As(err, &wrong) || wrong.Host != "127.0.0.2" {
		t.Errorf("a certificate for 127.0.0.1 is taken for one of 127.0.0.2: %v", err)
	}
	other := &rest.Config{Host: "https://" + net.JoinHostPort("127.0.0.1", port), QPS: -1} // doesn't trust it
	file := filepath.Join(t.TempDir(), "servers")
	testkit.Check(t, os.WriteFile(file, []byte(`{"servers":["`+a.Listener.Addr().String()+`"]}`), 0o600))
	testkit.Must(Use(t.Context(), other, file))(t)
	var unknown x509.UnknownAuthorityError
	if err := testkit.Must(kube.NewClients(other))(t).Core.Get().Resource("nodes").Do(t.Context()).Error(); !errors.As(err, &unknown) {
		t.Errorf("a certificate of an unknown authority: %v", err)
	}
}

// Only a URL of https with a port says what is dialed.
func TestUse(t *testing.T) {
	for host, ok := range map[string]bool{"https://10.96.0.1:443": true, "https://[fd00::1]:443": true, "https://10.96.0.1": false, "http://10.96.0.1:80": false, "10.96.0.1:443": false} {
		cfg := &rest.Config{Host: host}
		s, err := Use(t.Context(), cfg, filepath.Join(t.TempDir(), "servers"))
		if (err == nil) != ok || (cfg.Dial != nil) != ok {
			t.Errorf("%s: %v", host, err)
		}
		if ok && !slices.Contains([]string{"10.96.0.1:443", "[fd00::1]:443"}, s.host) {
			t.Errorf("%s: dials %s", host, s.host)
		}
	}
}

// The kernel looks whether a silent connection is broken, and breaks one whose other end is lost.
func TestLostConnections(t *testing.T) {
	l := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	cfg := &rest.Config{Host: "https://" + l.Addr().String()}
	testkit.Must(Use(t.Context(), cfg, filepath.Join(t.TempDir(), "servers")))(t)
	c := testkit.Must(cfg.Dial(t.Context(), "tcp", l.Addr().String()))(t)
	defer c.Close()
	raw := testkit.Must(c.(*net.TCPConn).SyscallConn())(t)
	testkit.Check(t, raw.Control(func(fd uintptr) {
		for option, want := range map[int]int{unix.TCP_USER_TIMEOUT: 5000, unix.TCP_KEEPIDLE: 3, unix.TCP_KEEPINTVL: 3} {
			if got, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option); got != want || err != nil {
				t.Errorf("option %d is %d, %v, want %d", option, got, err, want)
			}
		}
	}))
}
