package egress

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
)

// verdict is the state of an object, for the status: at most one of these is wrong with it.
type verdict struct {
	foreign  *object.ForeignError
	template *egress.TemplateError
	refused  *egress.Refusal
}

// judge returns what an error of ensuring an object says about it; false if it says nothing, as
// that of a conflict or a timeout.
func judge(kind, name string, err error) (v verdict, ok bool) {
	var status apierrors.APIStatus
	switch {
	case err == nil, errors.As(err, &v.foreign), errors.As(err, &v.template):
		return v, true
	case errors.As(err, &status) && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err)):
		var absent *object.AbsentError
		v.refused = &egress.Refusal{Kind: kind, Name: name, Absent: errors.As(err, &absent), Reason: status.Status().Message}
		return v, true
	}
	return v, false
}

// syncObjects makes the objects of an Egress what they should be, and then its status.
func (c *Controller) syncObjects(ctx context.Context, key types.NamespacedName) error {
	e := c.egresses.Find(key.String())
	if e == nil {
		c.gauges.forget(key)
		c.verdicts.Delete(key)
		c.counted.Delete(key)
		return nil
	}
	if e.DeletionTimestamp != nil {
		return nil
	}
	facts := egress.Facts{Egress: e, Now: c.now()}
	var errs []error
	before, now := c.verdicts.Get(key), map[string]verdict{}
	for _, o := range []struct {
		kind, name string
		ensure     func(context.Context, *v2.Egress) error
	}{
		{egress.KindServiceAccount, egress.RouterAccount, c.ensureAccount}, {egress.KindRoleBinding, egress.RouterAccount, c.ensureBinding},
		{egress.KindService, e.Name, c.ensureService}, {"PodDisruptionBudget", e.Name, c.ensureBudget},
		{"Deployment", e.Name, c.ensureDeployment}, {"AddressClaim", e.Name, c.ensureClaim},
	} {
		err := o.ensure(ctx, e)
		v, ok := judge(o.kind, o.name, err)
		if !ok {
			v = before[o.kind] // which holds until something else is known
		}
		now[o.kind] = v
		if v.foreign != nil {
			facts.Conflicts = append(facts.Conflicts, v.foreign.Object)
		}
		if v.template != nil {
			facts.Template = v.template
		}
		if v.refused != nil {
			facts.Refused = append(facts.Refused, *v.refused)
		}
		if !ok || v.refused != nil { // no event tells when it would be taken
			errs = append(errs, err)
		}
	}
	c.verdicts.Set(key, now)
	c.observe(&facts)
	status := egress.Status(facts)
	wait := c.untilCounted(e, status)
	if wait == 0 {
		errs = append(errs, c.writeStatus(ctx, e, status))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if len(facts.Conflicts) > 0 && (wait == 0 || wait > foreignPause) {
		wait = foreignPause
	}
	if wait > 0 {
		return reconcile.Later(wait)
	}
	return nil
}

// untilCounted is how long the status of an Egress need not be written: only what is counted
// differs, and was written lately.
func (c *Controller) untilCounted(e *v2.Egress, status v2.EgressStatus) time.Duration {
	if !egress.OnlyCounts(e.Status, status) {
		return 0
	}
	return max(0, cmp.Or(c.cfg.CountEvery, countEvery)-c.now().Sub(c.counted.Get(keyOf(e))))
}

func (c *Controller) ensureAccount(ctx context.Context, e *v2.Egress) error {
	have := cached[corev1.ServiceAccount](c.cfg.Accounts.Core().V1().ServiceAccounts(), e.Namespace, egress.RouterAccount)
	err := writer(c.cfg.Core.CoreV1().ServiceAccounts(e.Namespace), ownedByEgresses).
		Ensure(ctx, have, egress.RouterServiceAccount(e.Namespace, c.egresses.In(e.Namespace)))
	var foreign *object.ForeignError
	if errors.As(err, &foreign) {
		// An account that somebody else made, as Coil 2.x did, serves as well, and is his.
		return nil
	}
	return err
}

// ownedByEgresses says whether an account, or its binding, is one that was made here.
func ownedByEgresses[T metav1.Object](a T) bool {
	for _, o := range a.GetOwnerReferences() {
		if o.Kind == "Egress" && o.APIVersion == v2.GroupVersion.String() {
			return true
		}
	}
	return false
}

func (c *Controller) ensureService(ctx context.Context, e *v2.Egress) error {
	have := cached[corev1.Service](c.cfg.Routers.Core().V1().Services(), e.Namespace, e.Name)
	want, owned := egress.RouterService(e, c.cfg.Image.Port), ownedBy[*corev1.Service](e)
	if have != nil && owned(have) {
		if err := c.replacePorts(ctx, have, want); err != nil {
			return err
		}
	}
	return writer(c.cfg.Core.CoreV1().Services(e.Namespace), owned).Ensure(ctx, have, want)
}

// replacePorts takes away ports that somebody has added: applying leaves them, and
// beside them the API server refuses one without a name.
func (c *Controller) replacePorts(ctx context.Context, have, want *corev1.Service) error {
	if len(have.Spec.Ports) == 1 && have.Spec.Ports[0].Port == want.Spec.Ports[0].Port && have.Spec.Ports[0].Protocol == want.Spec.Ports[0].Protocol {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": have.UID, "resourceVersion": have.ResourceVersion},
		"spec":     map[string]any{"ports": want.Spec.Ports},
	})
	if err != nil {
		return err
	}
	_, err = c.cfg.Core.CoreV1().Services(have.Namespace).Patch(ctx, have.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: egress.ControllerName})
	if err != nil {
		return fmt.Errorf("replace the ports of Service %s: %w", klog.KObj(have), err)
	}
	return nil
}

