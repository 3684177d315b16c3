package nft_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
)

// A change lets nothing out past the tunnels: a destination before and after is one meanwhile.
func TestClientChangesClosed(t *testing.T) {
	everything := []netipx.IPRange{
		netipx.IPRangeFrom(netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("255.255.255.255")),
		netipx.IPRangeFrom(netip.MustParseAddr("::"), netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")),
	}
	for _, c := range []struct {
		name   string
		change func(*ruleset.Client)
	}{
		{"destinations", func(r *ruleset.Client) { r.Destinations = everything }},
		{"rules and sets", func(r *ruleset.Client) {
			r.Sources = []netipx.IPRange{ranged("203.0.113.7", "203.0.113.7")}
		}},
		{"addresses", func(r *ruleset.Client) { r.Addresses = nil }},
	} {
		t.Run(c.name, func(t *testing.T) { changesClosed(t, c.change) })
	}
}

// changesClosed sends from a client to a destination by its uplink, while a change is made and taken back.
func changesClosed(t *testing.T, change func(*ruleset.Client)) {
	l := newClientLab(t)
	testkit.Must(l.table.Sync(t.Context(), l.rules))(t)
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var leaked, lost atomic.Int64
	for i, f := range families {
		p := packet{from: l.client, to: l.outside, link: "eth0", src: addr(f, netClient, 1), dst: addr(f, netDestination, 1), port: 7000 + uint16(i)}
		sends, hears, target, body, err := p.ends(ctx)
		testkit.Check(t, err)
		all.Go(func() {
			defer sends.Close()
			for ctx.Err() == nil {
				switch _, err := sends.WriteTo(body, target); {
				case errors.Is(err, unix.EPERM):
					lost.Add(1)
				case err != nil:
					t.Errorf("%s: %v", f, err)
					return
				}
			}
		})
		all.Go(func() {
			defer hears.Close()
			buf := make([]byte, 100)
			for ctx.Err() == nil {
				testkit.Check(t, hears.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
				if _, from, err := hears.ReadFrom(buf); err == nil && from.(*net.UDPAddr).AddrPort().Addr().Unmap() == p.src {
					leaked.Add(1)
				}
			}
		})
	}
	for i := range testkit.EgressForm.Times(60, 200) {
		rules := l.rules
		if i%2 == 0 {
			change(&rules)
		}
		if out := testkit.Must(l.table.Sync(t.Context(), rules))(t); !out.Changed() {
			t.Fatalf("change %d isn't one: %+v", i, out)
		}
	}
	stop()
	all.Wait()
	if leaked.Load() > 0 || lost.Load() == 0 {
		t.Errorf("%d packets got past the tunnels, %d were dropped", leaked.Load(), lost.Load())
	}
}
