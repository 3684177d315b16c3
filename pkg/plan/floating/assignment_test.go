package floating_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/plan/floating"
)

var strategies = []floating.Strategy{floating.Default, floating.Unused, floating.LeastUsed, floating.Random}

// assigned is a history's state before and after an assignment.
type assigned struct {
	a         floating.Assignment
	addresses []floating.Address
	policies  []floating.Policy
	given     []floating.Given
}

func (s assigned) String() string {
	return fmt.Sprintf("%s, at most %d, refuse %t\naddresses %v\npolicies %v\ngiven %v",
		s.a.Strategy, s.a.MaxPolicies, s.a.Refuse, s.addresses, s.policies, s.given)
}

// Addresses and policies come and go: all that an assignment promises holds in each moment.
func TestAssignment(t *testing.T) {
	histories(t, func(t *testing.T, r *rand.Rand) {
		s := assigned{a: floating.Assignment{
			Strategy: strategies[r.IntN(len(strategies))], MaxPolicies: r.IntN(4), Refuse: r.IntN(2) == 0, Draw: r.IntN,
		}}
		has := map[string]string{}
		for range 8 {
			s.addresses, s.policies = nil, nil
			for _, a := range names(r, "a", 6) {
				s.addresses = append(s.addresses, floating.Address{Name: a, Shared: r.IntN(3) == 0})
			}
			for _, n := range names(r, "p", 12) {
				p := floating.Policy{Namespace: fmt.Sprint("ns", n[len(n)-1]%3), Name: n, Has: has[n]}
				if r.IntN(3) == 0 {
					p.Wants = fmt.Sprint("a", r.IntN(7))
				}
				s.policies = append(s.policies, p)
			}
			s.given = s.a.Assign(s.addresses, s.policies)
			s.check(t)
			for i, p := range s.policies {
				has[p.Name] = s.given[i].Address
			}
			if t.Failed() {
				t.Log(s)
				return
			}
		}
	})
}

// usable says whether a policy may have an address beside those who have it, and how many these are.
func (s assigned) usable(i int, a floating.Address) (may bool, others int) {
	may = true
	for j, g := range s.given {
		if j != i && g.Address == a.Name {
			others++
			may = may && (a.Shared || s.policies[j].Namespace == s.policies[i].Namespace)
		}
	}
	return may, others
}

func (s assigned) check(t *testing.T) {
	t.Helper()
	for i, p := range s.policies {
		g := s.given[i]
		if (g.Address == "") == (g.Reason == "") {
			t.Errorf("%s has address %q and reason %q", p.Name, g.Address, g.Reason)
		}
		at := slices.IndexFunc(s.addresses, func(a floating.Address) bool { return a.Name == g.Address })
		if g.Address == "" {
			s.checkReason(t, i)
			continue
		}
		if at < 0 {
			t.Errorf("%s has %s, which isn't one of the Egress's", p.Name, g.Address)
			continue
		}
		may, others := s.usable(i, s.addresses[at])
		if !may {
			t.Errorf("%s has %s, which belongs to another namespace", p.Name, g.Address)
		}
		if p.Wants != "" && p.Wants != g.Address {
			t.Errorf("%s wants %s, and has %s", p.Name, p.Wants, g.Address)
		}
		if s.a.Refuse && s.a.MaxPolicies > 0 && others >= s.a.MaxPolicies {
			t.Errorf("%s has %d policies", g.Address, others+1)
		}
		if s.a.Refuse && s.a.Strategy == floating.Unused && others > 0 && p.Wants == "" && p.Has != g.Address && !s.wanted(i) {
			t.Errorf("%s gets %s, which others have", p.Name, g.Address)
		}
	}
}

// wanted reports whether another policy names the address of a policy, which may be how it came to be shared.
func (s assigned) wanted(i int) bool {
	return slices.ContainsFunc(s.policies, func(p floating.Policy) bool { return p.Wants == s.given[i].Address })
}

