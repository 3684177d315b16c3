package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/egress"
	"github.com/coil-net/coil/pkg/node/routerhealth"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	direct = "direct" // the Egress whose routers nodes ask
	// handful is how many Events a router's death may make, and its return, however many nodes notice.
	handful = 20
	// noticedTimeout is how long all nodes may take to notice either.
	noticedTimeout = 3 * time.Minute
)

// measureDeaths has a router of an Egress with peering Direct die, and live again, for many nodes, each
// with a client of it, and counts the Events that come of it. The nodes' loops are coild's, each with a
// recorder of its own; kernels and caches are played. The controller is the program.
func measureDeaths(ctx context.Context, o options, rep *report) (err error) {
	few := o
	few.nodes = 2 // objects; nobody looks at these
	c, err := newGatewayCluster(ctx, few)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	w := &routersWorld{dead: map[netip.Addr]bool{}, seen: map[string]int{}}
	if w.egress, err = c.egress(ctx, direct, v2.EgressPeeringDirect); err != nil {
		return err
	}
	w.egress.Status.Clients = int32(o.nodes) // each node has one
	for i := range 2 {
		w.routers = append(w.routers, client.Router{Addr: netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}), State: client.RouterLive})
		if err := c.router(ctx, i, true); err != nil {
			return err
		}
	}
	runCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	done, err := w.run(runCtx, o.nodes, c.recorder)
	if err != nil {
		return err
	}
	defer func() { cancel(); err = errors.Join(err, done()) }()
	if err := w.await(ctx, o.nodes, 0); err != nil {
		return err
	}
	if err := pass(o.quiet)(ctx); err != nil { // each router was asked then
		return err
	}
	l, err := watchEtcd(ctx, c.rig.API, "events/", func(string) string { return kindEvent })
	if err != nil {
		return err
	}
	defer l.close()
	for _, turn := range []struct {
		what string
		dead int // routers
	}{{"a router dies", 1}, {"a router lives again", 0}} {
		what := fmt.Sprintf("%s for %d nodes", turn.what, o.nodes)
		before, err := l.counts()
		if err != nil {
			return err
		}
		began := time.Now()
		w.set(w.routers[0].Addr, turn.dead > 0)
		if err := w.await(ctx, o.nodes, turn.dead); err != nil {
			return err
		}
		rep.Figures.Note(what+": until all have noticed", "s", time.Since(began).Seconds())
		if err := c.router(ctx, 0, turn.dead == 0); err != nil {
			return err
		}
		if err := pass(o.quiet)(ctx); err != nil { // Events are written behind
			return err
		}
		after, err := l.counts()
		if err != nil {
			return err
		}
		rep.Figures.AtMost(what+": writes of Events", "", float64(after[kindEvent].minus(before[kindEvent]).Count), handful)
	}
	return nil
}

// router makes the pod of a router, or changes whether it is ready. Its address is this machine's, where
// the controller asks in vain how it is.
func (c *gatewayCluster) router(ctx context.Context, i int, ready bool) error {
	pods := c.rig.Core.CoreV1().Pods(gateways)
	name := fmt.Sprintf("%s-7c9f6d5b8f-%d", direct, i)
	p, err := pods.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		p, err = pods.Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: plan.RouterLabels(direct)},
			Spec:       corev1.PodSpec{NodeName: "router-node", Containers: []corev1.Container{{Name: "egress", Image: "example.org/coil"}}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		return err
	}
	condition := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse, LastTransitionTime: metav1.Now()}
	if ready {
		condition.Status = corev1.ConditionTrue
	}
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "127.0.0.1", PodIPs: []corev1.PodIP{{IP: "127.0.0.1"}}, Conditions: []corev1.PodCondition{condition}}
	_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
	return err
}

// routersWorld is the caches and the kernels of nodes: it implements egress.Cluster, egress.Network and routerhealth.Network.
type routersWorld struct {
	egress  *v2.Egress
	routers []client.Router

	mu   sync.Mutex
	dead map[netip.Addr]bool
	seen map[string]int // routers to which a node's client sends no new flow
}

func (w *routersWorld) set(router netip.Addr, dead bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead[router] = dead
}

// await waits until the clients of all nodes leave out so many routers.
func (w *routersWorld) await(ctx context.Context, nodes, dead int) error {
	var some int
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, testkit.Timeout(noticedTimeout), true, func(context.Context) (bool, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		some = 0
		for _, n := range w.seen {
			if n == dead {
				some++
			}
		}
		return some == nodes, nil
	})
	if err != nil {
		return fmt.Errorf("%d of %d nodes know %d dead routers: %w", some, nodes, dead, err)
	}
	return nil
}

// recorder records Events as coild does; each has a memory of its own.
func (c *gatewayCluster) recorder(ctx context.Context, i int) (kube.Recorder, func(), error) {
	clients, err := kube.NewClients(c.rig.API.RESTConfig())
	if err != nil {
		return nil, nil, err
	}
	return kube.RunRecorder(ctx, clients.Core, fmt.Sprintf("coild-%d", i))
}

