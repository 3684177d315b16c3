package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/egresscontroller"
	"github.com/coil-net/coil/pkg/testkit"
)

// egressCluster is an API server on which the tests of coil-egress-controller run the
// program with its own rights, one test after the other.
type egressCluster struct {
	*cluster
	ns string // the namespace of the test
}

// routerImage is that of the program's own pod.
const routerImage = "example.org/coil:own"

var ownPod = types.NamespacedName{Namespace: "kube-system", Name: "coil-egress-controller-0"}

// egressServer starts the API server of these tests.
var egressServer = sync.OnceValues(func() (*controlplane.API, error) {
	api, err := startEgressServer(context.Background())
	if err == nil {
		servers.mu.Lock()
		servers.all = append(servers.all, api)
		servers.mu.Unlock()
	}
	return api, err
})

// startEgressServer starts an API server that has what the program needs.
func startEgressServer(ctx context.Context) (*controlplane.API, error) {
	api, err := controlplane.StartAPI(ctx, controlplane.Options{
		Log:           os.Stderr,
		APIServerArgs: []string{"--enable-admission-plugins=OwnerReferencesPermissionEnforcement"},
	})
	if err != nil {
		return nil, err
	}
	core, err := kubernetes.NewForConfig(api.RESTConfig())
	if err == nil {
		_, err = core.CoreV1().Pods(ownPod.Namespace).Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: ownPod.Name},
			Spec: corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{
				{Name: "sidecar", Image: "other"},
				{Name: "coil-egress-controller", Image: routerImage, ImagePullPolicy: corev1.PullNever},
			}},
		}, metav1.CreateOptions{})
	}
	for _, file := range []string{"coil-egress-controller.yaml", "coil-egress-controller-ipam.yaml", "coil-egress.yaml", "coil-ipam-controller.yaml"} {
		if err == nil {
			err = installRBAC(ctx, api.RESTConfig(), file)
		}
	}
	if err == nil {
		err = installCRDs(ctx, api.RESTConfig(), readCRDs)
	}
	if err != nil {
		return nil, errors.Join(err, api.Stop())
	}
	return api, nil
}

// newEgressCluster returns the cluster of most tests, with a namespace for this one.
func newEgressCluster(t testing.TB) *egressCluster {
	t.Helper()
	testkit.Need(t, testkit.APIServer)
	api, err := egressServer()
	if err != nil {
		t.Fatalf("start the API server: %v", err)
	}
	return egressClusterOf(t, api)
}

func egressClusterOf(t testing.TB, api *controlplane.API) *egressCluster {
	t.Helper()
	c := &egressCluster{cluster: &cluster{api: api, admin: api.RESTConfig()}, ns: fresh("egress")}
	c.coil = testkit.Must(versioned.NewForConfig(c.admin))(t)
	c.core = testkit.Must(kubernetes.NewForConfig(c.admin))(t)
	c.namespace(t, c.ns, nil)
	return c
}

func (c *egressCluster) namespace(t testing.TB, name string, labels map[string]string) {
	t.Helper()
	testkit.Must(c.core.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		// Egresses and pods of one test are none of the next one's business.
		ctx := context.WithoutCancel(t.Context())
		grace := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
		if err := errors.Join(
			c.coil.CoilV2().EgressPolicies(name).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
			c.coil.CoilV2().Egresses(name).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
			c.coil.CoilV2().AddressClaims(name).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
			c.core.CoreV1().Pods(name).DeleteCollection(ctx, grace, metav1.ListOptions{}),
		); err != nil {
			t.Error(err)
		}
	})
}

// account returns a configuration with the rights of coil-egress-controller.
func (c *egressCluster) account(t testing.TB) *rest.Config {
	t.Helper()
	cfg := testkit.Must(c.api.UserConfig("system:serviceaccount:kube-system:coil-egress-controller",
		"system:serviceaccounts", "system:serviceaccounts:kube-system"))(t)
	cfg.QPS = -1
	return cfg
}

func egressOptions() *egresscontroller.Options {
	return &egresscontroller.Options{
		PodNamespace: ownPod.Namespace, PodName: ownPod.Name, EgressPort: 5555, EnableIPAM: true, Options: election,
	}
}

// start runs the program until the returned function is called, at the latest when the test ends.
func (c *egressCluster) start(t testing.TB) (stop func()) {
	t.Helper()
	return c.startWith(t, c.account(t), egressOptions())
}

// startCounting runs the program with a short CountEvery: a status is written after seconds if nothing but numbers has changed.
func (c *egressCluster) startCounting(t testing.TB) {
	t.Helper()
	o := egressOptions()
	o.CountEvery = 2 * time.Second
	c.startWith(t, c.account(t), o)
}

func (c *egressCluster) startWith(t testing.TB, cfg *rest.Config, o *egresscontroller.Options) (stop func()) {
	t.Helper()
	return testkit.Background(context.WithoutCancel(t.Context()), t, func(ctx context.Context) error { return egresscontroller.Run(ctx, cfg, o) })
}

// egress makes an Egress from the YAML of its spec.
func (c *egressCluster) egress(t testing.TB, name, spec string) *v2.Egress {
	t.Helper()
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.EgressSpec{Replicas: 1}}
	testkit.Check(t, yaml.UnmarshalStrict([]byte(spec), &e.Spec))
	return testkit.Must(c.coil.CoilV2().Egresses(c.ns).Create(t.Context(), e, metav1.CreateOptions{}))(t)
}

