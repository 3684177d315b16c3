package loadbalancer

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// step makes the next write into a Service, whose event leads to the one after it.
func (c *Controller) step(ctx context.Context, key types.NamespacedName) error {
	c.noteWaiting(key, false) // it is noted again below
	s := c.services.Find(key.String())
	if s == nil || c.written.has(s) {
		return nil
	}
	if !loadbalancer.Managed(s, c.cfg.WithoutClass) {
		return c.do(ctx, s, loadbalancer.Release(s))
	}
	c.mu.Lock()
	given, ok := c.given[s.UID]
	c.mu.Unlock()
	if !ok {
		return nil // the next plan has it
	}
	want := c.state(s, given)
	next := loadbalancer.Serve(s, want)
	if rest := c.waitsFor(s, want, next); rest > 0 {
		c.steps.AddAfter(key, rest)
		return nil
	}
	return c.do(ctx, s, next)
}

// waitsFor is for how long a write waits that says no more than that a Service waits. One that takes an address out of the status, or forgets it, never waits.
func (c *Controller) waitsFor(s *corev1.Service, want loadbalancer.State, next loadbalancer.Step) time.Duration {
	waits := loadbalancer.Waits(want.Assigned.Reason) || want.Assigned.Status == metav1.ConditionTrue && loadbalancer.Waits(want.Serving.Reason)
	says := next.Metadata != nil && !loadbalancer.Taken(s) && len(want.Addresses.Addrs()) == 0 ||
		next.Status != nil && reflect.DeepEqual(next.Status.Status.LoadBalancer, s.Status.LoadBalancer)
	c.mu.Lock()
	defer c.mu.Unlock()
	until, known := c.waiting[s.UID]
	switch {
	case !waits || !says || known && !time.Now().Before(until):
		delete(c.waiting, s.UID)
		return 0
	case !known:
		until = time.Now().Add(min(mostPatience, patience+time.Duration(c.without)*turn))
		c.waiting[s.UID] = until
	}
	return time.Until(until)
}

// do makes a write.
func (c *Controller) do(ctx context.Context, s *corev1.Service, next loadbalancer.Step) error {
	services := c.cfg.Core.CoreV1().Services(s.Namespace)
	var after *corev1.Service
	var err error
	switch {
	case next.Metadata != nil:
		after, err = kube.PatchMetadata(ctx, services, s, map[string]any{
			"finalizers": next.Metadata.Finalizers, "annotations": map[string]any{
				loadbalancer.AnnotationAssigned: annotation(next.Metadata, loadbalancer.AnnotationAssigned), loadbalancer.AnnotationFloatingIP: annotation(next.Metadata, loadbalancer.AnnotationFloatingIP),
			},
		})
	case next.Status != nil:
		after, err = services.UpdateStatus(ctx, next.Status, metav1.UpdateOptions{})
		if err == nil {
			c.tell(s, next.Status)
			c.tellPolicies(s, next.Status)
		}
	}
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return nil // its event comes
	case err != nil:
		return fmt.Errorf("write into Service %s: %w", klog.KObj(s), err)
	}
	if after != nil {
		c.written.add(s, after)
		passed(s, next)
	}
	return nil
}

// passed says which step of a Service was done.
func passed(s *corev1.Service, done loadbalancer.Step) {
	switch {
	case done.Metadata != nil && slices.Contains(done.Metadata.Finalizers, loadbalancer.Finalizer):
		faultpoint.At(faultpoint.ServeRemembered)
	case done.Metadata != nil:
		faultpoint.At(faultpoint.ServeReleased)
	case done.Status != nil && len(done.Status.Status.LoadBalancer.Ingress) > 0:
		faultpoint.At(faultpoint.ServeTold)
	case done.Status != nil && len(s.Status.LoadBalancer.Ingress) > 0:
		faultpoint.At(faultpoint.ServeUntold)
	}
}

