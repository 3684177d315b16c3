package egress

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/policy"
)

func egressNamed(ns, name string) *v2.Egress {
	return &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: types.UID(ns + "/" + name)}}
}

func policyNamed(ns, name string, destinations ...string) policy.Policy {
	p, _ := policy.Of(&v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: v2.EgressPolicySpec{EgressUse: v2.EgressUse{Destinations: destinations}}})
	return p
}

func TestPolicyLists(t *testing.T) {
	long := strings.Repeat("x", 63)
	seen := map[string]string{}
	for _, e := range []*v2.Egress{egressNamed("a", "nat"), egressNamed("b", "nat"), egressNamed("a", "n-"+long[2:]), egressNamed("a", "nat-clients")} {
		for _, p := range []policy.Policy{policyNamed("", "p"), policyNamed("a", "p"), policyNamed("b", "p"), policyNamed("a", "clients"), policyNamed("a", "1.2-"),
			policyNamed("a", strings.Repeat("a.", 126)+"a"), policyNamed("a", strings.Repeat("a.", 126)+"b")} {
			l := PolicyListOf(e, p)
			if other := seen[l.Prefix]; other != "" {
				t.Errorf("%s is the prefix of two lists, such as %s", l.Prefix, other)
			}
			seen[l.Prefix] = p.String()
			name := freeName(l.Prefix, discoveryv1.AddressTypeIPv6, nil)
			if why := validation.IsDNS1123Label(name[:len(name)-1] + "9999"); len(why) > 0 {
				t.Errorf("%s: %q", name, why)
			}
			if again := PolicyListOf(e, p); again.Prefix != l.Prefix {
				t.Errorf("%s, then %s", l.Prefix, again.Prefix)
			}
		}
	}
	s := ClientSlices(nil, 100, PolicyListOf(egressNamed("internet", "nat"), policyNamed("shop", "p", "192.0.2.0/24")).With(clients(0, 1))).Create[0]
	want := metav1.ObjectMeta{
		Namespace: "internet", Name: s.Name,
		Labels: map[string]string{
			"coil.cybozu.com/policy-egress": "nat", "endpointslice.kubernetes.io/managed-by": "coil-egress-controller", "service.kubernetes.io/headless": "",
		},
		Annotations: map[string]string{
			"coil.cybozu.com/policy": `{"namespace":"shop","name":"p","created":"0001-01-01T00:00:00Z","destinations":["192.0.2.0/24"]}`,
		},
		OwnerReferences: []metav1.OwnerReference{controlledBy(egressNamed("internet", "nat"))},
	}
	if diff := cmp.Diff(want, s.ObjectMeta); diff != "" || !strings.HasPrefix(s.Name, "nat-p-") {
		t.Errorf("%s (-want +got):\n%s", s.Name, diff)
	}
}

