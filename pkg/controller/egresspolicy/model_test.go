package egresspolicy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	corefake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// The resources of the API server in memory.
const (
	policyResource  = "egresspolicies"
	clusterResource = "egressclusterpolicies"
	egressResource  = "egresses"
	podResource     = "pods"
	serviceResource = "services"
	nsResource      = "namespaces"
	sliceResource   = "endpointslices"
)

// scene is a controller that runs in a bubble of testing/synctest, and an API server. Its caches show what is delivered.
type scene struct {
	*Controller
	*fakeapi.View
	t      *testing.T
	s      *fakeapi.Server
	ns     string // where pods and policies are made
	events *events.FakeRecorder
	core   *corefake.Clientset
	coil   *fake.Clientset
	stop   func()
}

func newScene(t *testing.T) *scene {
	t.Helper()
	sc := &scene{t: t, s: fakeapi.New(t, nil), events: events.NewFakeRecorder(100000), core: corefake.NewSimpleClientset(), coil: fake.NewSimpleClientset()}
	sc.core.PrependReactor("*", "*", sc.s.React)
	sc.coil.PrependReactor("*", "*", sc.s.React)
	sc.start()
	return sc
}

// start runs a controller that has seen everything.
func (sc *scene) start() {
	sc.t.Helper()
	informer := func(o runtime.Object) cache.SharedIndexInformer {
		return cache.NewSharedIndexInformer(&cache.ListWatch{}, o, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	}
	cfg := Config{
		Coil: sc.coil, Core: sc.core, EndpointsPerSlice: 3, Recorder: sc.events,
		Policies: informer(&v2.EgressPolicy{}), ClusterPolicies: informer(&v2.EgressClusterPolicy{}), Egresses: informer(&v2.Egress{}),
		Pods: informer(&corev1.Pod{}), Services: informer(&corev1.Service{}), Namespaces: informer(&metav1.PartialObjectMetadata{}),
		Clients: informer(&discoveryv1.EndpointSlice{}),
	}
	var err error
	if sc.Controller, err = New(cfg); err != nil {
		sc.t.Fatal(err)
	}
	sc.synced = nil // the caches are filled by hand
	handlers := map[string]func(before, after fakeapi.Object){
		policyResource: func(a, b fakeapi.Object) {
			sc.policyChanged(subjectOf(fakeapi.As[v2.EgressPolicy](a), ofPolicy), subjectOf(fakeapi.As[v2.EgressPolicy](b), ofPolicy))
		},
		clusterResource: func(a, b fakeapi.Object) {
			sc.policyChanged(subjectOf(fakeapi.As[v2.EgressClusterPolicy](a), ofClusterPolicy), subjectOf(fakeapi.As[v2.EgressClusterPolicy](b), ofClusterPolicy))
		},
		egressResource: func(a, b fakeapi.Object) {
			sc.egressMayHaveChanged(fakeapi.As[v2.Egress](a), fakeapi.As[v2.Egress](b))
		},
		podResource: func(a, b fakeapi.Object) { sc.podChanged(fakeapi.As[corev1.Pod](a), fakeapi.As[corev1.Pod](b)) },
		serviceResource: func(a, b fakeapi.Object) {
			if x, y := fakeapi.As[corev1.Service](a), fakeapi.As[corev1.Service](b); x == nil || y == nil || !sameSelector(x, y) {
				sc.serviceChanged(fakeapi.Last[corev1.Service](a, b))
			}
		},
		nsResource: func(a, b fakeapi.Object) {
			sc.namespaceChanged(fakeapi.As[metav1.PartialObjectMetadata](a), fakeapi.As[metav1.PartialObjectMetadata](b))
		},
		sliceResource: func(a, b fakeapi.Object) {
			sc.sliceChanged(fakeapi.As[discoveryv1.EndpointSlice](a), fakeapi.As[discoveryv1.EndpointSlice](b))
		},
	}
	sc.View = sc.s.View(map[string]cache.Indexer{
		policyResource: cfg.Policies.GetIndexer(), clusterResource: cfg.ClusterPolicies.GetIndexer(), egressResource: cfg.Egresses.GetIndexer(),
		podResource: cfg.Pods.GetIndexer(), serviceResource: cfg.Services.GetIndexer(), nsResource: cfg.Namespaces.GetIndexer(), sliceResource: cfg.Clients.GetIndexer(),
	}, func(resource string, before, after fakeapi.Object) {
		if before != nil || after != nil {
			handlers[resource](before, after)
		}
	})
	sc.DeliverAll()
	sc.stop = testkit.Background(context.WithoutCancel(sc.t.Context()), sc.t, sc.Controller.Run)
}

// settle lets the controller work until it has nothing to do, also by its clock.
func (sc *scene) settle() {
	sc.t.Helper()
	for quiet := 0; quiet < 80; quiet++ {
		if sc.Behind() > 0 {
			quiet = 0
		}
		if quiet == 0 {
			sc.listNaming()
		}
		sc.DeliverAll()
		time.Sleep(time.Second)
		synctest.Wait()
	}
}

// history changes everything at random.
type history struct {
	*scene
	r *rand.Rand
}

// TestRandomHistories has caches that lag, lost answers, controllers that end, and policies, Egresses, Services, namespaces, pods and slices that come, change and go
// by the hands of others. In the end the status of each policy is what it would be if it were looked at now, and the lists are those of the
// pods that a plain reading of the policies selects.
func TestRandomHistories(t *testing.T) {
	var seen sums
	for seed := range uint64(testkit.EgressForm.Times(14, 60)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := &history{newScene(t), rand.New(rand.NewPCG(seed, 1))}
				faults := rand.New(rand.NewPCG(seed, 2)) // for the server's callers, of which there is one at a time
				h.s.Fault = func(verb, _ string) (before, after error) {
					switch {
					case verb == "get", faults.IntN(10) > 0:
						return nil, nil
					case faults.IntN(2) == 0:
						return fakeapi.ErrLost, nil
					}
					return nil, fakeapi.ErrLost
				}
				for range 300 {
					h.step()
					if h.chance(50) { // and another one takes over
						h.stop()
						h.start()
					}
					if h.r.IntN(3) == 0 {
						h.Deliver(h.r.IntN(20))
						time.Sleep(time.Duration(h.r.IntN(2000)) * time.Millisecond)
						synctest.Wait()
					}
				}
				synctest.Wait()
				h.s.Fault = nil
				h.settle()
				h.check(&seen)
				for range 20 { // one change alone must be noticed
					h.step()
					h.settle()
					h.check(&sums{})
				}
				before := h.s.Events()
				time.Sleep(5 * time.Minute)
				synctest.Wait()
				if n := h.s.Events() - before; n > 0 {
					t.Errorf("%d writes without a reason", n)
				}
			})
		})
	}
	if seen.policies < 100 || seen.inForce < 40 || seen.conflicting < 10 || seen.clients < 50 {
		t.Errorf("the histories hardly test: %+v", seen)
	}
}

