package convert

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/egress"
	planfloating "github.com/coil-net/coil/pkg/plan/floating"
	planpolicy "github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/testkit"
)

// meanings are the addresses by which the pods of policies leave, or the reasons why they don't.
var meanings = map[string]map[string]string{
	"simple":     {"shop/checkout": "198.51.100.5"},
	"dual-stack": {"all": "198.51.100.17 and 2001:db8::1", "a/both": "198.51.100.20 and 2001:db8::4", "a/one": "198.51.100.21 and 2001:db8::5", "b/torn": "198.51.100.20 and 2001:db8::4"},
	// The first unused one of the list is the default, which another policy names.
	"random":         {"a/kept": "198.51.100.14", "a/new": "198.51.100.8", "b/default": "198.51.100.12"},
	"node-addresses": {"a/by-node": "nodes", "a/by-node-too": "nodes", "a/by-address": "198.51.100.7", "a/no-address": "nodes"},
	"unsupported":    {"a/fields": "198.51.100.7", "a/subnet": "198.51.100.7", "a/other-address": "NoSuchAddress"},
	"extra-cidr":     {"a/all": "192.0.2.50", "a/inside": "192.0.2.50"},
	"defaults":       {"blue/by-label": "198.51.100.1", "plain/by-cluster": "198.51.100.2", "grey/unknown": "EgressNotFound"},
	"no-default":     {"default/lonely": "NoDefaultEgress"},
	"large":          {"a/far": "198.18.14.200"},
	"static":         {"default/eip-0": "198.51.100.100", "default/eip-1": "198.51.100.101"},
	"static-many":    {"a/eip-0": "198.51.100.100", "a/eip-1": "198.51.100.101", "a/eip-2": "198.51.100.102", "b/eip-0": "198.51.100.100"},
	"both-systems":   {"a/eip-0": "198.51.100.4", "a/eip-0-4117ab9e": "198.51.100.100"},
	"ranges":         nil, "scattered": nil, "written-by-controllers": nil,
}

// The controllers' own decisions about the converted objects are those that the input asks for.
func TestMeanings(t *testing.T) {
	for _, file := range testkit.Must(filepath.Glob(inputs))(t) {
		name := strings.TrimSuffix(filepath.Base(file), ".in.yaml")
		t.Run(name, func(t *testing.T) {
			want, ok := meanings[name]
			if !ok {
				t.Fatal("it has no meaning in the table")
			}
			_, result := converted(t, file)
			got := decided(t, result)
			if len(got) == 0 {
				got = nil
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// decided returns what the controllers decide for each policy.
func decided(t *testing.T, result Result) map[string]string {
	t.Helper()
	egresses, byName := egressesOf(t, result), map[types.NamespacedName]*v2.Egress{}
	for _, e := range egresses {
		byName[types.NamespacedName{Namespace: e.Namespace, Name: e.Name}] = e
	}
	var facts []planpolicy.Facts
	for _, o := range result.Objects {
		f := planpolicy.Facts{
			Egress: func(n types.NamespacedName) *v2.Egress { return byName[n] },
			Service: func(string) *corev1.Service {
				return &corev1.Service{Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "a"}}}
			},
			Refused:  func(*v2.Egress) []string { return nil },
			Conflict: func(*v2.Egress) *planpolicy.Conflict { return nil },
		}
		switch p := o.Object.(type) {
		case *v2.EgressPolicy:
			f.Policy, f.Selector = planpolicy.Of(p)
			f.Use, f.Services, f.Namespace = p.Spec.EgressUse, p.Spec.Services, &planpolicy.Namespace{Name: p.Namespace}
		case *v2.EgressClusterPolicy:
			f.Policy, f.Selector = planpolicy.OfCluster(p)
			f.Use = p.Spec.EgressUse
		default:
			continue
		}
		facts = append(facts, f)
	}
	assign(t, egresses, facts)
	got := map[string]string{}
	for _, f := range facts {
		st := planpolicy.Status(f)
		said := meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted)
		name := strings.TrimPrefix(f.Policy.Name.String(), "/")
		switch {
		case said.Reason != planpolicy.ReasonAccepted:
			got[name] = said.Reason
		case st.Resolved.Address != nil:
			got[name] = st.Resolved.Address.String()
		case f.Uses().Spec.Addresses.For(v2.EgressAddressOfNode):
			got[name] = "nodes"
		default:
			got[name] = "nothing"
		}
	}
	return got
}

// egressesOf returns the Egresses with the addresses that their pools give them.
func egressesOf(t *testing.T, result Result) (egresses []*v2.Egress) {
	t.Helper()
	pools := map[string]ipam.Pool{}
	for _, o := range result.Objects {
		switch o := o.Object.(type) {
		case *v2.AddressPool:
			var subnets []ipam.Subnet
			for _, s := range o.Spec.Subnets {
				subnets = append(subnets, testkit.Must(ipam.ParseSubnet(s.IPv4, s.IPv6))(t))
			}
			pools[o.Name] = testkit.Must(ipam.NewPool(0, subnets))(t)
		case *v2.Egress:
			if o.Spec.Addresses.Float() {
				pool := pools[o.Spec.Addresses.Pool]
				indexes, _ := claims.Indexes(o.Spec.Addresses.List, pool)
				for _, i := range indexes {
					b := testkit.Must(pool.Block(i))(t)
					s := v2.EgressAddressStatus{Block: fmt.Sprintf("%s-%d", o.Spec.Addresses.Pool, i)}
					if b.IPv4.IsValid() {
						s.IPv4 = b.IPv4.Addr().String()
					}
					if b.IPv6.IsValid() {
						s.IPv6 = b.IPv6.Addr().String()
					}
					o.Status.Addresses = append(o.Status.Addresses, s)
				}
			}
			if _, err := egress.RouterDeployment(o, egress.RouterImage{Name: "coil", Port: 5555}); err != nil {
				t.Errorf("Egress %s has no routers: %v", o.Name, err)
			}
			egresses = append(egresses, o)
		}
	}
	return egresses
}

// assign gives policies the addresses that coil-egress-controller would.
func assign(t *testing.T, egresses []*v2.Egress, facts []planpolicy.Facts) {
	t.Helper()
	for _, e := range egresses {
		if !e.Spec.Addresses.Float() {
			continue
		}
		var of []int
		var asks []planfloating.Policy
		for i, f := range facts {
			if f.Uses() == e {
				of = append(of, i)
				ask := planfloating.Policy{Name: f.Policy.Name.Name, Wants: planpolicy.Wanted(e, f.Use.Address)}
				if f.Namespace != nil {
					ask.Namespace = f.Namespace.Name
				}
				asks = append(asks, ask)
			}
		}
		var addresses []planfloating.Address
		for _, s := range e.Status.Addresses {
			a := planfloating.Address{Name: s.Block}
			for _, shared := range e.Spec.Addresses.Shared {
				a.Shared = a.Shared || shared == s.IPv4 || shared == s.IPv6
			}
			addresses = append(addresses, a)
		}
		a := planfloating.Assignment{Strategy: planfloating.Unused}
		if s := e.Spec.Addresses.Assignment; s != nil {
			a.Strategy, a.Refuse = planfloating.Strategy(s.Strategy), s.WhenFull == v2.EgressWhenFullRefuse
		}
		for i, given := range a.Assign(addresses, asks) {
			facts[of[i]].Given = given
		}
	}
}