// TestPolicyListHistory holds that the slices of a policy are those of its present Egress, destinations and address, whatever it was before,
// and that a sync that has nothing to do writes nothing.
func TestPolicyListHistory(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	egresses := []*v2.Egress{egressNamed("a", "nat"), egressNamed("a", "other"), egressNamed("b", "nat")}
	for _, e := range egresses[1:] { // the first one has no addresses
		e.Spec.Addresses = &v2.EgressAddresses{}
		for i := range 3 {
			e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{Block: fmt.Sprint(i), EgressAddress: v2.EgressAddress{IPv4: fmt.Sprint("198.51.100.", i)}})
		}
	}
	all := [][]string{nil, {"192.0.2.0/24"}, {"192.0.2.0/24", "2001:db8::/32"}}
	have := map[string]*discoveryv1.EndpointSlice{}
	list := func() []*discoveryv1.EndpointSlice { return slices.Collect(maps.Values(have)) }
	version, moves := 0, 0
	apply := func(c SliceChanges) {
		for _, s := range slices.Concat(c.Create, c.Update) {
			version++
			s.ResourceVersion = fmt.Sprint(version)
			have[s.Namespace+"/"+s.Name] = s
		}
		for _, s := range c.Delete {
			delete(have, s.Namespace+"/"+s.Name)
		}
	}
	e, destinations, block, want := egresses[0], all[0], "", clients(0, 30)
	for step := range 500 {
		switch rng.IntN(5) {
		case 0:
			e = egresses[rng.IntN(len(egresses))]
			moves++
		case 1:
			destinations = all[rng.IntN(len(all))]
		case 2:
			want = clients(rng.IntN(50), rng.IntN(60))
		case 3:
			for _, s := range have { // somebody
				s = s.DeepCopy()
				s.Annotations[[]string{v2.AnnotationPolicy, v2.AnnotationAddress}[rng.IntN(2)]] = "spoiled"
				have[s.Namespace+"/"+s.Name] = s
				break
			}
		case 4:
			block = fmt.Sprint(rng.IntN(3))
		}
		p := policyNamed("shop", "p", destinations...)
		p.Block = block
		l := PolicyListOf(e, p)
		apply(ClientSlices(list(), 10, l.With(want)))
		if again := ClientSlices(list(), 10, l.With(want)); !again.Empty() {
			t.Fatalf("step %d: %d, %d and %d writes again", step, len(again.Create), len(again.Update), len(again.Delete))
		}
		got := map[Client]bool{}
		for _, s := range have {
			if s.Namespace != e.Namespace || s.Labels[v2.LabelPolicyEgress] != e.Name || s.OwnerReferences[0].UID != e.UID || !maps.Equal(s.Annotations, l.Annotations) {
				t.Fatalf("step %d: slice %+v", step, s.ObjectMeta)
			}
			for _, ep := range s.Endpoints {
				c, _ := clientOf(ep)
				got[c] = true
			}
		}
		for _, c := range want {
			if !got[c] {
				t.Fatalf("step %d: %v is missing", step, c)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("step %d: %d clients, want %d", step, len(got), len(want))
		}
	}
	if moves < 50 {
		t.Errorf("%d moves", moves)
	}
}

// Lists say by which address their clients leave, and are written anew when it is another one, or none. Addresses of routers are nobody's.
func TestAddressesOfLists(t *testing.T) {
	egressWith := func(use v2.EgressAddressUse, addresses ...v2.EgressAddressStatus) *v2.Egress {
		e := egressNamed("internet", "nat")
		e.Spec.Addresses, e.Status.Addresses = &v2.EgressAddresses{Use: use}, addresses
		return e
	}
	one := v2.EgressAddressStatus{Block: "b-1", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.1", IPv6: "2001:db8::1"}}
	other := v2.EgressAddressStatus{Block: "b-2", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.2"}}
	p := policyNamed("shop", "p")
	p.Block = "b-2"
	var named, chosen []*discoveryv1.EndpointSlice
	for _, c := range []struct {
		name          string
		egress        *v2.Egress
		named, chosen string // addresses of pods with the annotation, and of the policy
	}{
		{"none yet", egressWith(v2.EgressAddressOfClient), "", ""},
		{"two", egressWith(v2.EgressAddressOfClient, one, other), "198.51.100.1,2001:db8::1", "198.51.100.2"},
		{"in another order", egressWith(v2.EgressAddressOfClient, other, one), "198.51.100.2", "198.51.100.2"},
		{"one is gone", egressWith(v2.EgressAddressOfClient, one), "198.51.100.1,2001:db8::1", ""},
		{"they are routers'", egressWith(v2.EgressAddressOfRouter, one, other), "", ""},
	} {
		for _, l := range []struct {
			list List
			have *[]*discoveryv1.EndpointSlice
			want string
		}{{ListOf(c.egress), &named, c.named}, {PolicyListOf(c.egress, p), &chosen, c.chosen}} {
			changes := ClientSlices(*l.have, 100, l.list.With(clients(0, 1)))
			if all := slices.Concat(changes.Create, changes.Update); len(all) > 0 {
				*l.have = all
			}
			if got := (*l.have)[0].Annotations[v2.AnnotationAddress]; len(*l.have) != 1 || got != l.want {
				t.Errorf("%s: %d slices, whose clients leave by %q, want %q", c.name, len(*l.have), got, l.want)
			}
			if again := ClientSlices(*l.have, 100, l.list.With(clients(0, 1))); !again.Empty() {
				t.Errorf("%s: a second look changes %+v", c.name, again)
			}
		}
	}
}