// sums says what there was at the end of histories.
type sums struct{ policies, inForce, conflicting, clients int }

func (h *history) word() string         { return string(rune('a' + h.r.IntN(3))) }
func (h *history) name(p string) string { return p + h.word() }
func (h *history) chance(n int) bool    { return h.r.IntN(n) == 0 }

func (h *history) step() {
	switch h.r.IntN(12) {
	case 0, 1, 2, 3:
		h.changePod()
	case 4, 5:
		h.changePolicy()
	case 6:
		h.changeClusterPolicy()
	case 7, 8:
		h.changeEgress()
	case 9:
		h.changeService()
	case 10:
		h.changeNamespace()
	case 11:
		h.spoil()
	}
}

func edit[T fakeapi.Object](h *history, resource, name string, empty T, change func(T), rarely bool) {
	o := fakeapi.Find[T](h.s, resource, name)
	if any(o) == any(*new(T)) {
		ns, n, ok := strings.Cut(name, "/")
		if !ok {
			ns, n = "", name
		}
		o = empty
		o.SetNamespace(ns)
		o.SetName(n)
	} else if h.chance(6) || rarely && h.chance(3) {
		h.s.Drop(resource, name)
		return
	}
	o.SetGeneration(o.GetGeneration() + 1)
	change(o)
	h.s.Put(resource, o)
}

func (h *history) use() v2.EgressUse {
	var u v2.EgressUse
	if !h.chance(3) {
		u.Egress = &v2.EgressReference{Namespace: h.name("ns-"), Name: h.word()}
	}
	u.Destinations = [][]string{nil, {"203.0.113.0/24"}, {"0.0.0.0/0"}, {"10.1.0.0/16"}}[h.r.IntN(4)]
	return u
}

func (h *history) selector() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": h.word()}}
}

func (h *history) changePolicy() {
	edit(h, policyResource, h.name("ns-")+"/"+h.name("p-"), &v2.EgressPolicy{}, func(p *v2.EgressPolicy) {
		p.Spec = v2.EgressPolicySpec{EgressUse: h.use()}
		switch h.r.IntN(3) {
		case 0:
			p.Spec.Pods = h.selector()
		case 1:
			p.Spec.Services = slices.Compact(slices.Sorted(slices.Values([]string{h.word(), h.word()})))
		case 2:
			p.Spec.PodCIDRs = []string{fmt.Sprintf("10.0.%d.0/24", h.r.IntN(3))}
		}
	}, false)
}

