package echo

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// wait is longer than a busy machine leaves a packet in a queue of the kernel.
var wait = testkit.Timeout(time.Second)

// wire is a link that takes packets as a tunnel does, and whose other end the test holds.
type wire struct {
	*os.File
	index int
}

func newWire(t *testing.T, ns *netnstest.NS, name string) wire {
	t.Helper()
	var w wire
	testkit.Check(t, ns.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		ifr := testkit.Must(unix.NewIfreq(name))(t)
		ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		w.File = os.NewFile(uintptr(fd), name)
		return nil
	}))
	t.Cleanup(func() { w.Close() })
	ns.IP(t, "link", "set", name, "up")
	h := testkit.Must(rtnl.New(ns.NS))(t)
	defer h.Close()
	w.index = testkit.Must(h.IndexByName(name))(t)
	return w
}

// serve answers by another wire than the question came, until the test ends; change spoils answers.
func serve(t *testing.T, from, to wire, change func(packet []byte) []byte) {
	go func() {
		buf := make([]byte, 1500)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			if b := change(answerTo(buf[:n])); b != nil {
				if _, err := to.Write(b); err != nil {
					return
				}
			}
		}
	}()
}

// answerTo turns a request into its answer.
func answerTo(b []byte) []byte {
	b = slices.Clone(b)
	p, header, size, at := protocols[dataplane.IPv4], headerIPv4, 4, 12
	if b[0]>>4 == 6 {
		p, header, size, at = protocols[dataplane.IPv6], headerIPv6, 16, 8
	}
	from := slices.Clone(b[at : at+size])
	copy(b[at:], b[at+size:at+2*size])
	copy(b[at+size:], from)
	if b[header] != p.ask {
		return nil // what the kernel sends by itself
	}
	b[header] = p.reply
	// By its type alone the message differs, and the sum of the addresses doesn't (RFC 1624).
	sum := uint32(^(uint16(b[header+2])<<8 | uint16(b[header+3]))) + uint32(^(uint16(p.ask) << 8)) + uint32(p.reply)<<8
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	b[header+2], b[header+3] = byte(^uint16(sum)>>8), byte(^uint16(sum))
	return b
}

