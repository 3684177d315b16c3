package egresspolicy

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
)

// syncStatus makes the status of a policy what it should be.
func (c *Controller) syncStatus(ctx context.Context, key types.NamespacedName) error {
	s := c.policies.find(key)
	if s == nil {
		c.counted.Delete(key)
		c.moved.Delete(key)
		return nil
	}
	f := c.facts(s)
	e := f.Uses()
	if e != nil && e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		given, known := c.given(s, e)
		if !known {
			c.assign.Add(keyOf(e)) // which comes back here
			return nil
		}
		f.Given = given
	}
	status := policy.Status(f)
	unsettled := c.untilSettled(s, e, status)
	if unsettled > 0 {
		status = policy.WithPlace(status, s.status)
	}
	if equality.Semantic.DeepEqual(s.status, status) {
		return again(unsettled)
	}
	if wait := c.untilCounted(s, status); wait > 0 {
		return again(cmp.Or(min(wait, unsettled), wait))
	}
	wrote, err := c.writeStatus(ctx, s, status)
	if !wrote {
		return err
	}
	if status.Clients != s.status.Clients {
		c.counted.Set(key, c.now().Time)
	}
	c.tell(ctx, s, status)
	return again(unsettled)
}

// again ends a sync that has to be done again after some time; never, if that is 0.
func again(after time.Duration) error {
	if after <= 0 {
		return nil
	}
	return reconcile.Later(after)
}

// untilSettled is how long the status of a policy keeps saying by which nodes' addresses its pods left before.
func (c *Controller) untilSettled(s *subject, e *v2.Egress, status v2.EgressPolicyStatus) time.Duration {
	if e == nil || !e.Spec.Addresses.For(v2.EgressAddressOfNode) || !policy.AtNodes(s.status, status.Summary.Egress) || policy.SamePlace(s.status, status) {
		c.moved.Delete(s.Name)
		return 0
	}
	since, known := c.moved.Find(s.Name)
	if !known {
		since = c.now().Time
		c.moved.Set(s.Name, since)
	}
	return max(0, settlePlace-c.now().Sub(since))
}

// untilCounted is how long the status of a policy need not be written: only the number of clients
// differs, and was written lately.
func (c *Controller) untilCounted(s *subject, status v2.EgressPolicyStatus) time.Duration {
	status.Clients = s.status.Clients
	if !equality.Semantic.DeepEqual(s.status, status) {
		return 0
	}
	return max(0, cmp.Or(c.cfg.CountEvery, countEvery)-c.now().Sub(c.counted.Get(s.Name)))
}

// facts returns what the caches have.
func (c *Controller) facts(s *subject) policy.Facts {
	f := policy.Facts{
		Policy: s.Policy, Selector: s.invalid, Use: s.use, Services: s.services, Generation: s.object.GetGeneration(), Status: s.status,
		Egress:   c.egress,
		Service:  func(name string) *corev1.Service { return c.services.Find(s.Name.Namespace + "/" + name) },
		Refused:  func(e *v2.Egress) []string { return c.refused(s, e) },
		Conflict: func(e *v2.Egress) *policy.Conflict { return c.conflict(s, e) },
		Clients:  egress.CountClients(c.slices.Under(s.Name.String())),
		Now:      c.now(),
	}
	if defaults := plan.DefaultEgresses(c.defaults.Under(isDefault)); len(defaults) > 0 {
		f.Default = defaults[0]
	}
	if !s.ofCluster() {
		f.Namespace = &policy.Namespace{Name: s.Name.Namespace}
		if ns := c.namespaces.Find(s.Name.Namespace); ns != nil {
			f.Namespace.Labels, f.Namespace.Egress = ns.Labels, ns.Annotations[v2.AnnotationEgress]
		}
	}
	return f
}

func (c *Controller) egress(name types.NamespacedName) *v2.Egress {
	return c.egresses.Find(name.String())
}

// refused returns the namespaces that an Egress doesn't allow and that have pods which a policy of the cluster selects, sorted.
func (c *Controller) refused(s *subject, e *v2.Egress) (all []string) {
	for _, ns := range c.namespaces.All() {
		if allowed, _ := plan.AllowsNamespace(e, ns.Labels); !allowed && len(c.selected(s.Policy, ns.Name)) > 0 {
			all = append(all, ns.Name)
		}
	}
	slices.Sort(all)
	return all
}

// conflict returns the first pod of a policy that follows something else to another Egress, and what.
func (c *Controller) conflict(s *subject, e *v2.Egress) *policy.Conflict {
	if e == nil {
		return nil
	}
	mine := s.Policy
	mine.Egress = keyOf(e)
	var others []policy.Policy
	for _, o := range c.policies.beside(s.Name.Namespace) {
		others = append(others, o.Policy)
	}
	for _, key := range slices.Sorted(slices.Values(c.naming.Keys())) {
		if named := c.egresses.Find(key); named != nil {
			others = append(others, policy.Annotation(keyOf(named)))
		}
	}
	for _, rival := range policy.Rivals(mine, others, c.egress) {
		var both []*corev1.Pod
		if rival.Annotated() {
			both = slices.DeleteFunc(c.naming.Under(rival.Egress.String()), func(p *corev1.Pod) bool {
				return !egress.MayBeClient(p) || !mine.Selects(podOf(p, c.namespaceLabels(p.Namespace)))
			})
		} else {
			both = slices.DeleteFunc(c.selected(rival.Policy, cmp.Or(rival.Name.Namespace, s.Name.Namespace)), func(p *corev1.Pod) bool {
				return !mine.Selects(podOf(p, c.namespaceLabels(p.Namespace)))
			})
		}
		if len(both) > 0 {
			pod := slices.MinFunc(both, func(a, b *corev1.Pod) int {
				return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
			})
			return &policy.Conflict{Rival: rival, Pod: keyOf(pod)}
		}
	}
	return nil
}

// tell makes Events of problems that weren't there before.
func (c *Controller) tell(ctx context.Context, s *subject, status v2.EgressPolicyStatus) {
	for _, kind := range []struct {
		condition string
		bad       metav1.ConditionStatus
	}{{v2.PolicyAccepted, metav1.ConditionFalse}, {v2.PolicyConflicting, metav1.ConditionTrue}} {
		was, is := meta.FindStatusCondition(s.status.Conditions, kind.condition), meta.FindStatusCondition(status.Conditions, kind.condition)
		if is == nil || is.Status != kind.bad || was != nil && was.Status == is.Status && was.Reason == is.Reason {
			continue
		}
		c.cfg.Recorder.Eventf(s.object, nil, corev1.EventTypeWarning, is.Reason, "Reconcile", "%s", is.Message)
		klog.FromContext(ctx).V(2).Info("Policy changed", "policy", s.String(), "reason", is.Reason, "message", is.Message)
	}
}
