package egress

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// pod is a client; change alters it.
func pod(name string, change func(*corev1.Pod), addrs ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(time.Unix(1000, 0))},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, a := range addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a})
	}
	if change != nil {
		change(p)
	}
	return p
}

func TestEgressClients(t *testing.T) {
	phase := func(ph corev1.PodPhase) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Status.Phase = ph } }
	ending := func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.Now()) }
	younger := func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(time.Unix(2000, 0)) }
	elsewhere := func(p *corev1.Pod) { p.Namespace = "others" }
	team := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}
	for _, tt := range []struct {
		name          string
		allowed       *metav1.LabelSelector
		pods          []*corev1.Pod
		want, refused []string
		err           bool
	}{
		{name: "nobody"},
		{name: "both families", pods: []*corev1.Pod{pod("a", nil, "10.0.0.1", "fd00::1")}, want: []string{"a 10.0.0.1", "a fd00::1"}},
		{name: "no address yet", pods: []*corev1.Pod{pod("a", phase(corev1.PodPending))}},
		{name: "pending with an address", pods: []*corev1.Pod{pod("a", phase(corev1.PodPending), "10.0.0.1")}, want: []string{"a 10.0.0.1"}},
		{name: "ended", pods: []*corev1.Pod{pod("a", phase(corev1.PodSucceeded), "10.0.0.1"), pod("b", phase(corev1.PodFailed), "10.0.0.2")}},
		{name: "ending", pods: []*corev1.Pod{pod("a", ending, "10.0.0.1")}, want: []string{"a 10.0.0.1"}},
		{name: "network of the host", pods: []*corev1.Pod{pod("a", func(p *corev1.Pod) { p.Spec.HostNetwork = true }, "10.0.0.1")}},
		{name: "addresses that no slice may have", pods: []*corev1.Pod{pod("a", nil, "127.0.0.1", "169.254.1.1", "fe80::1", "nonsense", "0.0.0.0", "::ffff:10.0.0.3")}, want: []string{"a 10.0.0.3"}},
		{name: "an address of a pod that ends", pods: []*corev1.Pod{pod("a", nil, "10.0.0.1"), pod("b", func(p *corev1.Pod) { younger(p); ending(p) }, "10.0.0.1")}, want: []string{"a 10.0.0.1"}},
		{name: "an address that a younger pod has", pods: []*corev1.Pod{pod("a", nil, "10.0.0.1"), pod("b", younger, "10.0.0.1")}, want: []string{"b 10.0.0.1"}},
		{name: "an address of a Job that has ended", pods: []*corev1.Pod{pod("a", func(p *corev1.Pod) { younger(p); phase(corev1.PodSucceeded)(p) }, "10.0.0.1"), pod("b", nil, "10.0.0.1")}, want: []string{"b 10.0.0.1"}},
		{name: "twins", pods: []*corev1.Pod{pod("b", nil, "10.0.0.1"), pod("a", nil, "10.0.0.1")}, want: []string{"a 10.0.0.1"}},
		{name: "all namespaces", allowed: &metav1.LabelSelector{}, pods: []*corev1.Pod{pod("a", elsewhere, "10.0.0.1")}, want: []string{"a 10.0.0.1"}},
		{name: "an allowed namespace", allowed: team, pods: []*corev1.Pod{pod("a", nil, "10.0.0.1")}, want: []string{"a 10.0.0.1"}},
		{name: "another namespace", allowed: team, pods: []*corev1.Pod{pod("a", nil, "10.0.0.1"), pod("b", elsewhere, "10.0.0.2")}, want: []string{"a 10.0.0.1"}, refused: []string{"b"}},
		{name: "a selector that can't be used", allowed: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}},
			pods: []*corev1.Pod{pod("a", nil, "10.0.0.1")}, refused: []string{"a"}, err: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := testEgress("")
			e.Spec.AllowedNamespaces = tt.allowed
			clients, refused, err := Clients(ClientFacts{Egress: e, Pods: tt.pods, Namespaces: func(name string) labels.Set {
				return map[string]labels.Set{"apps": {"team": "a"}}[name]
			}})
			if (err != nil) != tt.err {
				t.Errorf("error %v", err)
			}
			var got, out []string
			for _, c := range clients {
				got = append(got, c.Pod.Name+" "+c.Addr.String())
			}
			slices.Sort(got)
			for _, p := range refused {
				out = append(out, p.Name)
			}
			if !slices.Equal(got, tt.want) || !slices.Equal(out, tt.refused) {
				t.Errorf("clients %q, refused %q; want %q and %q", got, out, tt.want, tt.refused)
			}
		})
	}
}

func client(i int, v6 bool) Client {
	a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
	if v6 {
		a = netip.MustParseAddr(fmt.Sprintf("fd00::%x", i+1))
	}
	return Client{Pod: types.NamespacedName{Namespace: "apps", Name: fmt.Sprintf("p-%06d", i)}, UID: types.UID(fmt.Sprintf("uid-%d", i)), Addr: a}
}

