package egresspolicy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// sources are those with which a pod may leave, by destination; empty for none.
type sources [3]string

var probed = [len(sources{})]netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("198.51.100.1")}

// turnsScene has an Egress with an address for each of some policies.
type turnsScene struct {
	*scene
	// want is how each pod is to leave, and before how it left before it was changed.
	want, before map[netip.Addr]sources
}

// withAddresses gives the Egress addresses for its clients, which policies of all namespaces may have.
func (sc *scene) withAddresses(n int) {
	e := fakeapi.Find[*v2.Egress](sc.s, egressResource, "internet/nat")
	e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfClient}
	for i := range n {
		address := fmt.Sprint("192.0.2.", i+1)
		e.Spec.Addresses.Shared = append(e.Spec.Addresses.Shared, address)
		e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{Block: fmt.Sprint("block-", i), EgressAddress: v2.EgressAddress{IPv4: address}})
	}
	sc.s.Put(egressResource, e)
}

func newTurnsScene(sc *scene, addresses int) *turnsScene {
	sc.withAddresses(addresses)
	ts := &turnsScene{sc, map[netip.Addr]sources{}, map[netip.Addr]sources{}}
	sc.core.PrependReactor("*", sliceResource, func(clienttesting.Action) (bool, runtime.Object, error) { // what routers see between two writes
		ts.check("before a write", false)
		return false, nil, nil
	})
	return ts
}

// seen are the sources that a router gives pods by the lists that there are.
func (ts *turnsScene) seen() map[netip.Addr]sources {
	ts.t.Helper()
	e := fakeapi.Find[*v2.Egress](ts.s, egressResource, "internet/nat")
	cfg := gateway.Config{Addresses: []netip.Addr{netip.MustParseAddr("10.9.9.9")}}
	lists := slices.DeleteFunc(fakeapi.All[*discoveryv1.EndpointSlice](ts.s, sliceResource), func(s *discoveryv1.EndpointSlice) bool {
		return s.Labels[v2.LabelEgress] != e.Name && s.Labels[v2.LabelPolicyEgress] != e.Name
	})
	router, skipped := gateway.StateOf(cfg, e, lists)
	if len(skipped) > 0 {
		ts.t.Errorf("skipped: %q", skipped)
	}
	seen := map[netip.Addr]sources{}
	for _, s := range router.Floating.Sources {
		all := seen[s.Client]
		for i, to := range probed {
			if !s.Destinations.IsValid() || s.Destinations.Contains(to) {
				all[i] = s.Address.String()
			}
		}
		seen[s.Client] = all
	}
	return seen
}

// check wants that pods leave by no other addresses than they are to, or did before; if that is complete, by those that they are to.
func (ts *turnsScene) check(when string, complete bool) {
	ts.t.Helper()
	if ts.t.Failed() {
		return // once is enough
	}
	seen := ts.seen()
	for pod, want := range ts.want {
		for i, to := range probed {
			if got := seen[pod][i]; got != want[i] && (complete || got != "" && got != ts.before[pod][i]) {
				ts.t.Errorf("%s: pod %s leaves to %s by %q, want %q, or before %q", when, pod, to, got, want[i], ts.before[pod][i])
			}
		}
	}
}

// chooses makes a policy for pods with a label; for all, if it is empty.
func (ts *turnsScene) chooses(name, label string, destinations ...string) {
	ts.policy(name, "", func(p *v2.EgressPolicy) {
		p.Spec.Destinations = destinations
		p.Spec.Pods = &metav1.LabelSelector{}
		if label != "" {
			p.Spec.Pods.MatchLabels = map[string]string{label: ""}
		}
	})
}

// addressOf is the address of a policy.
func (ts *turnsScene) addressOf(name string) string { return ts.statusOf(name).Resolved.Address.IPv4 }

