package migrate

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	coilfake "github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// swap is a Replace on fake clients: an evicted pod ends some seconds later, and another one of its name has an
// address of Coil then.
type swap struct {
	Replace
	kube    *fake.Clientset
	log     bytes.Buffer
	changes []string
	budget  map[string]int // how often the eviction of a pod is refused
	stuck   string         // the pod that doesn't end
	failAt  int
}

var podsResource = corev1.SchemeGroupVersion.WithResource("pods")

// v1Pod is a pod of a ReplicaSet.
func v1Pod(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "app", Name: name, UID: types.UID(name + "-1"),
			OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web", Controller: new(true)}},
		},
		Spec:   corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64(5))},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}},
	}
}

func reservedBlock(name, cidr string, labels ...string) *v2.AddressBlock {
	b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{v2.LabelReserved: "true", v2.LabelNode: "n1"}}, IPv4: &cidr}
	for _, l := range labels {
		b.Labels[l] = "true"
	}
	return b
}

// cluster has three pods of v1, and pods that are none: one with an address of Coil, one of the node's network, and one that
// has ended.
func clusterOfV1() (kube, coil []runtime.Object) {
	host, ended := v1Pod("host", "n1", "10.1.0.4"), v1Pod("ended", "n1", "10.1.0.7")
	host.Spec.HostNetwork = true
	ended.Status.Phase = corev1.PodSucceeded
	return []runtime.Object{
			&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "coild"}},
			v1Pod("c", "n2", "10.1.0.1"), v1Pod("b", "n1", "10.1.0.6"), v1Pod("a", "n1", "10.1.0.5"), v1Pod("new", "n1", "10.1.0.9"), host, ended,
		}, []runtime.Object{
			reservedBlock("app-0", "10.1.0.0/30"), reservedBlock("app-1", "10.1.0.4/30"),
			reservedBlock("floating-0", "10.1.0.9/32", v2.LabelFloating),
			&v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: "app-2", Labels: map[string]string{v2.LabelNode: "n1"}}, IPv4: new("10.1.0.8/30")},
		}
}

func newSwap(t *testing.T) *swap {
	kube, coil := clusterOfV1()
	s := &swap{kube: fake.NewClientset(kube...), budget: map[string]int{}}
	coilClient := coilfake.NewSimpleClientset(coil...)
	s.Replace = Replace{
		Cluster:   Cluster{Kube: s.kube, Coil: coilClient, Log: &s.log},
		Namespace: "kube-system", DaemonSet: "coild", Interval: 10 * time.Second, Grace: time.Minute,
	}
	change := func(what string) error {
		if s.failAt == len(s.changes)+1 {
			s.failAt = 0
			return errKilled
		}
		s.changes = append(s.changes, what)
		return nil
	}
	s.kube.PrependReactor("create", "pods", func(a k8stesting.Action) (bool, runtime.Object, error) {
		e, ok := a.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction)
		if !ok {
			return false, nil, nil
		}
		if s.budget[e.Name] > 0 {
			s.budget[e.Name]--
			return true, nil, apierrors.NewTooManyRequests("it would violate the budget", 10)
		}
		old, err := s.kube.Tracker().Get(podsResource, e.Namespace, e.Name)
		if err != nil {
			return true, nil, err
		}
		p := old.(*corev1.Pod).DeepCopy()
		if uid := e.DeleteOptions.Preconditions.UID; *uid != p.UID {
			t.Errorf("evicted %s with UID %s, but it has %s", e.Name, *uid, p.UID)
		}
		if err := change("evict " + e.Name); err != nil {
			return true, nil, err
		}
		p.DeletionTimestamp = new(metav1.Now())
		err = s.kube.Tracker().Update(podsResource, p, p.Namespace)
		if e.Name != s.stuck {
			time.AfterFunc(3500*time.Millisecond, func() { s.end(t, p) }) // between two looks at the pod
		}
		return true, nil, err
	})
	s.kube.PrependReactor("patch", "daemonsets", func(a k8stesting.Action) (bool, runtime.Object, error) {
		what := "note"
		if bytes.Contains(a.(k8stesting.PatchAction).GetPatch(), []byte("restartedAt")) {
			what = "restart"
		}
		err := change(what)
		return err != nil, nil, err
	})
	coilClient.PrependReactor("delete", "addressblocks", func(a k8stesting.Action) (bool, runtime.Object, error) {
		err := change("delete " + a.(k8stesting.DeleteAction).GetName())
		return err != nil, nil, err
	})
	return s
}

