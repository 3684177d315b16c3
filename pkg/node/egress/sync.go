package egress

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// Reasons of Events on pods.
const (
	EgressMissing    = "EgressMissing"
	EgressNotAllowed = "EgressNotAllowed"
	EgressConflict   = "EgressConflict"
	EgressTooMany    = "EgressTooMany"
	EgressIgnored    = "EgressIgnored"
	EgressUnguarded  = "EgressUnguarded"
)

// wanted is what a pod's annotations ask for, as far as it can be had.
type wanted struct {
	egresses []plan.ClientEgress
	known    []store.KnownEgress
	problems []problem
	// unknown says that of one it isn't known yet where its packets go.
	unknown bool
}

// problem is what the owner of a pod should know.
type problem struct {
	reason, text string
	// fatal problems let ADD fail.
	fatal bool
}

// look finds out what Egresses are for a pod of a namespace; last is what was known of them. The sandbox
// is nil as long as the pod is being added.
func (m *Manager) look(ctx context.Context, namespace string, refs []types.NamespacedName, last []store.KnownEgress, s *sandbox) (wanted, error) {
	var w wanted
	var missing int
	refs, w.problems = usable(refs)
	// What isn't used may lead where what was used before did.
	w.unknown = len(w.problems) > 0
	for _, ref := range refs {
		known := store.KnownEgress{Name: ref.String()}
		i := slices.IndexFunc(last, func(k store.KnownEgress) bool { return k.Name == known.Name })
		if i >= 0 {
			known = last[i]
		}
		known.Former = false
		e, live, err := m.egress(ctx, ref, s)
		if err != nil && !notFound(err) {
			return wanted{}, err
		}
		client := clientEgress(known)
		if err != nil {
			w.problems = append(w.problems, problem{EgressMissing, fmt.Sprintf("Egress %s doesn't exist", ref), true})
			w.unknown = true
			if missing++; s == nil && missing == mostAsked {
				break // ADD fails anyway
			}
		} else {
			var refused *problem
			if client, refused, err = m.use(ctx, namespace, ref, e, live); err != nil {
				return wanted{}, err
			}
			known.Switched = i >= 0 && (known.Switched || known.Direct != client.Direct)
			known.Direct, client.Switched = client.Direct, known.Switched
			if refused == nil {
				if client.Routers, err = m.routersOf(ref, s); err != nil {
					return wanted{}, err
				}
			}
			if refused != nil {
				w.problems = append(w.problems, *refused)
			}
			w.unknown = w.unknown || refused == nil && !reachable(client)
			if len(client.InCluster) == 0 && e.Status.ObservedGeneration == 0 {
				client.InCluster = known.InCluster // an Egress that was made again has no status yet
			}
		}
		client.Left = m.left(known.Name, client.Addresses(), time.Now())
		w.egresses = append(w.egresses, client)
		known.Destinations, known.InCluster, known.OriginatingOnly = client.Destinations, client.InCluster, client.OriginatingOnly
		w.known = append(w.known, known)
	}
	if _, excess := plan.Fit(w.egresses); len(excess) > 0 {
		text := fmt.Sprintf("the Egresses have more than %d different destinations, or %d addresses of routers, together: unreachable are destinations of %s",
			plan.MostDestinations, plan.MostTunnels, few(excess, ", "))
		w.problems = append(w.problems, problem{EgressTooMany, text, true})
	}
	return w, nil
}

// use returns an Egress as a client in a namespace uses it.
func (m *Manager) use(ctx context.Context, namespace string, ref types.NamespacedName, e *v2.Egress, live bool) (plan.ClientEgress, *problem, error) {
	labels := map[string]string{}
	if e.Spec.AllowedNamespaces != nil {
		ns, err := m.cluster.Namespace(ctx, namespace, live)
		if err != nil && !notFound(err) {
			return plan.ClientEgress{}, nil, err
		}
		if err == nil {
			labels = ns.Labels
		}
	}
	var service *corev1.Service
	var refused *problem
	allowed, err := plan.AllowsNamespace(e, labels)
	if allowed {
		if service, err = m.cluster.Service(ctx, ref, live); err != nil && !notFound(err) {
			return plan.ClientEgress{}, nil, err
		}
		if err != nil {
			service = nil
		}
	} else {
		text := fmt.Sprintf("Egress %s isn't for pods of namespace %s: spec.allowedNamespaces doesn't select its labels", ref, namespace)
		if err != nil {
			text = fmt.Sprintf("Egress %s isn't for pods of any namespace: %v", ref, err)
		}
		refused = &problem{EgressNotAllowed, text, true}
	}
	return plan.ClientEgressOf(e, service), refused, nil
}

// clientEgress is an Egress of which only that is known what it was.
func clientEgress(k store.KnownEgress) plan.ClientEgress {
	return plan.ClientEgress{Name: k.Name, Destinations: k.Destinations, InCluster: k.InCluster, OriginatingOnly: k.OriginatingOnly}
}