// has makes a pod, or gives it other labels.
func (ts *turnsScene) has(i int, annotations map[string]string, want sources, labels ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ts.ns, Name: fmt.Sprint("pod-", i), Labels: map[string]string{}, Annotations: annotations},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: fmt.Sprint("10.0.0.", i+1)}, {IP: fmt.Sprint("fd00::", i+1)}}},
	}
	for _, l := range labels {
		p.Labels[l] = ""
	}
	if is := fakeapi.Find[*corev1.Pod](ts.s, podResource, ts.ns+"/"+p.Name); is != nil {
		p.UID, p.CreationTimestamp = is.UID, is.CreationTimestamp
	}
	addr := netip.MustParseAddr(p.Status.PodIPs[0].IP)
	ts.before[addr], ts.want[addr] = ts.want[addr], want
	ts.s.Put(podResource, p)
	return p
}

// A pod that comes leaves by the address of the policy that decides, or not yet: also while the list of that policy, which was written a moment
// ago, is held back.
func TestPodsComeInTurn(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		ts := newTurnsScene(sc, 2)
		ts.chooses("old", "old")
		ts.chooses("young", "")
		ts.run(3 * time.Second)
		old, young := ts.addressOf("old"), ts.addressOf("young")
		ts.has(0, nil, sources{old, old, old}, "old")
		ts.run(3 * time.Second)
		p := ts.has(0, nil, sources{old, old, old}, "old")
		p.Status.PodIPs[1].IP = "fd00::ff"
		ts.s.Put(podResource, p) // both lists are written
		ts.run(100 * time.Millisecond)
		ts.chooses("young", "", "0.0.0.0/0") // and may be written again
		ts.has(1, nil, sources{old, old, old}, "old")
		ts.has(2, nil, sources{young, young, young})
		ts.run(time.Second)
		ts.check("after a second", true)
	})
}

// A pod whose labels change leaves by the address of the policy that decided before, of that which decides afterwards, or not: also while lists
// are held back.
func TestPodsChangeInTurn(t *testing.T) {
	for _, tt := range []struct {
		name          string
		before, after []string
		from, to      string
	}{
		{"to a younger one", []string{"1", "2"}, []string{"3"}, "1", "3"},
		{"to an older one", []string{"2", "3"}, []string{"1"}, "2", "1"},
		{"a third one stays", []string{"1", "3"}, []string{"2", "3"}, "1", "2"},
		{"to none", []string{"1", "2", "3"}, nil, "1", ""},
		{"an older one comes", []string{"3"}, []string{"1", "2", "3"}, "3", "1"},
		{"an older one goes", []string{"1", "2", "3"}, []string{"3"}, "1", "3"},
	} {
		for held := range 8 { // a bit for each policy whose list is held back
			t.Run(fmt.Sprint(tt.name, " ", held), func(t *testing.T) {
				inScene(t, func(t *testing.T, sc *scene) {
					ts := newTurnsScene(sc, 3)
					addresses := map[string]string{}
					for _, name := range []string{"1", "2", "3"} {
						ts.chooses(name, name)
						ts.run(2 * time.Second)
						addresses[name] = ts.addressOf(name)
					}
					all := func(name string) sources { return sources{addresses[name], addresses[name], addresses[name]} }
					ts.has(0, nil, all(tt.from), tt.before...)
					ts.run(3 * time.Second)
					for i, name := range []string{"1", "2", "3"} {
						if held&(1<<i) > 0 {
							ts.has(i+1, nil, all(name), name)
						}
					}
					ts.run(100 * time.Millisecond)
					ts.has(0, nil, all(tt.to), tt.after...)
					ts.run(2 * time.Second)
					ts.check("in the end", true)
				})
			})
		}
	}
}

// refuse has the API server refuse to write lists of a policy until the function is called that it returns.
func (ts *turnsScene) refuse(name string) (end func()) {
	var ended atomic.Bool
	ts.core.PrependReactor("*", sliceResource, func(a clienttesting.Action) (bool, runtime.Object, error) {
		var of string
		switch a := a.(type) {
		case clienttesting.CreateActionImpl:
			of = a.GetObject().(*discoveryv1.EndpointSlice).Name
		case clienttesting.UpdateActionImpl:
			of = a.GetObject().(*discoveryv1.EndpointSlice).Name
		case clienttesting.DeleteActionImpl:
			of = a.GetName()
		}
		return !ended.Load() && strings.HasPrefix(of, "nat-"+name), nil, fakeapi.ErrLost
	})
	return func() { ended.Store(true) }
}

