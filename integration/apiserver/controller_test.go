package apiserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/generated/informers/externalversions"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/ipamcontroller"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/kube/leader"
	"github.com/coil-net/coil/pkg/testkit"
)

// cluster is an API server on which the tests of coil-ipam-controller run the program
// with its own rights, one test after the other.
type cluster struct {
	api   *controlplane.API
	admin *rest.Config
	coil  versioned.Interface
	core  kubernetes.Interface
}

// ipamServer starts the API server of these tests; the controller looks at all
// objects, so it isn't that of the other tests.
var ipamServer = sync.OnceValues(func() (*controlplane.API, error) {
	api, err := controlplane.StartAPI(context.Background(), controlplane.Options{
		Log: os.Stderr,
		// Where this plugin is on, blocks need a right on the finalizers of their pool.
		APIServerArgs: []string{"--enable-admission-plugins=OwnerReferencesPermissionEnforcement"},
	})
	if err != nil {
		return nil, err
	}
	servers.mu.Lock()
	servers.all = append(servers.all, api)
	servers.mu.Unlock()
	return api, errors.Join(
		installCRDs(context.Background(), api.RESTConfig(), readCRDs),
		installRBAC(context.Background(), api.RESTConfig(), "coil-ipam-controller.yaml"),
	)
})

// ipamCluster returns an empty cluster. The objects that the test makes are removed when it ends.
func ipamCluster(t testing.TB) *cluster {
	t.Helper()
	testkit.Need(t, testkit.APIServer)
	api, err := ipamServer()
	if err != nil {
		t.Fatalf("start the API server: %v", err)
	}
	c := &cluster{api: api, admin: api.RESTConfig()}
	c.coil = testkit.Must(versioned.NewForConfig(c.admin))(t)
	c.core = testkit.Must(kubernetes.NewForConfig(c.admin))(t)
	c.clean(t)
	return c
}

// installRBAC creates the objects of a file of manifests/rbac.
func installRBAC(ctx context.Context, cfg *rest.Config, file string) error {
	root, err := build.Root()
	if err != nil {
		return err
	}
	f, err := os.Open(filepath.Join(root, "manifests/rbac", file))
	if err != nil {
		return err
	}
	defer f.Close()
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	docs := utilyaml.NewYAMLReader(bufio.NewReader(f))
	for {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		obj, _, err := scheme.Codecs.UniversalDeserializer().Decode(doc, nil, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := createRBAC(ctx, client, obj); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
}

func createRBAC(ctx context.Context, c kubernetes.Interface, obj runtime.Object) (err error) {
	switch o := obj.(type) {
	case *corev1.ServiceAccount:
		_, err = c.CoreV1().ServiceAccounts(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
	case *rbacv1.ClusterRole:
		_, err = c.RbacV1().ClusterRoles().Create(ctx, o, metav1.CreateOptions{})
	case *rbacv1.ClusterRoleBinding:
		_, err = c.RbacV1().ClusterRoleBindings().Create(ctx, o, metav1.CreateOptions{})
	case *rbacv1.Role:
		_, err = c.RbacV1().Roles(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
	case *rbacv1.RoleBinding:
		_, err = c.RbacV1().RoleBindings(o.Namespace).Create(ctx, o, metav1.CreateOptions{})
	case *admissionv1.ValidatingAdmissionPolicy:
		_, err = c.AdmissionregistrationV1().ValidatingAdmissionPolicies().Create(ctx, o, metav1.CreateOptions{})
	case *admissionv1.ValidatingAdmissionPolicyBinding:
		_, err = c.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Create(ctx, o, metav1.CreateOptions{})
	default:
		return fmt.Errorf("unexpected %T", obj)
	}
	return err
}

// serviceAccount returns a configuration with the rights of coil-ipam-controller.
func (c *cluster) serviceAccount(t testing.TB) *rest.Config {
	t.Helper()
	cfg := testkit.Must(c.api.UserConfig("system:serviceaccount:kube-system:coil-ipam-controller",
		"system:serviceaccounts", "system:serviceaccounts:kube-system"))(t)
	cfg.WarningHandler = rest.NoWarnings{} // one about the name of the finalizer in each answer
	return cfg
}

// options are those of the tests: no ports, and short times.
func options() *ipamcontroller.Options {
	return &ipamcontroller.Options{
		GCInterval: time.Hour, Quarantine: 10 * time.Minute, Options: election,
	}
}

// election gives the lease back at the end, so that the next run need not wait for its end.
var election = leading.Options{Election: leader.Election{
	Namespace: "kube-system", LeaseDuration: 30 * time.Second, RenewDeadline: 20 * time.Second, RetryPeriod: 300 * time.Millisecond,
}}

// run runs the program until the returned function is called, at the latest when the test ends.
func (c *cluster) run(t testing.TB, cfg *rest.Config, o *ipamcontroller.Options) (stop func()) {
	t.Helper()
	return testkit.Background(t.Context(), t, func(ctx context.Context) error { return ipamcontroller.Run(ctx, cfg, o) })
}

// node makes a Node.
func (c *cluster) node(t testing.TB, name string) *corev1.Node {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("4096")} // the most that count
	return testkit.Must(c.core.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}))(t)
}

// pool makes a pool of blocks of 2^bits addresses.
func (c *cluster) pool(t testing.TB, name string, bits int32, subnets ...v2.SubnetSet) *v2.AddressPool {
	t.Helper()
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{BlockSizeBits: bits, Subnets: subnets}}
	return testkit.Must(c.coil.CoilV2().AddressPools().Create(t.Context(), p, metav1.CreateOptions{}))(t)
}

