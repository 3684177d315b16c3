package nft_test

import (
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// A set counts packets of each element. What it has counted stays when others come and go, and a set that doesn't count is made anew.
func TestCountedSet(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	ns := netnstest.New(t)
	table := open(t, ns.NS, "first")
	if got := testkit.Must(table.Counted(t.Context(), "to"))(t); len(got) > 0 {
		t.Errorf("before there is a table: %+v", got)
	}
	sync := func(counted bool, addrs ...string) dataplane.Result {
		t.Helper()
		s := dataplane.Set{Name: "to", Key: "ipv4_addr", Counted: counted}
		for _, a := range addrs {
			s.Elements = append(s.Elements, dataplane.Element{Key: key(a)})
		}
		r := dataplane.Ruleset{Sets: []dataplane.Set{s}, Chains: []dataplane.Chain{{
			Name: "out", Hook: &dataplane.Hook{Type: "filter", Name: "output", Priority: dataplane.HookFilter},
			Rules: []dataplane.ChainRule{{Comment: "it is found", Text: "meta nfproto ipv4 ip daddr @to accept"}},
		}}}
		done := testkit.Must(table.Sync(t.Context(), r))(t)
		testkit.Check(t, open(t, ns.NS, "first").Check(t.Context(), r))
		return done
	}
	counts := func(want ...nft.ElementCounter) {
		t.Helper()
		got := testkit.Must(table.Counted(t.Context(), "to"))(t)
		slices.SortFunc(got, func(a, b nft.ElementCounter) int { return int(a.Key[3]) - int(b.Key[3]) })
		if !slices.Equal(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	ns.IP(t, "link", "set", "lo", "up")
	sync(true, "127.0.0.1", "127.0.0.2")
	testkit.Must(ns.Run("ping", "-c", "2", "-i", "0.01", "-s", "72", "127.0.0.2"))(t)
	// Answers go to the address that has asked.
	counts(nft.ElementCounter{Key: key("127.0.0.1"), Packets: 2, Bytes: 200}, nft.ElementCounter{Key: key("127.0.0.2"), Packets: 2, Bytes: 200})
	sync(true, "127.0.0.2", "127.0.0.3")
	counts(nft.ElementCounter{Key: key("127.0.0.2"), Packets: 2, Bytes: 200}, nft.ElementCounter{Key: key("127.0.0.3")})
	if done := sync(true, "127.0.0.2", "127.0.0.3"); done.Changed() {
		t.Errorf("the second Sync did %+v", done)
	}
	sync(false, "127.0.0.2")
	counts(nft.ElementCounter{Key: key("127.0.0.2")})
	sync(true, "127.0.0.2")
	testkit.Must(ns.Run("ping", "-c", "1", "-s", "72", "127.0.0.2"))(t)
	counts(nft.ElementCounter{Key: key("127.0.0.2"), Packets: 1, Bytes: 100})
}
