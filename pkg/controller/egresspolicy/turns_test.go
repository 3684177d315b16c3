package egresspolicy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// sources are those with which a pod may leave, by destination; empty for none.
type sources [3]string

var probed = [len(sources{})]netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("198.51.100.1")}

// turnsScene has an Egress with an address for each of some policies.
type turnsScene struct {
	*scene
	want map[netip.Addr]sources // by pod
}

func newTurnsScene(sc *scene, addresses int) *turnsScene {
	e := fakeapi.Find[*v2.Egress](sc.s, egressResource, "internet/nat")
	e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfClient}
	for i := range addresses {
		e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{Block: fmt.Sprint("block-", i), EgressAddress: v2.EgressAddress{IPv4: fmt.Sprint("192.0.2.", i+1)}})
	}
	sc.s.Put(egressResource, e)
	ts := &turnsScene{sc, map[netip.Addr]sources{}}
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
	router, skipped := gateway.StateOf(cfg, e, fakeapi.All[*discoveryv1.EndpointSlice](ts.s, sliceResource))
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

// check wants that pods leave by no other addresses than they are to; by all of these, if they are complete.
func (ts *turnsScene) check(when string, complete bool) {
	ts.t.Helper()
	seen := ts.seen()
	for pod, want := range ts.want {
		for i, to := range probed {
			if got := seen[pod][i]; got != want[i] && (complete || got != "") {
				ts.t.Errorf("%s: pod %s leaves to %s by %q, want %q", when, pod, to, got, want[i])
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

// comes makes a pod with some labels.
func (ts *turnsScene) comes(i int, annotations map[string]string, want sources, labels ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ts.ns, Name: fmt.Sprint("pod-", i), Labels: map[string]string{}, Annotations: annotations},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: fmt.Sprint("10.0.0.", i+1)}, {IP: fmt.Sprint("fd00::", i+1)}}},
	}
	for _, l := range labels {
		p.Labels[l] = ""
	}
	ts.want[netip.MustParseAddr(p.Status.PodIPs[0].IP)] = want
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
		ts.comes(0, nil, sources{old, old, old}, "old")
		ts.run(3 * time.Second)
		p := ts.comes(0, nil, sources{old, old, old}, "old")
		p.Status.PodIPs[1].IP = "fd00::ff"
		ts.s.Put(podResource, p) // both lists are written
		ts.run(100 * time.Millisecond)
		ts.chooses("young", "", "0.0.0.0/0") // and may be written again
		ts.comes(1, nil, sources{old, old, old}, "old")
		ts.comes(2, nil, sources{young, young, young})
		ts.run(time.Second)
		ts.check("after a second", true)
	})
}

// The same for any policies, as far as an order is right for all destinations.
func TestAnyPodsComeInTurn(t *testing.T) {
	ranges := [][]string{nil, {"203.0.113.0/24"}, {"203.0.113.9/32"}}
	for seed := range uint64(20) {
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
				for i := range 30 {
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
					ts.comes(i, nil, want, labels...)
					time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
					ts.Deliver(r.IntN(10))
					synctest.Wait()
				}
				ts.run(3 * time.Second)
				ts.check("in the end", true)
			})
		})
	}
}
