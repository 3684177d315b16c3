package egress

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/routerhealth"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// serving is a pod that serves those outside and uses the Egress a, with originatingOnly, for all
// destinations.
type serving struct {
	*clientnettest.Pod
	*world
	out *netnstest.NS
	m   *Manager
	// ear hears at port 9 outside what the pod sends.
	ear net.PacketConn
}

func newServing(t *testing.T, service string) *serving {
	s := &serving{Pod: clientnettest.NewPod(t), world: newWorld()}
	s.out = s.Outside("192.0.2.129/32", "2001:db8::129/128")
	s.open(service)
	s.world.pod("p", "a")
	s.restart()
	var l net.Listener
	var u net.PacketConn
	testkit.Check(t, s.NS.Do(func() (err error) {
		if l, err = net.Listen("tcp", ":80"); err == nil {
			u, err = net.ListenPacket("udp", ":81")
		}
		return err
	}), s.out.Do(func() (err error) {
		s.ear, err = net.ListenPacket("udp", ":9")
		return err
	}))
	t.Cleanup(func() { l.Close(); u.Close(); s.ear.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); c.Close() }()
		}
	}()
	go func() {
		b := make([]byte, 10)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(b[:n], from)
		}
	}()
	return s
}

// open makes the Egress, with a Service of an address if there is one.
func (s *serving) open(service string) {
	e := s.egress("a", service, "0.0.0.0/0", "::/0")
	e.Spec.OriginatingOnly = true
	if service != "" {
		s.services["net/a"].Spec.ClusterIPs = []string{service, "fd96::1"}
	}
}

// sandbox is the pod's.
func (s *serving) sandbox() node.Sandbox {
	at := sandboxOf("p")
	at.Netns, at.Address = s.At(), s.Pod.Client.Address
	return at
}

// restart lets another coild begin.
func (s *serving) restart() {
	s.m = New(Config{
		Port: 5555, Protocol: dataplane.ProtocolNode, Drift: time.Minute, Available: func() error { return nil }, Health: routerhealth.New(s, s, s),
		Repaired: func(context.Context, clientnet.Outcome) {},
	}, s.world, clientnet.New(dataplane.ProtocolNode, s.Links, nil), s.world, s.world, reconcile.NewMetrics(nil))
	testkit.Check(s.T, s.m.Restore(s.T.Context(), []node.Sandbox{s.sandbox()}))
}

