// Package upgrade runs this version of Coil and the one before on one cluster, in both orders, while pods come and go. It
// must not know what differs between them.
package upgrade

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	name  = "upgrade"
	tools = "localhost/coil-lab/tools:1"
)

// env is the cluster.
type env struct {
	*cluster.Cluster
	core kubernetes.Interface
	coil versioned.Interface

	mu sync.Mutex
	// given has the pod that has an address now.
	given map[string]string
}

// step installs some programs of a version.
type step struct {
	name    string
	version version
	without string // the kind of objects that stay as they are: DaemonSet or Deployment
}

// TestUpgrade: the programs of both versions work with each other, whichever were updated first; no running pod loses a
// packet; and the way back is as good.
func TestUpgrade(t *testing.T) {
	testkit.Need(t, testkit.Cluster)
	old, now := versions(t)
	controllers, nodes := "DaemonSet", "Deployment" // what isn't of the kind named is installed
	// Both mixtures are here: new controllers with old nodes, and old controllers with new nodes.
	steps := []step{
		{"controllers first", now, controllers},
		{"then nodes", now, ""},
		{"back: all at once", old, ""},
		{"nodes first", now, nodes},
	}
	perNode := 1
	if testkit.MigrateForm.Long() {
		perNode = 2
		steps = []step{
			{"controllers first", now, controllers},
			{"then nodes", now, ""},
			{"back: nodes first", old, nodes},
			{"back: then controllers", old, ""},
			{"nodes first", now, nodes},
			{"then controllers", now, ""},
			{"back: controllers first", old, controllers},
			{"back: then nodes", old, ""},
			{"all at once", now, ""},
			{"back: all at once", old, ""},
		}
	}

	begin := time.Now()
	e := start(t, old, now)
	standing := e.pods(t, "standing", perNode)
	t.Logf("the cluster: %v", time.Since(begin).Round(time.Second))
	var pings []*netlab.Pinger
	for _, p := range standing {
		for _, ip := range p.Status.PodIPs {
			for _, n := range e.Nodes() {
				pings = append(pings, testkit.Must(e.netns(t, n).Pings(fmt.Sprintf("%s from %s", p.Name, n), netip.MustParseAddr(ip.IP)))(t))
			}
		}
	}
	stop := e.churn(t)
	var addresses map[string]v2.AddressBlock
	left := false
	for i, s := range steps {
		begin := time.Now()
		e.install(t, s)
		e.runs(t, s)
		switch {
		case addresses == nil: // the first step brings the controllers that know floating addresses
			addresses = e.claim(t)
		case s.version == old && !left:
			e.leave(t)
			left = true
		}
		e.unchanged(t, s, addresses)
		// A pool whose blocks nobody has: the programs of both versions have to agree on a request.
		pool := fmt.Sprintf("step-%d", i)
		e.pool(t, pool, fmt.Sprintf("10.%d.0.0/24", 110+i), fmt.Sprintf("fd00:%d::/120", 110+i))
		made := e.pods(t, pool, perNode)
		for _, p := range made {
			for _, ip := range p.Status.PodIPs {
				for _, n := range e.Nodes() {
					if err := e.netns(t, n).Ping(netip.MustParseAddr(ip.IP), testkit.Timeout(5*time.Second)); err != nil {
						t.Errorf("%s: %s doesn't reach %s: %v", s.name, n, p.Name, err)
					}
				}
			}
		}
		e.remain(t, s, standing)
		t.Logf("%s: %v", s.name, time.Since(begin).Round(time.Second))
	}
	e.install(t, step{"the controllers of this version", now, "DaemonSet"})
	e.give(t)
	stop()
	for _, p := range pings {
		sent, answered, err := p.End()
		if err != nil || sent < 100 || answered != sent {
			t.Errorf("pings to %s: %d of %d were answered, %v", p, answered, sent, err)
		}
	}
}

