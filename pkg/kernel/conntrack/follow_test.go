package conntrack

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
)

// heard are the events of a table.
type heard struct {
	mu   sync.Mutex
	all  []Event
	lost atomic.Int32
}

func (h *heard) add(e Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, e)
}

// of returns what was heard of the flow with a source.
func (h *heard) of(src netip.AddrPort) (kinds []string, last Flow) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.all {
		if e.Src == src {
			kinds, last = append(kinds, map[bool]string{false: "begun", true: "over"}[e.Over]), e.Flow
		}
	}
	return kinds, last
}

// listen hears events until the test is over.
func listen(t *testing.T, table *Table, buffer int, wanted func(netip.Addr) bool) *heard {
	t.Helper()
	events := testkit.Must(table.Events(buffer))(t)
	h := &heard{}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		if err := events.Run(ctx, time.Millisecond, wanted, h.add, func() { h.lost.Add(1) }); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		done.Wait()
		testkit.Check(t, events.Close())
	})
	return h
}

// A connection is told once when it begins and once when it ends, with all that is needed to copy it; one of another address never.
func TestFollow(t *testing.T) {
	for name, f := range map[string]family{"IPv4": ipv4, "IPv6": ipv6} {
		t.Run(name, func(t *testing.T) {
			m := newMoved(t)
			tcp, _ := m.serve(f)
			from, to := table(t, m.a), table(t, m.b)
			float := netip.MustParseAddr(f.float)
			mine := listen(t, from, FollowBuffer, func(a netip.Addr) bool { return a == float })
			others := listen(t, from, FollowBuffer, func(a netip.Addr) bool { return a != float })
			var conn net.Conn
			testkit.Eventually(t, 20*time.Second, "a connection", func() (err error) {
				ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(3*time.Second))
				defer cancel()
				conn, err = m.client.Lab().Dial(ctx, "tcp", tcp)
				return err
			})
			known := testkit.Must(ask(conn, testkit.Timeout(5*time.Second)))(t)
			src := testkit.Must(netip.ParseAddrPort(conn.LocalAddr().String()))(t)
			is := func(want ...string) Flow {
				t.Helper()
				var last Flow
				testkit.Eventually(t, 10*time.Second, fmt.Sprint(want), func() error {
					var kinds []string
					if kinds, last = mine.of(src); !slices.Equal(kinds, want) {
						return fmt.Errorf("%v", kinds)
					}
					return nil
				})
				return last
			}
			flow := is("begun")
			if flow.Translated.String() != known || flow.TCP.State != tcpEstablished || flow.Timeout == 0 {
				t.Errorf("the flow is %+v, and the server knows it as %s", flow, known)
			}
			if n, err := to.Insert(t.Context(), []Flow{flow}); n != 1 || err != nil {
				t.Fatalf("%d flows are inserted, %v", n, err)
			}
			testkit.Check(t, conn.Close())
			is("begun", "over")
			// It is in the table for two minutes more. Its deletion isn't told again, as far as the kernel tells how it ended.
			testkit.Must(from.Forget(t.Context(), float))(t)
			second := testkit.Must(m.client.Lab().Dial(t.Context(), "tcp", tcp))(t)
			defer second.Close()
			src = testkit.Must(netip.ParseAddrPort(second.LocalAddr().String()))(t)
			is("begun")
			testkit.Must(from.Forget(t.Context(), float))(t)
			is("begun", "over")
			src = testkit.Must(netip.ParseAddrPort(conn.LocalAddr().String()))(t)
			is("begun", "over")
			if mine.lost.Load() > 0 || len(others.all) > 0 {
				t.Errorf("%d times events were lost, of others are %v", mine.lost.Load(), others.all)
			}
		})
	}
}

// Flows are deleted as they are translated: another one with the same source and destination stays.
func TestDelete(t *testing.T) {
	for name, f := range map[string]family{"IPv4": ipv4, "IPv6": ipv6} {
		t.Run(name, func(t *testing.T) {
			to := table(t, newMoved(t).b)
			at := func(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), port) }
			flow := func(protocol byte, port uint16) Flow {
				return Flow{Protocol: protocol, Src: at(f.client, port), Dst: at(f.server, 443), Translated: at(f.float, port+100), Timeout: 1000, TCP: TCP{State: map[byte]byte{unix.IPPROTO_TCP: 3}[protocol]}}
			}
			all := []Flow{flow(unix.IPPROTO_TCP, 1), flow(unix.IPPROTO_TCP, 2), flow(unix.IPPROTO_UDP, 1), flow(unix.IPPROTO_UDP, 2)}
			if n, err := to.Insert(t.Context(), all); n != len(all) || err != nil {
				t.Fatalf("%d flows are inserted, %v", n, err)
			}
			other := all[0]
			other.Translated = at(f.float, 7)
			if n, err := to.Delete(t.Context(), []Flow{other, all[1], all[2], flow(unix.IPPROTO_UDP, 3)}); n != 2 || err != nil {
				t.Errorf("%d flows are deleted, %v, want 2", n, err)
			}
			var left []string
			testkit.Check(t, to.Translated(t.Context(), []netip.Addr{netip.MustParseAddr(f.float)}, func(f Flow) { left = append(left, f.String()) }))
			slices.Sort(left)
			if want := []string{all[0].String(), all[3].String()}; !slices.Equal(left, want) {
				t.Errorf("%q are left, want %q", left, want)
			}
			if _, err := to.Delete(t.Context(), []Flow{{}}); err == nil {
				t.Error("no flow is deleted")
			}
		})
	}
}

// That events were lost is told.
func TestLostEvents(t *testing.T) {
	f := newMoved(t)
	from := table(t, f.a)
	events := testkit.Must(from.Events(1))(t)
	defer events.Close()
	var flows []Flow
	for i := range uint16(1000) {
		flows = append(flows, Flow{Protocol: unix.IPPROTO_UDP, Src: netip.AddrPortFrom(netip.MustParseAddr(ipv4.client), i+1), Dst: netip.MustParseAddrPort("192.0.2.1:53"),
			Translated: netip.AddrPortFrom(netip.MustParseAddr(ipv4.float), i+1), Timeout: 60})
	}
	if n, err := from.Insert(t.Context(), flows); n != len(flows) || err != nil {
		t.Fatalf("%d flows are inserted, %v", n, err)
	}
	testkit.Must(from.Delete(t.Context(), flows))(t)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(20*time.Second))
	defer cancel()
	over, lost := 0, 0
	testkit.Check(t, events.Run(ctx, time.Millisecond, func(netip.Addr) bool { return true }, func(Event) { over++ }, func() { lost++; cancel() }))
	if lost == 0 || over >= len(flows) {
		t.Errorf("%d events, %d times some were lost", over, lost)
	}
}
