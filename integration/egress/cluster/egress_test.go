package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	lab "github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node/routerhealth"
	"github.com/coil-net/coil/pkg/testkit"
)

// Names in testdata/egress.yaml.
const (
	namespace = "internet"
	egress    = "nat"
)

// site is the cluster and the network beyond it.
type site struct {
	*lab.Cluster
	core kubernetes.Interface
	coil versioned.Interface
}

// scaler wants two routers whatever they have to do, and needs no metrics for that.
const scaler = `
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: nat, namespace: internet}
spec:
  scaleTargetRef: {apiVersion: coil.cybozu.com/v2, kind: Egress, name: nat}
  minReplicas: 2
  maxReplicas: 2
`

func testEgress(t *testing.T) {
	start := time.Now()
	c := up(t)
	since(start, "nodes have registered")
	s := &site{Cluster: c}
	var err error
	s.core, err = kubernetes.NewForConfig(c.RESTConfig())
	testkit.Check(t, err)
	s.coil, err = versioned.NewForConfig(c.RESTConfig())
	testkit.Check(t, err)
	proxyKubelets(t, s)
	out := newOutside(t, s)
	testkit.Check(t, s.WaitReady(t.Context()))
	since(start, "nodes are ready")
	testkit.Check(t, s.WaitWorkloads(t.Context(), metav1.NamespaceSystem))
	since(start, "Coil runs")

	routers := s.routers(t, 1)
	since(start, "the router is available")
	t.Run("clients", func(t *testing.T) {
		out.await(t, "chosen", ips(routers...))
		other := testkit.Must(s.core.CoreV1().Pods("clients").Get(t.Context(), "other", metav1.GetOptions{}))(t)
		out.await(t, "other", ips(*other))
	})
	since(start, "clients were seen")
	t.Run("looks", func(t *testing.T) { testLooks(t, s) })
	since(start, "an operator looked at them")
	if testkit.EgressForm.Long() {
		t.Run("autoscaler", func(t *testing.T) { testScaled(t, s, out) })
		since(start, "it was scaled")
	}
	if testkit.EgressForm.Long() {
		t.Run("first hour", func(t *testing.T) { testFirstHour(t, s) })
		since(start, "the way out of the first hour was gone")
	}
	t.Run("addresses", func(t *testing.T) { testAddresses(t, s, out) })
	since(start, "clients leave by floating addresses")
	t.Run("addresses of nodes", func(t *testing.T) {
		testNodeAddresses(t, s, out, s.routers(t, testkit.EgressForm.Times(1, 2)))
	})
	since(start, "clients leave by the addresses of nodes")
	t.Run("direct", func(t *testing.T) { testDirect(t, s, out) })
	since(start, "clients send to routers themselves")
}

// testDirect changes the peering while a client uses the Egress. If there is another node with a
// router, it loses its power while the API server is away. The other nodes take its floating addresses when that is back.
func testDirect(t *testing.T, s *site, out *outside) {
	routers := s.routers(t, testkit.EgressForm.Times(1, 2))
	testkit.Must(s.coil.CoilV2().Egresses(namespace).Patch(t.Context(), egress, types.MergePatchType, []byte(`{"spec":{"peering":"Direct"}}`), metav1.PatchOptions{}))(t)
	chosen := testkit.Must(s.core.CoreV1().Pods("clients").Get(t.Context(), "chosen", metav1.GetOptions{}))(t)
	s.awaitTunnels(t, chosen, routers)
	out.forget()
	out.await(t, "chosen", ips(routers...))
	i := slices.IndexFunc(routers, func(p corev1.Pod) bool { return p.Spec.NodeName != chosen.Spec.NodeName })
	if i < 0 || !testkit.EgressForm.Long() {
		return
	}
	dead := routers[i]
	s.awaitAlive(t, chosen, len(routers))
	s.withoutAPI(t, func() {
		testkit.Check(t, s.PowerOff(t.Context(), dead.Spec.NodeName))
		s.awaitAlive(t, chosen, len(routers)-1)
		out.forget()
		out.await(t, "chosen", ips(slices.Delete(routers, i, i+1)...))
	})
	testkit.Eventually(t, 30*time.Second, "the Egress says that a router is dead", func() error {
		events, err := s.core.EventsV1().Events(namespace).List(t.Context(), metav1.ListOptions{})
		if err == nil && !slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Reason == routerhealth.RouterDead && strings.Contains(e.Note, dead.Status.PodIP)
		}) {
			err = fmt.Errorf("%d events", len(events.Items))
		}
		return err
	})
	testAddressesMoved(t, s, out, dead.Spec.NodeName)
}

// withoutAPI does something while no node reaches the API server.
func (s *site) withoutAPI(t *testing.T, do func()) {
	t.Helper()
	route := func(op string) {
		t.Helper()
		testkit.Must(s.Exec(t.Context(), lab.Fabric, "ip", "route", op, "blackhole", vm.HostAddr.String()))(t)
	}
	route("add")
	defer route("del")
	do()
}