// start starts a cluster with the old version, whose nodes have the images of both.
func start(t *testing.T, old, now version) *env {
	t.Helper()
	testkit.Check(t, cluster.Down(t.Context(), cluster.DefaultStateDir, name))
	t.Cleanup(func() {
		testkit.Check(t, cluster.Down(context.WithoutCancel(t.Context()), cluster.DefaultStateDir, name))
	})
	e := &env{given: map[string]string{}}
	e.Cluster = testkit.Must(cluster.Up(t.Context(), cluster.Options{
		Name: name, Nodes: 2, Images: []string{old.archive, now.archive}, Kustomize: []string{old.manifests(t, "")}, Log: os.Stderr,
	}))(t)
	e.core = testkit.Must(kubernetes.NewForConfig(e.RESTConfig()))(t)
	e.coil = testkit.Must(versioned.NewForConfig(e.RESTConfig()))(t)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, component := range []string{"coild", "coil-ipam-controller"} {
			out, err := e.Kubectl(context.WithoutCancel(t.Context()), "-n", "kube-system", "logs", "--prefix", "--tail=60", "-l", "app.kubernetes.io/component="+component)
			t.Logf("%s (%v):\n%s", component, err, out)
		}
	})
	e.pool(t, "standing", "10.90.0.0/24", "fd00:90::/120")
	e.pool(t, "churn", "10.89.0.0/24", "fd00:89::/120")
	testkit.Check(t, e.WaitReady(t.Context()), e.WaitWorkloads(t.Context(), "kube-system"))
	return e
}

func (e *env) netns(t *testing.T, node string) *netlab.NS {
	t.Helper()
	ns := testkit.Must(netlab.Open(testkit.Must(e.NetNS(node))(t)))(t)
	t.Cleanup(func() { ns.Close() })
	return ns
}

// pool makes a pool with blocks of two addresses, and a namespace that uses it.
func (e *env) pool(t *testing.T, pool, ipv4, ipv6 string) {
	t.Helper()
	testkit.Must(e.coil.CoilV2().AddressPools().Create(t.Context(), &v2.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: pool},
		Spec:       v2.AddressPoolSpec{BlockSizeBits: 1, Subnets: []v2.SubnetSet{{IPv4: &ipv4, IPv6: &ipv6}}},
	}, metav1.CreateOptions{}))(t)
	testkit.Must(e.core.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: pool, Annotations: map[string]string{v2.AnnotationPool: pool}},
	}, metav1.CreateOptions{}))(t)
}

// pods makes n pods on each node, and returns them when they run.
func (e *env) pods(t *testing.T, ns string, n int) []corev1.Pod {
	t.Helper()
	var pods []corev1.Pod
	for i, node := range slices.Repeat(e.Nodes(), n) {
		testkit.Check(t, e.make(t.Context(), ns, fmt.Sprintf("p-%d", i), node))
	}
	testkit.Eventually(t, time.Minute, "the pods of "+ns+" run", func() error {
		list, err := e.core.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		pods = list.Items
		for _, p := range pods {
			if !ready(&p) {
				return fmt.Errorf("%s isn't ready", p.Name)
			}
		}
		return nil
	})
	for _, p := range pods {
		if len(p.Status.PodIPs) != 2 {
			t.Errorf("%s/%s has the addresses %v, want one of each family", ns, p.Name, p.Status.PodIPs)
		}
	}
	return pods
}

func ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// make makes a pod, as soon as its namespace is ready for it.
func (e *env) make(ctx context.Context, ns, name, node string) error {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: ns},
		Spec: corev1.PodSpec{
			NodeName: node, TerminationGracePeriodSeconds: new(int64(0)), AutomountServiceAccountToken: new(false),
			Containers: []corev1.Container{{Name: "main", Image: tools, ImagePullPolicy: corev1.PullNever, Command: []string{"sleep", "86400"}}},
		},
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(10*time.Second))
	defer cancel()
	return testkit.Poll(ctx, 100*time.Millisecond, func() error {
		_, err := e.core.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{})
		return err
	})
}

// churn makes and deletes pods on each node until stop is called: one after the other, and in the long form on all nodes at
// once. Each has to run within a minute, with an address that nobody else has.
func (e *env) churn(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	made := map[string]int{}
	lanes := [][]string{e.Nodes()}
	if testkit.MigrateForm.Long() {
		lanes = slices.Collect(slices.Chunk(e.Nodes(), 1))
	}
	for _, nodes := range lanes {
		group.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				node := nodes[i%len(nodes)]
				if err := e.cycle(t.Context(), fmt.Sprintf("%s-%d", node, i), node); err != nil {
					t.Errorf("pod %d on %s: %v", i, node, err)
					return
				}
				e.mu.Lock()
				made[node]++
				e.mu.Unlock()
			}
		})
	}
	return func() {
		cancel()
		group.Wait()
		t.Logf("pods that came and went: %v", made)
		for _, node := range e.Nodes() {
			if made[node] < 10 {
				t.Errorf("%d pods came and went on %s, want at least 10", made[node], node)
			}
		}
	}
}

