// Package egress lets pods of the node use Egresses: it sets up those that ask for it by an annotation, or that a policy selects, when
// they are added, and keeps them up to date with Egresses, Services, annotations and policies.
//
// It decides what a client is to be, and when it is changed; package clientnet makes it. It must not know
// who gives the addresses, how objects and records are read, nor how routers are found to be dead.
//
// Destinations of a pod are always as closed as its annotations and policies ask for:
//
//	Egress exists, its Service too    destinations by the tunnel
//	Egress exists, no Service yet     destinations unreachable
//	Egress was deleted                its last destinations unreachable
//	Egress never existed              ADD fails; in a running pod nothing is known of it
//	it isn't known where to send to   what the same policy, or the annotations, named before is unreachable
//	namespace isn't allowed           ADD fails; in a running pod destinations unreachable
//	its routers are sent to directly  destinations by those that live; unreachable without one
//	its peering has changed           the same at once, but flows stay where they are
//	nothing can forward, and the      packets to its destinations leave as if no Egress had them
//	policy has onFailure Node
//	policy isn't resolved yet         ADD fails; in a running pod what the policy asked for before stays
//	policy names no Egress, and       ADD fails; in a running pod what it named before is unreachable
//	there is no default
//	no annotation any more, and       nothing is left
//	no policy selects the pod
//	more Egresses than 64             ADD fails; in a running pod the first are used, the others are
//	                                  as if they didn't exist
//	pod has its node's network        nothing is done; an Event tells if it has an annotation
//	pod is a router of an Egress      no policy selects it. With an annotation ADD fails; in a running pod
//	                                  nothing is done, and an Event tells
//	pod was deleted                   stays until the network namespace goes
//
// An annotation decides as the oldest policy would. Pods of Coil and of the cluster are as others: a policy that selects all pods of
// all namespaces selects them, too, unless they have their node's network.
package egress

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// Cluster has objects of the API server. An object that isn't there is an error of apierrors.
// With live, the API server is asked for objects that a cache lacks; see package view.
type Cluster interface {
	Pod(ctx context.Context, pod store.Pod, live bool) (*metav1.PartialObjectMetadata, error)
	Namespace(ctx context.Context, name string, live bool) (*metav1.PartialObjectMetadata, error)
	Egress(ctx context.Context, name types.NamespacedName, live bool) (*v2.Egress, error)
	Service(ctx context.Context, name types.NamespacedName, live bool) (*corev1.Service, error)
	// HostNetwork says, of a pod of the API server, whether it has the network of its node.
	HostNetwork(ctx context.Context, pod types.NamespacedName) (bool, error)
	// Routers returns the routers of an Egress that a cache has.
	Routers(name types.NamespacedName) []client.Router
	// Holder returns the UID of the router that has the floating address of an AddressBlock, empty if none has, and whether the node
	// answers for that router yet.
	Holder(block string) (pod types.UID, settled bool)
	// Policies returns the policies that may select a pod, and the labels of its namespace. With live they are at least as new as the
	// pod's binding to the node, and the API server is asked unless the caches are.
	Policies(ctx context.Context, pod *metav1.PartialObjectMetadata, live bool) ([]policy.Policy, map[string]string, error)
}