// run runs the loops of nodes, each with a recorder, until ctx ends, for which done waits.
func (w *routersWorld) run(ctx context.Context, nodes int, record func(context.Context, int) (kube.Recorder, func(), error)) (done func() error, err error) {
	metrics := reconcile.NewMetrics(nil)
	group, ctx := errgroup.WithContext(ctx)
	var flushes []func()
	done = func() error {
		err := group.Wait()
		for _, flush := range flushes {
			flush()
		}
		return err
	}
	for i := range nodes {
		recorder, flush, err := record(ctx, i)
		if err != nil {
			return nil, err
		}
		flushes = append(flushes, flush)
		health := routerhealth.New(w, w, recorder)
		m := egress.New(egress.Config{
			Port: dataplane.FouPort, Protocol: dataplane.ProtocolNode, Drift: time.Hour, Available: func() error { return nil },
			Repaired: func(context.Context, clientnet.Outcome) {}, Health: health,
		}, w, w, noRecord{}, recorder, metrics)
		name := fmt.Sprintf("client-%d", i)
		if err := m.Restore(ctx, []node.Sandbox{{
			ID: attachment.ID{ContainerID: name, IfName: "eth0"}, Pod: store.Pod{Namespace: customers, Name: name, UID: name},
			Netns: store.Netns{Path: name}, Address: ipam.Address{IPv4: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})},
		}}); err != nil {
			return nil, err
		}
		group.Go(func() error { return m.Run(ctx) })
		group.Go(func() error { return health.Run(ctx, m) })
	}
	return done, nil
}

// Pod implements egress.Cluster, as do the next four.
func (w *routersWorld) Pod(_ context.Context, p store.Pod, _ bool) (*metav1.PartialObjectMetadata, error) {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID), Annotations: map[string]string{v2.AnnotationEgressPrefix + gateways: direct},
	}}, nil
}

// HostNetwork implements egress.Cluster.
func (w *routersWorld) HostNetwork(context.Context, types.NamespacedName) (bool, error) {
	return false, nil
}

// Namespace implements egress.Cluster.
func (w *routersWorld) Namespace(_ context.Context, name string, _ bool) (*metav1.PartialObjectMetadata, error) {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
}

// Egress implements egress.Cluster.
func (w *routersWorld) Egress(context.Context, types.NamespacedName, bool) (*v2.Egress, error) {
	return w.egress, nil
}

// Service implements egress.Cluster.
func (w *routersWorld) Service(context.Context, types.NamespacedName, bool) (*corev1.Service, error) {
	return &corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.100"}}}, nil
}

// Policies implements egress.Cluster.
func (*routersWorld) Policies(context.Context, *metav1.PartialObjectMetadata, bool) ([]policy.Policy, map[string]string, error) {
	return nil, nil, nil
}

// Routers implements egress.Cluster.
func (w *routersWorld) Routers(types.NamespacedName) []client.Router { return w.routers }
func (w *routersWorld) Holder(string) (types.UID, bool)              { return "", false }

// Client implements egress.Network, as do the next four.
func (w *routersWorld) Client(_ context.Context, at store.Netns, c client.Client) (clientnet.Outcome, error) {
	c.MTU = 1400
	out := clientnet.Outcome{State: client.StateOf(c), Links: map[netip.Addr]int{}, Pinned: map[int]int{}}
	for i, t := range out.State.Tunnels {
		out.Links[t.Remote] = 10 + i
	}
	dead := 0
	for _, e := range c.Egresses {
		for _, r := range e.Routers {
			if r.State != client.RouterLive {
				dead++
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[at.Path] = dead
	return out, nil
}

// Router implements egress.Network.
func (w *routersWorld) Router(context.Context, store.Netns, string, bool) (clientnet.Outcome, error) {
	return clientnet.Outcome{}, nil
}

// Check implements egress.Network.
func (w *routersWorld) Check(context.Context, store.Netns, client.Client, client.State) error {
	return nil
}

// CheckRouter implements egress.Network.
func (w *routersWorld) CheckRouter(context.Context, store.Netns, string) error { return nil }

// Guard implements egress.Network, as do the next two: the nodes have none.
func (w *routersWorld) Guard(context.Context, store.Netns, client.Client) (dataplane.ClientGuard, error) {
	return dataplane.ClientGuard{}, nil
}

// SetGuard see Guard.
func (w *routersWorld) SetGuard(context.Context, store.Netns, client.Client, dataplane.ClientGuard) error {
	return nil
}

// CheckGuard see Guard.
func (w *routersWorld) CheckGuard(context.Context, store.Netns, client.Client, dataplane.ClientGuard) error {
	return nil
}

// Closed implements egress.Network.
func (w *routersWorld) Closed(context.Context, store.Netns) ([]dataplane.Route, error) {
	return nil, nil
}

// Silent implements egress.Network.
func (w *routersWorld) Silent(context.Context, store.Netns, client.Client) ([]netip.Addr, error) {
	return nil, nil
}

// Exists implements egress.Network.
func (w *routersWorld) Exists(store.Netns) (bool, error) { return true, nil }

// Ask implements routerhealth.Network: it answers for all routers that live, at once.
func (w *routersWorld) Ask(_ context.Context, _ store.Netns, _ time.Duration, questions []echo.Question) ([]echo.Answer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	answers := make([]echo.Answer, len(questions))
	for i, q := range questions {
		answers[i] = echo.Given
		if w.dead[q.To] {
			answers[i] = echo.Missing
		}
	}
	return answers, nil
}
