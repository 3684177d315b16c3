package egress

import (
	"context"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// The status of an Egress says which policies leave by its addresses.
func TestPoliciesAreNamed(t *testing.T) {
	f := newFixture(t)
	e := f.withAddresses(t, "partners")
	claim := egress.AddressClaim(e)
	claim.Status.Addresses = []v2.ClaimedAddress{{Block: "partners-0", IPv4: "198.51.100.0"}, {Block: "partners-1", IPv4: "198.51.100.1"}}
	f.put(t, f.cfg.Floating.Claims.Informer().GetIndexer(), claim)
	for _, a := range claim.Status.Addresses {
		f.put(t, f.cfg.Floating.Blocks.GetIndexer(), &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: a.Block}, Floating: &v2.Floating{
			Owner: v2.FloatingOwner{Kind: kindEgress, Namespace: nat.Namespace, Name: nat.Name, UID: "uid"},
		}})
	}
	leaves := func(block string) v2.EgressPolicyStatus {
		return v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{
			Egress: &v2.EgressReference{Namespace: nat.Namespace, Name: nat.Name}, Address: &v2.ResolvedAddress{Block: block},
		}}
	}
	f.put(t, f.cfg.Floating.Policies.GetIndexer(),
		&v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}, Status: leaves("partners-1")},
		&v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "without"}})
	f.put(t, f.cfg.Floating.ClusterPolicies.GetIndexer(), &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Status: leaves("partners-1")})
	sync := func() (policies [][]string) {
		t.Helper()
		_ = f.syncObjects(t.Context(), nat) // the fake has no Deployment
		for _, a := range f.egress(t).Status.Addresses {
			policies = append(policies, a.Policies)
		}
		return policies
	}
	if got := sync(); len(got) != 2 || len(got[0]) > 0 || !slices.Equal(got[1], []string{"all", "shop/a"}) {
		t.Errorf("the policies of its addresses are %q", got)
	}
	// They are counted from time to time only.
	f.put(t, f.cfg.Floating.Policies.GetIndexer(), &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "b"}, Status: leaves("partners-0")})
	if got := sync(); len(got[0]) > 0 {
		t.Errorf("at once %q are written", got)
	}
	f.now = func() metav1.Time { return metav1.NewTime(metav1.Now().Add(countEvery)) }
	if got := sync(); !slices.Equal(got[0], []string{"shop/b"}) {
		t.Errorf("later %q are written", got)
	}
}

// A policy that gets an address, or another one, is news for its Egress, and nothing else of it.
func TestPoliciesWakeTheirEgress(t *testing.T) {
	f := newFixture(t)
	at := func(egress, block string) *v2.EgressPolicy {
		return &v2.EgressPolicy{Status: v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{
			Egress: &v2.EgressReference{Namespace: "internet", Name: egress}, Address: &v2.ResolvedAddress{Block: block},
		}}}
	}
	for name, c := range map[string]struct {
		before, after *v2.EgressPolicy
		want          []string
	}{
		"it is there, and has none":      {nil, &v2.EgressPolicy{}, nil},
		"it gets one":                    {&v2.EgressPolicy{}, at("a", "p-0"), []string{"internet/a"}},
		"it keeps it":                    {at("a", "p-0"), at("a", "p-0"), nil},
		"it gets another":                {at("a", "p-0"), at("a", "p-1"), []string{"internet/a"}},
		"it gets one of another Egress":  {at("a", "p-0"), at("b", "q-0"), []string{"internet/a", "internet/b"}},
		"it is gone, and has had one":    {at("a", "p-0"), nil, []string{"internet/a"}},
		"it is gone, and has never been": {nil, nil, nil},
	} {
		status := func(p *v2.EgressPolicy) use {
			return leaving(p, func() v2.EgressPolicyStatus { return p.Status })
		}
		got := f.queued(t, func(context.Context) {
			f.userChanged(status(c.before), status(c.after))
			time.Sleep(2 * settle) // in no time
		})
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q are looked at, want %q", name, got, c.want)
		}
	}
}
