package egress

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// The wanted state of a sandbox is derived from caches, and the node's guard of it is changed then. That asks neither
// the API server nor a pod. Anything that may take longer is done afterwards; see work.

// wanted is the wanted state of a sandbox.
type wanted struct {
	// client and router say that the sandbox is made a client's, or a router's. If both are false nothing is done.
	// floating says that the router's Egress has floating addresses.
	client, router, floating bool
	// egresses are the Egresses that annotations and policies name, as far as they can be had, and former ones
	// that stay closed.
	egresses []client.Egress
	known    []store.KnownEgress
	problems []problem
	// unknown are the policies, and "" for annotations, that name an Egress to which packets have no known way yet.
	unknown map[string]bool
	// missing are Egresses for which the API server is to be asked. lost says that it isn't known which destinations a
	// former process has closed.
	missing []types.NamespacedName
	lost    bool
	// fit are the Egresses of the client that the sandbox is to be, excess the names of those that are too many; own is
	// the guard for these, as soon as it is planned, and guard the node's guard of the client.
	fit        []client.Egress
	excess     []string
	planned    bool
	own, guard dataplane.ClientGuard
	conflicts  []client.Conflict
}

// decide derives the wanted states of a pod's sandboxes, and lets them be made.
func (m *Manager) decide(ctx context.Context, pod types.NamespacedName) error {
	sandboxes := m.affected(isOf(pod))
	if len(sandboxes) == 0 {
		m.ignored.Add(pod)
		return nil
	}
	again := false
	err := m.decisions.do(ctx, pod.Namespace, func() error {
		defer m.pods.Add(pod)
		return each(sandboxes, func(s *sandbox) error {
			used, err := m.decideFor(ctx, s)
			again = again || used
			return err
		})
	})
	if err != nil || !again {
		return err
	}
	return reconcile.Later(m.cfg.Drift + rand.N(m.cfg.Drift/10+1))
}

// decideFor says whether the sandbox uses Egresses, or is labelled as a router's.
func (m *Manager) decideFor(ctx context.Context, s *sandbox) (used bool, err error) {
	s.deciding.Lock()
	defer s.deciding.Unlock()
	last, current := m.lastOf(s)
	if !current {
		return false, nil
	}
	meta, err := ifAny(m.cluster.Pod(ctx, s.Pod, false))
	if err != nil || meta == nil { // its DEL comes, or the cache is behind and tells
		return false, err
	}
	refs := plan.EgressRefs(meta.Annotations)
	_, labelled := plan.RouterOf(meta.Labels)
	if labelled && len(last) == 0 { // a client stays one, whatever labels it gets
		e, err := m.egress(ctx, routed(meta), s, 0)
		switch {
		case errors.Is(err, errNotAsked): // it may be a router, which no policy selects
			s.want = &wanted{missing: []types.NamespacedName{routed(meta)}}
			return true, nil
		case err != nil:
			return false, err
		case e != nil: // a router has rules and tunnels of its own
			s.want = &wanted{router: true, floating: e.Spec.Addresses.Float()}
			m.tell(meta, s, ignoredBy(refs, "the pod is a router of an Egress"))
			return true, nil
		}
	}
	d, err := m.demandOf(ctx, s, meta, refs, last)
	switch {
	case apierrors.IsNotFound(err): // the namespace: the cache is behind and tells
		return len(last) > 0, nil
	case err != nil:
		return false, err
	case d.any() || len(last) > 0:
		err = m.decideClient(ctx, s, meta, d, last)
	default:
		s.want = &wanted{}
	}
	return d.any() || labelled, err
}

