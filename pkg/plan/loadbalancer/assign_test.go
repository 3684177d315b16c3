package loadbalancer_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// pools are those of the tests: "four", "six", and "both".
func pools(t *testing.T) map[string]ipam.Pool {
	four, six := "192.0.2.0/28", "2001:db8::/124"
	pairs4, pairs6 := "198.51.100.0/28", "2001:db8:1::/124"
	made := map[string]ipam.Pool{}
	for name, cidrs := range map[string][2]*string{"four": {&four, nil}, "six": {nil, &six}, "both": {&pairs4, &pairs6}} {
		subnet := testkit.Must(ipam.ParseSubnet(cidrs[0], cidrs[1]))(t)
		made[name] = testkit.Must(ipam.NewPool(0, []ipam.Subnet{subnet}))(t)
	}
	return made
}

// world plays the controller, whose claims are answered at once.
type world struct {
	loadbalancer.Facts
	next  map[string]int32 // index of the next address, by pool
	plan  loadbalancer.Plan
	ports uint16 // the last one that a Service was given
}

func newWorld(t *testing.T) *world {
	return &world{Facts: loadbalancer.Facts{Pools: pools(t), Default: "both"}, next: map[string]int32{}}
}

// assign makes a plan, and does what it says.
func (w *world) assign(t *testing.T) {
	t.Helper()
	w.plan = loadbalancer.Assign(w.Facts)
	w.Addresses = slices.DeleteFunc(w.Addresses, func(a loadbalancer.Address) bool { return slices.Contains(w.plan.Idle, a.Claim) })
	for _, a := range w.plan.Make {
		for len(a.Addrs()) == 0 {
			b := testkit.Must(w.Pools[a.Pool].Block(w.next[a.Pool]))(t)
			w.next[a.Pool] = (w.next[a.Pool] + 1) % int32(w.Pools[a.Pool].Total())
			if !slices.ContainsFunc(slices.Concat(w.Addresses, w.plan.Make), func(o loadbalancer.Address) bool { return o.Address == b.At(0) }) {
				a.Address = b.At(0)
			}
		}
		w.Addresses = append(w.Addresses, a)
	}
	for i := range w.Services {
		if s := &w.Services[i]; s.Leaving {
			continue
		} else if w.plan.Given[i].Claim != "" {
			s.Has = w.address(w.plan.Given[i].Claim).Addrs()
		} else {
			s.Has = nil
		}
	}
}

func (w *world) address(claim string) loadbalancer.Address {
	i := slices.IndexFunc(w.Addresses, func(a loadbalancer.Address) bool { return a.Claim == claim })
	if i < 0 {
		return loadbalancer.Address{}
	}
	return w.Addresses[i]
}

// service returns a Service with some ports, such as "TCP 80", which is older than those with a greater number.
func service(n int, ports ...string) loadbalancer.Service {
	s := loadbalancer.Service{
		Name: types.NamespacedName{Namespace: "shop", Name: fmt.Sprint("s", n)}, UID: types.UID(fmt.Sprint("u", n)),
		Created: time.Unix(int64(n), 0), Families: []dataplane.Family{dataplane.IPv4},
	}
	for _, text := range ports {
		var p loadbalancer.Port
		if _, err := fmt.Sscan(text, &p.Protocol, &p.Number); err != nil {
			panic(err)
		}
		s.Ports = append(s.Ports, p)
	}
	return s
}

func with(s loadbalancer.Service, change func(*loadbalancer.Service)) loadbalancer.Service {
	change(&s)
	return s
}

