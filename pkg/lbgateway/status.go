package lbgateway

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// contact is how often the status is written at least, and pause how long no other one is after each.
	contact = 20 * time.Second
	pause   = time.Second
	// maxMessage bounds the text of an error.
	maxMessage = 1024
)

// tell writes the status of the machine's LoadBalancerGateway.
func (g *Gateway) tell(ctx context.Context, _ struct{}) error {
	own := g.gateways.Find(g.cfg.Name)
	if own == nil {
		klog.FromContext(ctx).Info("There is no LoadBalancerGateway of the machine: nothing is served", "name", g.cfg.Name)
		return reconcile.Retry(fmt.Errorf("there is no LoadBalancerGateway %s: make it, and name AddressPools in its spec.pools", g.cfg.Name), contact)
	}
	now := metav1.NewTime(g.now())
	if rest := pause - now.Sub(g.toldAt); rest > 0 {
		return reconcile.Later(rest)
	}
	status := g.status(own, now)
	due := own.Status.LastContact == nil || now.Sub(own.Status.LastContact.Time).Abs() >= contact
	if equality.Semantic.DeepEqual(own.Status, status) && !due {
		return reconcile.Later(contact - now.Sub(own.Status.LastContact.Time).Abs())
	}
	after := own.DeepCopy()
	after.Status = status
	after.Status.LastContact = &now
	_, err := g.cfg.Coil.CoilV2().LoadBalancerGateways().UpdateStatus(ctx, after, metav1.UpdateOptions{})
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return reconcile.Later(pause) // its event comes
	case err != nil:
		return fmt.Errorf("write the status of LoadBalancerGateway %s: %w", g.cfg.Name, err)
	}
	g.toldAt = now.Time
	return reconcile.Later(contact)
}

// status is that of the machine's LoadBalancerGateway.
func (g *Gateway) status(own *v2.LoadBalancerGateway, now metav1.Time) v2.LoadBalancerGatewayStatus {
	g.mu.Lock()
	does, refused, problem, elections := g.does, g.refused, g.vrrp.problem, g.vrrp.states
	g.mu.Unlock()
	st := *own.Status.DeepCopy()
	st.Applied = does.told()
	st.Errors, st.VRRP = nil, elections
	for _, key := range slices.Sorted(maps.Keys(does.services)) {
		if err := does.services[key].err; err != nil && len(st.Errors) < v2.MaxGatewayErrors {
			st.Errors = append(st.Errors, v2.GatewayError{Service: key, Message: short(err.Error())})
		}
	}
	applied := metav1.Condition{
		Type: v2.GatewayApplied, Status: metav1.ConditionTrue, Reason: v2.ReasonAllServed, Message: "The machine serves all Services",
		ObservedGeneration: does.generation, LastTransitionTime: now,
	}
	switch {
	case refused == nil && problem != nil:
		applied.Status, applied.Reason, applied.Message = metav1.ConditionFalse, v2.ReasonVRRPFailed, short(problem.Error())
	case refused != nil:
		applied.Status, applied.Reason, applied.Message = metav1.ConditionFalse, v2.ReasonKernelRefused, short(refused.Error())
	case len(st.Errors) > 0:
		applied.Status, applied.Reason = metav1.ConditionFalse, v2.ReasonServiceErrors
		applied.Message = short(fmt.Sprintf("Service %s: %s", st.Errors[0].Service, st.Errors[0].Message))
	}
	meta.SetStatusCondition(&st.Conditions, applied)
	return st
}

// told is a state as a status tells it.
func (s state) told() v2.GatewayState {
	told := v2.GatewayState{Generation: s.generation, Blocks: s.version, Ports: int32(len(s.forwards))}
	if len(s.forwards) > 0 {
		told.Hash = fmt.Sprintf("%016x", s.hash)
	}
	for _, is := range s.services {
		if is.err == nil {
			told.Services++
		}
	}
	for _, f := range s.forwards {
		told.Endpoints += int32(len(f.Endpoints))
	}
	return told
}

func short(text string) string { return text[:min(len(text), maxMessage)] }