func clients(from, to int) (out []Client) {
	for i := from; i < to; i++ {
		out = append(out, client(i, false))
	}
	return out
}

// apiSlices does writes as an API server does.
type apiSlices map[string]*discoveryv1.EndpointSlice

func (a apiSlices) do(t *testing.T, c SliceChanges) (n int) {
	t.Helper()
	for _, s := range c.Create {
		if a[s.Name] != nil {
			t.Fatalf("%s is created twice", s.Name)
		}
		a[s.Name] = s
	}
	for _, s := range c.Update {
		if a[s.Name] == nil {
			t.Fatalf("%s doesn't exist", s.Name)
		}
		a[s.Name] = s
	}
	for _, s := range c.Delete {
		delete(a, s.Name)
	}
	return len(c.Create) + len(c.Update) + len(c.Delete)
}

func (a apiSlices) list() []*discoveryv1.EndpointSlice { return slices.Collect(maps.Values(a)) }

// sync plans, writes and checks what is there then; it returns the number of writes.
func (a apiSlices) sync(t *testing.T, e *v2.Egress, want []Client, limit int) int {
	t.Helper()
	n := a.do(t, ClientSlices(a.list(), limit, ListOf(e).With(want)))
	seen := map[Client]bool{}
	for _, s := range a {
		if len(s.Endpoints) == 0 || len(s.Endpoints) > limit || !strings.HasPrefix(s.Name, "nat-clients-") {
			t.Fatalf("%s has %d endpoints", s.Name, len(s.Endpoints))
		}
		for _, ep := range s.Endpoints {
			c, ok := clientOf(ep)
			if !ok || seen[c] || c.Addr.Is4() != (s.AddressType == discoveryv1.AddressTypeIPv4) {
				t.Fatalf("%s has %v", s.Name, ep)
			}
			seen[c] = true
		}
	}
	for _, c := range want {
		if !seen[c] {
			t.Fatalf("%v is missing", c)
		}
	}
	if len(seen) != len(want) {
		t.Fatalf("%d clients, want %d", len(seen), len(want))
	}
	if again := ClientSlices(a.list(), limit, ListOf(e).With(want)); len(again.Create)+len(again.Update)+len(again.Delete) > 0 {
		t.Fatalf("there is more to write: %+v", again)
	}
	return n
}

func TestClientSlices(t *testing.T) {
	e := testEgress("")
	a := apiSlices{}
	for _, step := range []struct {
		name   string
		want   []Client
		writes int
	}{
		{"nobody", nil, 0},
		{"the first", clients(0, 1), 1},
		{"both families", []Client{client(0, false), client(0, true)}, 1},
		{"one family less", clients(0, 1), 1},
		{"a full slice", clients(0, 1000), 1},
		{"one too many", clients(0, 1001), 1},
		{"as many as a large Egress has", clients(0, 5000), 4},
		{"one goes", slices.Delete(clients(0, 5000), 17, 18), 1},
		{"one comes into the hole", clients(0, 5000), 1},
		{"one is replaced", append(slices.Delete(clients(0, 5000), 2500, 2501), client(6000, false)), 1},
		{"the last thousand goes", clients(0, 4000), 2}, // a slice, and the one with a replaced client
		{"all go", nil, 4},
	} {
		t.Run(step.name, func(t *testing.T) {
			if n := a.sync(t, e, step.want, 1000); n != step.writes {
				t.Errorf("%d writes, want %d", n, step.writes)
			}
		})
	}
}

func TestClientSlicesStayWhatTheyAre(t *testing.T) {
	e := testEgress("")
	want := clients(0, 10)
	for name, spoil := range map[string]func(*discoveryv1.EndpointSlice){
		"a client is taken out":    func(s *discoveryv1.EndpointSlice) { s.Endpoints = s.Endpoints[1:] },
		"a stranger is put in":     func(s *discoveryv1.EndpointSlice) { s.Endpoints = append(s.Endpoints, endpoint(client(99, false))) },
		"a client is there twice":  func(s *discoveryv1.EndpointSlice) { s.Endpoints = append(s.Endpoints, s.Endpoints[0]) },
		"another pod's UID":        func(s *discoveryv1.EndpointSlice) { s.Endpoints[3].TargetRef.UID = "other" },
		"a client isn't ready":     func(s *discoveryv1.EndpointSlice) { s.Endpoints[3].Conditions.Ready = new(false) },
		"no pod":                   func(s *discoveryv1.EndpointSlice) { s.Endpoints[3].TargetRef = nil },
		"a port":                   func(s *discoveryv1.EndpointSlice) { s.Ports = []discoveryv1.EndpointPort{{}} },
		"no label":                 func(s *discoveryv1.EndpointSlice) { delete(s.Labels, corev1.IsHeadlessService) },
		"a Service's":              func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "x" },
		"an Egress of another UID": func(s *discoveryv1.EndpointSlice) { s.OwnerReferences[0].UID = "earlier" },
	} {
		t.Run(name, func(t *testing.T) {
			a := apiSlices{}
			a.sync(t, e, want, 1000)
			for _, s := range a {
				spoil(s)
			}
			if n := a.sync(t, e, want, 1000); n != 1 {
				t.Errorf("%d writes, want 1", n)
			}
			for _, s := range a {
				if diff := cmp.Diff(emptySlice(ListOf(e), s.AddressType, s.Name).ObjectMeta, s.ObjectMeta); diff != "" || len(s.Ports) > 0 {
					t.Errorf("%d ports, metadata (-want +got):\n%s", len(s.Ports), diff)
				}
			}
		})
	}
}