// Services get what they ask for, or a reason.
func TestAssign(t *testing.T) {
	wants := func(addrs ...string) func(*loadbalancer.Service) {
		return func(s *loadbalancer.Service) {
			for _, a := range addrs {
				s.Wants = append(s.Wants, netip.MustParseAddr(a))
			}
		}
	}
	has := func(a string) func(*loadbalancer.Service) {
		return func(s *loadbalancer.Service) { s.Has = []netip.Addr{netip.MustParseAddr(a)} }
	}
	pool := func(name string) func(*loadbalancer.Service) {
		return func(s *loadbalancer.Service) { s.Pool = name }
	}
	families := func(both bool, f ...dataplane.Family) func(*loadbalancer.Service) {
		return func(s *loadbalancer.Service) { s.Families, s.Both = f, both }
	}
	group := func(name string) func(*loadbalancer.Service) {
		return func(s *loadbalancer.Service) { s.Group = name }
	}
	invalid := func(s *loadbalancer.Service) { s.Invalid = "It is wrong" }
	alone := func(s *loadbalancer.Service) { s.Alone = true }
	local := func(endpoints string) func(*loadbalancer.Service) {
		return func(s *loadbalancer.Service) { s.Endpoints = endpoints }
	}
	for name, c := range map[string]struct {
		services []loadbalancer.Service
		want     []string // the address, or the reason
	}{
		"other ports share":                 {[]loadbalancer.Service{service(1, "TCP 80"), service(2, "TCP 443")}, []string{"198.51.100.0", "198.51.100.0"}},
		"another protocol shares":           {[]loadbalancer.Service{service(1, "TCP 53"), service(2, "UDP 53"), service(3, "SCTP 53")}, []string{"198.51.100.0", "198.51.100.0", "198.51.100.0"}},
		"the same port doesn't":             {[]loadbalancer.Service{service(1, "TCP 80", "TCP 443"), service(2, "TCP 443")}, []string{"198.51.100.0", "198.51.100.1"}},
		"the other family does":             {[]loadbalancer.Service{service(1, "TCP 80"), with(service(2, "TCP 80"), families(false, dataplane.IPv6))}, []string{"198.51.100.0", "198.51.100.0"}},
		"both families don't":               {[]loadbalancer.Service{service(1, "TCP 80"), with(service(2, "TCP 80"), families(true, dataplane.IPv6, dataplane.IPv4))}, []string{"198.51.100.0", "198.51.100.1"}},
		"one that refuses comes later":      {[]loadbalancer.Service{service(1, "TCP 80"), with(service(2, "TCP 443"), alone)}, []string{"198.51.100.0", "198.51.100.1"}},
		"one that refuses comes first":      {[]loadbalancer.Service{with(service(1, "TCP 80"), alone), service(2, "TCP 443")}, []string{"198.51.100.0", "198.51.100.1"}},
		"groups":                            {[]loadbalancer.Service{with(service(1, "TCP 80"), group("a")), service(2, "TCP 81"), with(service(3, "TCP 82"), group("a"))}, []string{"198.51.100.0", "198.51.100.1", "198.51.100.0"}},
		"other local endpoints":             {[]loadbalancer.Service{with(service(1, "TCP 80"), local("a")), with(service(2, "TCP 81"), local("b"))}, []string{"198.51.100.0", "198.51.100.1"}},
		"the same local endpoints":          {[]loadbalancer.Service{with(service(1, "TCP 80"), local("a")), with(service(2, "TCP 81"), local("a")), service(3, "TCP 82")}, []string{"198.51.100.0", "198.51.100.0", "198.51.100.0"}},
		"an address by name":                {[]loadbalancer.Service{service(1, "TCP 80"), with(service(2, "TCP 80"), wants("192.0.2.5"))}, []string{"198.51.100.0", "192.0.2.5"}},
		"a pair by name":                    {[]loadbalancer.Service{with(with(service(1, "TCP 80"), wants("198.51.100.3", "2001:db8:1::3")), families(true, dataplane.IPv4, dataplane.IPv6))}, []string{"198.51.100.3"}},
		"no pair":                           {[]loadbalancer.Service{with(service(1, "TCP 80"), wants("198.51.100.3", "2001:db8:1::4"))}, []string{"AddressPair"}},
		"an address of no pool":             {[]loadbalancer.Service{with(service(1, "TCP 80"), wants("203.0.113.1"))}, []string{"AddressOutsidePool"}},
		"an address of another pool":        {[]loadbalancer.Service{with(with(service(1, "TCP 80"), wants("192.0.2.5")), pool("both"))}, []string{"AddressOutsidePool"}},
		"an address of the other family":    {[]loadbalancer.Service{with(with(service(1, "TCP 80"), wants("192.0.2.5")), families(false, dataplane.IPv6))}, []string{"FamilyMissing"}},
		"two by the same name":              {[]loadbalancer.Service{with(service(1, "TCP 80"), wants("192.0.2.5")), with(service(2, "TCP 80"), wants("192.0.2.5"))}, []string{"192.0.2.5", "AddressInUse"}},
		"two share by the same name":        {[]loadbalancer.Service{with(service(1, "TCP 80"), wants("192.0.2.5")), with(service(2, "UDP 80"), wants("192.0.2.5"))}, []string{"192.0.2.5", "192.0.2.5"}},
		"a name comes before age":           {[]loadbalancer.Service{with(service(1, "TCP 80"), pool("four")), with(service(2, "TCP 80"), wants("192.0.2.0"))}, []string{"192.0.2.1", "192.0.2.0"}},
		"a pool by name":                    {[]loadbalancer.Service{with(service(1, "TCP 80"), pool("four"))}, []string{"192.0.2.0"}},
		"no such pool":                      {[]loadbalancer.Service{with(service(1, "TCP 80"), pool("five"))}, []string{"PoolNotFound"}},
		"a pool of the other family":        {[]loadbalancer.Service{with(service(1, "TCP 80"), pool("six"))}, []string{"FamilyMissing"}},
		"both of a pool that has one":       {[]loadbalancer.Service{with(with(service(1, "TCP 80"), pool("four")), families(true, dataplane.IPv4, dataplane.IPv6))}, []string{"FamilyMissing"}},
		"both if the pool has both":         {[]loadbalancer.Service{with(with(service(1, "TCP 80"), pool("four")), families(false, dataplane.IPv4, dataplane.IPv6))}, []string{"192.0.2.0"}},
		"what it has comes before age":      {[]loadbalancer.Service{with(service(1, "TCP 80"), wants("192.0.2.5")), with(service(2, "TCP 80"), has("192.0.2.5"))}, []string{"AddressInUse", "192.0.2.5"}},
		"of two that have it the older":     {[]loadbalancer.Service{with(service(2, "TCP 80"), has("192.0.2.5")), with(service(1, "TCP 80"), has("192.0.2.5"))}, []string{"198.51.100.0", "192.0.2.5"}},
		"it has one of no pool":             {[]loadbalancer.Service{with(service(1, "TCP 80"), has("203.0.113.1"))}, []string{"198.51.100.0"}},
		"it has one and wants another":      {[]loadbalancer.Service{with(with(service(1, "TCP 80"), has("192.0.2.5")), wants("192.0.2.6"))}, []string{"192.0.2.6"}},
		"it has one and wants a pool":       {[]loadbalancer.Service{with(with(service(1, "TCP 80"), has("192.0.2.5")), pool("both"))}, []string{"198.51.100.0"}},
		"it has one and needs a family":     {[]loadbalancer.Service{with(with(service(1, "TCP 80"), has("192.0.2.5")), families(true, dataplane.IPv4, dataplane.IPv6))}, []string{"198.51.100.0"}},
		"it has one of another default":     {[]loadbalancer.Service{with(service(1, "TCP 80"), has("192.0.2.5"))}, []string{"192.0.2.5"}},
		"what it asks for makes no sense":   {[]loadbalancer.Service{with(service(1, "TCP 80"), invalid)}, []string{"Invalid"}},
		"it keeps what it has all the same": {[]loadbalancer.Service{with(with(service(1, "TCP 80"), has("192.0.2.5")), invalid)}, []string{"192.0.2.5"}},
		"an address with room comes next":   {[]loadbalancer.Service{service(1, "TCP 80"), service(2, "TCP 81")}, []string{"198.51.100.0", "198.51.100.0"}},
		"one that isn't there yet doesn't":  {[]loadbalancer.Service{with(service(1, "TCP 80"), has("198.51.100.9")), service(2, "TCP 81")}, []string{"198.51.100.9", "198.51.100.0"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.Services = c.services
			w.assign(t)
			for i, g := range w.plan.Given {
				got := string(g.Reason)
				if g.Claim != "" {
					got = w.address(g.Claim).Addrs()[0].String()
				}
				if got != c.want[i] {
					t.Errorf("%s gets %s (%+v), want %s", w.Services[i].Name, got, g, c.want[i])
				}
				if g.Reason != "" && !strings.Contains(g.Message, " ") {
					t.Errorf("%s has no message: %+v", w.Services[i].Name, g)
				}
			}
			w.assign(t)
			if len(w.plan.Make)+len(w.plan.Idle) > 0 {
				t.Errorf("the second time it makes %v, and %v are idle", w.plan.Make, w.plan.Idle)
			}
		})
	}
}

