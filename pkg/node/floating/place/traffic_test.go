package place

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
)

// counters are those of sets, by their names.
type counters map[string][]nft.ElementCounter

func (c counters) Counted(_ context.Context, set string) ([]nft.ElementCounter, error) {
	if c == nil {
		return nil, errors.New("no answer")
	}
	return c[set], nil
}

func TestTraffic(t *testing.T) {
	of := func(c counters) *Traffic {
		return newTraffic(t.Context(), func(dataplane.Family) Counters { return c })
	}
	ipv4, ipv6 := string([]byte{192, 0, 2, 7}), "\x20\x01\x0d\xb8"+strings.Repeat("\x00", 11)+"\x07"
	m := of(counters{
		"sent_ipv4": {{Key: ipv4, Packets: 3, Bytes: 300}}, "received_ipv4": {{Key: ipv4, Packets: 2, Bytes: 200}}, "received_ipv6": {{Key: ipv6, Packets: 1, Bytes: 100}},
		"no_proxy_ipv6": {{Key: ipv6, Packets: 1, Bytes: 100}},
	})
	const help = " from (sent) and to (received) a floating address of the node, since it came to the node.\n"
	want := "# HELP coil_floating_bytes_total Bytes of packets" + help + `# TYPE coil_floating_bytes_total counter
coil_floating_bytes_total{address="192.0.2.7",direction="received"} 200
coil_floating_bytes_total{address="192.0.2.7",direction="sent"} 300
coil_floating_bytes_total{address="2001:db8::7",direction="received"} 100
` + "# HELP coil_floating_packets_total Packets" + help + `# TYPE coil_floating_packets_total counter
coil_floating_packets_total{address="192.0.2.7",direction="received"} 2
coil_floating_packets_total{address="192.0.2.7",direction="sent"} 3
coil_floating_packets_total{address="2001:db8::7",direction="received"} 1
# HELP coil_floating_untranslated_packets_total Packets to a floating address of Services that were dropped since no Service proxy of the node had translated them, since the address came to the node.
# TYPE coil_floating_untranslated_packets_total counter
coil_floating_untranslated_packets_total{address="2001:db8::7"} 1
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(of(nil)); n > 0 {
		t.Errorf("%d metrics of a table that can't be read", n)
	}
}
