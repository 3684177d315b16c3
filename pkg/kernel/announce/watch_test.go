package announce

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// link is the interface of a name in a namespace.
func link(t *testing.T, ns *netns.NS, name string) *net.Interface {
	t.Helper()
	return testkit.Must(netns.In(ns, func() (*net.Interface, error) { return net.InterfaceByName(name) }))(t)
}

// heard collects what a Watch sees.
type heard struct {
	mu  sync.Mutex
	all []string
}

func (h *heard) take(c Claim) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, fmt.Sprint(c.Addr, " at ", c.MAC))
}

func (h *heard) has(want string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Contains(h.all, want)
}

// send sends a frame as it is.
func send(t *testing.T, ns *netns.NS, index int, frame []byte) {
	t.Helper()
	testkit.Check(t, ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		return errors.Join(unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index}), unix.Close(fd))
	}))
}

// What another host announces, asks in the name of, or has by itself is seen, through a time without a link; and nothing else is.
func TestWatch(t *testing.T) {
	node, host := netnstest.New(t), netnstest.New(t)
	ctx := t.Context()
	testkit.Check(t,
		node.Lab().IP(ctx, fmt.Sprintf("link add eth0 type veth peer name eth0 netns %s", host.Lab().Path()),
			"link set eth0 up", "addr add 192.0.2.1/24 dev eth0", "addr add 2001:db8::1/64 dev eth0 nodad"),
		host.Lab().IP(ctx, "link set eth0 up", "addr add 192.0.2.2/24 dev eth0", "addr add 2001:db8::2/64 dev eth0 nodad"),
	)
	own, other := link(t, node.NS, "eth0"), link(t, host.NS, "eth0")
	watching, stop := context.WithCancel(ctx)
	var seen heard
	ended := make(chan error)
	go func() { ended <- Watch(watching, node.NS, own.Index, seen.take) }()

	announce := func(ns *netns.NS, l *net.Interface, addrs ...string) {
		t.Helper()
		for _, a := range addrs {
			testkit.Check(t, Send(ns, []Announcement{{Link: l.Index, MAC: l.HardwareAddr, Addr: netip.MustParseAddr(a)}}))
		}
	}
	at := func(a string) string { return fmt.Sprint(a, " at ", other.HardwareAddr) }
	until := func(want string, do func()) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, want, func() error {
			do()
			if !seen.has(want) {
				return errors.New("it isn't seen")
			}
			return nil
		})
	}
	for _, a := range []string{"192.0.2.7", "2001:db8::7"} {
		until(at(a), func() { announce(host.NS, other, a) })
	}
	// An answer to the node, and a question in the name of an address.
	for _, a := range []string{"192.0.2.2", "2001:db8::2"} {
		_, _ = node.Run("ping", "-c", "1", "-W", "1", a)
		until(at(a), func() {})
	}
	for _, a := range []string{"192.0.2.8", "2001:db8::8"} {
		testkit.Check(t, host.Lab().IP(ctx, fmt.Sprintf("addr add %s dev eth0 nodad", netip.PrefixFrom(netip.MustParseAddr(a), 24))))
		until(at(a), func() {
			to := "192.0.2.99"
			if netip.MustParseAddr(a).Is6() {
				// Asks go to a group of the address, which the other end of a veth hears.
				to = "2001:db8::99"
			}
			_, _ = host.Run("ping", "-c", "1", "-W", "1", "-I", a, to)
		})
	}
	// The link goes down and up again.
	testkit.Check(t, node.Lab().IP(ctx, "link set eth0 down", "link set eth0 up"))
	until(at("192.0.2.9"), func() { announce(host.NS, other, "192.0.2.9") })

	// Not what the node says, nor broken frames; hosts don't take advertisements from beyond a router.
	announce(node.NS, own, "192.0.2.77")
	forged := Announcement{Link: other.Index, MAC: other.HardwareAddr, Addr: netip.MustParseAddr("2001:db8::77")}.frames()[0]
	far := slices.Clone(forged)
	far[21] = 64
	long := slices.Clone(forged)
	long[optionsAt+1] = 200 // an option that ends behind the frame
	binary.BigEndian.PutUint64(long[icmpAt+16:], 0x99)
	for _, f := range [][]byte{far, forged[:60], forged[:optionsAt-1], long} {
		send(t, host.NS, other.Index, f)
	}
	until(at("2001:db8::99"), func() {})
	until(at("192.0.2.10"), func() { announce(host.NS, other, "192.0.2.10") })
	for _, a := range []string{"192.0.2.77", "2001:db8::77"} {
		if seen.has(at(a)) || seen.has(fmt.Sprint(a, " at ", own.HardwareAddr)) {
			t.Errorf("%s is seen", a)
		}
	}
	stop()
	testkit.Check(t, <-ended)
	if err := Watch(ctx, node.NS, 1<<20, seen.take); err == nil {
		t.Error("a link that isn't there is watched")
	}
}