// A Service that waits for a new address, of which there may be none for long, takes one that has got room for it. Until then it goes on waiting for the same one.
func TestWaitingServiceTakesRoom(t *testing.T) {
	first, second, third := service(1, "TCP 80"), service(2, "TCP 80"), service(3, "TCP 443")
	w := newWorld(t)
	w.Services = []loadbalancer.Service{first}
	w.assign(t)
	has := w.Services[0].Has
	waiting := loadbalancer.Address{Claim: "lb-waits", Pool: "both"}
	w.Addresses = append([]loadbalancer.Address{waiting}, w.Addresses...)
	second.Claim = waiting.Claim
	for name, c := range map[string]struct {
		change func(*loadbalancer.Service)
		waits  bool
	}{
		"no room":       {func(*loadbalancer.Service) {}, true},
		"another port":  {func(s *loadbalancer.Service) { s.Ports = third.Ports }, false},
		"wants another": {func(s *loadbalancer.Service) { s.Ports, s.Alone = third.Ports, true }, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := w.Facts
			f.Services = []loadbalancer.Service{w.Services[0], with(second, c.change)}
			plan := loadbalancer.Assign(f)
			got := plan.Given[1]
			if c.waits && (got.Claim != waiting.Claim || len(plan.Idle) > 0) || !c.waits && (!slices.Equal(got.Address.Addrs(), has) || !slices.Equal(plan.Idle, []string{waiting.Claim})) {
				t.Errorf("it gets %+v, and %v are idle", got, plan.Idle)
			}
			if !slices.Equal(plan.Given[0].Address.Addrs(), has) {
				t.Errorf("the other one gets %+v, and had %v", plan.Given[0], has)
			}
		})
	}
}

