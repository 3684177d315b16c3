package sending

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
)

// listen returns a listener of TCP, and sockets of UDP of which one answers, all at an address until the test ends.
func listen(t *testing.T, at string, control func(fn func() error) error) (tcp, answering, silent netip.AddrPort) {
	t.Helper()
	var l net.Listener
	var a, s net.PacketConn
	testkit.Check(t, control(func() (err error) {
		var config net.ListenConfig
		if l, err = config.Listen(t.Context(), "tcp", net.JoinHostPort(at, "0")); err != nil {
			return err
		}
		if a, err = config.ListenPacket(t.Context(), "udp", net.JoinHostPort(at, "0")); err != nil {
			return err
		}
		s, err = config.ListenPacket(t.Context(), "udp", net.JoinHostPort(at, "0"))
		return err
	}))
	t.Cleanup(func() { testkit.Check(t, errors.Join(l.Close(), a.Close(), s.Close())) })
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := a.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = a.WriteTo(b[:n], from)
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String()), netip.MustParseAddrPort(a.LocalAddr().String()), netip.MustParseAddrPort(s.LocalAddr().String())
}

// descriptors are those that the process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	return len(testkit.Must(os.ReadDir("/proc/self/fd"))(t))
}

// closedPort is one at which nobody listens.
func closedPort(t *testing.T, at string) uint16 {
	t.Helper()
	l := testkit.Must(new(net.ListenConfig).Listen(t.Context(), "tcp", net.JoinHostPort(at, "0")))(t)
	port := netip.MustParseAddrPort(l.Addr().String()).Port()
	testkit.Check(t, l.Close())
	return port
}

// Over the loopback link each kind of answer is told, packets have ports of their own, and no socket stays open.
func TestSendToItself(t *testing.T) {
	const at = "127.0.0.1"
	tcp, answering, silent := listen(t, at, func(fn func() error) error { return fn() })
	host := netip.MustParseAddr(at)
	refusing := netip.AddrPortFrom(host, closedPort(t, at))
	before := descriptors(t)
	for _, c := range []struct {
		name  string
		order Order
		words string
		by    netip.Addr
	}{
		{"TCP is accepted", Order{Kind: TCP, To: tcp}, "SYN-ACK", host},
		{"TCP is refused", Order{Kind: TCP, To: refusing}, "RST", host},
		{"UDP is answered", Order{Kind: UDP, To: answering}, "datagram", host},
		{"UDP is refused", Order{Kind: UDP, To: refusing}, "port unreachable (ICMP type 3, code 3)", host},
		{"UDP is ignored", Order{Kind: UDP, To: silent}, "", netip.Addr{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.order.Count, c.order.Interval, c.order.Wait = 3, time.Millisecond, testkit.Timeout(5*time.Second)
			if c.words == "" {
				c.order.Wait = 20 * time.Millisecond
			}
			from, all, err := Send(t.Context(), nil, c.order)
			if err != nil || from != host || len(all) != 3 {
				t.Fatalf("from %s: %+v, %v", from, all, err)
			}
			var ids []uint16
			for _, o := range all {
				if o.Words(c.order.Kind, true) != c.words || o.By != c.by || o.Arrived(c.order) != (c.words != "") || o.NotSent != nil || (o.After > 0) != (c.words != "") || slices.Contains(ids, o.ID) || o.ID == 0 {
					t.Errorf("%+v is %q", o, o.Words(c.order.Kind, true))
				}
				ids = append(ids, o.ID)
			}
		})
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors are open, before were %d", after, before)
	}
}

// Of SYN without an answer it is told how often they were sent again.
func TestResent(t *testing.T) {
	full := fullListener(t)
	_, all, err := Send(t.Context(), nil, Order{Kind: TCP, To: full, Count: 2, Interval: time.Millisecond, Wait: 1500 * time.Millisecond}) // a kernel sends again after a second
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	for _, o := range all {
		if o.Answer != None || o.Resent < 1 || o.ID == 0 || o.After != 0 || o.By.IsValid() {
			t.Errorf("%+v", o)
		}
	}
}

// fullListener is the address of a listener of TCP that has no room for connections, so that its kernel drops SYN.
func fullListener(t *testing.T) netip.AddrPort {
	t.Helper()
	open := func() int {
		fd := testkit.Must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))(t)
		t.Cleanup(func() { testkit.Check(t, unix.Close(fd)) })
		return fd
	}
	l := open()
	testkit.Check(t, unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(l, 0))
	at := local(l)
	testkit.Check(t, unix.Connect(open(), sockaddr(at)))
	return at
}