func (c *Controller) ensureBudget(ctx context.Context, e *v2.Egress) error {
	have := cached[policyv1.PodDisruptionBudget](c.cfg.Routers.Policy().V1().PodDisruptionBudgets(), e.Namespace, e.Name)
	budgets := writer(c.cfg.Core.PolicyV1().PodDisruptionBudgets(e.Namespace), ownedBy[*policyv1.PodDisruptionBudget](e))
	if want := egress.RouterBudget(e); want != nil {
		return budgets.Ensure(ctx, have, want)
	}
	return budgets.Remove(ctx, have)
}

// ensureDeployment returns a *egress.TemplateError for a template that isn't a pod spec, or
// of which the API server says so.
func (c *Controller) ensureDeployment(ctx context.Context, e *v2.Egress) error {
	want, err := egress.RouterDeployment(e, c.cfg.Image)
	if err != nil {
		return err
	}
	err = writer(c.cfg.Core.AppsV1().Deployments(e.Namespace), ownedBy[*appsv1.Deployment](e)).Ensure(ctx, c.deploymentOf(e), want)
	// Decoding and validation refuse with these errors until the template changes: all other fields are
	// made here.
	if status := apierrors.APIStatus(nil); errors.As(err, &status) && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)) {
		return &egress.TemplateError{Reason: status.Status().Message}
	}
	return err
}

// cached returns the object of an informer's cache, nil if there is none.
func cached[T any](of interface {
	Informer() cache.SharedIndexInformer
}, namespace, name string) *T {
	return kube.CacheOf[T](of.Informer()).Find(cache.NewObjectName(namespace, name).String())
}

func (c *Controller) deploymentOf(e *v2.Egress) *appsv1.Deployment {
	return cached[appsv1.Deployment](c.cfg.Routers.Apps().V1().Deployments(), e.Namespace, e.Name)
}

// observe adds what the caches have.
func (c *Controller) observe(f *egress.Facts) {
	key := keyOf(f.Egress)
	if d := c.deploymentOf(f.Egress); d != nil && metav1.IsControlledBy(d, f.Egress) {
		f.Deployment = d
	}
	f.Routers = c.routers.Under(key.String())
	have := c.served.Under(key.String())
	f.Clients = egress.CountClients(have)
	f.InCluster = c.clusterRanges().For(f.Egress)
	if f.Egress.Spec.Default {
		f.Defaults = plan.DefaultEgresses(c.defaults.Under(isDefault))
	}
	if s := f.Egress.Spec.AllowedNamespaces; s != nil {
		_, f.Selector = metav1.LabelSelectorAsSelector(s)
	}
	f.ForeignPods = c.cfg.Pools == nil
	f.NoPools, f.Claim, f.Blocks = c.addresses == nil, c.claimOf(f.Egress), c.blocksOf(f.Egress)
	f.Policies = c.policiesOf(f.Blocks)
	f.InternalIPs = c.internalIPs
	f.Pressure = c.pressures.Get(key).byPod()
	c.gauges.set(key, f.Clients, len(have), f.Deployment)
}

func (c *Controller) writeStatus(ctx context.Context, e *v2.Egress, status v2.EgressStatus) error {
	if equality.Semantic.DeepEqual(e.Status, status) {
		return nil
	}
	after := e.DeepCopy()
	after.Status = status
	wrote, err := object.WriteStatus(ctx, c.cfg.Coil.CoilV2().Egresses(e.Namespace), after, metav1.UpdateOptions{FieldManager: egress.ControllerName})
	if !wrote {
		return err
	}
	if !egress.SameCounts(status, e.Status) {
		c.counted.Set(keyOf(e), c.now().Time)
	}
	c.tell(ctx, e, status)
	return nil
}

// warnings are the conditions that should not be True.
var warnings = []object.Warning{
	{Condition: v2.EgressInvalidTemplate, Reason: egress.ReasonInvalidTemplate},
	{Condition: v2.EgressUnstableFlows, Reason: egress.ReasonSourcePortWithoutAffinity},
	{Condition: v2.EgressConflicting, Reason: egress.ReasonSeveralDefaults},
	// The conditions say more than their reason.
	{Condition: v2.EgressConntrackPressure, Reason: v2.EgressConntrackPressure},
	{Condition: v2.EgressPortPressure, Reason: v2.EgressPortPressure},
	{Condition: v2.EgressClientPressure, Reason: v2.EgressClientPressure},
}

// tell makes Events of conditions that others than before hold.
func (c *Controller) tell(ctx context.Context, e *v2.Egress, status v2.EgressStatus) {
	event := func(kind string, condition metav1.Condition) {
		c.cfg.Recorder.Eventf(e, nil, kind, condition.Reason, "Reconcile", "%s", condition.Message)
		klog.FromContext(ctx).V(2).Info("Egress changed", "egress", klog.KObj(e), "reason", condition.Reason, "message", condition.Message)
	}
	for _, is := range object.BecameTrue(e.Status.Conditions, status.Conditions, warnings...) {
		event(corev1.EventTypeWarning, is)
	}
	was, is := meta.FindStatusCondition(e.Status.Conditions, v2.EgressAvailable), meta.FindStatusCondition(status.Conditions, v2.EgressAvailable)
	switch {
	case is == nil || is.Reason == egress.ReasonInvalidTemplate || was != nil && was.Status == is.Status && was.Reason == is.Reason:
	case is.Status == metav1.ConditionTrue && is.Reason != egress.ReasonRefused:
		event(corev1.EventTypeNormal, *is)
	case is.Reason == egress.ReasonNoRouterReady && !meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressAvailable):
		// Routers are about to start.
	default:
		event(corev1.EventTypeWarning, *is)
	}
}
