package loadbalancer

import (
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
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// Reasons of conditions beside those of package plan/loadbalancer.
const (
	reasonAssigned  = "AddressAssigned"
	reasonWaits     = "WaitsForAddress"
	reasonServed    = "Served"
	reasonNoNode    = "NoNode"
	reasonEndpoints = "NoEndpoints"
	reasonHolder    = "NoHolder"
	reasonBlocked   = v2.BlockForwardingBlocked
	reasonNoGateway = "NoGateway"
	reasonGateway   = "WaitsForGateway"
	reasonSilent    = "GatewaySilent"
	reasonRefused   = "GatewayError"
	reasonPairs     = "WaitsForOpenStack"
)

// waiting says whether a reason is one for which Services have to wait only.
func waiting(reason string) bool {
	return reason == reasonWaits || reason == reasonHolder || reason == reasonGateway || reason == reasonPairs
}

// step makes the next write into a Service, whose event leads to the one after it.
func (c *Controller) step(ctx context.Context, key types.NamespacedName) error {
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
	waits := waiting(want.Assigned.Reason) || want.Assigned.Status == metav1.ConditionTrue && waiting(want.Serving.Reason)
	says := next.Metadata != nil && !loadbalancer.Taken(s) && len(want.Addresses.Addrs()) == 0 ||
		next.Status != nil && reflect.DeepEqual(next.Status.Status.LoadBalancer, s.Status.LoadBalancer)
	c.mu.Lock()
	defer c.mu.Unlock()
	since, known := c.waiting[s.UID]
	switch {
	case !waits || !says || known && time.Since(since) >= patience:
		delete(c.waiting, s.UID)
		return 0
	case !known:
		c.waiting[s.UID] = time.Now()
		return patience
	}
	return patience - time.Since(since)
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
		if is.Status != metav1.ConditionTrue && is.Reason != reasonWaits && is.Reason != reasonGateway && is.Reason != reasonPairs {
			severity = corev1.EventTypeWarning
		}
		c.cfg.Recorder.Eventf(after, nil, severity, is.Reason, "ServeAddress", "%s", is.Message)
	}
}

// state is what a Service is to say.
func (c *Controller) state(s *corev1.Service, given loadbalancer.Given) loadbalancer.State {
	want := loadbalancer.State{Now: c.now(), Policies: c.honors(s)}
	want.Assigned, want.Serving = metav1.Condition{Type: loadbalancer.ConditionAssigned, Status: metav1.ConditionFalse}, metav1.Condition{
		Type: loadbalancer.ConditionServed, Status: metav1.ConditionFalse, Reason: reasonWaits, Message: "It has no address",
	}
	claim := c.claims.Find(c.cfg.Namespace + "/" + given.Claim)
	switch {
	case given.Claim == "":
		want.Assigned.Reason, want.Assigned.Message = string(given.Reason), given.Message
		return want
	case claim == nil || len(addressOf(claim).Addrs()) == 0:
		want.Assigned.Reason, want.Assigned.Message = c.unanswered(claim, given)
		if has := loadbalancer.Of(s).Has; len(has) > 0 && sets.New(given.Address.Addrs()...).HasAll(has...) {
			want.Addresses, want.FloatingIP = given.Address, remembered(s) // its claim was lost, and comes back
		}
		return want
	}
	want.Addresses = addressOf(claim)
	want.Assigned.Status, want.Assigned.Reason = metav1.ConditionTrue, reasonAssigned
	want.Assigned.Message = fmt.Sprintf("It has %s of AddressPool %s", want.Addresses, claim.Spec.Pool)
	if claim.Status.Provided != nil {
		provided(&want, claim)
	}
	want.Serving.Reason, want.Serving.Message = c.served(s, claim)
	if want.Serving.Reason == reasonServed {
		want.Served, want.Serving.Status = true, metav1.ConditionTrue
		if drops := c.dropsBesideHolder(claim); drops != "" { // the others serve it
			want.Serving.Status, want.Serving.Reason, want.Serving.Message = metav1.ConditionFalse, reasonBlocked, drops
		}
	}
	return want
}