// A connection that was accepted, and reset before anybody looked, was accepted.
func TestResetAfterAccepted(t *testing.T) {
	l := testkit.Must(new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	defer func() { testkit.Check(t, l.Close()) }()
	s := &stream{order: Order{Kind: TCP, To: netip.MustParseAddrPort(l.Addr().String()), Count: 1}}
	defer s.close()
	testkit.Check(t, s.open())
	testkit.Must(s.send(0))(t)
	c := testkit.Must(l.Accept())(t)
	testkit.Check(t, c.(*net.TCPConn).SetLinger(0), c.Close())
	fds := []unix.PollFd{{Fd: int32(s.fds[0])}} // POLLERR and POLLHUP are always told
	if n := testkit.Must(unix.Poll(fds, int(testkit.Timeout(5*time.Second).Milliseconds())))(t); n != 1 {
		t.Fatal("the connection isn't reset")
	}
	var got []Outcome
	s.read(fds[0].Fd, func(_ int, o Outcome) { got = append(got, o) })
	if len(got) != 1 || got[0].Answer != Accepted || got[0].By != s.order.To.Addr() {
		t.Errorf("%+v", got)
	}
}

// What the kernel refuses to send is told of each packet, and nothing is waited for.
func TestRefusedByKernel(t *testing.T) {
	start := time.Now()
	order := Order{Kind: UDP, To: netip.MustParseAddrPort("255.255.255.255:9"), Count: 2, Wait: time.Hour} // nobody has asked for broadcast
	_, all, err := Send(t.Context(), nil, order)
	if err != nil || len(all) != 2 || !errors.Is(all[0].NotSent, unix.EACCES) && !errors.Is(all[0].NotSent, unix.ENETUNREACH) || all[1].NotSent == nil || all[0].ID != 0 || all[0].Arrived(order) {
		t.Errorf("%+v, %v", all, err)
	}
	if took := time.Since(start); took > testkit.Timeout(10*time.Second) {
		t.Errorf("it took %s", took)
	}
}

// At the end of its context it tells what it knows, and sends nothing more.
func TestEnd(t *testing.T) {
	_, _, silent := listen(t, "127.0.0.1", func(fn func() error) error { return fn() })
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, all, err := Send(ctx, nil, Order{Kind: UDP, To: silent, Count: 2, Interval: time.Hour, Wait: time.Hour})
	if !errors.Is(err, context.DeadlineExceeded) || len(all) != 2 || all[0].ID == 0 || all[1].ID != 0 {
		t.Errorf("%+v, %v", all, err)
	}
}

func TestWrongOrders(t *testing.T) {
	a := netip.MustParseAddrPort("127.0.0.1:9")
	for name, o := range map[string]Order{
		"nothing":            {},
		"no packets":         {Kind: UDP, To: a},
		"too many":           {Kind: UDP, To: a, Count: Most + 1},
		"an echo to a port":  {Kind: Echo, To: a, Count: 1},
		"TCP without a port": {Kind: TCP, To: netip.AddrPortFrom(a.Addr(), 0), Count: 1},
		"no such kind":       {Kind: UDP + 1, To: a, Count: 1},
		"a zone":             {Kind: UDP, To: netip.MustParseAddrPort("[fe80::1%lo]:9"), Count: 1},
		"IPv4 in IPv6":       {Kind: UDP, To: netip.MustParseAddrPort("[::ffff:127.0.0.1]:9"), Count: 1},
	} {
		if _, all, err := Send(t.Context(), nil, o); err == nil {
			t.Errorf("%s: %+v", name, all)
		}
	}
}

// Words of errors, and whether they come from the destination itself.
func TestWords(t *testing.T) {
	four, six, other := netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("2001:db8::5"), netip.MustParseAddr("10.0.0.1")
	for _, c := range []struct {
		to, by     netip.Addr
		kind, code byte
		words      string
		arrived    bool
	}{
		{four, four, 3, 3, "port unreachable (ICMP type 3, code 3)", true},
		{four, other, 3, 3, "port unreachable (ICMP type 3, code 3)", false},
		{four, four, 3, 1, "host unreachable (ICMP type 3, code 1)", false},
		{four, other, 3, 99, "unreachable (ICMP type 3, code 99)", false},
		{four, other, 11, 0, "hop limit exceeded (ICMP type 11, code 0)", false},
		{six, six, 1, 4, "port unreachable (ICMPv6 type 1, code 4)", true},
		{six, six, 1, 3, "address unreachable (ICMPv6 type 1, code 3)", false},
		{six, other, 3, 0, "hop limit exceeded (ICMPv6 type 3, code 0)", false},
		{four, other, 11, 1, "a fragment is missing (ICMP type 11, code 1)", false},
		{four, four, 12, 0, "parameter problem (ICMP type 12, code 0)", false},
		{six, other, 2, 0, "the packet is too big (ICMPv6 type 2, code 0)", false},
		{six, six, 4, 1, "parameter problem (ICMPv6 type 4, code 1)", false},
		{six, other, 100, 0, "another error (ICMPv6 type 100, code 0)", false},
	} {
		o := Outcome{Answer: Failed, By: c.by, Type: c.kind, Code: c.code}
		order := Order{Kind: UDP, To: netip.AddrPortFrom(c.to, 9)}
		if got := o.Words(UDP, c.to.Is4()); got != c.words || o.Arrived(order) != c.arrived {
			t.Errorf("%+v from %s: %q, arrived %v", c, c.by, got, o.Arrived(order))
		}
	}
	for by, want := range map[netip.Addr]bool{four: true, other: false} {
		o := Outcome{Answer: Replied, By: by}
		if got := o.Words(Echo, true); got != "echo reply" || o.Arrived(Order{Kind: Echo, To: netip.AddrPortFrom(four, 0)}) != want {
			t.Errorf("%q from %s, arrived %v", got, by, !want)
		}
	}
}

// Whatever comes by a socket, only answers to the own packets are heard, and nothing panics.
func FuzzHear(f *testing.F) {
	text := []byte("coil trace: 0123456789abcdef")
	four := &echo{to: netip.MustParseAddr("203.0.113.5"), content: text, first: 7}
	six := &echo{to: netip.MustParseAddr("2001:db8::5"), content: text, first: 7}
	header4 := func(proto byte, to netip.Addr) []byte {
		return append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, proto, 0, 0, 10, 0, 0, 1}, to.AsSlice()...)
	}
	header6 := func(to netip.Addr) []byte {
		return append(append([]byte{0x60, 0, 0, 0, 0, 0, 58, 64}, make([]byte, 16)...), to.AsSlice()...)
	}
	reply4, reply6 := icmp{reply: 0}.request(8, 2, text), icmp{ask: 129}.request(8, 2, text)
	error4 := append(append(header4(1, four.to), 3, 1, 0, 0, 0, 0, 0, 0), append(header4(1, four.to), icmp4.request(8, 2, text)...)...)
	error6 := append([]byte{1, 3, 0, 0, 0, 0, 0, 0}, append(header6(six.to), icmp6.request(8, 2, text)...)...)
	for _, b := range [][]byte{nil, {0x45}, append(header4(1, four.to), reply4...), reply6, error4, error6, error4[:40], error6[:20]} {
		f.Add(b)
	}
	if id, o, ok := four.hear(append(header4(1, four.to), reply4...), four.to); !ok || id != 8 || o.Answer != Replied || o.By != four.to {
		f.Errorf("reply of ICMP: %d, %+v, %v", id, o, ok)
	}
	if id, o, ok := six.hear(reply6, six.to); !ok || id != 8 || o.Answer != Replied {
		f.Errorf("reply of ICMPv6: %d, %+v, %v", id, o, ok)
	}
	if id, o, ok := four.hear(error4, four.to); !ok || id != 8 || o.Answer != Failed || o.Type != 3 || o.Code != 1 {
		f.Errorf("error of ICMP: %d, %+v, %v", id, o, ok)
	}
	if id, o, ok := six.hear(error6, six.to); !ok || id != 8 || o.Answer != Failed || o.Type != 1 || o.Code != 3 {
		f.Errorf("error of ICMPv6: %d, %+v, %v", id, o, ok)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, e := range []*echo{four, six} {
			stranger := &echo{to: netip.MustParseAddr("192.0.2.1"), content: []byte("another one"), first: 7}
			if _, o, ok := e.hear(b, e.to); ok && (o.Answer != Replied && o.Answer != Failed) {
				t.Errorf("%+v is an answer", o)
			}
			if _, o, ok := stranger.hear(b, e.to); ok && o.Answer == Replied && !slices.Contains([]string{string(stranger.content)}, string(b[len(b)-len(stranger.content):])) {
				t.Errorf("%x is an answer to somebody else", b)
			}
		}
		if o, ok := parseExtended(b); ok && (o.Answer != Failed || len(b) < sizeExtended) {
			t.Errorf("%x is %+v", b, o)
		}
	})
}