// end is the end of a pod, and the beginning of the next one.
func (s *swap) end(t *testing.T, p *corev1.Pod) {
	next := p.DeepCopy()
	next.DeletionTimestamp, next.UID = nil, types.UID(p.Name+"-2")
	next.Status.PodIP, next.Status.PodIPs = "10.1.0.10", []corev1.PodIP{{IP: "10.1.0.10"}}
	if err := s.kube.Tracker().Update(podsResource, next, next.Namespace); err != nil {
		t.Error(err)
	}
}

// lists is how often pods were listed.
func (s *swap) lists() int {
	n := 0
	for _, a := range s.kube.Actions() {
		if a.Matches("list", "pods") {
			n++
		}
	}
	return n
}

var allReplaced = []string{"evict a", "evict b", "evict c", "note", "delete app-0", "delete app-1", "restart"}

func (s *swap) want(t *testing.T, changes []string) {
	t.Helper()
	if !slices.Equal(s.changes, changes) {
		t.Errorf("changes are %q, want %q; log:\n%s", s.changes, changes, s.log.String())
	}
}

func TestReplace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, begin := newSwap(t), time.Now()
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.want(t, allReplaced)
		// The end of each pod is seen after 4 s, and 10 s pass before the next look at what is left.
		if took := time.Since(begin); took != 42*time.Second {
			t.Errorf("it took %v, want 42s", took)
		}
		// Before the first change, before the first eviction, and after the last one: the pods of a large cluster are megabytes.
		if got := s.lists(); got != 3 {
			t.Errorf("pods were listed %d times, want 3 times", got)
		}
		for _, line := range []string{
			"3 pods of Coil v1 in 2 reserved blocks", "Evicted app/a (10.1.0.5) on n1; 2 are left", "Evicted app/c (10.1.0.1) on n2; 0 are left",
			"Deleted AddressBlock app-1 of n1", "Restarting DaemonSet coild",
		} {
			if !strings.Contains(s.log.String(), line+"\n") {
				t.Errorf("no line %q:\n%s", line, s.log.String())
			}
		}
	})
}

func TestReplaceKilled(t *testing.T) {
	for n := range allReplaced {
		synctest.Test(t, func(t *testing.T) {
			s := newSwap(t)
			s.failAt = n + 1
			err := s.Run(t.Context())
			if !errors.Is(err, errKilled) {
				t.Fatalf("change %d: %v", n+1, err)
			}
			did := []string{
				"", "; until then, 1 pod was evicted: run replace again", "; until then, 2 pods were evicted: run replace again",
				"; until then, 3 pods were evicted: run replace again", "; until then, 3 pods were evicted, the restart of coild is pending: run replace again",
				"; until then, 3 pods were evicted, 1 reserved block was deleted, the restart of coild is pending: run replace again",
				"; until then, 3 pods were evicted, 2 reserved blocks were deleted, the restart of coild is pending: run replace again",
			}[n]
			if !strings.HasSuffix(err.Error(), did) || strings.HasPrefix(err.Error(), "nothing was changed: ") != (n == 0) {
				t.Errorf("change %d: error %v, want one that ends with %q", n+1, err, did)
			}
			if err := s.Run(t.Context()); err != nil {
				t.Fatalf("change %d: again: %v", n+1, err)
			}
			want := slices.Clone(allReplaced)
			if allReplaced[n] == "delete app-0" || allReplaced[n] == "delete app-1" { // the note is written again
				want = slices.Insert(want, n, "note")
			}
			s.want(t, want)

			// All is done: coild isn't restarted again.
			if err := s.Run(t.Context()); err != nil {
				t.Fatalf("change %d: a third time: %v", n+1, err)
			}
			s.want(t, want)
			if !strings.Contains(s.log.String(), "Nothing is to be done") {
				t.Errorf("the log doesn't say that nothing is to be done:\n%s", s.log.String())
			}
		})
	}
}

