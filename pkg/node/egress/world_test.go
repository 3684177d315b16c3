package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/routerhealth"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// world is an API server, a record and network namespaces in memory.
type world struct {
	mu         sync.Mutex
	pods       map[string]*metav1.PartialObjectMetadata
	namespaces map[string]*metav1.PartialObjectMetadata
	egresses   map[string]*v2.Egress
	services   map[string]*corev1.Service
	routers    map[string][]client.Router
	holders    map[string]types.UID     // of floating addresses, by block
	unsettled  map[string]bool          // blocks of addresses for which nodes don't answer yet
	silent     map[netip.Addr]bool      // routers that don't answer
	unlisted   map[string]bool          // namespaces of pods that no router knows yet
	slow       map[string]time.Duration // what it takes to ask, and to change, in namespaces
	lying      map[string]bool          // namespaces of pods that answer in routers' places
	patient    bool                     // an answer that is missing is waited for
	asked      map[netip.Addr]int
	down       error           // of the API server, for what isn't in a cache
	live       int             // requests beside the caches
	host       map[string]bool // pods of the node's network
	behind     map[string]bool // Egresses that the cache doesn't have yet

	policies  []metav1.Object
	unseen    []metav1.Object // policies that no cache has yet
	policyErr error           // of the API server, when it is asked for policies

	records   map[attachment.ID]store.Client
	recordErr error

	netns     map[string]client.Client // what was made, by path
	guards    map[string]dataplane.ClientGuard
	stale     []bool // of each time
	gone      map[string]bool
	broken    map[string]error
	unguarded map[string]error // what the node says
	routed    map[string]int
	floats    bool           // the router that was looked at last has floating addresses
	drift     map[string]int // rules that somebody deleted
	flow      netip.Addr     // where a flow of each client goes
	wrong     error          // what CHECK finds
	events    []string
	fixed     int
}

func newWorld() *world {
	return &world{
		pods: map[string]*metav1.PartialObjectMetadata{}, namespaces: map[string]*metav1.PartialObjectMetadata{},
		egresses: map[string]*v2.Egress{}, services: map[string]*corev1.Service{},
		records: map[attachment.ID]store.Client{}, netns: map[string]client.Client{}, guards: map[string]dataplane.ClientGuard{}, unguarded: map[string]error{}, gone: map[string]bool{}, broken: map[string]error{},
		routed: map[string]int{}, drift: map[string]int{},
		routers: map[string][]client.Router{}, silent: map[netip.Addr]bool{}, unlisted: map[string]bool{}, asked: map[netip.Addr]int{},
	}
}

func get[T any](w *world, live bool, all map[string]T, name string) (T, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	x, ok := all[name]
	if ok {
		return x, nil
	}
	if live {
		w.live++
		if w.down != nil {
			return x, w.down
		}
	}
	return x, fmt.Errorf("read: %w", apierrors.NewNotFound(schema.GroupResource{Resource: "things"}, name))
}

func (w *world) Pod(_ context.Context, p store.Pod, live bool) (*metav1.PartialObjectMetadata, error) {
	m, err := get(w, live, w.pods, p.Namespace+"/"+p.Name)
	if err == nil && p.UID != "" && string(m.UID) != p.UID {
		return get(w, live, w.pods, "another")
	}
	return m, err
}
func (w *world) Namespace(_ context.Context, name string, live bool) (*metav1.PartialObjectMetadata, error) {
	return get(w, live, w.namespaces, name)
}
func (w *world) Egress(_ context.Context, name types.NamespacedName, live bool) (*v2.Egress, error) {
	if !w.behind[name.String()] {
		return get(w, live, w.egresses, name.String())
	}
	if !live {
		return get(w, false, w.egresses, "none")
	}
	w.live++
	return get(w, true, w.egresses, name.String())
}
func (w *world) Service(_ context.Context, name types.NamespacedName, live bool) (*corev1.Service, error) {
	return get(w, live, w.services, name.String())
}

func (w *world) HostNetwork(_ context.Context, pod types.NamespacedName) (bool, error) {
	_, err := get(w, true, w.pods, pod.String())
	w.mu.Lock()
	defer w.mu.Unlock()
	w.live++
	return w.host[pod.String()], err
}

func (w *world) Holder(block string) (pod types.UID, settled bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.holders[block], !w.unsettled[block]
}

func (w *world) Routers(name types.NamespacedName) []client.Router {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.routers[name.String()]
}