// mostWork is for how long a sandbox is worked on before others have their turn: a program in the pod may make that
// take long. What is left is done later.
const mostWork = 30 * time.Second

// sync keeps the sandboxes of a pod up to date.
func (m *Manager) sync(ctx context.Context, pod types.NamespacedName) error {
	m.mu.Lock()
	var sandboxes []*sandbox
	for _, s := range m.known {
		if podName(s) == pod {
			sandboxes = append(sandboxes, s)
		}
	}
	m.mu.Unlock()
	if len(sandboxes) == 0 {
		return m.tellIgnored(ctx, pod)
	}
	var errs []error
	again := false
	for _, s := range sandboxes {
		work, cancel := context.WithTimeout(ctx, mostWork)
		used, err := m.syncSandbox(work, s)
		cancel()
		again = again || used
		if err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s: %w", s.ContainerID, err))
		}
	}
	if err := errors.Join(errs...); err != nil || !again {
		return err
	}
	return reconcile.Later(m.cfg.Drift + rand.N(m.cfg.Drift/10+1))
}

// syncSandbox says whether the sandbox uses Egresses, or is labelled as a router's.
func (m *Manager) syncSandbox(ctx context.Context, s *sandbox) (used bool, err error) {
	s.work.Lock()
	defer s.work.Unlock()
	last, current := m.lastOf(s)
	if s.gone || !current {
		return false, nil
	}
	meta, err := m.cluster.Pod(ctx, s.Pod, false)
	if notFound(err) {
		return false, nil // its DEL comes, or the cache is behind and tells
	}
	if err != nil {
		return false, err
	}
	refs := plan.EgressRefs(meta.Annotations)
	_, labelled := plan.RouterOf(meta.Labels)
	router := false
	if len(last) == 0 { // a client stays one, whatever labels it gets
		if router, err = m.isRouter(ctx, meta, false); err != nil {
			return false, err
		}
	}
	switch {
	case router: // which has rules and tunnels of its own
		err = m.syncRouter(ctx, s)
		m.tell(meta, s, ignoredBy(refs, "the pod is a router of an Egress"))
	case len(refs)+len(last) > 0:
		err = m.syncClient(ctx, s, meta, refs, last)
	case s.restored && !s.looked:
		err = m.clearLost(ctx, s)
	}
	if errors.Is(err, ErrGone) {
		logged(ctx, s).V(2).Info("The network namespace is gone without DEL")
		return false, m.drop(ctx, s)
	}
	return len(refs) > 0 || labelled, err
}

// clearLost removes, once in a process, what a former one has made in a sandbox that uses no Egress any
// more, and of which there is no record.
func (m *Manager) clearLost(ctx context.Context, s *sandbox) error {
	made, err := m.lastMade(ctx, s)
	if err == nil && len(made) > 0 {
		err = m.applyKernel(ctx, s, wanted{})
	}
	s.looked = err == nil
	return err
}

func (m *Manager) syncClient(ctx context.Context, s *sandbox, meta *metav1.PartialObjectMetadata, refs []types.NamespacedName, last []store.KnownEgress) error {
	s.forgetAbsent(refs)
	w, err := m.look(ctx, s.Namespace, refs, last, s)
	if err == nil && w.unknown && len(last) == 0 && s.done == nil {
		last, err = m.lastMade(ctx, s)
	}
	if err != nil {
		return err
	}
	if w.unknown {
		w.keep(last)
	}
	err = m.apply(ctx, s, w)
	problems := w.problems
	if s.done != nil {
		for _, c := range s.done.Conflicts {
			problems = append(problems, conflict(c))
		}
	}
	if errors.Is(err, ErrUnguarded) {
		problems = append(problems, problem{EgressUnguarded, fmt.Sprintf("%v: delete the pod if this goes on", ErrUnguarded), false})
	}
	m.tell(meta, s, problems)
	return err
}

// conflict is what the owner of a pod should know of two of its Egresses.
func conflict(c plan.ClientConflict) problem {
	text := fmt.Sprintf("Egress %s and Egress %s both have the destination %s: the first is used", c.Winner, c.Loser, c.Dst)
	if c.Router {
		text = fmt.Sprintf("router %s of Egress %s isn't used: it is outside of the cluster, and a destination of Egress %s", c.Dst.Addr(), c.Loser, c.Winner)
	}
	return problem{EgressConflict, text, false}
}

// syncRouter sets a router's parameters.
func (m *Manager) syncRouter(ctx context.Context, s *sandbox) error {
	out, err := m.net.Router(ctx, s.Netns, s.IfName)
	if err == nil && s.router && out.Others > 0 {
		m.cfg.Repaired(ctx, out)
	}
	s.router = s.router || err == nil
	return err
}

// lastOf returns what is known of the Egresses that a sandbox uses, and whether it is the
// one that is known by its ID.
func (m *Manager) lastOf(s *sandbox) (last []store.KnownEgress, current bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return s.egresses, m.known[s.ID] == s
}