// cycle makes a pod, waits until it runs, and deletes it.
func (e *env) cycle(ctx context.Context, name, node string) error {
	const ns = "churn"
	if err := e.make(ctx, ns, name, node); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(time.Minute))
	defer cancel()
	var p *corev1.Pod
	err := testkit.Poll(ctx, 200*time.Millisecond, func() (err error) {
		if p, err = e.core.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{}); err == nil && !ready(p) {
			err = errors.New("it isn't ready")
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := e.take(p); err != nil {
		return err
	}
	e.release(p) // before the address can be another pod's
	if err := e.core.CoreV1().Pods(ns).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	return testkit.Poll(ctx, 200*time.Millisecond, func() error {
		_, err := e.core.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there: %w", errors.Join(err))
	})
}

// take notes the addresses of a pod that runs.
func (e *env) take(p *corev1.Pod) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ip := range p.Status.PodIPs {
		if other := e.given[ip.IP]; other != "" {
			return fmt.Errorf("%s is the address of %s, too", ip.IP, other)
		}
		e.given[ip.IP] = p.Name
	}
	return nil
}

// release forgets them.
func (e *env) release(p *corev1.Pod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ip := range p.Status.PodIPs {
		delete(e.given, ip.IP)
	}
}

// install installs a step's version. The way back keeps the newer definitions, as manifests/README.md says.
func (e *env) install(t *testing.T, s step) {
	t.Helper()
	args := []string{"apply", "-k", s.version.manifests(t, s.without)}
	if s.version.name == previousName {
		args = append(args, "--selector=app.kubernetes.io/name=coil")
	}
	testkit.Must(e.Kubectl(t.Context(), args...))(t)
	testkit.Check(t, e.WaitWorkloads(t.Context(), "kube-system"))
}

// runs checks that the programs of a step are of its version, and that none of their containers has restarted.
func (e *env) runs(t *testing.T, s step) {
	t.Helper()
	pods := testkit.Must(e.core.CoreV1().Pods("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=coil"}))(t)
	of := 0
	for _, p := range pods.Items {
		owner := metav1.GetControllerOf(&p)
		if p.DeletionTimestamp != nil || owner == nil || owner.Kind == s.without || s.without == "Deployment" && owner.Kind == "ReplicaSet" {
			continue
		}
		of++
		for _, c := range p.Spec.Containers {
			if c.Image != s.version.image() {
				t.Errorf("%s: container %s of pod %s has image %s, want %s", s.name, c.Name, p.Name, c.Image, s.version.image())
			}
		}
		for _, c := range p.Status.ContainerStatuses {
			if c.RestartCount > 0 {
				out, err := e.Kubectl(t.Context(), "-n", "kube-system", "logs", "--previous", "--tail=20", p.Name)
				t.Errorf("%s: container %s of pod %s has restarted %d times (%v):\n%s", s.name, c.Name, p.Name, c.RestartCount, err, out)
			}
		}
	}
	if of == 0 {
		t.Errorf("%s: no pod of Coil was found", s.name)
	}
}

// remain checks that the record of each node has the pods that were there before, with their addresses.
func (e *env) remain(t *testing.T, s step, standing []corev1.Pod) {
	t.Helper()
	for _, p := range standing {
		now := testkit.Must(e.core.CoreV1().Pods(p.Namespace).Get(t.Context(), p.Name, metav1.GetOptions{}))(t)
		if !slices.Equal(now.Status.PodIPs, p.Status.PodIPs) || now.UID != p.UID {
			t.Errorf("%s: %s has %v, had %v", s.name, p.Name, now.Status.PodIPs, p.Status.PodIPs)
		}
		sql := fmt.Sprintf("SELECT ipv4 || ' ' || ipv6 FROM pods WHERE namespace = '%s' AND name = '%s' AND state = 'attached'", p.Namespace, p.Name)
		out := testkit.Must(e.Exec(t.Context(), p.Spec.NodeName, "sqlite3", "-readonly", "/var/lib/coil/coild.db", sql))(t)
		if got, want := strings.TrimSpace(string(out)), p.Status.PodIPs[0].IP+" "+p.Status.PodIPs[1].IP; got != want {
			t.Errorf("%s: the record of %s has %q, want %q", s.name, p.Name, got, want)
		}
	}
}