// call opens a connection from an address outside to the pod and echoes so many bytes.
func (s *serving) call(network string, from, to netip.Addr, size int) error {
	var local net.Addr = &net.TCPAddr{IP: from.AsSlice()}
	port := "80"
	if network == "udp" {
		local, port = &net.UDPAddr{IP: from.AsSlice()}, "81"
	}
	var conn net.Conn
	err := s.out.Do(func() (err error) {
		conn, err = (&net.Dialer{Timeout: testkit.Timeout(3 * time.Second), LocalAddr: local}).DialContext(s.T.Context(), network, net.JoinHostPort(to.String(), port))
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	sent, got := bytes.Repeat([]byte("x"), size), make([]byte, size)
	go func() { _, _ = conn.Write(sent) }()
	if err := conn.SetReadDeadline(time.Now().Add(testkit.Timeout(3 * time.Second))); err != nil {
		return err
	}
	_, err = io.ReadFull(conn, got)
	return err
}

// ends are an address outside and the pod's own, of each family.
func (s *serving) ends() [][2]netip.Addr {
	return [][2]netip.Addr{
		{netip.MustParseAddr("192.0.2.129"), s.Pod.Client.Address.IPv4},
		{netip.MustParseAddr("2001:db8::129"), s.Pod.Client.Address.IPv6},
	}
}

// answers wants that those outside are answered.
func (s *serving) answers(what string) {
	s.T.Helper()
	for _, e := range s.ends() {
		for network, size := range map[string]int{"tcp": 1 << 16, "udp": 1} {
			if err := s.call(network, e[0], e[1], size); err != nil {
				s.T.Errorf("%s: %s from %s: %v", what, network, e[0], err)
			}
		}
		if _, err := s.out.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", e[0].String(), e[1].String()); err != nil {
			s.T.Errorf("%s: %v", what, err)
		}
	}
}

// keeps wants that nothing leaves that the pod sends by itself.
func (s *serving) keeps(what string) {
	s.T.Helper()
	for _, e := range s.ends() {
		var conn net.Conn
		err := s.NS.Do(func() (err error) {
			conn, err = net.Dial("udp", net.JoinHostPort(e[0].String(), "9"))
			return err
		})
		for i := 0; err == nil && i < 3; i++ {
			_, err = conn.Write([]byte(what)) // the first may wait for the neighbour
		}
		if conn != nil {
			conn.Close()
		}
	}
	b := make([]byte, 100)
	testkit.Check(s.T, s.ear.SetReadDeadline(time.Now().Add(testkit.Timeout(200*time.Millisecond))))
	if n, from, err := s.ear.ReadFrom(b); err == nil {
		s.T.Errorf("%s: %q of %s leaves by eth0", what, b[:n], from)
	}
}

// Hosts outside are answered whatever becomes of the routers. Connections that the pod opens
// leave by a tunnel or not at all.
func TestAnswersWithoutRouters(t *testing.T) {
	for _, c := range []struct {
		name    string
		service string // at first
		change  func(*serving)
	}{
		{"Service", "10.96.0.1", func(*serving) {}},
		{"no Service yet", "", func(*serving) {}},
		{"Service gone", "10.96.0.1", func(s *serving) { s.open("") }},
		{"Egress deleted", "10.96.0.1", func(s *serving) { delete(s.egresses, "net/a") }},
		{"Egress deleted without Service", "", func(s *serving) { delete(s.egresses, "net/a") }},
		{"Egress deleted before a restart", "10.96.0.1", func(s *serving) { delete(s.egresses, "net/a"); s.restart() }},
		{"Egress deleted and the record lost", "10.96.0.1", func(s *serving) {
			delete(s.egresses, "net/a")
			clear(s.records)
			s.restart()
		}},
		{"another one asked for, that isn't there", "10.96.0.1", func(s *serving) { s.world.pod("p", "b") }},
		{"namespace refused", "10.96.0.1", func(s *serving) {
			s.egresses["net/a"].Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"no": "namespace"}}
		}},
		{"routers dead", "10.96.0.1", func(s *serving) {
			s.egresses["net/a"].Spec.Peering = "Direct"
			for _, a := range []string{"10.1.9.1", "fd01:9::1"} {
				s.routers["net/a"] = append(s.routers["net/a"], client.Router{Addr: netip.MustParseAddr(a), State: client.RouterDead})
			}
		}},
		{"no tunnel can be made", "", func(s *serving) {
			s.open("10.96.0.1")
			s.Links.Broken[netip.MustParseAddr("10.96.0.1")] = true
			s.Links.Broken[netip.MustParseAddr("fd96::1")] = true
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newServing(t, c.service)
			sync := func() {
				t.Helper()
				if err := s.m.sync(t.Context(), "p"); (err != nil) != (len(s.Links.Broken) > 0) {
					t.Errorf("sync: %v", err)
				}
			}
			sync()
			c.change(s)
			for _, what := range []string{"changed", "again"} {
				sync()
				s.answers(what)
				s.keeps(what)
			}
			if err := s.m.Check(t.Context(), s.sandbox().ID); (err != nil) != (len(s.Links.Broken) > 0) {
				t.Errorf("CHECK: %v", err)
			}
			testkit.Must(s.NS.Run("nft", "delete", "table", "inet", "coil"))(s.T)
			s.keeps("without marks")
			sync()
			s.answers("repaired")
		})
	}
}