func TestAsk(t *testing.T) {
	ns := netnstest.New(t)
	ns.IP(t, "address", "add", "10.1.0.5/32", "dev", "lo")
	ns.IP(t, "address", "add", "fd01::5/128", "dev", "lo", "nodad")
	out, back := newWire(t, ns, "out"), newWire(t, ns, "back")
	silent, deaf := netip.MustParseAddr("10.1.1.9"), netip.MustParseAddr("fd01::9")
	liar := netip.MustParseAddr("10.1.1.8")
	serve(t, out, back, func(b []byte) []byte {
		switch {
		case b == nil:
		case b[0]>>4 == 4 && netip.AddrFrom4([4]byte(b[12:16])) == silent, b[0]>>4 == 6 && netip.AddrFrom16([16]byte(b[8:24])) == deaf:
			return nil
		case b[0]>>4 == 4 && netip.AddrFrom4([4]byte(b[12:16])) == liar:
			m := b[headerIPv4:]
			m[headerICMP]++ // it doesn't know the secret, though its answer is well formed
			m[2], m[3] = 0, 0
			sum := checksum(m)
			m[2], m[3] = byte(sum>>8), byte(sum)
		}
		return b
	})
	own := map[dataplane.Family]netip.Addr{dataplane.IPv4: netip.MustParseAddr("10.1.0.5"), dataplane.IPv6: netip.MustParseAddr("fd01::5")}
	question := func(link int, to string) Question {
		a := netip.MustParseAddr(to)
		return Question{link, own[dataplane.FamilyOf(a)], a}
	}
	questions := []Question{
		question(out.index, "10.1.1.1"), question(out.index, "10.1.1.9"), question(out.index, "fd01::1"), question(out.index, "fd01::9"),
		question(out.index, "10.1.1.2"), question(out.index, "10.1.1.8"), question(9999, "10.1.1.1"),
	}
	answers, err := Ask(t.Context(), ns.NS, wait, questions)
	if err == nil || !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.ENODEV) {
		t.Errorf("by a link that isn't there: %v", err)
	}
	if want := []Answer{Given, Missing, Given, Missing, Given, Missing, Unknown}; !slices.Equal(answers, want) {
		t.Errorf("answers %v, want %v", answers, want)
	}

	// It doesn't wait longer than it has to.
	for _, q := range [][]Question{nil, {questions[0], questions[2]}} {
		start := time.Now()
		answers, err = Ask(t.Context(), ns.NS, time.Minute, q)
		if err != nil || slices.Contains(answers, Missing) || time.Since(start) > 10*time.Second {
			t.Errorf("%v: answers %v after %s, %v", q, answers, time.Since(start), err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	start := time.Now()
	if answers, err = Ask(ctx, ns.NS, time.Minute, questions[1:2]); err == nil || answers[0] == Given || time.Since(start) > 10*time.Second {
		t.Errorf("at the end of the context: %v, %v after %s", answers, err, time.Since(start))
	}
}

// An answer that was there in time is heard by a host that notices the end of the time first. Of those
// that it didn't hear, it knows nothing if it is too late itself.
func TestListenLate(t *testing.T) {
	ns := netnstest.New(t)
	ns.IP(t, "address", "add", "10.1.0.5/32", "dev", "lo")
	w := newWire(t, ns, "wire")
	q := Question{w.index, netip.MustParseAddr("10.1.0.5"), netip.MustParseAddr("10.1.1.1")}
	secret := make([]byte, secretSize)
	for _, tt := range []struct {
		name  string
		asked time.Duration
		want  []Answer
		err   error
	}{
		{"late", -time.Minute, []Answer{Given, Unknown, Unknown}, ErrLate},
		{"not late", time.Minute, []Answer{Given, Missing, Unknown}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var socket *os.File
			testkit.Check(t, ns.Do(func() (err error) { socket, err = icmpSocket(dataplane.IPv4); return err }))
			defer socket.Close()
			testkit.Must(w.Write(answerTo(protocols[dataplane.IPv4].packet(q, 0, secret))))(t)
			testkit.Eventually(t, 10*time.Second, "the answer is there", func() (err error) {
				c := testkit.Must(socket.SyscallConn())(t)
				testkit.Check(t, c.Control(func(fd uintptr) {
					_, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK)
				}))
				return err
			})
			r := reception{secret: secret, answers: []Answer{Missing, Missing, Unknown}}
			// The time is over as soon as it listens; whether that is late depends on when it asked.
			err := r.listen(t.Context(), map[dataplane.Family]*os.File{dataplane.IPv4: socket}, time.Now().Add(tt.asked), 0)
			if !errors.Is(err, tt.err) || !slices.Equal(r.answers, tt.want) {
				t.Errorf("answers %v, %v, want %v, %v", r.answers, err, tt.want, tt.err)
			}
		})
	}
}

// Messages that arrive as quickly as they are read don't keep anybody from the end of a round.
func TestListenEnds(t *testing.T) {
	ends := testkit.Must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0))(t)
	testkit.Check(t, unix.Close(ends[1])) // from now on there is always something to read, of no bytes
	socket := os.NewFile(uintptr(ends[0]), "socket")
	defer socket.Close()
	done := make(chan error, 1)
	go func() {
		r := reception{secret: make([]byte, secretSize), answers: []Answer{Missing}}
		done <- r.listen(t.Context(), map[dataplane.Family]*os.File{dataplane.IPv4: socket}, time.Now(), time.Minute)
	}()
	select {
	case err := <-done:
		testkit.Check(t, err)
	case <-time.After(testkit.Timeout(10 * time.Second)):
		t.Fatal("it goes on for ever")
	}
}