func (h *history) changeClusterPolicy() {
	edit(h, clusterResource, h.name("c-"), &v2.EgressClusterPolicy{}, func(p *v2.EgressClusterPolicy) {
		p.Spec = v2.EgressClusterPolicySpec{EgressUse: h.use(), Pods: h.selector()}
		if h.chance(2) {
			p.Spec.NamespaceSelector.MatchLabels = map[string]string{"team": h.word()}
		}
		if h.chance(8) {
			p.Spec.NamespaceSelector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}
		}
	}, true)
}

func (h *history) changeEgress() {
	key := h.name("ns-") + "/" + h.word()
	edit(h, egressResource, key, &v2.Egress{}, func(e *v2.Egress) {
		e.Spec.Destinations = [][]string{{"0.0.0.0/0"}, {"0.0.0.0/0", "10.0.0.0/8"}, {"203.0.113.0/24"}}[h.r.IntN(3)]
		e.Spec.Default, e.Spec.AllowedNamespaces = h.chance(3), nil
		if h.chance(3) {
			e.Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": h.word()}}
		}
		e.Status, e.Spec.Addresses = v2.EgressStatus{ObservedGeneration: 1}, nil
		if h.chance(2) {
			e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfClient}
			for i := range h.r.IntN(4) {
				address := v2.EgressAddress{IPv4: fmt.Sprintf("192.0.2.%d", i+1), IPv6: fmt.Sprintf("2001:db8::%d", i+1)}
				e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{Block: fmt.Sprint(e.Name, "-", i), EgressAddress: address})
			}
		}
		if h.chance(4) {
			e.Status.InClusterCIDRs = []string{"203.0.0.0/16"}
		}
	}, false)
	if fakeapi.Find[*v2.Egress](h.s, egressResource, key) != nil {
		return
	}
	// The garbage collector.
	for _, s := range fakeapi.All[*discoveryv1.EndpointSlice](h.s, sliceResource) {
		if s.Namespace+"/"+s.OwnerReferences[0].Name == key {
			h.s.Drop(sliceResource, s.Namespace+"/"+s.Name)
		}
	}
}

func (h *history) changeService() {
	edit(h, serviceResource, h.name("ns-")+"/"+h.word(), &corev1.Service{}, func(s *corev1.Service) {
		s.Spec.Selector = map[string]string{"app": h.word()}
		if h.chance(4) {
			s.Spec.Selector = nil
		}
	}, false)
}

func (h *history) changeNamespace() {
	name := h.name("ns-")
	n := fakeapi.Find[*metav1.PartialObjectMetadata](h.s, nsResource, name)
	if n == nil {
		n = &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	n.Labels, n.Annotations = map[string]string{"team": h.word()}, nil
	if h.chance(2) {
		n.Annotations = map[string]string{v2.AnnotationEgress: h.name("ns-") + "/" + h.word()}
	}
	h.s.Put(nsResource, n)
}

func (h *history) changePod() {
	name := h.name("ns-") + "/" + fmt.Sprint("pod-", h.r.IntN(8))
	edit(h, podResource, name, &corev1.Pod{}, func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": h.word()}
		if h.chance(8) {
			p.Labels = plan.RouterLabels(h.word())
			p.Labels["app"] = h.word()
		}
		p.Annotations = nil
		if h.chance(4) {
			p.Annotations = map[string]string{v2.AnnotationEgressPrefix + h.name("ns-"): h.word()}
		}
		p.Status.PodIPs = nil
		if !h.chance(5) {
			p.Status.PodIPs = []corev1.PodIP{{IP: fmt.Sprintf("10.0.%d.%d", h.r.IntN(3), h.r.IntN(40))}, {IP: fmt.Sprintf("fd00::%x", 1+h.r.IntN(40))}}
		}
		p.Spec.HostNetwork = h.chance(10)
		p.Status.Phase = corev1.PodRunning
		if h.chance(10) {
			p.Status.Phase = corev1.PodSucceeded
		}
	}, false)
}