// decideClient must be called with deciding held.
func (m *Manager) decideClient(ctx context.Context, s *sandbox, meta *metav1.PartialObjectMetadata, d demand, last []store.KnownEgress) error {
	s.forgetAsked(d.uses)
	w, err := m.look(ctx, s.Namespace, d, last, s)
	if err != nil {
		return err
	}
	w.lost = len(w.unknown) > 0 && !s.recalled
	w.keep(last)
	if s.want != nil && s.want.planned && reflect.DeepEqual(s.want.egresses, w.egresses) {
		w.fit, w.excess, w.own, w.conflicts, w.planned = s.want.fit, s.want.excess, s.want.own, s.want.conflicts, true
	} else {
		m.fit(&w)
	}
	problems := w.tooMany()
	err = m.aim(ctx, s, &w)
	problems = append(problems, w.problems...)
	for _, c := range w.conflicts {
		problems = append(problems, conflict(c))
	}
	if errors.Is(err, clientnet.ErrUnguarded) {
		problems = append(problems, problem{reason: EgressUnguarded, text: fmt.Sprintf("%v: delete the pod if this goes on", clientnet.ErrUnguarded)})
	}
	if unavailable := m.cfg.Available(); unavailable != nil && d.any() {
		problems = append(problems, problem{reason: EgressUnavailable, text: fmt.Sprintf("destinations of the pod's Egresses are unreachable: %v", unavailable)})
	}
	if len(w.missing) == 0 { // else it is decided again in a moment
		m.tell(meta, s, problems)
	}
	return err
}

// look finds out how a pod of a namespace can use Egresses; last are the Egresses as they were known
// before. The sandbox is nil as long as the pod is being added.
func (m *Manager) look(ctx context.Context, namespace string, d demand, last []store.KnownEgress, s *sandbox) (wanted, error) {
	d = d.usable()
	w := wanted{client: true, problems: slices.Clip(d.problems), unknown: map[string]bool{}}
	// An Egress that isn't used may have destinations of one that was used before.
	for _, by := range d.unknown {
		w.unknown[by] = true
	}
	all := map[types.NamespacedName]*found{}
	var missing int
	for _, u := range d.uses {
		f := all[u.egress]
		if f == nil {
			var err error
			if f, err = m.find(ctx, namespace, u.egress, last, s, &w); err != nil {
				return wanted{}, err
			}
			if all[u.egress] = f; f.missing {
				missing++
			}
		}
		w.add(u, f, last, m.cluster.Holder)
		if s == nil && missing == mostAsked {
			return w, nil // ADD fails anyway
		}
	}
	return w, nil
}

// add adds a use of an Egress.
func (w *wanted) add(u use, f *found, last []store.KnownEgress, holder holderOf) {
	known := store.KnownEgress{Name: u.egress.String(), Policy: u.policy()}
	if i := slices.IndexFunc(last, func(k store.KnownEgress) bool { return sameUse(k, known) }); i >= 0 {
		known = last[i]
	}
	known.Former, known.Open = false, u.open()
	used := clientEgress(known)
	switch {
	case f.missing:
		w.problems = append(w.problems, problem{EgressMissing, fmt.Sprintf("Egress %s doesn't exist", u), u.by != nil})
		w.unknown[known.Policy] = true
	case f.refused != "":
		w.problems = append(w.problems, problem{EgressNotAllowed, fmt.Sprintf("Egress %s %s", u, f.refused), u.by != nil})
		used, known.Open = u.of(f.Egress, holder), false
	case f.unasked:
		w.unknown[known.Policy] = true
	default:
		if used = u.of(f.Egress, holder); !used.Open && !reachable(used) {
			w.unknown[known.Policy] = true
		}
	}
	if !f.missing && !f.unasked {
		known.Direct, known.Switched = f.Direct, f.Switched
	}
	used.Open, used.Left = known.Open, f.Left
	w.egresses = append(w.egresses, used)
	known.Destinations, known.InCluster, known.OriginatingOnly = used.Destinations, used.InCluster, used.OriginatingOnly
	w.known = append(w.known, known)
}

// found is what is known of an Egress that a pod is to use.
type found struct {
	client.Egress
	// missing says that there is no such Egress, and unasked that the API server is to be asked for it: then only
	// the addresses are known that it has left.
	missing, unasked bool
	// refused says why the pod mustn't use it: then none of its addresses is known.
	refused string
}

