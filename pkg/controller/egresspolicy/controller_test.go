package egresspolicy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// inScene runs a test with a namespace and an Egress.
func inScene(t *testing.T, test func(*testing.T, *scene)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		sc := newScene(t)
		sc.ns = "shop"
		sc.s.Put(nsResource, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
		sc.s.Put(egressResource, &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat", Generation: 1}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}}})
		test(t, sc)
	})
}

func (sc *scene) pod(i int, app string) {
	sc.s.Put(podResource, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: sc.ns, Name: fmt.Sprintf("pod-%05d", i), Labels: map[string]string{"app": app}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)}}},
	})
}

// policy makes a policy for the pods of an app, or changes it.
func (sc *scene) policy(name, app string, change func(*v2.EgressPolicy)) {
	p := fakeapi.Find[*v2.EgressPolicy](sc.s, policyResource, sc.ns+"/"+name)
	if p == nil {
		p = &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: sc.ns, Name: name}}
		p.Spec.Egress = &v2.EgressReference{Namespace: "internet", Name: "nat"}
	}
	p.Generation++
	p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
	if change != nil {
		change(p)
	}
	sc.s.Put(policyResource, p)
}

func (sc *scene) statusOf(name string) v2.EgressPolicyStatus {
	return fakeapi.Find[*v2.EgressPolicy](sc.s, policyResource, "shop/"+name).Status
}

// run lets time pass while the caches show everything.
func (sc *scene) run(d time.Duration) {
	for end := time.Now().Add(d); ; {
		sc.DeliverAll()
		synctest.Wait()
		if sc.Behind() > 0 {
			continue
		}
		if !time.Now().Before(end) {
			return
		}
		time.Sleep(min(100*time.Millisecond, time.Until(end)))
	}
}

// told returns the Events since the last call.
func (sc *scene) told() (all []string) {
	for len(sc.events.Events) > 0 {
		all = append(all, <-sc.events.Events)
	}
	return all
}

var shopKey = types.NamespacedName{Namespace: "shop", Name: "p"}

// Until the status says what a changed spec means, routers let in whom they did.
func TestListsWaitForTheStatus(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pod(1, "a")
		sc.pod(2, "b")
		sc.policy("p", "a", nil)
		sc.run(2 * time.Second)
		want := map[string][]string{"internet/nat": {"shop/pod-00001 10.0.0.2"}}
		if diff := cmp.Diff(want, sc.listed(shopKey)); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
		sc.s.Fault = func(_, resource string) (before, after error) {
			if resource == policyResource {
				return fakeapi.ErrLost, nil
			}
			return nil, nil
		}
		sc.policy("p", "b", nil)
		sc.run(time.Minute)
		if diff := cmp.Diff(want, sc.listed(shopKey)); diff != "" {
			t.Errorf("before the status is written (-want +got):\n%s", diff)
		}
		sc.s.Fault = nil
		sc.run(2 * time.Minute)
		if diff := cmp.Diff(map[string][]string{"internet/nat": {"shop/pod-00002 10.0.0.3"}}, sc.listed(shopKey)); diff != "" {
			t.Errorf("after it (-want +got):\n%s", diff)
		}
	})
}

// A policy that names another Egress is listed there before it isn't any more where it was.
func TestMoves(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.s.Put(egressResource, &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "nat", Generation: 1}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}}})
		sc.pod(1, "a")
		sc.policy("p", "a", nil)
		sc.run(2 * time.Second)
		var least int
		sc.policy("p", "a", func(p *v2.EgressPolicy) { p.Spec.Egress.Namespace = "other" })
		sc.s.Fault = func(verb, resource string) (before, after error) {
			if verb == "delete" && resource == sliceResource {
				least++
				return fakeapi.ErrLost, nil
			}
			return nil, nil
		}
		sc.run(2 * time.Second)
		if got := sc.listed(shopKey); len(got) != 2 || least == 0 {
			t.Errorf("as long as it can't be deleted: %v", got)
		}
		sc.s.Fault = nil
		sc.run(time.Minute)
		if diff := cmp.Diff(map[string][]string{"other/nat": {"shop/pod-00001 10.0.0.2"}}, sc.listed(shopKey)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		sc.s.Drop(policyResource, "shop/p")
		sc.run(2 * time.Second)
		if got := sc.listed(shopKey); len(got) > 0 {
			t.Errorf("it is gone, but listed: %v", got)
		}
	})
}