// spoil does to a slice what somebody else may do.
func (h *history) spoil() {
	all := h.byPolicies()
	if len(all) == 0 {
		return
	}
	s := all[h.r.IntN(len(all))]
	switch h.r.IntN(5) {
	case 0:
		h.s.Drop(sliceResource, s.Namespace+"/"+s.Name)
		return
	case 1:
		s.Endpoints = nil
	case 2:
		s.Annotations = map[string]string{v2.AnnotationPolicy: "nonsense"}
	case 3:
		s.Annotations = map[string]string{v2.AnnotationPolicy: policy.Origin{Namespace: "ns-a", Name: h.name("p-")}.String()}
	case 4:
		s.Labels[v2.LabelPolicyEgress] = h.word()
	}
	h.s.Put(sliceResource, s)
}

func (h *history) check(seen *sums) {
	h.t.Helper()
	for _, p := range fakeapi.All[*v2.EgressPolicy](h.s, policyResource) {
		h.checkPolicy(ofPolicy(p), seen)
	}
	for _, p := range fakeapi.All[*v2.EgressClusterPolicy](h.s, clusterResource) {
		h.checkPolicy(ofClusterPolicy(p), seen)
	}
	for _, s := range h.byPolicies() {
		origin, err := policy.ParseOrigin(s.Annotations[v2.AnnotationPolicy])
		if err != nil || h.policies.find(origin.Policy()) == nil {
			h.t.Errorf("slice %s/%s is left, of %q", s.Namespace, s.Name, s.Annotations[v2.AnnotationPolicy])
		}
	}
}

func (h *history) checkPolicy(s *subject, seen *sums) {
	h.t.Helper()
	seen.policies++
	if policy.InForce(s.status) {
		seen.inForce++
	}
	if meta.IsStatusConditionTrue(s.status.Conditions, v2.PolicyConflicting) {
		seen.conflicting++
	}
	seen.clients += int(s.status.Clients)
	f := h.facts(s)
	if e := f.Uses(); e != nil && e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		f.Given, _ = h.given(s, e)
	}
	want := policy.Status(f)
	if diff := cmp.Diff(want, s.status); diff != "" {
		h.t.Errorf("status of %s (-want +got):\n%s", s.String(), diff)
	}
	lists := map[string][]string{}
	if e := fakeapi.Find[*v2.Egress](h.s, egressResource, s.status.Summary.Egress); e != nil && s.invalid == nil && policy.Decides(s.status, e) {
		if pods := h.chosen(s, e); len(pods) > 0 {
			lists[s.status.Summary.Egress] = pods
		}
	}
	if diff := cmp.Diff(lists, h.listed(s.Name)); diff != "" {
		h.t.Errorf("clients of %s (-want +got):\n%s", s.String(), diff)
	}
}

// chosen returns the clients by a plain reading.
func (h *history) chosen(s *subject, e *v2.Egress) []string {
	holder := map[string]*corev1.Pod{}
	for _, p := range fakeapi.All[*corev1.Pod](h.s, podResource) {
		ns := fakeapi.Find[*metav1.PartialObjectMetadata](h.s, nsResource, p.Namespace)
		team := ""
		if ns != nil {
			team = ns.Labels["team"]
		}
		_, labelled := plan.RouterOf(p.Labels)
		app := p.Labels["app"]
		router := labelled && fakeapi.Find[*v2.Egress](h.s, egressResource, p.Namespace+"/"+p.Labels["app.kubernetes.io/instance"]) != nil
		if router || p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || e.Spec.AllowedNamespaces != nil && e.Spec.AllowedNamespaces.MatchLabels["team"] != team {
			continue
		}
		selected := false
		switch o := s.object.(type) {
		case *v2.EgressPolicy:
			switch {
			case o.Namespace != p.Namespace:
			case o.Spec.Pods != nil:
				selected = o.Spec.Pods.MatchLabels["app"] == app
			case len(o.Spec.Services) > 0:
				selected = slices.ContainsFunc(o.Status.Resolved.Pods, func(l metav1.LabelSelector) bool { return l.MatchLabels["app"] == app })
			default:
				prefix := strings.TrimSuffix(o.Spec.PodCIDRs[0], "0/24")
				selected = slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return strings.HasPrefix(ip.IP, prefix) })
			}
		case *v2.EgressClusterPolicy:
			want := o.Spec.NamespaceSelector.MatchLabels["team"]
			selected = ns != nil && o.Spec.Pods.MatchLabels["app"] == app && (want == "" || want == team)
		}
		if !selected {
			continue
		}
		for _, ip := range p.Status.PodIPs {
			if other := holder[ip.IP]; other == nil || other.CreationTimestamp.Before(&p.CreationTimestamp) {
				holder[ip.IP] = p
			}
		}
	}
	var all []string
	for ip, p := range holder {
		all = append(all, p.Namespace+"/"+p.Name+" "+ip)
	}
	return slices.Sorted(slices.Values(all))
}