// Policies returns those of the cache, or of the API server.
func (w *world) Policies(_ context.Context, pod *metav1.PartialObjectMetadata, live bool) ([]policy.Policy, map[string]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.policies
	if live {
		if w.policyErr != nil {
			return nil, nil, w.policyErr
		}
		all = slices.Concat(all, w.unseen)
	}
	var labels map[string]string
	if ns := w.namespaces[pod.Namespace]; ns != nil {
		labels = ns.Labels
	}
	var of []policy.Policy
	for _, o := range all {
		switch o := o.(type) {
		case *v2.EgressPolicy:
			if p, err := policy.Of(o); err == nil && o.Namespace == pod.Namespace {
				of = append(of, p)
			}
		case *v2.EgressClusterPolicy:
			if p, err := policy.OfCluster(o); err == nil {
				of = append(of, p)
			}
		}
	}
	return of, labels, nil
}

// works takes as long as work does in a namespace.
func (w *world) works(ctx context.Context, at store.Netns) error {
	w.mu.Lock()
	slow := w.slow[at.Path]
	w.mu.Unlock()
	if slow == 0 {
		return ctx.Err()
	}
	select {
	case <-time.After(slow):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Ask takes its time for a router that doesn't answer.
func (w *world) Ask(ctx context.Context, at store.Netns, wait time.Duration, questions []echo.Question) (answers []echo.Answer, err error) {
	if err := w.works(ctx, at); err != nil {
		return nil, err
	}
	answers, err = w.answer(at, questions)
	if w.patient && slices.Contains(answers, echo.Missing) {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return answers, err
}

func (w *world) answer(at store.Netns, questions []echo.Question) (answers []echo.Answer, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone[at.Path] {
		return nil, clientnet.ErrGone
	}
	for _, q := range questions {
		w.asked[q.To]++
		switch {
		case q.Link == 0:
			answers = append(answers, echo.Unknown)
		case w.lying[at.Path]:
			answers = append(answers, echo.Given)
		case w.silent[q.To], w.unlisted[at.Path]:
			answers = append(answers, echo.Missing)
		default:
			answers = append(answers, echo.Given)
		}
	}
	return answers, nil
}

func (w *world) SetClient(_ context.Context, c store.Client) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.recordErr == nil {
		w.records[c.ID] = c
	}
	return w.recordErr
}
func (w *world) ForgetClients(_ context.Context, ids ...attachment.ID) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		delete(w.records, id)
	}
	return nil
}
func (w *world) ListClients(context.Context) ([]store.Client, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Values(w.records)), nil
}

func (w *world) Client(ctx context.Context, at store.Netns, c client.Client) (clientnet.Outcome, error) {
	if err := w.works(ctx, at); err != nil {
		return clientnet.Outcome{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone[at.Path] {
		return clientnet.Outcome{}, clientnet.ErrGone
	}
	w.stale = append(w.stale, c.Stale)
	c.MTU = 1500
	out := clientnet.Outcome{State: client.StateOf(c), Links: map[netip.Addr]int{}, Pinned: map[int]int{}}
	for i, t := range out.State.Tunnels {
		out.Links[t.Remote] = 10 + i
		if t.Remote == w.flow {
			out.Pinned[10+i] = 1
		}
	}
	if err := w.broken[at.Path]; err != nil {
		return out, err
	}
	out.Rules.Added = w.drift[at.Path]
	delete(w.drift, at.Path)
	w.netns[at.Path] = c
	return out, nil
}
func (w *world) Guard(_ context.Context, at store.Netns, _ client.Client) (dataplane.ClientGuard, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.guards[at.Path], w.unguarded[at.Path]
}
func (w *world) SetGuard(ctx context.Context, at store.Netns, _ client.Client, g dataplane.ClientGuard) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := errors.Join(ctx.Err(), w.unguarded[at.Path])
	if err == nil {
		w.guards[at.Path] = g
	}
	return err
}
func (w *world) CheckGuard(_ context.Context, at store.Netns, _ client.Client, g dataplane.ClientGuard) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.guards[at.Path].Equal(g) {
		return fmt.Errorf("the node keeps what is for %v", w.guards[at.Path].Destinations)
	}
	return w.unguarded[at.Path]
}
func (w *world) Router(_ context.Context, at store.Netns, _ string, floating bool) (clientnet.Outcome, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.routed[at.Path]++
	w.floats = floating
	return clientnet.Outcome{}, w.broken[at.Path]
}
func (w *world) Check(_ context.Context, at store.Netns, _ client.Client, made client.State) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(made.Routes) == 0 {
		return fmt.Errorf("nothing was made at %s", at.Path)
	}
	return w.wrong
}
func (w *world) CheckRouter(context.Context, store.Netns, string) error { return w.wrong }
func (w *world) Closed(_ context.Context, at store.Netns) ([]dataplane.Route, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone[at.Path] {
		return nil, clientnet.ErrGone
	}
	return client.StateOf(w.netns[at.Path]).Closed(map[dataplane.Family]int{dataplane.IPv4: 1, dataplane.IPv6: 2}), nil
}
func (w *world) Silent(_ context.Context, at store.Netns, _ client.Client) (silent []netip.Addr, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone[at.Path] {
		return nil, clientnet.ErrGone
	}
	for _, g := range client.StateOf(w.netns[at.Path]).Groups {
		silent = append(silent, g.Dead...)
	}
	return silent, nil
}
func (w *world) Exists(at store.Netns) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.gone[at.Path], nil
}
func (w *world) Eventf(about, _ runtime.Object, _, reason, _, note string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, fmt.Sprintf("%s: %s: %s", about.(*corev1.ObjectReference).Name, reason, fmt.Sprintf(note, args...)))
}