// A Service that waits for a new address, and isn't valid any more, says so rather than that it waits.
func TestWaitingServiceBecomesInvalid(t *testing.T) {
	w := newWorld(t)
	w.Addresses = []loadbalancer.Address{{Claim: "lb-waits", Pool: "both"}}
	s := with(service(1, "TCP 80"), func(s *loadbalancer.Service) { s.Claim, s.Invalid = "lb-waits", "It is wrong" })
	w.Services = []loadbalancer.Service{s}
	plan := loadbalancer.Assign(w.Facts)
	if got := plan.Given[0]; got.Claim != "" || got.Reason != loadbalancer.Invalid || got.Message != s.Invalid || !slices.Equal(plan.Idle, []string{"lb-waits"}) {
		t.Errorf("it gets %+v, and %v are idle", got, plan.Idle)
	}
}

// A Service that waits for a new address of a pool asks for another pool's, by its name or by none any more: it waits for the former no longer.
func TestWaitingServiceAsksForAnotherPool(t *testing.T) {
	for asks, want := range map[string]string{"": "both", "both": "both", "six": "", "four": "four"} {
		w := newWorld(t)
		w.Addresses = []loadbalancer.Address{{Claim: "lb-waits", Pool: "four"}}
		s := with(service(1, "TCP 80"), func(s *loadbalancer.Service) { s.Pool = asks })
		s.Claim = "lb-waits"
		w.Services = []loadbalancer.Service{s}
		plan := loadbalancer.Assign(w.Facts)
		var got string
		for _, a := range slices.Concat(w.Addresses, plan.Make) {
			if a.Claim == plan.Given[0].Claim {
				got = a.Pool
			}
		}
		if idle := slices.Contains(plan.Idle, "lb-waits"); got != want || idle != (want != "four") {
			t.Errorf("asking for %q it waits for an address of %q, want %q; the former is idle: %t", asks, got, want, idle)
		}
	}
}

// clash says whether two Services can't have an address together, from what sharing promises.
func clash(a, b loadbalancer.Service) bool {
	family := false
	for _, f := range a.Families {
		family = family || slices.Contains(b.Families, f)
	}
	for _, p := range a.Ports {
		if family && slices.Contains(b.Ports, p) {
			return true
		}
	}
	return a.Alone || b.Alone || a.Group != b.Group || a.Endpoints != "" && b.Endpoints != "" && a.Endpoints != b.Endpoints
}