// Network works in network namespaces; see package clientnet. Its methods return clientnet.ErrGone if that isn't
// there any more, and the changes that they made.
type Network interface {
	// Client makes a client what it should be, or, without Egresses, a pod like any other.
	// The MTU is found out.
	Client(ctx context.Context, at store.Netns, c client.Client) (clientnet.Outcome, error)
	// Guard returns the node's guard of a client, and SetGuard gives it another one. Nothing in the pod is
	// asked, where a program may see to it that the answer takes long. CheckGuard says whether the client has
	// the guard.
	Guard(ctx context.Context, at store.Netns, c client.Client) (dataplane.ClientGuard, error)
	SetGuard(ctx context.Context, at store.Netns, c client.Client, g dataplane.ClientGuard) error
	CheckGuard(ctx context.Context, at store.Netns, c client.Client, g dataplane.ClientGuard) error
	// Router sets the kernel parameters that a router in the namespace has no right to set. One with floating addresses needs more.
	Router(ctx context.Context, at store.Netns, link string, floating bool) (clientnet.Outcome, error)
	// Check returns an error for each object of a client that isn't as Client made it, and
	// CheckRouter for each parameter of a router. Nothing is changed.
	Check(ctx context.Context, at store.Netns, c client.Client, made client.State) error
	CheckRouter(ctx context.Context, at store.Netns, link string) error
	// Closed returns the routes of clients in the namespace. Some of them close destinations, others
	// spare ranges inside of these.
	Closed(ctx context.Context, at store.Netns) ([]dataplane.Route, error)
	// Silent returns the routers that take no flows of a client though it has a tunnel to them.
	Silent(ctx context.Context, at store.Netns, c client.Client) ([]netip.Addr, error)
	// Exists says whether the namespace is still there.
	Exists(at store.Netns) (bool, error)
}

// Health knows which routers answer; see package routerhealth.
type Health interface {
	// Mark sets the states of an Egress's routers as the pod has found them. Health needn't know the pod.
	Mark(id attachment.ID, egress string, routers []client.Router)
	// Answered says whether a router of an Egress has answered this process.
	Answered(egress string, addr netip.Addr) bool
	// Update takes the groups of routers that a pod has, and the links of its tunnels by the address of the router.
	// failed says that some could not be made.
	Update(at node.Sandbox, groups []client.Group, links map[netip.Addr]int, failed bool)
	// Forget forgets a pod after its DEL.
	Forget(id attachment.ID)
}

// Config has the settings that clients have in common.
type Config struct {
	Port     uint16
	Protocol int
	// OriginatingOnly holds for all Egresses.
	OriginatingOnly bool
	// RecordAll records sandboxes that use no Egress, too, since nobody else does.
	RecordAll bool
	// Drift is how often a client is compared with the kernel though nothing was told.
	Drift time.Duration
	// Available is nil when tunnels can be made, or says why not.
	Available func() error
	// Repaired is told of changes that had to be made though the wanted state is the same.
	Repaired func(context.Context, clientnet.Outcome)
	// Health must have the Manager as its Listener.
	Health Health
}

// Manager implements the package's task. Its methods may be called concurrently.
type Manager struct {
	cfg      Config
	cluster  Cluster
	net      Network
	record   store.Clients
	recorder kube.Recorder
	// loop derives the wanted states of pods, and pods makes them, both when it is the turn of the pod's namespace. Only
	// pods with a sandbox wait for turns; ignored is for the others.
	loop, pods, ignored *reconcile.Loop[types.NamespacedName]
	decisions, works    *turns
	// strangers are pods without a sandbox that ask for Egresses, by name, that were looked at; only for the one worker of
	// ignored.
	strangers       map[types.NamespacedName]types.UID
	moved, unpinned prometheus.Counter

	mu    sync.Mutex
	known map[attachment.ID]*sandbox
	// departed are by Egress the addresses from which its packets came, and since when they don't;
	// the zero time if they do.
	departed map[string]map[netip.Addr]time.Time
}

// New returns a Manager of nothing; see Restore.
func New(cfg Config, c Cluster, n Network, r store.Clients, e kube.Recorder, m *reconcile.Metrics) *Manager {
	mgr := &Manager{
		cfg: cfg, cluster: c, net: n, record: r, recorder: e, decisions: newTurns(decidedAtOnce), works: newTurns(workedAtOnce),
		known: map[attachment.ID]*sandbox{}, departed: map[string]map[netip.Addr]time.Time{}, strangers: map[types.NamespacedName]types.UID{},
		moved: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coil_egress_node_bucket_moves_total",
			Help: "Shares of new flows that went from one router to another, in all pods of the node.",
		}),
		unpinned: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coil_egress_node_unpinned_flows_total",
			Help: "Flows that could not be kept with their router when routers changed: a pod had too many.",
		}),
	}
	mgr.loop = reconcile.New("egress", mgr.decide, m)
	mgr.pods = reconcile.New("egress-pods", mgr.workOn, m)
	mgr.ignored = reconcile.New("egress-ignored", mgr.tellIgnored, m)
	return mgr
}