// A pod doesn't come before the list has it of the policy that decides, however long that takes, and comes when that policy doesn't decide any more.
func TestTurnsThatEnd(t *testing.T) {
	for name, end := range map[string]func(ts *turnsScene){
		"goes":           func(ts *turnsScene) { ts.s.Drop(policyResource, "shop/old") },
		"selects others": func(ts *turnsScene) { ts.chooses("old", "other") },
		"can't be understood": func(ts *turnsScene) {
			ts.policy("old", "", func(p *v2.EgressPolicy) {
				p.Spec.Pods = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: "Like"}}}
			})
		},
		"decides elsewhere": func(ts *turnsScene) {
			ts.chooses("old", "", "192.0.2.0/24")
			ts.chooses("young", "", "203.0.113.0/24", "198.51.100.0/24")
		},
		"uses another Egress": func(ts *turnsScene) {
			ts.policy("old", "", func(p *v2.EgressPolicy) { p.Spec.Egress.Name = "other"; p.Spec.Pods = &metav1.LabelSelector{} })
		},
	} {
		t.Run(name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				ts := newTurnsScene(sc, 2)
				ts.s.Put(egressResource, &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "other", Generation: 1}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}}})
				ts.refuse("old")
				ts.chooses("old", "")
				ts.chooses("young", "")
				ts.run(3 * time.Second)
				ts.has(0, nil, sources{})
				ts.run(time.Minute)
				ts.check("as long as the older one isn't written", true)
				end(ts)
				young := ts.addressOf("young")
				ts.has(0, nil, sources{young, young, young})
				ts.run(3 * time.Second)
				ts.check("when it doesn't decide any more", true)
			})
		})
	}
}

// A pod that has the policy that decides already doesn't come to another one before routers know for which destinations that policy decides now.
func TestPodsComeAfterDestinations(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		ts := newTurnsScene(sc, 2)
		ts.chooses("old", "old")
		ts.chooses("young", "young", "203.0.113.0/24")
		ts.run(3 * time.Second)
		old := ts.addressOf("old")
		ts.has(0, nil, sources{old, old, old}, "old")
		ts.run(3 * time.Second)
		end := ts.refuse("old")
		ts.has(0, nil, sources{old, old, ""}, "old")
		ts.chooses("old", "old", "203.0.113.0/24")
		ts.chooses("young", "old", "203.0.113.0/24")
		ts.run(time.Minute)
		ts.check("as long as the older one's destinations aren't written", false)
		end()
		ts.run(time.Minute)
		ts.check("in the end", true)
	})
}

// A list that can't be written keeps no pod in another one for long.
func TestPodsAreKeptForAWhile(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		ts := newTurnsScene(sc, 2)
		ts.chooses("old", "old")
		ts.chooses("young", "young")
		ts.run(3 * time.Second)
		old, young := ts.addressOf("old"), ts.addressOf("young")
		ts.has(0, nil, sources{old, old, old}, "old")
		ts.run(3 * time.Second)
		end := ts.refuse("young")
		ts.has(0, nil, sources{young, young, young}, "young")
		ts.run(keepFor - time.Second)
		if diff := cmp.Diff(map[string][]string{"internet/nat": {"shop/pod-0 10.0.0.1", "shop/pod-0 fd00::1"}}, ts.listedFor("old")); diff != "" {
			t.Errorf("until another list has the pod (-want +got):\n%s", diff)
		}
		ts.run(2 * time.Second)
		if got := ts.listedFor("old"); len(got) > 0 {
			t.Errorf("after %s: %v", keepFor, got)
		}
		end()
		ts.run(time.Minute)
		ts.check("in the end", true)
	})
}

