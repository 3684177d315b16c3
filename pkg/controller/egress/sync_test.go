package egress

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	corefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// fixture is a controller of the Egress nat, whose caches are filled by hand. They don't show the objects
// that it applies.
type fixture struct {
	*Controller
	core     *corefake.Clientset
	coil     *fake.Clientset
	egresses cache.Indexer
	events   *events.FakeRecorder
	// written counts the writes of the status.
	written int
	// fail is what the API server says to what is applied, by resource.
	fail map[string]error
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{core: corefake.NewSimpleClientset(), events: events.NewFakeRecorder(100), fail: map[string]error{}}
	f.core.PrependReactor("patch", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, f.fail[a.GetResource().Resource]
	})
	coil := fake.NewSimpleClientset()
	f.coil = coil
	informed := externalversions.NewSharedInformerFactory(coil, 0).Coil().V2()
	f.egresses = informed.Egresses().Informer().GetIndexer()
	coil.PrependReactor("update", "egresses", func(a clienttesting.Action) (bool, runtime.Object, error) {
		e := a.(clienttesting.UpdateActionImpl).Object
		f.written++
		return true, e, f.egresses.Update(e)
	})
	all := informers.NewSharedInformerFactory(f.core, 0)
	c, err := New(Config{
		Coil: coil, Core: f.core, Egresses: informed.Egresses(), Pools: informed.AddressPools(),
		Floating: &FloatingInformers{
			Claims: informed.AddressClaims(), Blocks: informed.AddressBlocks().Informer(),
			Policies: informed.EgressPolicies().Informer(), ClusterPolicies: informed.EgressClusterPolicies().Informer(),
		},
		Cluster: all, Routers: all, Accounts: all, Clients: all,
		Namespaces: cache.NewSharedIndexInformer(&cache.ListWatch{}, &metav1.PartialObjectMetadata{}, 0, cache.Indexers{}),
		Image:      egress.RouterImage{Name: "i", Port: 5555}, Recorder: f.events,
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Controller = c
	f.put(t, f.egresses, &v2.Egress{
		ObjectMeta: metav1.ObjectMeta{Namespace: nat.Namespace, Name: nat.Name, UID: "uid", Generation: 1},
		Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}, Replicas: 2,
			PodDisruptionBudget: &v2.EgressPDBSpec{MaxUnavailable: new(intstr.FromInt32(1))}},
	})
	return f
}

func (f *fixture) put(t *testing.T, in cache.Indexer, objects ...runtime.Object) {
	t.Helper()
	for _, o := range objects {
		if err := in.Update(o); err != nil {
			t.Fatal(err)
		}
	}
}

