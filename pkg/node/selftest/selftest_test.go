package selftest

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/plan/selftest"
	"github.com/coil-net/coil/pkg/testkit"
)

// start serves at a free port until the test ends.
func start(t *testing.T) uint16 {
	t.Helper()
	for {
		l := testkit.Must(net.Listen("tcp", ":0"))(t)
		port := l.Addr().(*net.TCPAddr).Port
		u, err := net.ListenPacket("udp", l.Addr().String())
		if err != nil { // somebody has the port for UDP
			l.Close()
			continue
		}
		testkit.Background(t.Context(), t, func(ctx context.Context) error {
			return Server{Name: "p"}.serve(ctx, l.(*net.TCPListener), u.(*net.UDPConn))
		})
		return uint16(port)
	}
}

// Both families answer by TCP and UDP with the source that they have seen. A datagram that is as long as the link takes is answered, and a longer one isn't sent.
func TestAsk(t *testing.T) {
	port := start(t)
	var questions []selftest.Question
	for _, a := range []string{"127.0.0.1", "::1"} {
		for _, kind := range []selftest.Kind{selftest.TCP, selftest.UDP, selftest.MTU} {
			questions = append(questions, selftest.Question{Kind: kind, To: netip.AddrPortFrom(netip.MustParseAddr(a), port)})
		}
	}
	lo := testkit.Must(net.InterfaceByName("lo"))(t)
	for i, a := range Ask(t.Context(), questions, testkit.Timeout(5*time.Second)) {
		q := questions[i]
		if a.Question != q.String() || !a.Reached || a.Error != "" || a.Name != "p" || a.Source.Addr() != q.To.Addr() {
			t.Errorf("%s: %+v", q, a)
		}
		if l := a.Link; (l != nil) != (q.Kind == selftest.MTU) || l != nil && (l.Name != "lo" || l.MTU != lo.MTU || l.Path == 0 || l.Longer) {
			t.Errorf("%s: the link is %+v", q, l)
		}
	}
}

// What answers in other words is reached by TCP, and has no name; nothing is reached where nobody listens.
func TestAskOthers(t *testing.T) {
	l := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("220 hello\n"))
			c.Close()
		}
	}()
	closed := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	closed.Close()
	at := func(kind selftest.Kind, l net.Listener) selftest.Question {
		return selftest.Question{Kind: kind, To: netip.MustParseAddrPort(l.Addr().String())}
	}
	got := Ask(t.Context(), []selftest.Question{at(selftest.TCP, l), at(selftest.TCP, closed), at(selftest.UDP, closed)}, time.Second)
	if a := got[0]; !a.Reached || a.Name != "" || a.Source.IsValid() || a.Error != "" {
		t.Errorf("another server: %+v", a)
	}
	for _, a := range got[1:] {
		if a.Reached || a.Error == "" {
			t.Errorf("nobody listens: %+v", a)
		}
	}
}

// No reply is longer than what asks for it, whoever asks, and nothing but hexadecimal digits is repeated.
func TestSmallDatagrams(t *testing.T) {
	port := start(t)
	c := testkit.Must(net.Dial("udp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String()))(t)
	defer c.Close()
	short, long := make([]byte, selftest.Request-1), make([]byte, selftest.Request)
	copy(long, "abc<script>")
	for _, b := range [][]byte{short, long} {
		testkit.Must(c.Write(b))(t)
	}
	testkit.Check(t, c.SetReadDeadline(time.Now().Add(testkit.Timeout(5*time.Second))))
	b := make([]byte, longest)
	n := testkit.Must(c.Read(b))(t)
	var a selftest.Answer
	if r, ok := take(&a, b[:n], "abc"); !ok || r.Bytes != selftest.Request || n > selftest.Request {
		t.Errorf("the first reply is %s", b[:n])
	}
}