func (ts *turnsScene) listedFor(name string) map[string][]string {
	return ts.scene.listed(types.NamespacedName{Namespace: ts.ns, Name: name})
}

// The annotation of a pod counts as the oldest policy, also while another controller hasn't listed the pod yet.
func TestAnnotationsComeFirst(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		ts := newTurnsScene(sc, 2)
		ts.chooses("some", "", "203.0.113.9/32")
		ts.chooses("young", "")
		ts.run(3 * time.Second)
		some, e := ts.addressOf("some"), fakeapi.Find[*v2.Egress](ts.s, egressResource, "internet/nat")
		of := plan.AddressOf(e, "").IPv4
		p := ts.has(0, map[string]string{v2.AnnotationEgressPrefix + "internet": "nat"}, sources{some, "", ""})
		ts.run(time.Minute)
		ts.check("before the controller of annotations has listed the pod", true)
		ts.want[netip.MustParseAddr("10.0.0.1")] = sources{some, of, of}
		clients, _, _ := egress.Clients(egress.ClientFacts{Egress: e, Pods: []*corev1.Pod{p}})
		for _, s := range egress.ClientSlices(nil, 100, egress.ListOf(e).With(clients)).Create {
			ts.s.Put(sliceResource, s)
		}
		ts.run(time.Second)
		ts.check("when it has", true)
		if got := ts.listedFor("young"); len(got) == 0 {
			t.Error("the younger policy doesn't list the pod")
		}
		ts.has(0, nil, sources{some, some, some})
		ts.want[netip.MustParseAddr("10.0.0.1")] = sources{some, ts.addressOf("young"), ts.addressOf("young")}
		for _, s := range ts.named.Under("internet/nat") {
			ts.s.Drop(sliceResource, s.Namespace+"/"+s.Name)
		}
		ts.run(time.Second)
		ts.check("when the annotation is gone", true)
	})
}

// The same for any policies, as far as an order is right for all destinations, and pods that come and change.
func TestAnyPodsChangeInTurn(t *testing.T) {
	ranges := [][]string{nil, {"203.0.113.0/24"}, {"203.0.113.9/32"}}
	for seed := range uint64(testkit.EgressForm.Times(14, 60)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				r := rand.New(rand.NewPCG(seed, 3))
				ts := newTurnsScene(sc, 4)
				type chooser struct {
					name, label string
					size        int // of ranges
				}
				var policies []chooser
				for i := range 4 {
					p := chooser{fmt.Sprint("p-", i), []string{"", "a", "b"}[r.IntN(3)], r.IntN(len(ranges))}
					policies = append(policies, p)
					ts.chooses(p.name, p.label, ranges[p.size]...)
				}
				ts.run(3 * time.Second)
				changed := map[int]time.Time{}
				for range 60 {
					i := r.IntN(30)
					if time.Since(changed[i]) < 3*time.Second { // else it may leave as it did before that
						continue
					}
					changed[i] = time.Now()
					labels := [][]string{nil, {"a"}, {"b"}, {"a", "b"}}[r.IntN(4)]
					var want sources
					for n := range probed {
						best := -1
						for _, p := range policies { // the oldest first
							chosen := p.label == "" || len(labels) > 0 && (labels[0] == p.label || labels[len(labels)-1] == p.label)
							if reaches := n <= len(ranges)-1-p.size; chosen && reaches && p.size > best {
								best, want[n] = p.size, ts.addressOf(p.name)
							}
						}
					}
					ts.has(i, nil, want, labels...)
					for range r.IntN(3) {
						ts.Deliver(r.IntN(10))
						time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond)
					}
					ts.DeliverAll()
					synctest.Wait()
				}
				ts.run(3 * time.Second)
				ts.check("in the end", true)
			})
		})
	}
}