// awaitAlive waits until a client's new flows can go by so many routers.
func (s *site) awaitAlive(t *testing.T, client *corev1.Pod, n int) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, fmt.Sprintf("the client has %d routers", n), func() error {
		out, err := s.inPod(t, client, "ip nexthop show")
		if groups := groupMembers.FindAllStringSubmatch(out, -1); err == nil && (len(groups) == 0 ||
			slices.ContainsFunc(groups, func(m []string) bool { return strings.Count(m[1], "/")+1 != n })) {
			err = errors.New(out)
		}
		return err
	})
}

// groupMembers are the members of a group of nexthops.
var groupMembers = regexp.MustCompile(`(?m)^id \d+ group (\S+)`)

// inPod runs a command in a pod's network namespace.
func (s *site) inPod(t *testing.T, pod *corev1.Pod, command string) (string, error) {
	t.Helper()
	// It is that one of the node's which has the pod's address.
	script := `for n in /run/netns/*; do
		if nsenter --net=$n ip -o address show dev eth0 2>/dev/null | grep -qF " $0/"; then nsenter --net=$n $1; fi
	done`
	out, err := s.Exec(t.Context(), pod.Spec.NodeName, "sh", "-c", script, pod.Status.PodIP, command)
	return string(out), err
}

// awaitTunnels waits until a client has tunnels to some routers, and none else.
func (s *site) awaitTunnels(t *testing.T, client *corev1.Pod, routers []corev1.Pod) {
	t.Helper()
	var want []string
	for _, a := range ips(routers...) {
		want = append(want, dataplane.TunnelName(netip.MustParseAddr(a), 0))
	}
	slices.Sort(want)
	testkit.Eventually(t, 60*time.Second, "the client has tunnels to routers", func() error {
		out, err := s.inPod(t, client, "ip -o link show")
		if err != nil {
			return err
		}
		has := tunnelLink.FindAllString(out, -1)
		if slices.Sort(has); !slices.Equal(has, want) {
			return fmt.Errorf("it has %v, want %v", has, want)
		}
		return nil
	})
}

// tunnelLink is the name of a tunnel's link.
var tunnelLink = regexp.MustCompile(`\bfou[46]_[0-9a-f]+`)

// testScaled has an autoscaler want a second router, through which the client comes, too. Without
// routers that run, integration/apiserver has autoscalers.
func testScaled(t *testing.T, s *site, out *outside) {
	s.apply(t, scaler)
	routers := s.routers(t, 2)
	eg := testkit.Must(s.coil.CoilV2().Egresses(namespace).Get(t.Context(), egress, metav1.GetOptions{}))(t)
	if eg.Spec.Replicas != 2 || eg.Status.Replicas != 2 || eg.Status.Clients != 1 {
		t.Errorf("the Egress has %d replicas of %d, and %d clients", eg.Status.Replicas, eg.Spec.Replicas, eg.Status.Clients)
	}
	out.forget()
	out.await(t, "chosen", ips(routers...))
}

// await waits until a visitor came from one of these addresses in each family, and from no others. Of
// several routers a client may take the same one each time, for its destination is the same.
func (o *outside) await(t *testing.T, visitor string, addrs []string) {
	t.Helper()
	testkit.Eventually(t, 60*time.Second, visitor+" comes from its addresses", func() error { return o.came(t, visitor, addrs) })
}

// came returns an error until a visitor came in both families, and ends the test if it came from other addresses.
func (o *outside) came(t *testing.T, visitor string, addrs []string) error {
	t.Helper()
	from := o.from(visitor)
	families := map[bool]bool{}
	for _, a := range from {
		if !slices.Contains(addrs, a) {
			t.Fatalf("%s comes from %s, and not only from %v", visitor, a, addrs)
		}
		families[strings.Contains(a, ":")] = true
	}
	if len(families) != 2 {
		return fmt.Errorf("it comes from %v", from)
	}
	return nil
}

// apply applies objects with kubectl.
func (s *site) apply(t *testing.T, objects string) {
	t.Helper()
	cmd := testkit.Must(s.KubectlCommand(t.Context(), "apply", "-f", "-"))(t)
	cmd.Stdin = strings.NewReader(objects)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("kubectl apply: %v\n%s", err, out)
	}
}

// routers waits until so many routers are ready and the Egress has its client, and returns them.
func (s *site) routers(t *testing.T, n int) []corev1.Pod {
	t.Helper()
	var pods []corev1.Pod
	testkit.Eventually(t, 60*time.Second, fmt.Sprintf("%d routers are ready", n), func() error {
		eg, err := s.coil.CoilV2().Egresses(namespace).Get(t.Context(), egress, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if eg.Status.Selector == "" {
			return errors.New("it has no selector")
		}
		l, err := s.core.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: eg.Status.Selector})
		if err != nil {
			return err
		}
		pods = slices.DeleteFunc(l.Items, func(p corev1.Pod) bool { return !ready(p) })
		if len(pods) != n || eg.Status.Clients != 1 {
			return fmt.Errorf("%d are ready, %d clients; the status says %+v", len(pods), eg.Status.Clients, eg.Status.Conditions)
		}
		return nil
	})
	return pods
}

func ready(p corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
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
