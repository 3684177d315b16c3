// Package cluster tests Coil as a user has it: installed by its manifests on a
// cluster of real nodes. It owns the cases that need kubelet and a container
// runtime; whatever a smaller test can show is tested there.
package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
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
	"github.com/coil-net/coil/integration/audit"
	"github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

const name = "e2e"

// tools is the image of the tests' pods: busybox.
const tools = "localhost/coil-lab/tools:1"

// env is the cluster of this package's tests, and clients for it.
type env struct {
	*cluster.Cluster
	core kubernetes.Interface
	coil versioned.Interface
}

// shared starts the cluster at the first test that needs it.
var shared = sync.OnceValues(func() (env, error) {
	ctx := context.Background()
	if err := cluster.Down(ctx, cluster.DefaultStateDir, name); err != nil {
		return env{}, fmt.Errorf("remove what an earlier run left: %w", err)
	}
	var err error
	if auditLog, err = audit.New(auditDir, audited...); err != nil {
		return env{}, err
	}
	opts := cluster.Options{Name: name, Nodes: 3, IPTablesProxies: 1, Log: os.Stderr, APIServerArgs: auditLog.APIServerArgs(),
		Kustomize: []string{"testdata/hasty"}}
	if err := opts.AddCoil(ctx); err != nil {
		return env{}, err
	}
	return start(ctx, opts)
})

// start starts a cluster, and makes clients for it.
func start(ctx context.Context, opts cluster.Options) (env, error) {
	c, err := cluster.Up(ctx, opts)
	if err != nil {
		return env{}, err
	}
	e := env{Cluster: c}
	if e.core, err = kubernetes.NewForConfig(c.RESTConfig()); err != nil {
		return env{}, err
	}
	if e.coil, err = versioned.NewForConfig(c.RESTConfig()); err != nil {
		return env{}, err
	}
	return e, nil
}

// auditDir has the log of the API server's audit.
var (
	auditDir string
	auditLog audit.Log
)

// audited are the ServiceAccounts of the programs that run on each node.
var audited = []string{"coild", "coil-router"}

func TestMain(m *testing.M) {
	var err error
	if auditDir, err = os.MkdirTemp("", "coil-cluster-test"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// Parallel tests wait most of the time: for kubelets, and for each cool-down.
	_ = flag.Set("test.parallel", "4")
	code := m.Run()
	if slices.Contains(strings.Split(os.Getenv("COIL_TEST_TIERS"), ","), string(testkit.Cluster)) {
		if err := cluster.Down(context.Background(), cluster.DefaultStateDir, name); err != nil {
			fmt.Fprintln(os.Stderr, "remove the cluster:", err)
			code = 1
		}
	}
	os.RemoveAll(auditDir)
	os.Exit(code)
}

// use returns the cluster, and shows Coil's logs if the test fails.
func use(t *testing.T) env {
	t.Helper()
	testkit.Need(t, testkit.Cluster)
	e, err := shared()
	if err != nil {
		t.Fatalf("start the cluster: %v", err)
	}
	e.showLogs(t)
	return e
}

// showLogs shows what Coil says at the end of a test that failed.
func (e env) showLogs(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		ctx := context.WithoutCancel(t.Context())
		for _, args := range [][]string{
			{"get", "pods", "-A", "-o", "wide"},
			{"get", "addresspools,addressblocks,blockrequests"},
			{"get", "events", "-A"},
			{"-n", "kube-system", "logs", "-l", "app.kubernetes.io/name=coil", "--all-containers", "--prefix", "--tail=60"},
		} {
			out, err := e.Kubectl(ctx, args...)
			t.Logf("kubectl %s\n%s%v", strings.Join(args, " "), out, err)
		}
	})
}

// pool makes an AddressPool of its own for a test, and a namespace that uses it;
// both go at the end of the test, the blocks first.
func (e env) pool(t *testing.T, blockSizeBits int32, ipv4, ipv6 string) string {
	t.Helper()
	ns := namespaceName(t)
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: ns}, Spec: v2.AddressPoolSpec{
		BlockSizeBits: blockSizeBits, Subnets: []v2.SubnetSet{{IPv4: &ipv4, IPv6: &ipv6}},
	}}
	if _, err := e.coil.CoilV2().AddressPools().Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := e.coil.CoilV2().AddressPools().Delete(ctx, ns, metav1.DeleteOptions{}); err != nil {
			t.Errorf("delete AddressPool %s: %v", ns, err)
		}
	})
	e.namespace(t, ns, ns)
	return ns
}