// find finds out about an Egress. If the API server is to be asked for it, it is missing in w.
func (m *Manager) find(ctx context.Context, namespace string, ref types.NamespacedName, last []store.KnownEgress, s *sandbox, w *wanted) (*found, error) {
	f := &found{}
	e, err := m.egress(ctx, ref, s, len(w.missing))
	switch {
	case errors.Is(err, errNotAsked):
		w.missing, f.unasked = append(w.missing, ref), true
	case err != nil:
		return nil, err
	case e == nil:
		f.missing = true
	default:
		if f.Egress, f.refused, err = m.use(ctx, namespace, ref, e, s); err != nil {
			return nil, err
		}
		for _, k := range last {
			if k.Name != f.Name {
				continue
			}
			f.Switched = f.Switched || !k.Former && (k.Switched || k.Direct != f.Direct)
			if len(f.InCluster) == 0 && e.Status.ObservedGeneration == 0 {
				f.InCluster = k.InCluster // an Egress that was made again has no status yet
			}
		}
	}
	if f.refused == "" {
		f.Left = m.left(ref.String(), f.Addresses(), time.Now())
	}
	return f, nil
}

// use returns an Egress as a client in a namespace uses it, or why it mustn't: then it knows none of the Egress's
// addresses.
func (m *Manager) use(ctx context.Context, namespace string, ref types.NamespacedName, e *v2.Egress, s *sandbox) (client.Egress, string, error) {
	var id attachment.ID
	if s != nil {
		id = s.ID
	}
	var labels map[string]string
	if e.Spec.AllowedNamespaces != nil {
		ns, err := ifAny(m.cluster.Namespace(ctx, namespace, s == nil))
		if err != nil {
			return client.Egress{}, "", err
		}
		if ns != nil {
			labels = ns.Labels
		}
	}
	allowed, err := plan.AllowsNamespace(e, labels)
	if allowed {
		service, err := ifAny(m.cluster.Service(ctx, ref, s == nil))
		if err != nil {
			return client.Egress{}, "", err
		}
		used := client.EgressOf(e, service)
		used.Routers = slices.Clone(m.cluster.Routers(ref))
		m.cfg.Health.Mark(id, used.Name, used.Routers)
		return used, "", nil
	}
	why := fmt.Sprintf("isn't for pods of namespace %s: spec.allowedNamespaces doesn't select its labels", namespace)
	if err != nil {
		why = fmt.Sprintf("isn't for pods of any namespace: %v", err)
	}
	return client.EgressOf(e, nil), why, nil
}

// clientEgress returns an Egress as it was when it was last known.
func clientEgress(k store.KnownEgress) client.Egress {
	return client.Egress{Name: k.Name, Policy: k.Policy, Open: k.Open, Destinations: k.Destinations, InCluster: k.InCluster, OriginatingOnly: k.OriginatingOnly}
}

// fit chooses the Egresses that a client can have together.
func (m *Manager) fit(w *wanted) {
	egresses := slices.Clone(w.egresses)
	for i := range egresses {
		egresses[i].OriginatingOnly = egresses[i].OriginatingOnly || m.cfg.OriginatingOnly
	}
	w.fit, w.excess = client.Fit(egresses)
}

// tooMany returns the problem that some Egresses of a client don't fit.
func (w *wanted) tooMany() []problem {
	excess := slices.DeleteFunc(slices.Clone(w.excess), func(name string) bool {
		return !slices.ContainsFunc(w.known, func(k store.KnownEgress) bool { return !k.Former && clientEgress(k).String() == name })
	})
	if len(excess) == 0 {
		return nil
	}
	text := fmt.Sprintf("the Egresses have more than %d different destinations, or %d addresses of routers, together: unreachable are destinations of %s; name fewer Egresses, or some with fewer destinations",
		client.MostDestinations, client.MostTunnels, few(excess, ", "))
	return []problem{{EgressTooMany, text, slices.ContainsFunc(w.known, func(k store.KnownEgress) bool { return k.Policy != "" })}}
}

// client returns the input of the plan of a sandbox.
func (m *Manager) client(s *sandbox, w *wanted) client.Client {
	return client.Client{Address: s.Address, Link: s.IfName, Port: m.cfg.Port, Protocol: m.cfg.Protocol, Idle: idle, Egresses: slices.Clone(w.fit),
		ContainerID: s.ContainerID, Wired: !m.cfg.RecordAll}
}