// change merges YAML into an Egress.
func (c *egressCluster) change(t testing.TB, name, patch string) {
	t.Helper()
	json := testkit.Must(yaml.YAMLToJSON([]byte(patch)))(t)
	testkit.Must(c.coil.CoilV2().Egresses(c.ns).Patch(t.Context(), name, types.MergePatchType, json, metav1.PatchOptions{}))(t)
}

// condition waits until a condition of an Egress has a status and a reason, and returns it.
func (c *egressCluster) condition(t testing.TB, name, condition string, status metav1.ConditionStatus, reason string) (got metav1.Condition) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%s has %s %s for %s", name, condition, status, reason), func() error {
		e, err := c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		is := meta.FindStatusCondition(e.Status.Conditions, condition)
		if is == nil || is.Status != status || is.Reason != reason || e.Status.ObservedGeneration != e.Generation || is.ObservedGeneration != e.Generation {
			return fmt.Errorf("generation %d, status %+v", e.Generation, e.Status)
		}
		got = *is
		return nil
	})
	return got
}

// deployment waits until the Deployment of an Egress passes a check.
func (c *egressCluster) deployment(t testing.TB, name, what string, check func(*appsv1.Deployment) error) *appsv1.Deployment {
	t.Helper()
	var d *appsv1.Deployment
	testkit.Eventually(t, 20*time.Second, "Deployment "+name+": "+what, func() (err error) {
		if d, err = c.core.AppsV1().Deployments(c.ns).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		return check(d)
	})
	return d
}

func exists[T any](T) error { return nil }

// client makes a pod that names Egresses of the test's namespace, with addresses.
func (c *egressCluster) client(t testing.TB, ns, name, egresses string, addrs ...string) *corev1.Pod {
	t.Helper()
	return testkit.Must(c.tryClient(t.Context(), ns, name, egresses, addrs...))(t)
}

func (c *egressCluster) tryClient(ctx context.Context, ns, name, egresses string, addrs ...string) (*corev1.Pod, error) {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	if egresses != "" {
		p.Annotations = map[string]string{v2.AnnotationEgressPrefix + c.ns: egresses}
	}
	p, err := c.core.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{})
	if err != nil || len(addrs) == 0 {
		return p, err
	}
	return c.setStatus(ctx, p, corev1.PodRunning, addrs...)
}

// setStatus does what kubelet does.
func (c *egressCluster) setStatus(ctx context.Context, p *corev1.Pod, phase corev1.PodPhase, addrs ...string) (*corev1.Pod, error) {
	p = p.DeepCopy()
	p.Status.Phase, p.Status.PodIPs, p.Status.PodIP = phase, nil, ""
	for i, a := range addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a})
		if i == 0 {
			p.Status.PodIP = a
		}
	}
	return c.core.CoreV1().Pods(p.Namespace).UpdateStatus(ctx, p, metav1.UpdateOptions{})
}

// kill deletes a pod at once.
func (c *egressCluster) kill(t testing.TB, p *corev1.Pod) {
	t.Helper()
	testkit.Check(t, c.core.CoreV1().Pods(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
}

// slices returns the EndpointSlices with clients of an Egress.
func (c *egressCluster) slices(t testing.TB, egress string) []discoveryv1.EndpointSlice {
	t.Helper()
	return testkit.Must(c.core.DiscoveryV1().EndpointSlices(c.ns).List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelEgress + "=" + egress}))(t).Items
}

// clientsOf returns "pod address" of each client of an Egress, with the UID of its pod.
func (c *egressCluster) clientsOf(t testing.TB, egress string) map[string]types.UID {
	t.Helper()
	got := map[string]types.UID{}
	for _, s := range c.slices(t, egress) {
		for _, ep := range s.Endpoints {
			got[ep.TargetRef.Name+" "+ep.Addresses[0]] = ep.TargetRef.UID
		}
	}
	return got
}

// requireClients waits until an Egress has exactly these clients, given as "pod address".
func (c *egressCluster) requireClients(t testing.TB, egress string, want ...string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("clients of %s are %q", egress, want), func() error {
		got := c.clientsOf(t, egress)
		for _, w := range want {
			if _, ok := got[w]; !ok {
				return fmt.Errorf("clients %v", got)
			}
		}
		if len(got) != len(want) {
			return fmt.Errorf("clients %v", got)
		}
		return nil
	})
}

// recorder notes the writes of a program, Leases and Events apart.
type recorder struct {
	mu     sync.Mutex
	writes []string
}

func (r *recorder) wrap(cfg *rest.Config) *rest.Config {
	return intercept(cfg, func(req *http.Request, next http.RoundTripper) (*http.Response, error) {
		if req.Method != http.MethodGet && !strings.Contains(req.URL.Path, "/leases") && !strings.Contains(req.URL.Path, "/events") {
			r.mu.Lock()
			r.writes = append(r.writes, req.Method+" "+req.URL.Path)
			r.mu.Unlock()
		}
		return next.RoundTrip(req)
	})
}

// take returns the writes since the last call.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.writes
	r.writes = nil
	return w
}

// reasons returns the reasons of Events about an object.
func (c *egressCluster) reasons(t testing.TB, ns, name string) map[string]int32 {
	t.Helper()
	out := map[string]int32{}
	for _, e := range testkit.Must(c.core.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name}))(t).Items {
		out[e.Reason] += max(e.Count, 1)
	}
	return out
}

func notFound(err error, what string) error {
	if err == nil {
		return errors.New(what + " is there")
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
