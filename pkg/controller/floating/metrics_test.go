package floating

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/plantest"
)

// The leader counts claims by what they lack. Names of pools that somebody has invented are no label.
func TestClaimsAreCounted(t *testing.T) {
	sc := newScene(t)
	sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/31"))
	sc.s.Put(poolResource, plantest.Pool("unused", 0, "10.0.1.0/31"))
	for name, spec := range map[string]v2.AddressClaimSpec{
		"has": {Pool: "p", Count: new(int32(1))}, "lacks": {Pool: "p", Count: new(int32(2))},
		"invented": {Pool: "x", Count: new(int32(1))}, "other": {Pool: "y", Count: new(int32(1))},
	} {
		c := newClaim(name, spec)
		c.Spec.Pool = spec.Pool
		sc.s.Put(claimResource, c)
	}
	for _, name := range []string{"has", "lacks", "invented"} {
		if _, err := sc.sync(name); err != nil {
			t.Fatal(err)
		}
	}
	m := sc.r.metrics
	if n := testutil.CollectAndCount(m); n != 0 {
		t.Errorf("the standby exports %d metrics", n)
	}
	m.leading.Store(true)
	want := `
		# HELP coil_floating_claims AddressClaims of an AddressPool, by the reason of their condition Ready: AddressesHeld if they have all addresses, Pending before they have one. Those of pools that don't exist have no pool. Only the leader exports it.
		# TYPE coil_floating_claims gauge
		coil_floating_claims{pool="",reason="Pending"} 1
		coil_floating_claims{pool="",reason="PoolNotFound"} 1
		coil_floating_claims{pool="p",reason="AddressesHeld"} 1
		coil_floating_claims{pool="p",reason="PoolExhausted"} 1
		coil_floating_claims{pool="unused",reason="PoolExhausted"} 0
	`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