// TestClientSlicesUnderChurn holds that a change writes no more slices than it touches clients.
func TestClientSlicesUnderChurn(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	e, a, want, next := testEgress(""), apiSlices{}, clients(0, 3000), 3000
	a.sync(t, e, want, EndpointsPerSlice)
	for range 200 {
		change := 1 + rng.IntN(3)
		for range change {
			if i := rng.IntN(len(want)); rng.IntN(2) == 0 {
				want = slices.Delete(slices.Clone(want), i, i+1)
			} else {
				want = append(slices.Clone(want), client(next, false))
				next++
			}
		}
		if n := a.sync(t, e, want, EndpointsPerSlice); n > change {
			t.Fatalf("%d writes for %d changes", n, change)
		}
	}
	if least := (len(want) + EndpointsPerSlice - 1) / EndpointsPerSlice; len(a) > least+3 {
		t.Errorf("%d slices for %d clients", len(a), len(want))
	}
}

// TestLargeClientSlicesAreRelieved holds that slices of a higher limit become small, a bit at a
// time, and that every client is in a slice after each single write, in whatever order these are.
func TestLargeClientSlicesAreRelieved(t *testing.T) {
	e, a, want := testEgress(""), apiSlices{}, clients(0, 2500)
	a.sync(t, e, want, MaxEndpoints)
	for round := 0; ; round++ {
		c := ClientSlices(a.list(), EndpointsPerSlice, ListOf(e).With(want))
		writes := slices.Concat(c.Create, c.Update)
		if len(writes) == 0 {
			break
		}
		if len(writes) > 3 || len(c.Delete) > 0 || round > 25 {
			t.Fatalf("round %d: %d writes, %d deletions", round, len(writes), len(c.Delete))
		}
		backwards := maps.Clone(a)
		for i, s := range writes {
			a[s.Name] = s
			a.holdAll(t, want)
			last := writes[len(writes)-1-i]
			backwards[last.Name] = last
			backwards.holdAll(t, want)
		}
		if round%5 == 3 { // one goes that two slices have
			last := writes[0].Endpoints[len(writes[0].Endpoints)-1]
			want = slices.DeleteFunc(want, func(c Client) bool { return c.Addr.String() == last.Addresses[0] })
		}
	}
	for _, s := range a {
		if len(s.Endpoints) > EndpointsPerSlice {
			t.Errorf("%s has %d endpoints", s.Name, len(s.Endpoints))
		}
	}
	if n := a.sync(t, e, want, EndpointsPerSlice); n != 0 {
		t.Errorf("%d writes in the end", n)
	}
}

// holdAll fails if a client is missing.
func (a apiSlices) holdAll(t *testing.T, want []Client) {
	t.Helper()
	seen := map[Client]bool{}
	for _, s := range a {
		for _, ep := range s.Endpoints {
			c, _ := clientOf(ep)
			seen[c] = true
		}
	}
	for _, c := range want {
		if !seen[c] {
			t.Fatalf("%v is missing", c)
		}
	}
}

func BenchmarkClientSlices(b *testing.B) {
	e := testEgress("")
	have := ClientSlices(nil, EndpointsPerSlice, ListOf(e).With(clients(0, 5000))).Create
	want := append(clients(0, 4999), client(6000, false))
	for b.Loop() {
		if c := ClientSlices(have, EndpointsPerSlice, ListOf(e).With(want)); len(c.Update) != 1 {
			b.Fatal(len(c.Update))
		}
	}
}

func BenchmarkEgressClients(b *testing.B) {
	var pods []*corev1.Pod
	for i := range 5000 {
		pods = append(pods, pod(fmt.Sprint(i), nil, client(i, false).Addr.String(), client(i, true).Addr.String()))
	}
	f := ClientFacts{Egress: testEgress(""), Pods: pods, Namespaces: func(string) labels.Set { return nil }}
	for b.Loop() {
		if all, _, _ := Clients(f); len(all) != 10000 {
			b.Fatal(len(all))
		}
	}
}

func TestCountClients(t *testing.T) {
	c := ClientSlices(nil, EndpointsPerSlice, ListOf(testEgress("")).With([]Client{client(0, false), client(0, true), client(1, false)}))
	if n := CountClients(c.Create); n != 2 {
		t.Errorf("%d clients, want 2", n)
	}
}