// A policy that can't be followed decides all the same: its pods leave to its destinations by no address, and not by that of another policy. When it can be
// followed, they leave by its own.
func TestPoliciesThatCantBeFollowedDecide(t *testing.T) {
	const own = "203.0.113.9/32"
	mend := func(p *v2.EgressPolicy) {
		p.Spec.Destinations, p.Spec.Address = []string{own}, &v2.EgressAddress{IPv4: "192.0.2.2"}
	}
	for name, spoil := range map[string]func(*v2.EgressPolicy){
		"an address that the Egress doesn't have": func(p *v2.EgressPolicy) { p.Spec.Address = &v2.EgressAddress{IPv4: "192.0.2.99"} },
		"a destination that the Egress doesn't have": func(p *v2.EgressPolicy) {
			p.Spec.Destinations = []string{own, "192.168.0.0/16"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				ts := newTurnsScene(sc, 3)
				change := func(change func(*v2.EgressPolicy)) {
					ts.policy("old", "", func(p *v2.EgressPolicy) {
						p.Spec.Pods = &metav1.LabelSelector{}
						mend(p)
						change(p)
					})
				}
				good := func(*v2.EgressPolicy) {}
				change(spoil)
				ts.chooses("young", "")
				ts.run(3 * time.Second)
				young := ts.addressOf("young")
				for range 2 {
					ts.has(0, nil, sources{"", young, young})
					ts.run(countEvery + 3*time.Second)
					ts.check("it can't be followed", true)
					if s := ts.statusOf("old"); policy.InForce(s) || s.Clients != 0 {
						t.Errorf("its status is %+v", s)
					}
					change(good)
					ts.has(0, nil, sources{"192.0.2.2", young, young})
					ts.run(countEvery + 3*time.Second)
					ts.check("it can be followed", true)
					if s := ts.statusOf("old"); !policy.InForce(s) || s.Clients != 1 {
						t.Errorf("its status is %+v", s)
					}
					change(spoil)
				}
			})
		})
	}
}

// Nodes learn late that a policy names another Egress. Until then routers of the one before send no packets to its destinations by the address of
// another policy.
func TestPoliciesLeaveAnEgress(t *testing.T) {
	const own = "203.0.113.9/32"
	for name, change := range map[string]func(*turnsScene, *v2.EgressPolicy){
		"to one with addresses": func(ts *turnsScene, p *v2.EgressPolicy) {
			e := fakeapi.Find[*v2.Egress](ts.s, egressResource, "internet/nat")
			e.Name, e.UID, e.ResourceVersion = "other", "other", ""
			ts.s.Put(egressResource, e)
			p.Spec.Egress.Name = "other"
		},
		"to one without addresses": func(ts *turnsScene, p *v2.EgressPolicy) {
			ts.s.Put(egressResource, &v2.Egress{
				ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "other", UID: "other", Generation: 1}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}},
			})
			p.Spec.Egress.Name = "other"
		},
		"to one that there isn't": func(_ *turnsScene, p *v2.EgressPolicy) { p.Spec.Egress.Name = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				ts := newTurnsScene(sc, 2)
				ts.chooses("old", "old", own)
				ts.chooses("young", "")
				ts.run(3 * time.Second)
				old, young := ts.addressOf("old"), ts.addressOf("young")
				ts.has(0, nil, sources{old, young, young}, "old")
				ts.has(1, nil, sources{old, young, young}, "old")
				ts.run(3 * time.Second)
				ts.check("at first", true)

				ts.has(0, nil, sources{"", young, young}, "old")
				ts.policy("old", "", func(p *v2.EgressPolicy) {
					p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"old": ""}}
					change(ts, p)
				})
				ts.has(1, nil, sources{"", young, young}, "old")
				ts.run(keepFor - time.Second)
				ts.check("while nodes may be late", true)
				ts.has(1, nil, sources{young, young, young})
				ts.run(500 * time.Millisecond)
				ts.check("when it doesn't select a pod any more", true)
				ts.has(0, nil, sources{young, young, young}, "old")
				ts.run(2 * time.Second)
				ts.check("in the end", true)
			})
		})
	}
}