// annotation is the value of an annotation in a patch: null if it is to go.
func annotation(s *corev1.Service, name string) any {
	if text, ok := s.Annotations[name]; ok {
		return text
	}
	return nil
}

// tell records Events about what a status says for the first time.
func (c *Controller) tell(before, after *corev1.Service) {
	for _, kind := range []string{loadbalancer.ConditionAssigned, loadbalancer.ConditionServed} {
		was, is := meta.FindStatusCondition(before.Status.Conditions, kind), meta.FindStatusCondition(after.Status.Conditions, kind)
		if is == nil || was != nil && was.Status == is.Status && was.Reason == is.Reason && was.Message == is.Message {
			continue
		}
		severity := corev1.EventTypeNormal
		if is.Status != metav1.ConditionTrue && is.Reason != loadbalancer.ReasonWaits && is.Reason != loadbalancer.ReasonGateway && is.Reason != loadbalancer.ReasonPairs {
			severity = corev1.EventTypeWarning
		}
		c.cfg.Recorder.Eventf(after, nil, severity, is.Reason, "ServeAddress", "%s", is.Message)
	}
}

// state is what a Service is to say.
func (c *Controller) state(s *corev1.Service, given loadbalancer.Given) loadbalancer.State {
	want := loadbalancer.State{Now: c.now(), Policies: c.honors(s)}
	want.Assigned, want.Serving = metav1.Condition{Type: loadbalancer.ConditionAssigned, Status: metav1.ConditionFalse}, metav1.Condition{
		Type: loadbalancer.ConditionServed, Status: metav1.ConditionFalse, Reason: loadbalancer.ReasonWaits, Message: "It has no address",
	}
	claim := c.claims.Find(c.cfg.Namespace + "/" + given.Claim)
	switch {
	case given.Claim == "":
		want.Assigned.Reason, want.Assigned.Message = string(given.Reason), given.Message
		return want
	case claim == nil || len(loadbalancer.AddressOf(claim).Addrs()) == 0:
		want.Assigned.Reason, want.Assigned.Message = loadbalancer.Unanswered(c.cfg.Namespace, given.Claim, claim)
		if has := loadbalancer.Of(s).Has; len(has) > 0 && sets.New(given.Address.Addrs()...).HasAll(has...) {
			want.Addresses, want.FloatingIP = given.Address, remembered(s) // its claim was lost, and comes back
		}
		return want
	}
	has := loadbalancer.Assigned(claim)
	want.Addresses, want.FloatingIP, want.Assigned = has.Addresses, has.FloatingIP, has.Assigned
	c.noteWaiting(keyOf(s), true) // before gateways are read: of those that change meanwhile it is told
	at := c.site(claim, s)
	want.Serving.Reason, want.Serving.Message = at.Served(s)
	c.noteWaiting(keyOf(s), want.Serving.Reason == loadbalancer.ReasonGateway)
	if want.Serving.Reason == loadbalancer.ReasonServed {
		want.Served, want.Serving.Status = true, metav1.ConditionTrue
		if drops := at.Drops(); drops != "" { // the others serve it
			want.Serving.Status, want.Serving.Reason, want.Serving.Message = metav1.ConditionFalse, loadbalancer.ReasonBlocked, drops
		}
	}
	return want
}

// site returns the place of a claim's address, as far as it is known, for a Service that has the address.
func (c *Controller) site(claim *v2.AddressClaim, s *corev1.Service) loadbalancer.Site {
	at := loadbalancer.Site{
		Claim: claim, Block: c.blockOf(claim), Serving: c.servingNodes,
		Endpoints: func() map[string]bool { return loadbalancer.WithEndpoints(c.slices.Under(keyOf(s).String())) },
	}
	if at.Block == nil || !loadbalancer.OfGateways(at.Block) {
		return at
	}
	at.Gateways = slices.SortedFunc(slices.Values(c.gateways.All()), func(a, b *v2.LoadBalancerGateway) int { return cmp.Compare(a.Name, b.Name) })
	at.Silent = c.silent
	return at
}
