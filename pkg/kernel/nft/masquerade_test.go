package nft_test

import (
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// The whole of the table by which clients leave by the node's address. One more router changes elements alone.
func TestMasqueradeRuleset(t *testing.T) {
	ns := netnstest.New(t)
	table := open(t, ns.NS, dataplane.NftTableMasquerade)
	m := ruleset.Masquerade{}
	sync := func(want dataplane.Result) {
		t.Helper()
		if got := testkit.Must(table.Sync(t.Context(), m.Ruleset()))(t); got != want {
			t.Errorf("it changed %+v, want %+v", got, want)
		}
		testkit.Check(t, table.Check(t.Context(), m.Ruleset()))
	}
	sync(dataplane.Result{})
	for n, link := range []int{7, 9} {
		for _, f := range families {
			m.Transits = append(m.Transits, ruleset.Transit{Link: link, Addr: dataplane.TransitAddr(f, n+1)})
		}
	}
	sync(dataplane.Result{Added: 1})
	golden(t, ns, dataplane.NftTableMasquerade, "masquerade")
	m.Transits = append(m.Transits, ruleset.Transit{Link: 12, Addr: dataplane.TransitAddr(dataplane.IPv4, 3)})
	sync(dataplane.Result{Added: 2})
	sync(dataplane.Result{})
	m.Transits = nil
	sync(dataplane.Result{Deleted: 1})
	sync(dataplane.Result{})
	if out := testkit.Must(ns.Run("nft", "list", "ruleset"))(t); out != "" {
		t.Errorf("without routers there is\n%s", out)
	}
}