// change changes objects, and does what informers do then.
func (w *world) change(m *Manager, f func()) {
	w.mu.Lock()
	f()
	w.mu.Unlock()
	m.mu.Lock()
	var pods []types.NamespacedName
	for _, s := range m.known {
		pods = append(pods, podName(s))
	}
	m.mu.Unlock()
	for _, p := range pods {
		m.PodChanged(p)
	}
}

// named returns the namespace, "ns" if none is given, and the name of a pod.
func named(pod string) (namespace, name string) {
	if namespace, name, ok := strings.Cut(pod, "/"); ok {
		return namespace, name
	}
	return "ns", pod
}

func (w *world) pod(pod, egresses string) {
	namespace, name := named(pod)
	p := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + pod)}}
	if egresses != "" {
		p.Annotations = map[string]string{v2.AnnotationEgressPrefix + "net": egresses}
	}
	w.pods[namespace+"/"+name] = p
}

func (w *world) egress(name, service string, destinations ...string) *v2.Egress {
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "net", Name: name}}
	e.Spec.Destinations = destinations
	w.egresses["net/"+name] = e
	delete(w.services, "net/"+name)
	if service != "" {
		w.services["net/"+name] = &corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{service}}}
	}
	return e
}

func (w *world) manager(all bool) *Manager {
	return New(Config{
		Port: 5555, Protocol: 30, RecordAll: all, Drift: 10 * time.Second, Available: func() error { return nil },
		Repaired: func(context.Context, clientnet.Outcome) { w.fixed++ }, Health: routerhealth.New(w, w, w),
	}, w, w, w, w, reconcile.NewMetrics(nil))
}

// health is the Health of a manager.
func (m *Manager) health() *routerhealth.Checker { return m.cfg.Health.(*routerhealth.Checker) }

// metrics are those of a manager and of its routers.
func (m *Manager) metrics() *prometheus.Registry {
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(m, m.health())
	return r
}

// answered are the routers of Egress net/a that have answered, of some.
func (m *Manager) answered(routers ...string) (all []string) {
	for _, r := range routers {
		if m.health().Answered("net/a", netip.MustParseAddr(r)) {
			all = append(all, r)
		}
	}
	return all
}

func sandboxOf(pod string) node.Sandbox {
	namespace, name := named(pod)
	return node.Sandbox{
		ID: attachment.ID{ContainerID: "c-" + pod, IfName: "eth0"}, Pod: store.Pod{Namespace: namespace, Name: name, UID: "uid-" + pod},
		Netns: store.Netns{Path: "/" + pod, Inode: 7}, Address: ipam.Address{IPv4: netip.MustParseAddr("10.0.0.5")},
	}
}

// sync decides what a pod is to be, and makes it that.
func (m *Manager) sync(ctx context.Context, pod string) error {
	s := m.known[sandboxOf(pod).ID]
	if _, err := m.decideFor(ctx, s); err != nil {
		return err
	}
	return m.work(ctx, s)
}

// add does ADD.
func (w *world) add(t *testing.T, m *Manager, pod string) error {
	t.Helper()
	s := sandboxOf(pod)
	finish, err := m.Begin(t.Context(), s.Pod)
	if err != nil {
		return err
	}
	return finish(t.Context(), s)
}

// has prints what the pod's network namespace has: each destination and its way.
func (w *world) has(pod string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, made := w.netns["/"+pod]
	if !made {
		return "untouched"
	}
	s := client.StateOf(c)
	ways := map[string]string{}
	for _, r := range s.Routes {
		switch {
		case r.Nexthop != 0:
			for _, g := range s.Groups {
				if g.ID == r.Nexthop && len(g.Members) > 0 {
					ways[r.Dst.String()] = fmt.Sprint(g.Members)
				}
			}
		case r.Peer.IsValid():
			ways[r.Dst.String()] = r.Peer.String()
		case r.Type == dataplane.Unreachable && ways[r.Dst.String()] == "":
			ways[r.Dst.String()] = "nowhere"
		}
	}
	var all []string
	for _, d := range slices.Sorted(maps.Keys(ways)) {
		all = append(all, d+" "+ways[d])
	}
	return strings.Join(all, ", ")
}
