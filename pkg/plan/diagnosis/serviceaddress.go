package diagnosis

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// assignedReasons are reasons for which a Service gets no address, and that are neither the pool's nor OpenStack's.
var assignedReasons = map[string]string{
	string(loadbalancer.AddressOutsidePool): "ask for an address of the pool, or name its pool in the annotation " + v2.AnnotationPool,
	string(loadbalancer.AddressPair):        "ask for one of the two",
	string(loadbalancer.AddressInUse):       "ask for another address, or for other ports, in the annotation " + loadbalancer.AnnotationWanted + " or spec.ports",
	string(loadbalancer.Invalid):            "correct what the message names",
	string(loadbalancer.AddressChanged):     "ask for what can be had: it gets another address then",
}

// claimed judges who has which address for the Service.
func (w *serviceWalk) claimed() {
	if w.unread(StepClaim, KindClaims, KindBlocks) {
		return
	}
	if c := w.condition(loadbalancer.ConditionAssigned); c != nil && c.Status != metav1.ConditionTrue && assignedReasons[c.Reason] != "" && c.ObservedGeneration == w.s.Generation {
		w.wrong(StepClaim, assignedReasons[c.Reason], "the Service gets no address (%s): %s", c.Reason, c.Message)
		return
	}
	if w.claim == nil {
		w.soon(StepClaim, controllerLogs, "no AddressClaim asks for an address for the Service")
		return
	}
	name := w.claim.Namespace + "/" + w.claim.Name
	switch ready := w.notReady(); {
	case ready != nil && w.faulty(StepPool, StepOpenStack):
		w.unknown(StepClaim, "", "AddressClaim %s has no address: first put the %s right", name, w.firstWrong())
	case ready != nil && ready.Reason == v2.ReasonWaitsForOpenStack:
		w.unknown(StepClaim, "look again in a moment", "AddressClaim %s has no address: %s", name, ready.Message)
	case ready != nil:
		w.wrong(StepClaim, "ask for another address, or see that whoever has this one gives it back", "AddressClaim %s has no address (%s): %s", name, ready.Reason, ready.Message)
	case !w.has():
		w.soon(StepClaim, "see the log of the coil-ipam-controller that leads: kubectl -n kube-system logs -l app.kubernetes.io/component=coil-ipam-controller",
			"AddressClaim %s has no address, and no coil-ipam-controller has answered", name)
	case w.block == nil:
		w.soon(StepClaim, "see the log of the coil-ipam-controller that leads", "AddressClaim %s has %s, and there is no AddressBlock of that", name, loadbalancer.AddressOf(w.claim))
	default:
		w.addressBlock(name)
	}
}

// addressBlock judges the block of the claim's address.
func (w *serviceWalk) addressBlock(claim string) {
	if c := meta.FindStatusCondition(w.block.Status.Conditions, v2.BlockConflicting); c != nil && c.Status == metav1.ConditionTrue {
		w.wrong(StepClaim, "find the host by the hardware address that the message names", "another host says that it has %s: %s", loadbalancer.AddressOf(w.claim), c.Message)
		return
	}
	text := fmt.Sprintf("AddressClaim %s has %s", claim, loadbalancer.AddressOf(w.claim))
	if others := w.sharers(); len(others) > 0 {
		text += ", which the Service shares with " + plan.Enumerate(others)
	}
	w.right(StepClaim, "%s", text)
}

// sharers are the other Services at the address.
func (w *serviceWalk) sharers() []string {
	var all []string
	for _, p := range w.block.Floating.Ports {
		if p.Service != "" && p.Service != w.s.Namespace+"/"+w.s.Name && !slices.Contains(all, p.Service) {
			all = append(all, p.Service)
		}
	}
	return all
}

// status compares what the Service tells with what it has.
func (w *serviceWalk) status() {
	if w.unread(StepStatus, KindClaims) {
		return
	}
	var want loadbalancer.State
	if w.has() {
		want = loadbalancer.Assigned(w.claim)
	}
	should, does, others := loadbalancer.Told(w.s, want)
	also := ""
	if len(others) > 0 {
		also = "; of others it tells " + strings.Join(others, ", ")
	}
	c := w.condition(loadbalancer.ConditionAssigned)
	slices.Sort(should)
	slices.Sort(does)
	switch same := slices.Equal(should, does); {
	case c != nil && c.ObservedGeneration < w.s.Generation:
		w.soon(StepStatus, controllerLogs, "the status is about generation %d of the Service, which has %d by now", c.ObservedGeneration, w.s.Generation)
	case w.has() && same:
		w.right(StepStatus, "the status tells %s%s", strings.Join(does, ", "), also)
	case len(does) > 0:
		w.soon(StepStatus, controllerLogs, "the status tells %s, and the Service has %s%s", strings.Join(does, ", "), orNone(should), also)
	case !w.has():
		w.unknown(StepStatus, "", "the status tells no address, as the Service has none%s", also)
	case w.serving == loadbalancer.ReasonServed:
		w.soon(StepStatus, controllerLogs, "the status doesn't tell %s, for which a place answers%s", strings.Join(should, ", "), also)
	default:
		w.unknown(StepStatus, "", "the status tells %s once a place answers for it: %s%s", strings.Join(should, ", "), w.why, also)
	}
}

func orNone(all []string) string {
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}