// Each coild gets each status: one that only counts clients waits, all others don't.
func TestCountsAreCalm(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.policy("p", "a", nil)
		sc.run(2 * time.Second)
		before := sc.s.Calls()["update "+policyResource]
		for i := range 120 {
			sc.pod(i, "a")
			sc.run(time.Second)
		}
		sc.run(countEvery)
		if got := sc.statusOf("p").Clients; got != 120 {
			t.Errorf("%d clients, want 120", got)
		}
		if n := sc.s.Calls()["update "+policyResource] - before; n < 4 || n > 7 {
			t.Errorf("%d writes of the status in 150 seconds", n)
		}
		sc.policy("p", "a", func(p *v2.EgressPolicy) { p.Spec.Destinations = []string{"203.0.113.0/24"} })
		sc.run(0)
		if st := sc.statusOf("p"); st.Resolved.ObservedGeneration != 2 {
			t.Errorf("a new spec waits: %+v", st)
		}
	})
}

func TestEventsAreTold(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		expect := func(what string, want ...string) {
			t.Helper()
			sc.run(3 * time.Second)
			got := sc.told()
			if !slices.EqualFunc(got, want, func(g, w string) bool { return strings.HasPrefix(g, w) }) {
				t.Errorf("%s: Events %q, want %q", what, got, want)
			}
		}
		typo := func(p *v2.EgressPolicy) { p.Spec.Egress.Name = "typo" }
		sc.policy("p", "a", nil)
		expect("a policy")
		sc.policy("p", "a", typo)
		expect("a typo", "Warning EgressNotFound There is no Egress internet/typo")
		sc.pod(1, "a")
		sc.policy("p", "a", typo)
		expect("the same again")
		sc.policy("p", "a", func(p *v2.EgressPolicy) { p.Spec.Egress.Name = "nat" })
		expect("mended")
		pod := fakeapi.Find[*corev1.Pod](sc.s, podResource, "shop/pod-00001")
		pod.Annotations = map[string]string{v2.AnnotationEgressPrefix + "other": "nat"}
		sc.s.Put(podResource, pod)
		expect("an annotation without an Egress")
		sc.s.Put(egressResource, &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "nat", Generation: 1}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}}})
		expect("an annotation", "Warning Annotation Pod shop/pod-00001 reaches 0.0.0.0/0 through Egress other/nat, by its annotation")
	})
}

// One pod's change writes one slice, and one policy's its own, however many there are; and none takes long.
func TestScale(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.withAddresses(10)
		const namespaces, policies, pods = 50, 20, 200
		for n := range namespaces {
			sc.ns = fmt.Sprint("ns-", n)
			sc.s.Put(nsResource, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: sc.ns}})
			for i := range policies {
				sc.policy(fmt.Sprint("p-", i), fmt.Sprint("app-", i), nil)
			}
			for i := range pods {
				sc.pod(n*pods+i, fmt.Sprint("app-", i%policies))
			}
		}
		sc.ns = "ns-0"
		sc.run(3 * time.Second)
		sc.run(countEvery + 3*time.Second)
		writes := func(what string, change func(), want map[string]int) {
			t.Helper()
			before := sc.s.Calls()
			change()
			sc.run(countEvery + 3*time.Second)
			got := map[string]int{}
			for call, n := range sc.s.Calls() {
				if n -= before[call]; n > 0 {
					got[call] = n
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		}
		const update, status = "update endpointslices", "update egresspolicies"
		writes("nothing", func() {}, map[string]int{})
		writes("a pod gets another label", func() { sc.pod(7, "app-8") }, map[string]int{update: 2, status: 2})
		writes("a pod gets an address", func() {
			p := fakeapi.Find[*corev1.Pod](sc.s, podResource, "ns-0/pod-00009")
			p.Status.PodIPs[0].IP = "10.9.9.9"
			sc.s.Put(podResource, p)
		}, map[string]int{update: 1})
		writes("a policy gets destinations", func() {
			sc.policy("p-3", "app-3", func(p *v2.EgressPolicy) { p.Spec.Destinations = []string{"203.0.113.0/24"} })
		}, map[string]int{update: 4, status: 1}) // 10 clients, 3 in a slice
		writes("a policy goes", func() { sc.s.Drop(policyResource, "ns-0/p-4") }, map[string]int{"delete endpointslices": 4})
		n := 0
		for _, s := range fakeapi.All[*discoveryv1.EndpointSlice](sc.s, sliceResource) {
			n += len(s.Endpoints)
		}
		if n != namespaces*pods-10 {
			t.Errorf("%d clients, want %d", n, namespaces*pods-10)
		}
	})
}