// A pod whose eviction a PodDisruptionBudget refuses is evicted later, and others meanwhile.
func TestReplaceRespectsBudgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSwap(t)
		s.budget["a"], s.budget["b"] = 2, 1
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.want(t, []string{"evict c", "evict b", "evict a", "note", "delete app-0", "delete app-1", "restart"})
	})
	synctest.Test(t, func(t *testing.T) {
		s := newSwap(t)
		s.budget["a"], s.budget["b"], s.budget["c"] = 3, 3, 3
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.want(t, allReplaced)
		if got := strings.Count(s.log.String(), "Waiting: app/a (10.1.0.5) on n1: it would violate the budget"); got != 1 {
			t.Errorf("it says %d times that it waits, want once:\n%s", got, s.log.String())
		}
	})
}

// A pod of a dead node doesn't keep the others from being replaced.
func TestReplaceStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSwap(t)
		s.stuck = "a"
		time.AfterFunc(10*time.Minute, func() {
			p, err := s.kube.Tracker().Get(podsResource, "app", "a")
			if err != nil {
				t.Error(err)
				return
			}
			s.end(t, p.(*corev1.Pod))
		})
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.want(t, allReplaced)
		for _, line := range []string{"Pod app/a (10.1.0.5) on n1 hasn't ended within 1m5s", "Waiting: app/a (10.1.0.5) on n1 is ending"} {
			if strings.Count(s.log.String(), line) != 1 {
				t.Errorf("want one line %q:\n%s", line, s.log.String())
			}
		}
	})
}

func TestReplaceDryRun(t *testing.T) {
	s := newSwap(t)
	s.DryRun = true
	if err := s.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.want(t, nil)
	if got := strings.Count(s.log.String(), "Would "); got != 6 {
		t.Errorf("%d lines say what would be done, want 6:\n%s", got, s.log.String())
	}
}

// Pods that nobody makes again are refused before anything is changed.
func TestReplaceRefuses(t *testing.T) {
	bare := v1Pod("bare", "n1", "10.1.0.7")
	bare.OwnerReferences = nil
	mirror := v1Pod("mirror", "n1", "10.1.0.7")
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		force bool
		says  string // empty if it isn't refused
	}{
		"bare":            {bare, false, "app/bare (10.1.0.7) on n1 has no controller"},
		"bare by force":   {bare, true, ""},
		"mirror":          {mirror, false, "app/mirror (10.1.0.7) on n1 is made from a file"},
		"mirror by force": {mirror, true, "app/mirror (10.1.0.7) on n1 is made from a file"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSwap(t)
				s.Force = c.force
				if err := s.kube.Tracker().Add(c.pod.DeepCopy()); err != nil {
					t.Fatal(err)
				}
				err := s.Run(t.Context())
				if c.says == "" {
					if err != nil || !slices.Contains(s.changes, "evict "+c.pod.Name) {
						t.Errorf("error %v, changes %q", err, s.changes)
					}
					return
				}
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %v, want one that says %q", err, c.says)
				}
				s.want(t, nil)
			})
		})
	}
}