// unanswered says why a claim has no address yet: it waits, or OpenStack has refused it.
func (c *Controller) unanswered(claim *v2.AddressClaim, given loadbalancer.Given) (reason, message string) {
	if claim != nil {
		if is := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimProvided); is != nil && is.Status == metav1.ConditionFalse {
			return is.Reason, fmt.Sprintf("AddressClaim %s gets no address: %s", klog.KObj(claim), is.Message)
		}
		if ready := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimReady); ready != nil && ready.Status == metav1.ConditionFalse {
			return reasonWaits, fmt.Sprintf("AddressClaim %s gets no address: %s: %s", klog.KObj(claim), ready.Reason, ready.Message)
		}
	}
	return reasonWaits, fmt.Sprintf("AddressClaim %s/%s has no address yet", c.cfg.Namespace, given.Claim)
}

// served says whether a node answers for the address of a claim, and takes packets for the ports of a Service.
func (c *Controller) served(s *corev1.Service, claim *v2.AddressClaim) (reason, message string) {
	b := c.blockOf(claim)
	if b == nil {
		return reasonHolder, fmt.Sprintf("The AddressBlock of AddressClaim %s isn't known yet", klog.KObj(claim))
	}
	f := b.Floating
	switch {
	case slices.ContainsFunc(portsOf(s), func(p v2.FloatingPort) bool { return !slices.Contains(f.Ports, p) }):
		return reasonHolder, fmt.Sprintf("AddressBlock %s doesn't have the ports yet", b.Name)
	case ofGateways(b):
		refused, why, also := allowed(claim)
		if refused != "" {
			return refused, why
		}
		reason, message := c.servedByGateways(s, b)
		return reason, message + also
	case len(f.Successors) == 0 && needsEndpoints(s):
		return reasonEndpoints, "No node that may have the address has an endpoint that is ready (externalTrafficPolicy: Local)"
	case len(f.Successors) == 0:
		return reasonNoNode, "No node may have the address: each one has the label " + corev1.LabelNodeExcludeBalancers + ", is about to be deleted, or has no InternalIP"
	case !slices.ContainsFunc(f.Successors, func(n v2.FloatingNode) bool { return n.Node == f.Holding.Holder }):
		return reasonHolder, "No node answers for the address yet"
	case slices.Contains(plan.ForwardingBlockedAt(b), f.Holding.Holder):
		return reasonBlocked, blockedText(b, append([]string{f.Holding.Holder}, c.blockedBesideHolder(b)...))
	}
	switch {
	case f.Announcers.All:
		return reasonServed, fmt.Sprintf("Node %s answers for the address, and so do all other nodes that may have it", f.Holding.Holder)
	case len(f.Announcers.Nodes) > 0:
		return reasonServed, fmt.Sprintf("Node %s answers for the address, and so do all other nodes with endpoints", f.Holding.Holder)
	}
	return reasonServed, fmt.Sprintf("Node %s answers for the address", f.Holding.Holder)
}

// dropsBesideHolder says which nodes that announce the address of a claim beside its holder drop its packets, and why; empty if none does.
func (c *Controller) dropsBesideHolder(claim *v2.AddressClaim) string {
	b := c.blockOf(claim)
	if b == nil {
		return ""
	}
	return blockedText(b, c.blockedBesideHolder(b))
}

// blockedBesideHolder returns the nodes that announce an address beside its holder, and drop its packets, sorted. Nodes that have left it, or that are gone, may still be in
// the block's condition.
func (c *Controller) blockedBesideHolder(b *v2.AddressBlock) []string {
	announcers := b.Floating.Announcers
	nodes := plan.ForwardingBlockedAt(b)
	if len(nodes) == 0 {
		return nil
	}
	serving := c.servingNodes()
	nodes = slices.DeleteFunc(nodes, func(n string) bool {
		_, serves := serving[n]
		return n == b.Floating.Holding.Holder || !slices.Contains(announcers.Nodes, n) && !(announcers.All && serves)
	})
	slices.Sort(nodes)
	return nodes
}

// blockedText is what a Service says of nodes that drop packets of its address; empty without any. The first one says why.
func blockedText(b *v2.AddressBlock, nodes []string) string {
	if len(nodes) == 0 {
		return ""
	}
	blocked := meta.FindStatusCondition(b.Status.Conditions, v2.BlockForwardingBlocked)
	why := plan.ToldBy(blocked.Message, nodes[0])
	if len(nodes) == 1 {
		return fmt.Sprintf("Node %s answers for the address, and %s", nodes[0], why)
	}
	return fmt.Sprintf("Nodes %s answer for the address, and %s", plan.Enumerate(nodes), why)
}