func v4(cidr string) v2.SubnetSet           { return v2.SubnetSet{IPv4: &cidr} }
func dual(cidr4, cidr6 string) v2.SubnetSet { return v2.SubnetSet{IPv4: &cidr4, IPv6: &cidr6} }

// ask makes a BlockRequest as coild does.
func (c *cluster) ask(t testing.TB, name string, n *corev1.Node, pool string) *v2.BlockRequest {
	t.Helper()
	return testkit.Must(c.tryAsk(t.Context(), name, n, pool))(t)
}

func (c *cluster) tryAsk(ctx context.Context, name string, n *corev1.Node, pool string) (*v2.BlockRequest, error) {
	return c.coil.CoilV2().BlockRequests().Create(ctx, &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{v2.LabelNode: n.Name},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}},
		},
		Spec: v2.BlockRequestSpec{NodeName: n.Name, PoolName: pool},
	}, metav1.CreateOptions{})
}

// answer waits for the answer of a request.
func (c *cluster) answer(t testing.TB, name string) *v2.BlockRequest {
	t.Helper()
	var r *v2.BlockRequest
	testkit.Eventually(t, 20*time.Second, "answer of "+name, func() (err error) {
		if r, err = c.coil.CoilV2().BlockRequests().Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if len(r.Status.Conditions) == 0 {
			return errors.New("no condition")
		}
		return nil
	})
	return r
}

func failed(r *v2.BlockRequest) *v2.BlockRequestCondition {
	for i, c := range r.Status.Conditions {
		if c.Type == v2.BlockRequestFailed && c.Status == corev1.ConditionTrue {
			return &r.Status.Conditions[i]
		}
	}
	return nil
}

func (c *cluster) block(t testing.TB, name string) *v2.AddressBlock {
	t.Helper()
	return testkit.Must(c.coil.CoilV2().AddressBlocks().Get(t.Context(), name, metav1.GetOptions{}))(t)
}

func (c *cluster) blocksOf(t testing.TB, pool string) []v2.AddressBlock {
	t.Helper()
	return testkit.Must(c.coil.CoilV2().AddressBlocks().List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelPool + "=" + pool}))(t).Items
}

