package clientnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/kernel/sending"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Packets that are sent from a pod are counted by the links on their way, and told with their answers.
func TestSend(t *testing.T) {
	host, pod := netnstest.New(t), netnstest.New(t)
	ctx := t.Context()
	testkit.Check(t,
		host.Lab().IP(ctx, fmt.Sprintf("link add pod type veth peer name eth0 netns %s", pod.Lab().Path()), "link set pod up", "addr add 192.0.2.1/24 dev pod"),
		pod.Lab().IP(ctx, "link set eth0 up", "addr add 192.0.2.7/24 dev eth0"),
	)
	testkit.Check(t, pod.Ping(netip.MustParseAddr("192.0.2.1"), testkit.Timeout(5*time.Second)))
	at, from := store.Netns{Path: pod.Path}, []netip.Addr{netip.MustParseAddr("192.0.2.7")}
	order := inspection.Order{Protocol: inspection.TCP, To: netip.MustParseAddrPort("192.0.2.1:9"), Count: 2}
	s := testkit.Must(Send(ctx, at, from, order))(t)
	if s.Protocol != inspection.TCP || s.From != "192.0.2.7" || s.To != "192.0.2.1:9" || len(s.Packets) != 2 || len(s.IDs()) != 2 || len(s.Unknown) > 0 || len(s.Dropped.Pod) > 0 {
		t.Errorf("%+v", s)
	}
	for _, p := range s.Packets {
		if p.Answer != "RST" || p.By != "192.0.2.1" || !p.Arrived || p.Milliseconds <= 0 {
			t.Errorf("%+v", p)
		}
	}
	if len(s.Links) != 1 || !s.Links[0].InPod || s.Links[0].Link != "eth0" || s.Links[0].Out < 2 || s.Links[0].Back < 2 || s.Links[0].Lost > 0 {
		t.Errorf("links: %+v", s.Links)
	}
	// Without a way nothing leaves, and no link counts.
	order = inspection.Order{Protocol: inspection.ICMP, To: netip.MustParseAddrPort("203.0.113.5:0"), Count: 1}
	s = testkit.Must(Send(ctx, at, from, order))(t)
	if s.From != "" || s.To != "203.0.113.5" || len(s.Packets) != 1 || s.Packets[0].NotSent != "network is unreachable" || s.Packets[0].Arrived || len(s.IDs()) > 0 || len(s.Links) > 0 {
		t.Errorf("without a way: %+v", s)
	}
	if _, err := Send(ctx, store.Netns{Path: filepath.Join(t.TempDir(), "gone")}, from, order); !errors.Is(err, ErrGone) {
		t.Errorf("from a pod that is gone: %v", err)
	}
	order.Count = 11
	if s, err := Send(ctx, at, from, order); err == nil {
		t.Errorf("too many: %+v", s)
	}
}

// Counts say what was dropped since they began, or why that isn't known.
func TestCountDropped(t *testing.T) {
	if sending.Most != inspection.MostSent {
		t.Errorf("%d packets can be sent, and %d may be ordered", sending.Most, inspection.MostSent)
	}
	counts := []map[string]uint64{{"forged": 2}, {"forged": 5, "past_tunnel": 1}}
	for failing, want := range []int{1, 1, 0} { // the first, the second, or none of the two reads
		var unknown []string
		n := 0
		read := func(context.Context) (map[string]uint64, error) {
			n++
			if n == failing+1 {
				return nil, errors.New("no nftables")
			}
			return counts[n-1], nil
		}
		got := CountDropped(t.Context(), read)(t.Context(), &unknown)
		if len(unknown) != want || want == 0 && (got["forged"] != 3 || got["past_tunnel"] != 1) || want > 0 && got != nil {
			t.Errorf("read %d fails: %v, %q", failing, got, unknown)
		}
	}
}