// apply makes a sandbox, whose work is held, what it should be. What would be forgotten if
// coild ended is recorded first, and what there is no more is forgotten last. A record that
// can't be written keeps nothing from the pod.
func (m *Manager) apply(ctx context.Context, s *sandbox, w wanted) error {
	last, _ := m.lastOf(s)
	if len(w.known) > 0 {
		recordErr := m.remember(ctx, s, w.known)
		faultpoint.At(faultpoint.EgressRecorded)
		err := m.applyKernel(ctx, s, w)
		faultpoint.At(faultpoint.EgressMade)
		if err == nil && recordErr == nil {
			err = m.settle(ctx, s, w.known)
		}
		return errors.Join(err, recordErr)
	}
	if len(last) > 0 {
		if err := m.applyKernel(ctx, s, w); err != nil {
			return err
		}
		faultpoint.At(faultpoint.EgressCleared)
	}
	err := m.remember(ctx, s, nil)
	if len(last) > 0 {
		faultpoint.At(faultpoint.EgressForgotten)
	}
	return err
}

func (m *Manager) applyKernel(ctx context.Context, s *sandbox, w wanted) error {
	c := m.client(s, w)
	if s.restored && s.done == nil {
		m.recall(ctx, s, c)
	}
	c.Stale = s.done == nil || s.failed != nil
	out, err := m.net.Client(ctx, s.Netns, c)
	m.made(ctx, s, out, err)
	if s.failed = err; err != nil {
		return err
	}
	switch {
	case !out.changed():
	case s.done != nil && reflect.DeepEqual(*s.done, out.State):
		m.cfg.Repaired(ctx, out)
	default:
		logged(ctx, s).V(2).Info("Egress of a pod changed", "tunnels", out.State.Tunnels, "rules", out.Rules, "routes", out.Routes, "nexthops", out.Nexthops)
	}
	s.done = &out.State
	return nil
}

// idle is as long as routers remember connections that send nothing, but for TCP's: these have
// pins (nf_conntrack_udp_timeout_stream).
const idle = 2 * time.Minute

// client is what the plan of a sandbox is made of.
func (m *Manager) client(s *sandbox, w wanted) plan.Client {
	egresses := slices.Clone(w.egresses)
	for i := range egresses {
		egresses[i].OriginatingOnly = egresses[i].OriginatingOnly || m.cfg.OriginatingOnly
	}
	egresses, _ = plan.Fit(egresses)
	return plan.Client{Address: s.Address, Link: s.IfName, Port: m.cfg.Port, Protocol: m.cfg.Protocol, Idle: idle, Egresses: egresses,
		ContainerID: s.ContainerID, Wired: !m.cfg.RecordAll}
}

// remember records what a sandbox uses.
func (m *Manager) remember(ctx context.Context, s *sandbox, egresses []store.KnownEgress) error {
	m.mu.Lock()
	same := slices.EqualFunc(s.egresses, egresses, sameEgress)
	recorded := s.recorded
	// EgressChanged concerns the pod from now on, whatever the disk does.
	s.egresses = egresses
	m.mu.Unlock()
	keep := len(egresses) > 0 || m.cfg.RecordAll
	if recorded == keep && (same || !keep) {
		return nil
	}
	var err error
	if keep {
		err = m.record.SetClient(ctx, store.Client{ID: s.ID, Pod: s.Pod, Netns: s.Netns, Address: s.Address, Egresses: egresses})
	} else {
		err = m.record.ForgetClients(ctx, s.ID)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// What failed is done again: a record that may be there is taken for a missing one as
	// long as it should be, and the other way round.
	s.recorded = keep == (err == nil)
	return err
}

func sameEgress(a, b store.KnownEgress) bool {
	return a.Name == b.Name && a.Direct == b.Direct && a.Switched == b.Switched && a.Former == b.Former && a.OriginatingOnly == b.OriginatingOnly &&
		slices.Equal(a.Destinations, b.Destinations) && slices.Equal(a.InCluster, b.InCluster)
}

// settle forgets that Egresses have switched as soon as no flow goes the former way. The next sync
// removes what is left of that.
func (m *Manager) settle(ctx context.Context, s *sandbox, known []store.KnownEgress) error {
	settled := slices.Clone(known)
	for i := range settled {
		settled[i].Switched = settled[i].Switched && m.former(s, settled[i].Name)
	}
	if slices.EqualFunc(known, settled, sameEgress) {
		return nil
	}
	m.loop.Add(podName(s))
	return m.remember(ctx, s, settled)
}

// tell records an Event for the problems of each reason if it wasn't told yet; without a sandbox, for all.
func (m *Manager) tell(pod *metav1.PartialObjectMetadata, s *sandbox, problems []problem) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	said := map[string]bool{}
	for _, p := range summed(problems) {
		said[p.text] = true
		if s == nil || !s.said[p.text] {
			m.recorder.Eventf(ref, nil, corev1.EventTypeWarning, p.reason, p.reason, "%s", p.text)
		}
	}
	if s != nil {
		s.said = said
	}
}