// An update of coild ends before the first pod is replaced: a new pod needs a coild.
func TestReplaceWaitsForCoild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSwap(t)
		ds := &appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "coild", Generation: 2},
			Status:     appsv1.DaemonSetStatus{ObservedGeneration: 2, DesiredNumberScheduled: 2, UpdatedNumberScheduled: 1, NumberReady: 2},
		}
		set := func() error {
			return s.kube.Tracker().Update(appsv1.SchemeGroupVersion.WithResource("daemonsets"), ds.DeepCopy(), ds.Namespace)
		}
		if err := set(); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(30*time.Second, func() {
			if len(s.changes) > 0 {
				t.Errorf("changes before coild is updated: %q", s.changes)
			}
			ds.Status.UpdatedNumberScheduled = 2
			if err := set(); err != nil {
				t.Error(err)
			}
		})
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.want(t, allReplaced)
		if want := "1 of 2 pods of DaemonSet coild are updated, 2 are ready"; strings.Count(s.log.String(), want) != 1 {
			t.Errorf("want one line %q:\n%s", want, s.log.String())
		}
	})
}

// What was there before the change of coild says nothing about its restart.
func TestReplaceSaysHowTheRestartGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSwap(t)
		resource := appsv1.SchemeGroupVersion.WithResource("daemonsets")
		set := func(edit func(*appsv1.DaemonSet)) {
			o, err := s.kube.Tracker().Get(resource, "kube-system", "coild")
			if err != nil {
				t.Error(err)
				return
			}
			ds := o.(*appsv1.DaemonSet).DeepCopy()
			edit(ds)
			if err := s.kube.Tracker().Update(resource, ds, "kube-system"); err != nil {
				t.Error(err)
			}
		}
		set(func(ds *appsv1.DaemonSet) {
			ds.Status = appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, UpdatedNumberScheduled: 2, NumberReady: 2}
		})
		s.kube.PrependReactor("patch", "daemonsets", func(a k8stesting.Action) (bool, runtime.Object, error) {
			if bytes.Contains(a.(k8stesting.PatchAction).GetPatch(), []byte("restartedAt")) {
				set(func(ds *appsv1.DaemonSet) { ds.Generation++ })
				time.AfterFunc(1500*time.Millisecond, func() {
					set(func(ds *appsv1.DaemonSet) {
						ds.Status.ObservedGeneration, ds.Status.UpdatedNumberScheduled, ds.Status.NumberReady = ds.Generation, 0, 1
					})
				})
				time.AfterFunc(4500*time.Millisecond, func() {
					set(func(ds *appsv1.DaemonSet) { ds.Status.UpdatedNumberScheduled, ds.Status.NumberReady = 2, 2 })
				})
			}
			return false, nil, nil
		})
		if err := s.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if log := s.log.String(); strings.Contains(log, "2 of 2 pods") || !strings.Contains(log, "0 of 2 pods of DaemonSet coild are updated, 1 are ready") {
			t.Errorf("the log doesn't say how the restart goes:\n%s", log)
		}
	})
}

// Without coild nothing is changed, and a dry run says so, too.
func TestReplaceWithoutCoild(t *testing.T) {
	for _, dry := range []bool{false, true} {
		s := newSwap(t)
		s.DaemonSet, s.DryRun = "other", dry
		err := s.Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "DaemonSet other of namespace kube-system, which has to be installed") {
			t.Errorf("dry run %v: error %v", dry, err)
		}
		s.want(t, nil)
	}
}

func TestReplaceBeforeTheDefinitions(t *testing.T) {
	s := newSwap(t)
	coil := coilfake.NewSimpleClientset()
	coil.PrependReactor("list", "addressblocks", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewNotFound(v2.Resource("addressblocks"), "")
	})
	s.Coil = coil
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "apply the definitions, the file that dump wrote, and Coil first") {
		t.Errorf("error %v", err)
	}
	s.want(t, nil)
}

// Who interrupts it reads what it has done.
func TestReplaceInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSwap(t)
		ctx, cancel := context.WithTimeoutCause(t.Context(), 20*time.Second, errors.New("interrupt signal received"))
		defer cancel()
		err := s.Run(ctx)
		if want := "interrupt signal received; until then, 2 pods were evicted: run replace again"; err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
		s.want(t, allReplaced[:2])
	})
}