// checkReason checks that there is no address for a policy.
func (s assigned) checkReason(t *testing.T, i int) {
	t.Helper()
	p, g := s.policies[i], s.given[i]
	var reasons []floating.Reason
	for _, a := range s.addresses {
		may, others := s.usable(i, a)
		full := s.a.Refuse && s.a.MaxPolicies > 0 && others >= s.a.MaxPolicies
		used := s.a.Refuse && s.a.Strategy == floating.Unused && others > 0
		switch {
		case p.Wants == "" && may && !full && !used:
			t.Errorf("%s has no address, though it may have %s", p.Name, a.Name)
		case p.Wants == a.Name && !may:
			reasons = append(reasons, floating.AddressTaken)
		case p.Wants == a.Name && full:
			reasons = append(reasons, floating.AddressFull)
		case p.Wants == a.Name:
			t.Errorf("%s hasn't got %s, which it may have", p.Name, a.Name)
		}
	}
	want := floating.NoAddress
	switch {
	case len(reasons) > 0:
		want = reasons[0]
	case p.Wants != "":
		want = floating.NoSuchAddress
	}
	if g.Reason != want {
		t.Errorf("%s has no address because of %s, want %s", p.Name, g.Reason, want)
	}
}

// What is kept, in a table: the rest is the history's.
func TestAssignmentKeeps(t *testing.T) {
	addresses := []floating.Address{{Name: "a0"}, {Name: "a1"}, {Name: "a2"}, {Name: "s", Shared: true}}
	policy := func(namespace, wants, has string) floating.Policy {
		return floating.Policy{Namespace: namespace, Wants: wants, Has: has}
	}
	for name, c := range map[string]struct {
		a        floating.Assignment
		policies []floating.Policy
		want     []floating.Given
	}{
		"all get the default": {
			floating.Assignment{Strategy: floating.Default},
			[]floating.Policy{policy("x", "", ""), policy("x", "", ""), policy("y", "", "")},
			[]floating.Given{{Address: "a0"}, {Address: "a0"}, {Address: "a1"}},
		},
		"unused ones first, then the least used": {
			floating.Assignment{Strategy: floating.Unused},
			[]floating.Policy{policy("x", "", ""), policy("x", "", ""), policy("x", "", ""), policy("x", "", ""), policy("x", "", "")},
			[]floating.Given{{Address: "a0"}, {Address: "a1"}, {Address: "a2"}, {Address: "s"}, {Address: "a0"}},
		},
		"the least used": {
			floating.Assignment{Strategy: floating.LeastUsed},
			[]floating.Policy{policy("x", "a0", ""), policy("x", "", ""), policy("x", "", "a1"), policy("x", "", "")},
			[]floating.Given{{Address: "a0"}, {Address: "a2"}, {Address: "a1"}, {Address: "s"}},
		},
		"a younger one keeps what an older one names now": {
			floating.Assignment{Strategy: floating.Default},
			[]floating.Policy{policy("x", "a1", "a0"), policy("y", "", "a1")},
			[]floating.Given{{Reason: floating.AddressTaken}, {Address: "a1"}},
		},
		"of two namespaces that had a shared address the older one keeps it": {
			floating.Assignment{Strategy: floating.Default},
			[]floating.Policy{policy("x", "", "a2"), policy("y", "", "a2")},
			[]floating.Given{{Address: "a2"}, {Address: "a0"}},
		},
		"shared": {
			floating.Assignment{Strategy: floating.LeastUsed, MaxPolicies: 2, Refuse: true},
			[]floating.Policy{policy("x", "s", ""), policy("y", "s", ""), policy("z", "s", "")},
			[]floating.Given{{Address: "s"}, {Address: "s"}, {Reason: floating.AddressFull}},
		},
		"random": {
			floating.Assignment{Strategy: floating.Random, Draw: func(n int) int { return n - 1 }},
			[]floating.Policy{policy("x", "", "a1"), policy("x", "", "")},
			[]floating.Given{{Address: "a1"}, {Address: "s"}},
		},
	} {
		if got := c.a.Assign(addresses, c.policies); !slices.Equal(got, c.want) {
			t.Errorf("%s: given %v, want %v", name, got, c.want)
		}
	}
}