// arbitrary returns a Service that may be anything.
func arbitrary(r *rand.Rand, n int) loadbalancer.Service {
	s := service(n)
	s.Created = time.Unix(int64(r.IntN(5)), 0)
	for port := range uint16(4) {
		if p := corev1.Protocol([]string{"", "TCP", "UDP"}[r.IntN(3)]); p != "" {
			s.Ports = append(s.Ports, loadbalancer.Port{Protocol: p, Number: 80 + port})
		}
	}
	s.Families = [][]dataplane.Family{{4}, {6}, {4, 6}, {6, 4}}[r.IntN(4)]
	s.Both = len(s.Families) > 1 && r.IntN(2) == 0
	s.Pool = []string{"", "", "four", "six", "both", "none"}[r.IntN(6)]
	if r.IntN(4) == 0 {
		s.Wants = []netip.Addr{netip.MustParseAddr([]string{"192.0.2.1", "192.0.2.2", "198.51.100.1", "2001:db8:1::1", "203.0.113.1"}[r.IntN(5)])}
	}
	s.Alone = r.IntN(8) == 0
	s.Group = []string{"", "", "", "a"}[r.IntN(4)]
	s.Endpoints = []string{"", "", "", "x", "y"}[r.IntN(5)]
	return s
}

// Services come, change and go: nobody gets what clashes with another one, nobody loses an address without a reason, and the order in which Services are
// seen means nothing.
func TestAnyServices(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		for n := range 12 {
			var changed []types.UID
			switch i := r.IntN(len(w.Services) + 1); {
			case i == len(w.Services) || r.IntN(3) == 0 && len(w.Services) < 8:
				w.Services = append(w.Services, arbitrary(r, n))
			case r.IntN(2) == 0:
				if w.Services[i].Leaving || r.IntN(2) == 0 {
					w.Services = slices.Delete(w.Services, i, i+1)
				} else {
					w.Services[i].Leaving = true
				}
			default:
				s := arbitrary(r, n)
				s.Name, s.UID, s.Created, s.Has = w.Services[i].Name, w.Services[i].UID, w.Services[i].Created, w.Services[i].Has
				w.Services[i] = s
				changed = append(changed, s.UID)
			}
			before := w.Facts
			before.Services = slices.Clone(w.Services)
			before.Addresses = slices.Clone(w.Addresses)
			w.assign(t)
			check(t, before, w.plan, changed)
			if t.Failed() {
				t.Fatalf("seed %d, step %d: %+v\n%+v", seed, n, before, w.plan)
			}
		}
	}
}

func check(t *testing.T, f loadbalancer.Facts, plan loadbalancer.Plan, changed []types.UID) {
	names := map[string]bool{}
	for _, a := range slices.Concat(f.Addresses, plan.Make) {
		if names[a.Claim] {
			t.Errorf("there are two claims %s", a.Claim)
		}
		names[a.Claim] = true
	}
	used := map[string]bool{}
	for i, g := range plan.Given {
		s := f.Services[i]
		if s.Leaving {
			if g != (loadbalancer.Given{}) {
				t.Errorf("%s is leaving, and gets %+v", s.Name, g)
			}
			continue
		}
		if g.Claim == "" {
			// Only what a Service asks for can be had by nobody.
			if _, ok := f.Pools[s.Pool]; g.Reason == "" || len(s.Wants) == 0 && s.Pool == "" || len(s.Wants) == 0 && g.Reason != loadbalancer.FamilyMissing && ok {
				t.Errorf("%s gets nothing: %+v", s.Name, g)
			}
			continue
		}
		used[g.Claim] = true
		if !names[g.Claim] {
			t.Errorf("%s gets %s, which there isn't", s.Name, g.Claim)
		}
		for j := range i {
			if plan.Given[j].Claim == g.Claim && clash(s, f.Services[j]) {
				t.Errorf("%s and %s have %s", s.Name, f.Services[j].Name, g.Claim)
			}
		}
		if len(s.Has) == 0 || slices.Contains(changed, s.UID) {
			continue
		}
		had := f.Addresses[slices.IndexFunc(f.Addresses, func(a loadbalancer.Address) bool { return slices.Equal(a.Addrs(), s.Has) })].Claim
		if had == g.Claim {
			continue
		}
		if !slices.ContainsFunc(f.Services, func(o loadbalancer.Service) bool { return slices.Contains(changed, o.UID) && clash(o, s) }) {
			t.Errorf("%s has moved from %s to %s", s.Name, had, g.Claim)
		}
	}
	// Nobody else gets what a Service still says it has.
	for _, a := range f.Addresses {
		for i, s := range f.Services {
			if len(s.Has) == 0 || !slices.Equal(a.Addrs(), s.Has) || plan.Given[i].Claim == a.Claim {
				continue
			}
			used[a.Claim] = true
			for j, o := range f.Services {
				if plan.Given[j].Claim == a.Claim && !slices.Equal(o.Has, s.Has) && clash(s, o) {
					t.Errorf("%s gets %s, which %s says it has", o.Name, a.Claim, s.Name)
				}
			}
		}
	}
	for name := range names {
		if used[name] == slices.Contains(plan.Idle, name) {
			t.Errorf("claim %s: used %t, idle %t", name, used[name], !used[name])
		}
	}
	reversed := f
	reversed.Services = slices.Clone(f.Services)
	slices.Reverse(reversed.Services)
	other := loadbalancer.Assign(reversed)
	slices.Reverse(other.Given)
	if !slices.Equal(other.Given, plan.Given) {
		t.Errorf("in another order it is %+v", other.Given)
	}
}

