// Package routerhealth finds out which routers of Egresses answer the pods of the node that send to them directly.
//
// It owns the questions, the conclusions from the answers, and the Events about routers. It must not know which
// Egresses a pod asks for, nor how a pod is made a client of them.
//
// Each router to which a pod has a tunnel is asked every askEvery, through the tunnels of its pods in turn, and has askWait
// to answer. A router drops packets of a pod until it knows the pod, which is seconds after the pod's ADD. So a pod that
// has never had an answer asks, too, until it has one; its silence proves nothing.
//
// A program in a pod can answer in the place of a router, or drop the answer. A pod without an answer asks again until it
// has one, and believes itself: answers to other pods keep no dead router alive for it.
package routerhealth

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

const (
	askEvery = time.Second
	askWait  = 500 * time.Millisecond
)

// Network works in network namespaces; see package clientnet.
type Network interface {
	// Ask asks routers through tunnels of a pod; see package kernel/echo.
	Ask(ctx context.Context, at store.Netns, wait time.Duration, questions []echo.Question) ([]echo.Answer, error)
}

// Egresses has the Egresses of the API server; without live, those that a cache has.
type Egresses interface {
	Egress(ctx context.Context, name types.NamespacedName, live bool) (*v2.Egress, error)
}

// Listener is told of changes of routers' states. Its methods don't block.
type Listener interface {
	// EgressChanged tells of a router that has died or come back for all pods.
	EgressChanged(egress types.NamespacedName)
	// PodChanged tells of a router that has died or come back for this pod alone.
	PodChanged(pod types.NamespacedName)
}

// Checker implements the package's task. Its methods may be called concurrently.
type Checker struct {
	net      Network
	egresses Egresses
	recorder kube.Recorder
	failover prometheus.Histogram
	// sending tells Run that a pod sends to routers.
	sending chan struct{}
	// next is, by namespace and queue, where the next round goes on when questions have to wait; crowded says that they
	// have to. Only the goroutine of Run uses both.
	next    map[string][2]uint64
	crowded bool

	mu sync.Mutex
	// round is the number of the round that goes on, or was the last one.
	round   uint64
	pods    map[attachment.ID]*pod
	routers map[routerKey]*router
	// muted are namespaces whose pods took long to ask, and until when others don't wait for them.
	muted map[string]time.Time
}

// routerKey is a router of an Egress at one of its addresses. Anybody who may write EndpointSlices can list
// the routers of another Egress.
type routerKey struct {
	egress string // namespace/name
	addr   netip.Addr
}

// router is the state of one, as pods of the node have found it.
type router struct {
	liveness
	// turn counts the turns of pods that ask it. Pods that the router has never answered have
	// turns of their own.
	turn, newTurn int
	// waited is in how many rounds since it last answered it had to wait, since there were too many questions.
	waited int
	// seen is the last round in which a pod had a tunnel to it.
	seen uint64
}

// pod is one that has tunnels to routers, with their answers to it.
type pod struct {
	node.Sandbox
	groups []client.Group
	links  map[netip.Addr]int
	// answered are the routers that have answered it: they know it as a client.
	answered map[netip.Addr]bool
	// missed are the questions in a row that a router didn't answer it, alone the routers that are dead
	// for it though not for other pods.
	missed map[routerKey]int
	alone  map[routerKey]bool
	// asking says that the pod asks, and hasn't come back.
	asking bool
}

// New returns a Checker that knows no pod.
func New(n Network, e Egresses, r kube.Recorder) *Checker {
	return &Checker{
		net: n, egresses: e, recorder: r, sending: make(chan struct{}, 1),
		pods: map[attachment.ID]*pod{}, routers: map[routerKey]*router{}, muted: map[string]time.Time{},
		failover: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "coil_egress_node_failover_duration_seconds",
			Help:    "Time from the last answer of a router that died until a pod sends new flows to others.",
			Buckets: []float64{1, 2, 3, 4, 5, 7, 10, 20, 60},
		}),
	}
}

// Update notes the groups of routers that a pod has, by the links of its tunnels. Routers that are dead in a group and
// unknown were found dead by a former process. With failed, not all of that could be made.
func (c *Checker) Update(at node.Sandbox, groups []client.Group, links map[netip.Addr]int, failed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[at.ID]
	if p == nil {
		if len(groups) == 0 {
			return
		}
		p = &pod{Sandbox: at, answered: map[netip.Addr]bool{}, missed: map[routerKey]int{}, alone: map[routerKey]bool{}}
		c.pods[at.ID] = p
	}
	used := map[netip.Addr]bool{}
	for _, g := range p.groups {
		for _, a := range g.Members {
			used[a] = true
		}
	}
	for _, g := range groups {
		for _, a := range g.Dead {
			key := routerKey{g.Egress, a}
			switch r := c.routers[key]; {
			case r == nil:
				c.routers[key] = &router{liveness: deadAlready()}
			case !failed && !r.last.IsZero() && used[a]:
				c.failover.Observe(time.Since(r.last).Seconds())
			}
		}
		for _, a := range g.Routers() {
			if r := c.routers[routerKey{g.Egress, a}]; r != nil {
				r.seen = c.round // which may have begun before
			}
		}
	}
	p.groups, p.links = groups, links
	if len(groups) > 0 {
		select {
		case c.sending <- struct{}{}:
		default: // it is told already
		}
	}
}

// Forget forgets a pod.
func (c *Checker) Forget(id attachment.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pods, id)
}

// Mark sets the states of an Egress's routers as they are for a pod, or for one that isn't known yet: routers that don't
// answer are dead. One that answers again, but not for long enough, keeps the flows that nobody has taken from it.
func (c *Checker) Mark(id attachment.ID, egress string, routers []client.Router) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[id]
	for i := range routers {
		key := routerKey{egress, routers[i].Addr}
		switch r := c.routers[key]; {
		case p != nil && p.alone[key]:
			routers[i].State = client.RouterDead
		case r == nil || !r.dead:
		case r.answers > 0:
			routers[i].State = client.RouterDraining
		default:
			routers[i].State = client.RouterDead
		}
	}
}

// Answered says whether a router of an Egress has answered this process.
func (c *Checker) Answered(egress string, addr netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.routers[routerKey{egress, addr}]
	return r != nil && !r.last.IsZero()
}

// Run asks all routers again and again until ctx ends, and rests while there are none.
func (c *Checker) Run(ctx context.Context, l Listener) error {
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	var due <-chan time.Time // nil while there is nobody to ask
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.sending:
			if due == nil {
				ticker.Reset(askEvery)
				due = ticker.C
			}
		case <-due:
			if !c.askOnce(ctx, l) {
				due = nil
			}
		}
	}
}

// askOnce asks each router once, and says whether there is any.
func (c *Checker) askOnce(ctx context.Context, l Listener) bool {
	asking, any := c.questions(ctx)
	c.askAll(ctx, asking)
	if ctx.Err() != nil {
		return false
	}
	for _, s := range asking {
		if s.err != nil {
			klog.FromContext(ctx).V(2).Info("Can't ask routers through the pod, another one does", "pod", klog.KRef(s.Namespace, s.Name), "containerID", s.ContainerID, "reason", s.err)
		}
	}
	changed, pods := c.hear(asking)
	egresses := map[types.NamespacedName]bool{}
	for _, r := range changed {
		egresses[r.name()] = true
	}
	for name := range egresses {
		l.EgressChanged(name)
	}
	for name := range pods {
		l.PodChanged(name)
	}
	for _, r := range changed {
		c.tell(ctx, r.routerKey, r.dead)
	}
	return any
}
