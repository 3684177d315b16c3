package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestEgressClients(t *testing.T) {
	c := newEgressCluster(t)
	c.startCounting(t)
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	c.egress(t, "other", `destinations: [192.0.2.0/24]`)
	apps := fresh("apps")
	c.namespace(t, apps, nil)
	annotate := func(p *corev1.Pod, value string) {
		t.Helper()
		patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: %s}}}`, v2.AnnotationEgressPrefix+c.ns, value)
		testkit.Must(c.core.CoreV1().Pods(p.Namespace).Patch(t.Context(), p.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
	}

	a := c.client(t, apps, "a", "nat", "10.0.0.1", "fd00::1")
	c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1")
	t.Run("slices are as the contract says", func(t *testing.T) {
		e := testkit.Must(c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "nat", metav1.GetOptions{}))(t)
		all := c.slices(t, "nat")
		if len(all) != 2 {
			t.Fatalf("%d slices, want one of each family", len(all))
		}
		for _, s := range all {
			if _, ok := s.Labels["service.kubernetes.io/headless"]; !ok || s.Labels["endpointslice.kubernetes.io/managed-by"] != "coil-egress-controller" || s.Labels[discoveryv1.LabelServiceName] != "" {
				t.Errorf("labels %v", s.Labels)
			}
			if !metav1.IsControlledBy(&s, e) || !strings.HasPrefix(s.Name, "nat-clients-") || len(s.Ports) > 0 {
				t.Errorf("%s is owned by %v, ports %v", s.Name, s.OwnerReferences, s.Ports)
			}
			want := corev1.ObjectReference{Kind: "Pod", Namespace: apps, Name: "a", UID: a.UID}
			if ep := s.Endpoints[0]; *ep.TargetRef != want || !*ep.Conditions.Ready {
				t.Errorf("endpoint %+v", ep)
			}
		}
	})
	t.Run("the status counts pods", func(t *testing.T) { c.requireCount(t, "nat", 1) })
	t.Run("a pod without an address isn't one yet", func(t *testing.T) {
		p := c.client(t, apps, "late", "nat")
		c.client(t, apps, "b", "nat", "10.0.0.2")
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2")
		testkit.Must(c.setStatus(t.Context(), p, corev1.PodRunning, "10.0.0.3"))(t)
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2", "late 10.0.0.3")
		c.kill(t, p)
	})
	t.Run("several Egresses", func(t *testing.T) {
		annotate(a, `"nat, other"`)
		c.requireClients(t, "other", "a 10.0.0.1", "a fd00::1")
		annotate(a, `"other"`)
		c.requireClients(t, "nat", "b 10.0.0.2")
		annotate(a, `null`)
		c.requireClients(t, "other")
		annotate(a, `"nat"`)
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2")
	})
	t.Run("a finished Job", func(t *testing.T) {
		job := c.client(t, apps, "job", "nat", "10.0.0.9")
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2", "job 10.0.0.9")
		job = testkit.Must(c.setStatus(t.Context(), job, corev1.PodSucceeded, "10.0.0.9"))(t)
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2")
		// Its address is another pod's by now, which must stay when the Job goes.
		heir := c.client(t, apps, "heir", "nat", "10.0.0.9")
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2", "heir 10.0.0.9")
		c.kill(t, job)
		mark := c.client(t, apps, "mark", "nat", "10.0.0.10") // the deletion was handled before this
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2", "heir 10.0.0.9", "mark 10.0.0.10")
		if uid := c.clientsOf(t, "nat")["heir 10.0.0.9"]; uid != heir.UID {
			t.Errorf("the address is that of %s, want %s", uid, heir.UID)
		}
		c.kill(t, heir)
		c.kill(t, mark)
	})
	t.Run("a pod of the same name is another one", func(t *testing.T) {
		p := c.client(t, apps, "twin", "nat", "10.0.0.7")
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2", "twin 10.0.0.7")
		c.kill(t, p)
		p = c.client(t, apps, "twin", "nat", "10.0.0.7")
		testkit.Eventually(t, 10*time.Second, "the new UID", func() error {
			return same(p.UID, c.clientsOf(t, "nat")["twin 10.0.0.7"])
		})
		c.kill(t, p)
	})
	t.Run("the network of the host", func(t *testing.T) {
		host := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "host", Annotations: map[string]string{v2.AnnotationEgressPrefix + c.ns: "nat"}},
			Spec: corev1.PodSpec{HostNetwork: true, NodeName: "node", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		host = testkit.Must(c.core.CoreV1().Pods(apps).Create(t.Context(), host, metav1.CreateOptions{}))(t)
		testkit.Must(c.setStatus(t.Context(), host, corev1.PodRunning, "192.0.2.1"))(t)
		mark := c.client(t, apps, "mark", "nat", "10.0.0.10")
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2", "mark 10.0.0.10")
		c.kill(t, mark)
	})
	t.Run("slices are restored", func(t *testing.T) {
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2") // what was killed before is gone
		for name, spoil := range map[string]string{
			"clients": `{"endpoints": null}`, "labels": `{"metadata": {"labels": {"endpointslice.kubernetes.io/managed-by": "me"}}}`,
			"a Service": `{"metadata": {"labels": {"kubernetes.io/service-name": "x"}}}`,
		} {
			s := c.slices(t, "nat")[0]
			testkit.Must(c.core.DiscoveryV1().EndpointSlices(c.ns).Patch(t.Context(), s.Name, types.MergePatchType, []byte(spoil), metav1.PatchOptions{}))(t)
			testkit.Eventually(t, 10*time.Second, name, func() error {
				got, err := c.core.DiscoveryV1().EndpointSlices(c.ns).Get(t.Context(), s.Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				return errors.Join(same(addresses(s), addresses(*got)), same(s.Labels, got.Labels))
			})
		}
		for _, s := range c.slices(t, "nat") {
			testkit.Check(t, c.core.DiscoveryV1().EndpointSlices(c.ns).Delete(t.Context(), s.Name, metav1.DeleteOptions{}))
		}
		c.requireClients(t, "nat", "a 10.0.0.1", "a fd00::1", "b 10.0.0.2")
	})
	t.Run("everybody goes", func(t *testing.T) {
		for _, name := range []string{"a", "b"} {
			testkit.Check(t, c.core.CoreV1().Pods(apps).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
		}
		c.requireClients(t, "nat")
		testkit.Eventually(t, 10*time.Second, "no slice is left", func() error { return same(0, len(c.slices(t, "nat"))) })
		c.requireCount(t, "nat", 0)
	})
}

// addresses are those of a slice, sorted.
func addresses(s discoveryv1.EndpointSlice) (all []string) {
	for _, ep := range s.Endpoints {
		all = append(all, ep.Addresses...)
	}
	slices.Sort(all)
	return all
}

// requireCount waits until the status of an Egress has a number of clients.
func (c *egressCluster) requireCount(t testing.TB, egress string, want int32) {
	t.Helper()
	// It is written every 30 seconds, unless the program was told otherwise.
	testkit.Eventually(t, 50*time.Second, fmt.Sprintf("status.clients of %s is %d", egress, want), func() error {
		e, err := c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), egress, metav1.GetOptions{})
		if err != nil {
			return err
		}
		return same(want, e.Status.Clients)
	})
}

func TestEgressAllowedNamespaces(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	c.egress(t, "nat", `{destinations: [0.0.0.0/0], allowedNamespaces: {matchLabels: {team: a}}}`)
	good, bad := fresh("good"), fresh("bad")
	c.namespace(t, good, map[string]string{"team": "a"})
	c.namespace(t, bad, nil)
	c.client(t, bad, "refused", "nat", "10.1.0.1")
	c.client(t, good, "a", "nat", "10.1.0.2")
	c.requireClients(t, "nat", "a 10.1.0.2")
	testkit.Eventually(t, 10*time.Second, "the pod is told", func() error {
		return same(map[string]int32{"EgressNotAllowed": 1}, c.reasons(t, bad, "refused"))
	})
	if told := c.reasons(t, good, "a"); len(told) > 0 {
		t.Errorf("Events %v of a pod that is allowed", told)
	}
	label := func(ns, value string) {
		t.Helper()
		testkit.Must(c.core.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, []byte(`{"metadata": {"labels": {"team": `+value+`}}}`), metav1.PatchOptions{}))(t)
	}
	label(bad, `"a"`)
	c.requireClients(t, "nat", "a 10.1.0.2", "refused 10.1.0.1")
	label(good, `null`)
	c.requireClients(t, "nat", "refused 10.1.0.1")
	c.change(t, "nat", `spec: {allowedNamespaces: null}`)
	c.requireClients(t, "nat", "a 10.1.0.2", "refused 10.1.0.1")
	c.change(t, "nat", `spec: {allowedNamespaces: {matchExpressions: [{key: team, operator: Like}]}}`)
	c.requireClients(t, "nat")
	if got := c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "InvalidSelector"); !strings.Contains(got.Message, "Like") {
		t.Errorf("message %q doesn't say what is wrong", got.Message)
	}
	// Many syncs, one Event: other pods come and go.
	c.change(t, "nat", `spec: {allowedNamespaces: {matchLabels: {team: b}, matchExpressions: null}}`)
	for i := range 5 {
		p := c.client(t, bad, fmt.Sprint("more-", i), "nat", fmt.Sprint("10.1.1.", i+1))
		testkit.Eventually(t, 10*time.Second, "it is told", func() error {
			return same(map[string]int32{"EgressNotAllowed": 1}, c.reasons(t, bad, p.Name))
		})
	}
}

// TestEgressManyClients holds that one client's change is one write of one slice and is
// there soon, however many clients an Egress has.
func TestEgressManyClients(t *testing.T) {
	many, rounds := testkit.EgressForm.Times(300, 5000), testkit.EgressForm.Times(6, 20) // three slices of each family, or more
	c := newEgressCluster(t)
	apps := fresh("apps")
	c.namespace(t, apps, nil)
	rec := &recorder{}
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	var wg sync.WaitGroup
	errs := make(chan error, many)
	for w := range 16 {
		wg.Go(func() {
			for i := w; i < many; i += 16 {
				if _, err := c.tryClient(t.Context(), apps, fmt.Sprintf("p-%04d", i), "nat", addr4(i), addr6(i)); err != nil {
					errs <- err
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	testkit.Check(t, slices.Collect(func(yield func(error) bool) {
		for err := range errs {
			if !yield(err) {
				return
			}
		}
	})...)
	start := time.Now()
	c.startWith(t, rec.wrap(c.account(t)), egressOptions())
	testkit.Eventually(t, 60*time.Second, "all clients are there", func() error {
		n := 0
		for _, s := range c.slices(t, "nat") {
			n += len(s.Endpoints)
		}
		return same(2*many, n)
	})
	t.Logf("%d clients of two families after %s", many, time.Since(start).Round(time.Millisecond))
	c.requireCount(t, "nat", int32(many))

	// The clients that a router sees, and when.
	seen := make(chan *discoveryv1.EndpointSlice, 100)
	watch := testkit.Must(c.core.DiscoveryV1().EndpointSlices(c.ns).Watch(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelEgress + "=nat"}))(t)
	go func() {
		for ev := range watch.ResultChan() {
			if s, ok := ev.Object.(*discoveryv1.EndpointSlice); ok {
				seen <- s
			}
		}
	}()
	t.Cleanup(watch.Stop)
	await := func(what string, has func(*discoveryv1.EndpointSlice) bool) {
		t.Helper()
		timeout := time.After(testkit.Timeout(20 * time.Second))
		for {
			select {
			case s := <-seen:
				if has(s) {
					return
				}
			case <-timeout:
				t.Fatalf("%s: not seen", what)
			}
		}
	}
	endpoints := func(s *discoveryv1.EndpointSlice, addr string) bool {
		return slices.ContainsFunc(s.Endpoints, func(ep discoveryv1.Endpoint) bool { return ep.Addresses[0] == addr })
	}
	for len(seen) > 0 {
		<-seen
	}
	var times []time.Duration
	for i := range rounds {
		rec.take()
		p := testkit.Must(c.tryClient(t.Context(), apps, fmt.Sprint("new-", i), "nat"))(t)
		begin := time.Now()
		testkit.Must(c.setStatus(t.Context(), p, corev1.PodRunning, addr4(many+i)))(t)
		await("a new client", func(s *discoveryv1.EndpointSlice) bool { return endpoints(s, addr4(many+i)) })
		times = append(times, time.Since(begin))
		requireSliceWrites(t, rec, 1)
		c.kill(t, testkit.Must(c.core.CoreV1().Pods(apps).Get(t.Context(), fmt.Sprintf("p-%04d", i*(many/rounds)), metav1.GetOptions{}))(t))
		gone := 0
		await("a client goes, of both families", func(s *discoveryv1.EndpointSlice) bool {
			if !endpoints(s, addr4(i*(many/rounds))) && !endpoints(s, addr6(i*(many/rounds))) {
				gone++
			}
			return gone == 2
		})
		requireSliceWrites(t, rec, 2)
	}
	slices.Sort(times)
	t.Logf("from the status of a pod to the event of its slice, of %d clients: median %s, longest %s", many, times[len(times)/2], times[len(times)-1])
}

func addr4(i int) string { return fmt.Sprintf("10.%d.%d.%d", 16+i>>16, i>>8&255, i&255) }
func addr6(i int) string { return fmt.Sprintf("fd00:1::%x", i+1) }

func requireSliceWrites(t *testing.T, r *recorder, want int) {
	t.Helper()
	n := 0
	for _, w := range r.take() {
		if strings.Contains(w, "/endpointslices") {
			n++
		}
	}
	if n != want {
		t.Errorf("%d writes of slices, want %d", n, want)
	}
}

// TestEgressStatusIsCalm holds that clients that come and go write the status rarely.
func TestEgressStatusIsCalm(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
	ctx, cancel := context.WithCancel(t.Context())
	f := externalversions.NewSharedInformerFactoryWithOptions(c.coil, 0, externalversions.WithNamespace(c.ns))
	var mu sync.Mutex
	changes := 0
	testkit.Must(f.Coil().V2().Egresses().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, _ any) {
		mu.Lock()
		defer mu.Unlock()
		changes++
	}}))(t)
	f.Start(ctx.Done())
	t.Cleanup(func() { cancel(); f.Shutdown() })
	f.WaitForCacheSync(ctx.Done())
	start := time.Now()
	const pods = 100
	for i := range pods {
		c.client(t, c.ns, fmt.Sprint("p-", i), "nat", addr4(i))
	}
	c.requireCount(t, "nat", pods)
	took := time.Since(start)
	mu.Lock()
	defer mu.Unlock()
	if most := 2 + int(took/time.Second); changes > most {
		t.Errorf("%d writes of the status in %s for %d clients, want at most %d", changes, took, pods, most)
	}
}