// A claim asks for an address that another claim got meanwhile, since the one before it was deleted by somebody: the oldest Service that has the address keeps it by
// the claim that has it, and the other claim goes.
func TestClaimThatComesTooLate(t *testing.T) {
	f := loadbalancer.Facts{Pools: pools(t), Default: "four"}
	addr := testkit.Must(f.Pools["four"].Block(3))(t).At(0)
	f.Addresses = []loadbalancer.Address{{Claim: "late", Pool: "four", Address: addr, Asked: true}, {Claim: "has", Pool: "four", Address: addr}}
	for i, claim := range []string{"has", "late"} {
		f.Services = append(f.Services, loadbalancer.Service{
			Name: types.NamespacedName{Namespace: "shop", Name: claim}, UID: types.UID(claim), Created: time.Unix(int64(10-i), 0), Claim: claim, Has: addr.Addrs(),
			Ports: []loadbalancer.Port{{Protocol: corev1.ProtocolTCP, Number: 80}}, Families: []dataplane.Family{dataplane.IPv4},
		})
	}
	p := loadbalancer.Assign(f)
	if got := p.Given[1]; got.Claim != "has" || got.Address != addr {
		t.Errorf("the older Service gets %+v", got)
	}
	if got := p.Given[0]; got.Claim == "has" || got.Claim == "late" || got.Claim == "" || got.Reason != loadbalancer.AddressInUse {
		t.Errorf("the younger one gets %+v", got)
	}
	if !slices.Equal(p.Idle, []string{"late"}) || len(p.Make) != 1 {
		t.Errorf("the claims %v go, and %+v are made", p.Idle, p.Make)
	}
}

// An address has room for 1,024 ports. A Service for which it has none gets another one, or is told so.
func TestPortsOfAnAddress(t *testing.T) {
	w := newWorld(t)
	service := func(name string, ports int, wants ...netip.Addr) {
		s := loadbalancer.Service{Name: types.NamespacedName{Namespace: "shop", Name: name}, UID: types.UID(name), Families: []dataplane.Family{dataplane.IPv4}, Wants: wants}
		for range ports {
			w.ports++
			s.Ports = append(s.Ports, loadbalancer.Port{Protocol: corev1.ProtocolTCP, Number: w.ports})
		}
		w.Services = append(w.Services, s)
		w.assign(t)
		w.assign(t)
	}
	service("a", 1000)
	service("b", 24)
	service("c", 1)
	a, b, c := w.plan.Given[0], w.plan.Given[1], w.plan.Given[2]
	if a.Claim == "" || b.Claim != a.Claim || c.Claim == "" || c.Claim == a.Claim {
		t.Errorf("1,000 ports, 24 and 1 get %+v", w.plan.Given)
	}
	service("named", 2, a.Address.IPv4)
	service("large", 1025)
	for i, want := range map[int]string{3: "It has 2 ports, and of the 1024 ports that an address may have 0 are left", 4: "It has 1025 ports, and of the 1024 ports that an address may have 1024 are left"} {
		if g := w.plan.Given[i]; g.Claim != "" || g.Reason != loadbalancer.TooManyPorts || !strings.HasPrefix(g.Message, want) {
			t.Errorf("Service %s gets %+v, want %q", w.Services[i].Name, g, want)
		}
	}
	if len(w.Addresses) != 2 {
		t.Errorf("there are %v", w.Addresses)
	}
}
