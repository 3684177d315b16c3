package egress

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

// An annotation or a policy that changes names an Egress that a cache may not have yet, that is made a moment later,
// or that never is. As long as it isn't known where packets to its destinations go, the Egresses that
// were named before stay closed: they may have the same destinations.

// mostAsked bounds the Egresses of one pod for which the API server is asked though the cache is filled, and those
// that an ADD, which kubelet repeats, finds missing before it fails.
const mostAsked = 8

// mostFormer bounds the Egresses that one pod's annotations and policies named before: tenants may change these without
// end.
const mostFormer = 16

// said is the API server's answer about an Egress; nil if there is none.
type said struct {
	egress *v2.Egress
	at     time.Time
}

// errNotAsked: a cache doesn't have the Egress, and the API server may.
var errNotAsked = errors.New("the API server wasn't asked for the Egress")

// egress returns an Egress, nil if there is none, live for a pod that is being added. For a running pod it is the Egress
// of the cache, which may be behind, or the one that the API server had when it was asked. others are how many it is to
// be asked for already.
func (m *Manager) egress(ctx context.Context, ref types.NamespacedName, s *sandbox, others int) (*v2.Egress, error) {
	e, err := ifAny(m.cluster.Egress(ctx, ref, s == nil))
	if s == nil {
		return e, err
	}
	if e != nil || err != nil {
		delete(s.asked, ref)
		return e, err
	}
	a, asked := s.asked[ref]
	switch {
	case asked && a.egress != nil && time.Since(a.at) < m.cfg.Drift:
		return a.egress, nil
	case asked && a.egress == nil, !asked && len(s.asked)+others >= mostAsked:
		return nil, nil
	}
	return nil, errNotAsked
}

// forgetAsked forgets the answers about Egresses that aren't asked for any more.
func (s *sandbox) forgetAsked(uses []use) {
	maps.DeleteFunc(s.asked, func(ref types.NamespacedName, _ said) bool {
		return !slices.ContainsFunc(uses, func(u use) bool { return u.egress == ref })
	})
}

// findOut asks the API server and the pod for the facts that a decision about a sandbox lacked, and decides again. The
// sandbox's work is held.
func (m *Manager) findOut(ctx context.Context, s *sandbox, w *wanted) error {
	for _, ref := range w.missing {
		// Once, unless it is there: the cache will have it then.
		e, err := ifAny(m.cluster.Egress(ctx, ref, true))
		if err != nil {
			return err
		}
		s.deciding.Lock()
		s.asked[ref] = said{e, time.Now()}
		s.deciding.Unlock()
	}
	if w.lost {
		last, err := m.lastMade(ctx, s)
		if err != nil {
			return err
		}
		s.deciding.Lock()
		s.recalled = true
		m.mu.Lock()
		s.egresses = append(slices.Clip(s.egresses), last...)
		m.mu.Unlock()
		s.deciding.Unlock()
	}
	_, err := m.decideFor(ctx, s)
	return err
}

// reachable says whether something is known to which packets of an Egress can be sent.
func reachable(e client.Egress) bool {
	if e.Direct {
		return len(e.Routers) > 0
	}
	return e.Peers != ipam.Address{}
}

// keep closes the Egresses that were known last and aren't named any more, but for destinations of
// those that are named: as long as it isn't known where packets of the policy go that named them, or of annotations. Of one
// without a name nothing tells which of these named it.
func (w *wanted) keep(last []store.KnownEgress) {
	taken := map[netip.Prefix]bool{}
	for _, e := range w.egresses {
		for _, d := range e.Destinations {
			taken[d] = true
		}
	}
	former := slices.DeleteFunc(slices.Clone(last), func(k store.KnownEgress) bool {
		// A former Egress without destinations closes nothing, and each change would leave one more.
		return len(k.Destinations) == 0 || !w.unknown[k.Policy] && (k.Name != "" || len(w.unknown) == 0) || slices.ContainsFunc(w.known, func(named store.KnownEgress) bool { return sameUse(named, k) })
	})
	for _, k := range bounded(former) {
		k.Former, k.Switched, k.Open = true, false, false
		w.known = append(w.known, k)
		closed := clientEgress(k)
		closed.Destinations = slices.DeleteFunc(slices.Clone(k.Destinations), func(d netip.Prefix) bool {
			had := taken[d]
			taken[d] = true
			return had
		})
		w.egresses = append(w.egresses, closed)
	}
}

// bounded returns Egresses, the latest first. If they are many, the oldest ones become one or two without
// a name, which close the same destinations and, if these are very many, more.
func bounded(former []store.KnownEgress) []store.KnownEgress {
	if len(former) <= mostFormer {
		return former
	}
	latest, oldest := former[:mostFormer-2], former[mostFormer-2:]
	var some []client.Egress
	for _, k := range oldest {
		some = append(some, clientEgress(k))
	}
	// Destinations that other Egresses have by now aren't left out: these may lose them.
	for _, joined := range client.Closing(some, nil) {
		latest = append(slices.Clip(latest), store.KnownEgress{
			Destinations: joined.Destinations, InCluster: joined.InCluster, OriginatingOnly: joined.OriginatingOnly,
		})
	}
	return latest
}

// lastMade returns, without names, the Egresses that a former process has made in a sandbox without
// a record.
func (m *Manager) lastMade(ctx context.Context, s *sandbox) ([]store.KnownEgress, error) {
	routes, err := m.net.Closed(ctx, s.Netns)
	return closedBy(routes), err
}

// mostBelieved is how many destinations, and how many ranges of the cluster, a pod's routes tell of. coild makes no
// more; a program in the pod may.
const mostBelieved = 2 * client.MostDestinations

// closedBy returns the destinations that routes close, as Egresses without a name. Destinations
// for connections that only clients open are apart.
func closedBy(routes []dataplane.Route) []store.KnownEgress {
	var inCluster []netip.Prefix
	lost, thrown := map[netip.Prefix]bool{}, map[netip.Prefix]bool{}
	for _, r := range routes {
		switch {
		case r.Type == dataplane.Throw && !thrown[r.Dst]:
			thrown[r.Dst] = true
			inCluster = append(inCluster, r.Dst)
		case r.Type == dataplane.Unicast && r.Metric == dataplane.MetricSink:
			lost[r.Dst] = true
		}
	}
	var all []store.KnownEgress
	inCluster = inCluster[:min(len(inCluster), mostBelieved)]
	for _, originatingOnly := range []bool{false, true} {
		made := store.KnownEgress{InCluster: inCluster, OriginatingOnly: originatingOnly}
		for _, r := range routes {
			if len(made.Destinations) == mostBelieved {
				break
			}
			if r.Type == dataplane.Unreachable && r.Metric == dataplane.MetricUnreachable && lost[r.Dst] == originatingOnly {
				made.Destinations = append(made.Destinations, r.Dst)
			}
		}
		if len(made.Destinations) > 0 {
			all = append(all, made)
		}
	}
	return all
}