func (f *fixture) egress(t *testing.T) *v2.Egress {
	t.Helper()
	e, err := f.cfg.Egresses.Lister().Egresses(nat.Namespace).Get(nat.Name)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// ready fills the caches with a Deployment that has ready routers.
func (f *fixture) ready(t *testing.T) {
	t.Helper()
	d, err := egress.RouterDeployment(f.egress(t), f.cfg.Image)
	if err != nil {
		t.Fatal(err)
	}
	d.Status = appsv1.DeploymentStatus{Replicas: 2, ReadyReplicas: 2}
	f.put(t, f.cfg.Routers.Apps().V1().Deployments().Informer().GetIndexer(), d)
}

// condition syncs the objects, and returns a condition as text: nothing if it isn't there.
func (f *fixture) condition(t *testing.T, condition string) string {
	t.Helper()
	if err := f.syncObjects(t.Context(), nat); err != nil && len(f.fail) == 0 {
		t.Fatal(err)
	}
	c := meta.FindStatusCondition(f.egress(t).Status.Conditions, condition)
	if c == nil {
		return ""
	}
	return fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
}

// told returns the Events since the last call.
func (f *fixture) told() (all []string) {
	for len(f.events.Events) > 0 {
		all = append(all, <-f.events.Events)
	}
	return all
}

// An object that the API server refuses is told of, and keeps an Egress from being available that can't be
// without it.
func TestRefusedObjects(t *testing.T) {
	quota := func(resource string) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "nat", errors.New("exceeded quota"))
	}
	invalid := apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, "nat", nil)
	direct := func(t *testing.T, f *fixture) {
		e := f.egress(t).DeepCopy()
		e.Spec.Peering = v2.EgressPeeringDirect
		f.put(t, f.egresses, e)
	}
	service := func(t *testing.T, f *fixture) {
		s := egress.RouterService(f.egress(t), 5555)
		s.Labels = nil // which is to be mended
		f.put(t, f.cfg.Routers.Core().V1().Services().Informer().GetIndexer(), s)
	}
	account := func(t *testing.T, f *fixture) {
		a := egress.RouterServiceAccount("internet", []*v2.Egress{f.egress(t)})
		a.Labels = nil
		f.put(t, f.cfg.Accounts.Core().V1().ServiceAccounts().Informer().GetIndexer(), a)
	}
	none := func(*testing.T, *fixture) {}
	for _, tt := range []struct {
		name     string
		resource string
		err      error
		also     func(*testing.T, *fixture)
		ready    string // what Available is with ready routers
		starting string // and without
	}{
		{"a Service", "services", quota("services"), none,
			`False Refused: 2 of 2 routers are ready. The API server refuses Service nat: services "nat" is forbidden: exceeded quota`,
			`False Refused: No router is ready. The API server refuses Service nat: services "nat" is forbidden: exceeded quota`},
		{"an invalid Service", "services", invalid, none,
			`False Refused: 2 of 2 routers are ready. The API server refuses Service nat: Service "nat" is invalid`,
			`False Refused: No router is ready. The API server refuses Service nat: Service "nat" is invalid`},
		{"a Service that clients don't use", "services", quota("services"), direct,
			`True Refused: 2 of 2 routers are ready. The API server refuses Service nat: services "nat" is forbidden: exceeded quota`,
			`False Refused: No router is ready. The API server refuses Service nat: services "nat" is forbidden: exceeded quota`},
		{"a change of a Service", "services", quota("services"), service,
			`True Refused: 2 of 2 routers are ready. The API server refuses Service nat: services "nat" is forbidden: exceeded quota`,
			`False Refused: No router is ready. The API server refuses Service nat: services "nat" is forbidden: exceeded quota`},
		{"an account", "serviceaccounts", quota("serviceaccounts"), none,
			`False Refused: 2 of 2 routers are ready. The API server refuses ServiceAccount coil-egress: serviceaccounts "nat" is forbidden: exceeded quota`,
			`False Refused: No router is ready. The API server refuses ServiceAccount coil-egress: serviceaccounts "nat" is forbidden: exceeded quota`},
		{"a change of an account", "serviceaccounts", quota("serviceaccounts"), account,
			`True Refused: 2 of 2 routers are ready. The API server refuses ServiceAccount coil-egress: serviceaccounts "nat" is forbidden: exceeded quota`,
			`False Refused: No router is ready. The API server refuses ServiceAccount coil-egress: serviceaccounts "nat" is forbidden: exceeded quota`},
		{"a budget", "poddisruptionbudgets", quota("poddisruptionbudgets"), none,
			`True Refused: 2 of 2 routers are ready. The API server refuses PodDisruptionBudget nat: poddisruptionbudgets "nat" is forbidden: exceeded quota`,
			`False Refused: No router is ready. The API server refuses PodDisruptionBudget nat: poddisruptionbudgets "nat" is forbidden: exceeded quota`},
		{"a Deployment", "deployments", quota("deployments"), none,
			`True Refused: 2 of 2 routers are ready. The API server refuses Deployment nat: deployments "nat" is forbidden: exceeded quota`,
			`False Refused: No router is ready. The API server refuses Deployment nat: deployments "nat" is forbidden: exceeded quota`},
		{"a template", "deployments", invalid, none,
			`True RoutersReady: 2 of 2 routers are ready`,
			`False InvalidTemplate: No router is ready: Service "nat" is invalid`},
	} {
		for _, ready := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, ready %v", tt.name, ready), func(t *testing.T) {
				f, want, healthy := newFixture(t), tt.starting, "False NoRouterReady: No router is ready"
				tt.also(t, f)
				if ready {
					f.ready(t)
					want, healthy = tt.ready, "True RoutersReady: 2 of 2 routers are ready"
				}
				f.fail = map[string]error{tt.resource: tt.err}
				if got := f.condition(t, v2.EgressAvailable); got != want {
					t.Errorf("Available is\n%s, want\n%s", got, want)
				}
				if events := f.told(); strings.Contains(want, " Refused: ") && (len(events) != 1 || !strings.HasPrefix(events[0], "Warning Refused ")) {
					t.Errorf("Events %q, want one Warning Refused", events)
				}
				invalid := meta.FindStatusCondition(f.egress(t).Status.Conditions, v2.EgressInvalidTemplate) != nil

				// An error that says nothing about the object changes nothing.
				for _, err := range []error{
					apierrors.NewConflict(schema.GroupResource{Resource: tt.resource}, "nat", errors.New("changed")),
					apierrors.NewTimeoutError("slow", 1), apierrors.NewInternalError(errors.New("webhook")), errors.New("connection refused"),
				} {
					f.fail[tt.resource] = err
					if got := f.condition(t, v2.EgressAvailable); got != want {
						t.Errorf("after %v Available is\n%s, want\n%s", err, got, want)
					}
					if got := meta.FindStatusCondition(f.egress(t).Status.Conditions, v2.EgressInvalidTemplate) != nil; got != invalid {
						t.Errorf("after %v InvalidTemplate is there: %v, want %v", err, got, invalid)
					}
				}
				if events := f.told(); len(events) > 0 {
					t.Errorf("Events %q of what says nothing", events)
				}
				clear(f.fail)
				if got := f.condition(t, v2.EgressAvailable); got != healthy {
					t.Errorf("in the end Available is\n%s, want\n%s", got, healthy)
				}
			})
		}
	}
	t.Run("of what is refused, it is asked again", func(t *testing.T) {
		f := newFixture(t)
		f.fail["services"] = quota("services")
		if err := f.syncObjects(t.Context(), nat); !apierrors.IsForbidden(err) {
			t.Errorf("error %v, want that it is forbidden", err)
		}
	})
	t.Run("what says nothing from the first", func(t *testing.T) {
		f := newFixture(t)
		f.ready(t)
		f.fail["services"] = apierrors.NewInternalError(errors.New("webhook"))
		if got, want := f.condition(t, v2.EgressAvailable), "True RoutersReady: 2 of 2 routers are ready"; got != want {
			t.Errorf("Available is %s, want %s", got, want)
		}
	})
	t.Run("an Egress that was made again", func(t *testing.T) {
		f := newFixture(t)
		e := f.egress(t)
		f.fail["services"] = quota("services")
		f.condition(t, v2.EgressAvailable)
		if err := f.egresses.Delete(e); err != nil {
			t.Fatal(err)
		}
		if err := f.syncObjects(t.Context(), nat); err != nil {
			t.Fatal(err)
		}
		f.put(t, f.egresses, e)
		f.fail["services"] = errors.New("connection refused")
		if got, want := f.condition(t, v2.EgressAvailable), "False NoRouterReady: No router is ready"; got != want {
			t.Errorf("Available is %s, want %s", got, want)
		}
	})
}

// routerPod is a ready router.
func routerPod(ip string, port corev1.ContainerPort) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: nat.Namespace, Name: "a", UID: "1", Labels: plan.RouterLabels(nat.Name)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{
			{Name: "sidecar", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 1}}},
			{Name: v2.EgressContainerName, Ports: []corev1.ContainerPort{{Name: "other", ContainerPort: 2}, port}},
		}},
		Status: corev1.PodStatus{
			PodIPs:            []corev1.PodIP{{IP: ip}},
			Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "sidecar", ContainerID: "s"}, {Name: v2.EgressContainerName, ContainerID: "c"}},
		},
	}
}