// The queue of a socket says who sent an error.
func TestParseExtended(t *testing.T) {
	head := func(origin, kind, code byte) []byte {
		return []byte{0, 0, 0, 0, origin, kind, code, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	}
	four := append([]byte{unix.AF_INET, 0, 0, 0}, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0)
	six := append([]byte{unix.AF_INET6, 0, 0, 0, 0, 0, 0, 0}, netip.MustParseAddr("fd00::1").AsSlice()...)
	for _, c := range []struct {
		name string
		b    []byte
		by   string
		ok   bool
	}{
		{"ICMP", append(head(originICMP, 3, 1), four...), "10.0.0.1", true},
		{"ICMPv6", append(head(originICMPv6, 3, 1), six...), "fd00::1", true},
		{"ICMPv6, cut short", append(head(originICMPv6, 3, 1), six[:20]...), "invalid IP", true},
		{"without a sender", head(originICMP, 3, 1), "invalid IP", true},
		{"of the own kernel", append(head(1, 3, 1), four...), "", false},
		{"cut short", head(originICMP, 3, 1)[:15], "", false},
	} {
		o, ok := parseExtended(c.b)
		if ok != c.ok || ok && (o.By.String() != c.by || o.Type != 3 || o.Code != 1 || o.Answer != Failed) {
			t.Errorf("%s: %+v, %v", c.name, o, ok)
		}
	}
}