// namespace makes a namespace that uses a pool, or the default one.
func (e env) namespace(t *testing.T, ns, pool string) {
	t.Helper()
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}
	if pool != "" {
		n.Annotations = map[string]string{v2.AnnotationPool: pool}
	}
	if _, err := e.core.CoreV1().Namespaces().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := e.core.CoreV1().Namespaces().Delete(ctx, ns, metav1.DeleteOptions{}); err != nil {
			t.Errorf("delete Namespace %s: %v", ns, err)
			return
		}
		testkit.Eventually(t, 2*time.Minute, "namespace "+ns+" is gone", func() error {
			_, err := e.core.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return fmt.Errorf("it is still there: %w", errors.Join(err))
		})
	})
}

func namespaceName(t *testing.T) string {
	return strings.ToLower(strings.NewReplacer("Test", "", "/", "-", "_", "-").Replace(t.Name()))
}

// start makes pods on the given nodes, round robin, without waiting for them.
func (e env) start(t *testing.T, ns, prefix string, n int, nodes ...string) {
	t.Helper()
	for i := range n {
		grace := int64(0)
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", prefix, i), Namespace: ns},
			Spec: corev1.PodSpec{
				NodeName:                      nodes[i%len(nodes)],
				TerminationGracePeriodSeconds: &grace,
				AutomountServiceAccountToken:  new(bool),
				Containers: []corev1.Container{{
					Name: "main", Image: tools, ImagePullPolicy: corev1.PullNever, Command: []string{"sleep", "86400"},
				}},
			},
		}
		testkit.Eventually(t, 10*time.Second, "pod "+p.Name+" is created", func() error {
			// The namespace's ServiceAccount comes a moment after the namespace.
			_, err := e.core.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{})
			return err
		})
	}
}

// running waits until all pods of a namespace run, and returns them.
func (e env) running(t *testing.T, ns string, timeout time.Duration) []corev1.Pod {
	t.Helper()
	var pods []corev1.Pod
	testkit.Eventually(t, timeout, "all pods of "+ns+" run", func() error {
		l, err := e.core.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		pods = l.Items
		var waiting []string
		for _, p := range pods {
			if !isReady(&p) {
				waiting = append(waiting, p.Name)
			}
		}
		if len(waiting) > 0 {
			return fmt.Errorf("%d of %d don't: %v", len(waiting), len(pods), waiting[:min(5, len(waiting))])
		}
		return nil
	})
	return pods
}

func isReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// event waits for an Event about a pod whose text has all the words.
func (e env) event(t *testing.T, ns, pod string, timeout time.Duration, words ...string) {
	t.Helper()
	testkit.Eventually(t, timeout, fmt.Sprintf("an Event of pod %s says %q", pod, words), func() error {
		l, err := e.core.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
		if err != nil {
			return err
		}
		var texts []string
		for _, ev := range l.Items {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(ev.Message, w) }) {
				return nil
			}
			texts = append(texts, ev.Message)
		}
		return fmt.Errorf("they say %q", texts)
	})
}

// ping lets a pod ping addresses and returns those that did not answer.
func (e env) ping(t *testing.T, from *corev1.Pod, to []string) []string {
	t.Helper()
	var script []string
	for _, ip := range to {
		script = append(script, fmt.Sprintf("(ping -q -c1 -W5 %s >/dev/null || echo %s) &", ip, ip))
	}
	out, err := e.Kubectl(t.Context(), "-n", from.Namespace, "exec", from.Name, "--", "sh", "-c", strings.Join(script, "\n")+"\nwait")
	if err != nil {
		t.Fatalf("exec in pod %s: %v", from.Name, err)
	}
	return strings.Fields(string(out))
}

// ips returns the addresses of pods.
func ips(pods ...corev1.Pod) []string {
	var all []string
	for _, p := range pods {
		for _, ip := range p.Status.PodIPs {
			all = append(all, ip.IP)
		}
	}
	return all
}

// blocksOf returns the blocks of a pool.
func (e env) blocksOf(t *testing.T, pool string) ([]v2.AddressBlock, error) {
	l, err := e.coil.CoilV2().AddressBlocks().List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelPool + "=" + pool})
	if err != nil {
		return nil, err
	}
	return l.Items, nil
}

// allocations returns what coild recorded on a node, a line per address that is in use.
func (e env) allocations(t *testing.T, node, where string) []string {
	t.Helper()
	out, err := e.Exec(t.Context(), node, "sqlite3", "-readonly", filepath.Join("/var/lib/coil", "coild.db"),
		"SELECT ipv4 || ' ' || ipv6 || ' ' || namespace || '/' || name FROM pods WHERE state NOT IN ('cooling', 'free') AND "+where)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for l := range strings.Lines(string(out)) {
		lines = append(lines, strings.TrimSpace(l))
	}
	slices.Sort(lines)
	return lines
}