// Restore makes the Manager know the sandboxes that others have recorded, or that were found, and
// the clients of its own record. A sandbox that is known already counts as newer.
func (m *Manager) Restore(ctx context.Context, others []node.Sandbox) error {
	clients, err := m.record.ListClients(ctx)
	if err != nil {
		return err
	}
	if m.cfg.RecordAll {
		for _, s := range others {
			if err := m.record.SetClient(ctx, store.Client{Sandbox: s}); err != nil {
				return err
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range others {
		if m.known[s.ID] == nil {
			m.known[s.ID] = newSandbox(s)
			m.known[s.ID].recorded, m.known[s.ID].restored = m.cfg.RecordAll, true
		}
	}
	for _, c := range clients {
		s := m.known[c.ID]
		if s == nil {
			s = newSandbox(c.Sandbox)
			s.restored = true
			m.known[c.ID] = s
		}
		if !s.recorded {
			s.egresses, s.record, s.recorded = c.Egresses, c.Egresses, true
		}
	}
	for _, s := range m.known {
		if s.restored {
			s.recalled = len(s.egresses) > 0
		}
		m.loop.Add(podName(s))
	}
	return nil
}

// Run keeps all known pods up to date until ctx ends, as soon as the caches are filled.
func (m *Manager) Run(ctx context.Context, synced ...cache.DoneChecker) error {
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return m.loop.Run(running, mostPods, synced...) })
	group.Go(func() error { return m.pods.Run(running, mostPods, synced...) })
	group.Go(func() error { return m.ignored.Run(running, 1, synced...) })
	err := group.Wait()
	return errors.Join(err, m.narrowAll(ctx))
}

// PodChanged, EgressChanged and NamespaceChanged tell of objects that changed; a Service has
// the name of its Egress. They don't block.
func (m *Manager) PodChanged(pod types.NamespacedName) {
	if !m.wake(isOf(pod)) {
		m.ignored.AddAfter(pod, unattended)
	}
}

// EgressChanged see PodChanged.
func (m *Manager) EgressChanged(egress types.NamespacedName) {
	m.wake(usesEgress(egress.String()))
}

// NamespaceChanged see PodChanged.
func (m *Manager) NamespaceChanged(name string) {
	m.wake(isClientOf(name))
}

// PoliciesChanged tells that policies may select other pods of a namespace, or say something else of these. It doesn't block.
func (m *Manager) PoliciesChanged(namespace string) {
	m.wake(func(s *sandbox) bool { return s.Namespace == namespace })
}

func usesEgress(name string) func(*sandbox) bool {
	return func(s *sandbox) bool {
		return slices.ContainsFunc(s.egresses, func(e store.KnownEgress) bool { return e.Name == name })
	}
}

func isOf(pod types.NamespacedName) func(*sandbox) bool {
	return func(s *sandbox) bool { return podName(s) == pod }
}

// isClientOf says whether a sandbox uses Egresses and its pod is of the namespace.
func isClientOf(namespace string) func(*sandbox) bool {
	return func(s *sandbox) bool { return s.Namespace == namespace && len(s.egresses) > 0 }
}

// wake says whether there is a sandbox that something concerns.
func (m *Manager) wake(concerns func(*sandbox) bool) (any bool) {
	all := m.affected(concerns)
	for _, s := range all {
		m.loop.Add(podName(s))
	}
	return len(all) > 0
}

func podName(s *sandbox) types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}