// drop removes a block as its coild does.
func (c *cluster) drop(ctx context.Context, b *v2.AddressBlock) error {
	blocks := c.coil.CoilV2().AddressBlocks()
	err := blocks.Delete(ctx, b.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &b.UID}})
	if err == nil {
		_, err = blocks.Patch(ctx, b.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// clean removes what a test has made. No controller runs any more.
func (c *cluster) clean(t testing.TB) {
	t.Helper()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		bs, err := c.coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		err = c.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		for i := range bs.Items {
			err = errors.Join(err, c.drop(ctx, &bs.Items[i]))
		}
		ps, e := c.coil.CoilV2().AddressPools().List(ctx, metav1.ListOptions{})
		err = errors.Join(err, e)
		for _, p := range ps.Items {
			_, e := c.coil.CoilV2().AddressPools().Patch(ctx, p.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
			err = errors.Join(err, e)
		}
		if err := errors.Join(err,
			c.coil.CoilV2().AddressPools().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
			c.coil.CoilV2().BlockRequests().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
			c.core.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
		); err != nil {
			t.Error(err)
		}
	})
}

// fakeCoilds does what coild does to blocks that pods don't use: it lets go of those
// that are being deleted.
func (c *cluster) fakeCoilds(t testing.TB) {
	t.Helper()
	f := externalversions.NewSharedInformerFactory(c.coil, 0)
	letGo := func(obj any) {
		if b, ok := obj.(*v2.AddressBlock); ok && b.DeletionTimestamp != nil {
			if err := c.drop(t.Context(), b); err != nil && t.Context().Err() == nil {
				t.Errorf("let go of %s: %v", b.Name, err)
			}
		}
	}
	if _, err := f.Coil().V2().AddressBlocks().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: letGo, UpdateFunc: func(_, obj any) { letGo(obj) },
	}); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	f.Start(stop)
	t.Cleanup(func() { close(stop); f.Shutdown() })
}

// requireOneBlockEach fails the test unless each request has the answer Complete, there
// is exactly one block for each and none else, and no address is in two blocks.
func (c *cluster) requireOneBlockEach(t testing.TB, within time.Duration, requests ...string) {
	t.Helper()
	testkit.Eventually(t, within, "one block for each request", func() error {
		rs, err := c.coil.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		bs, err := c.coil.CoilV2().AddressBlocks().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		return oneBlockEach(rs.Items, bs.Items, requests)
	})
}

func oneBlockEach(rs []v2.BlockRequest, bs []v2.AddressBlock, requests []string) error {
	unanswered := slices.Clone(requests)
	blockOf := map[types.UID]string{}
	for _, r := range rs {
		if r.Status.AddressBlockName != "" && failed(&r) == nil {
			blockOf[r.UID] = r.Status.AddressBlockName
			unanswered = slices.DeleteFunc(unanswered, func(n string) bool { return n == r.Name })
		}
	}
	if len(unanswered) > 0 {
		return fmt.Errorf("%d of %d requests have no block: %q...", len(unanswered), len(requests), unanswered[0])
	}
	if len(bs) != len(requests) {
		return fmt.Errorf("%d blocks for %d requests", len(bs), len(requests))
	}
	seen := map[netip.Addr]string{}
	for _, b := range bs {
		if want := blockOf[types.UID(b.Labels[v2.LabelRequest])]; want != b.Name {
			return fmt.Errorf("block %s was made for a request whose block is %q", b.Name, want)
		}
		for _, cidr := range []*string{b.IPv4, b.IPv6} {
			if cidr == nil {
				continue
			}
			p := netip.MustParsePrefix(*cidr)
			for a := p.Addr(); p.Contains(a); a = a.Next() {
				if other, ok := seen[a]; ok {
					return fmt.Errorf("%s is in blocks %s and %s", a, other, b.Name)
				}
				seen[a] = b.Name
			}
		}
	}
	return nil
}

// condition returns a condition of a pool.
func (c *cluster) condition(t testing.TB, pool, condition string) (metav1.Condition, error) {
	p, err := c.coil.CoilV2().AddressPools().Get(t.Context(), pool, metav1.GetOptions{})
	if err != nil {
		return metav1.Condition{}, err
	}
	got := meta.FindStatusCondition(p.Status.Conditions, condition)
	if got == nil {
		return metav1.Condition{}, fmt.Errorf("pool %s has no condition %s", pool, condition)
	}
	return *got, nil
}

// roundTripper is a function as an http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// intercept returns cfg with f around each request; f calls next.
func intercept(cfg *rest.Config, f func(r *http.Request, next http.RoundTripper) (*http.Response, error)) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) { return f(r, next) })
	})
	return cfg
}

// isWrite says whether a request has the method and is for one or any object of a resource.
func isWrite(r *http.Request, method, resource string) bool {
	return r.Method == method && strings.Contains(r.URL.Path, "/"+resource)
}

// stoppableBody is the body of a watch that says nothing more once stop is set.
type stoppableBody struct {
	io.ReadCloser
	stop *atomic.Bool
}

func (b *stoppableBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.stop.Load() {
		return 0, io.EOF
	}
	return n, err
}
