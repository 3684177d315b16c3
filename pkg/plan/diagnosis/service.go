package diagnosis

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// ServiceFacts are what a walk about a Service knows. Its Node, Coilds and Answer are of the node that has the address; its Blocks are floating addresses.
type ServiceFacts struct {
	Facts
	Service *corev1.Service
	// Claims are those of Services, of all namespaces.
	Claims   []*v2.AddressClaim
	Gateways []*v2.LoadBalancerGateway
	// Slices are the Service's.
	Slices []*discoveryv1.EndpointSlice
	// Leases are those of coil-lb-controller and coil-ipam-controller.
	Leases []*coordinationv1.Lease
	// Nodes are those of the cluster, if NeedsNodes says so.
	Nodes []*corev1.Node
}

// claim is the AddressClaim of the Service, nil if there is none.
func (f ServiceFacts) claim() *v2.AddressClaim {
	return loadbalancer.ClaimOf(f.Service, f.Claims, f.Blocks)
}

// block is the AddressBlock of the claim, nil if there is none.
func (f ServiceFacts) block() *v2.AddressBlock {
	claim := f.claim()
	if claim == nil {
		return nil
	}
	return loadbalancer.BlockOf(claim, slices.DeleteFunc(slices.Clone(f.Blocks), func(b *v2.AddressBlock) bool {
		name, is := loadbalancer.Claims(claim.Namespace, b)
		return !is || name != claim.Name
	}))
}

// Holder is the node that has the Service's address, and that address; empty if none has.
func (f ServiceFacts) Holder() (node string, a netip.Addr) {
	b := f.block()
	if b == nil || loadbalancer.OfGateways(b) {
		return "", a
	}
	if addrs := loadbalancer.AddressOf(f.claim()).Addrs(); len(addrs) > 0 {
		a = addrs[0]
	}
	return b.Floating.Holding.Holder, a
}

// NeedsNodes says whether the walk has to know all nodes: because none may have the address, because many announce it, or because one may have it for other Services.
func (f ServiceFacts) NeedsNodes() bool {
	b := f.block()
	return b != nil && !loadbalancer.OfGateways(b) && (len(b.Floating.Successors) == 0 || b.Floating.Announcers.All || loadbalancer.NeedsEndpoints(f.Service) && loadbalancer.Shared(b, f.Service))
}

// serviceWalk is a walk about a Service.
type serviceWalk struct {
	walk
	f     ServiceFacts
	s     *corev1.Service
	claim *v2.AddressClaim
	block *v2.AddressBlock
	// serving and why are the reason and the message that say whether a place answers for the address. They are empty without an address.
	serving, why string
}

// Service walks through all that gives a Service of the type LoadBalancer its address, and its traffic.
func Service(f ServiceFacts) Diagnosis {
	w := &serviceWalk{walk: walk{Facts: f.Facts}, f: f, s: f.Service, claim: f.claim(), block: f.block()}
	if w.has() {
		w.serving, w.why = w.site().Served(w.s)
	}
	if w.service() {
		w.leaders()
		w.poolOfService()
		w.openstack()
		w.claimed()
		w.status()
		w.onNode()
		w.onGateways()
		w.endpoints()
		w.clients()
	}
	return Diagnosis{Subject: "Service " + f.Service.Namespace + "/" + f.Service.Name, Steps: w.steps}
}

// has says whether the Service has an address, whoever tells it.
func (w *serviceWalk) has() bool {
	return w.claim != nil && len(loadbalancer.AddressOf(w.claim).Addrs()) > 0
}

// site is what is known of the place of the address.
func (w *serviceWalk) site() loadbalancer.Site {
	return loadbalancer.Site{
		Claim: w.claim, Block: w.block, Gateways: w.f.Gateways, Silent: w.silent, Serving: w.servingNodes,
		Endpoints: func() map[string]bool { return loadbalancer.WithEndpoints(w.f.Slices) },
	}
}

// servingNodes are the nodes that may have addresses; where Nodes can't be read, those that may have this one.
func (w *serviceWalk) servingNodes() loadbalancer.Nodes {
	if len(w.f.Nodes) == 0 {
		return w.block.Floating.Successors
	}
	return loadbalancer.NodesOf(w.f.Nodes)
}

// silent says whether nothing was heard of a gateway for too long.
func (w *serviceWalk) silent(name string) bool {
	i := slices.IndexFunc(w.f.Gateways, func(g *v2.LoadBalancerGateway) bool { return g.Name == name })
	_, silent := health.Silent(w.f.Gateways[i], w.Now)
	return silent
}

// condition is one that coil-lb-controller wrote into the Service, nil if it didn't.
func (w *serviceWalk) condition(kind string) *metav1.Condition {
	return meta.FindStatusCondition(w.s.Status.Conditions, kind)
}

// hangs says whether what objects say hasn't been followed for too long: nobody has written any of them lately.
func (w *serviceWalk) hangs() bool {
	last := inventory.Changed(w.s).Time
	if w.claim != nil && inventory.Changed(w.claim).After(last) {
		last = inventory.Changed(w.claim).Time
	}
	if w.block != nil && inventory.Changed(w.block).After(last) {
		last = inventory.Changed(w.block).Time
	}
	return w.late(last)
}

// soon adds a step about something that a program should do by itself: it is wrong if that takes too long, and nothing before explains it.
func (w *serviceWalk) soon(step, do, format string, args ...any) {
	seen := fmt.Sprintf(format, args...)
	switch first := w.firstWrong(); {
	case first != "":
		w.unknown(step, "", "%s: first put the %s right", seen, first)
	case w.hangs():
		w.wrong(step, do, "%s", seen)
	default:
		w.unknown(step, "look again in a moment", "%s", seen)
	}
}

// controllerLogs is what to do about coil-lb-controller.
const controllerLogs = "see the log of the coil-lb-controller that leads: kubectl -n kube-system logs -l app.kubernetes.io/component=coil-lb-controller"

// service judges the Service, and says whether Coil has more to do with it than that.
func (w *serviceWalk) service() bool {
	s := w.s
	class, managed := s.Spec.LoadBalancerClass, loadbalancer.Managed(s, true)
	switch {
	case !managed && loadbalancer.Taken(s):
		w.leaders()
		if w.late(w.leavingSince()) {
			w.wrong(StepService, controllerLogs, "the Service is deleted, or of another type or class, and still has what Coil wrote into it, the finalizer %s included", loadbalancer.Finalizer)
		} else {
			w.unknown(StepService, "look again in a moment", "the Service is deleted, or of another type or class: its address is given back")
		}
		return false
	case s.DeletionTimestamp != nil:
		w.right(StepService, "the Service is deleted, and has nothing of Coil's; its finalizers are %s", strings.Join(s.Finalizers, ", "))
		return false
	case s.Spec.Type != corev1.ServiceTypeLoadBalancer:
		w.right(StepService, "the Service is of type %s: Coil does nothing for it", s.Spec.Type)
		return false
	case !managed && class != nil && len(s.Status.LoadBalancer.Ingress) == 0:
		w.unknown(StepService, "if Coil is to serve it, make it anew with spec.loadBalancerClass: "+loadbalancer.Class+", which can't be changed", "the Service is of class %s, not Coil's: ask the controller of that", *class)
		return false
	case !managed:
		w.right(StepService, "another controller serves the Service")
		return false
	case class == nil && !loadbalancer.Taken(s) && w.late(s.CreationTimestamp.Time):
		w.wrong(StepService, "make it anew with spec.loadBalancerClass: "+loadbalancer.Class+", which can't be changed, or run coil-lb-controller with --serve-without-class",
			"the Service has no class, and nobody serves it")
		return false
	}
	var asks []string
	for _, name := range []string{v2.AnnotationPool, loadbalancer.AnnotationWanted, loadbalancer.AnnotationSharing} {
		if value := s.Annotations[name]; value != "" {
			asks = append(asks, name+"="+value)
		}
	}
	text := "it asks for any address"
	if len(asks) > 0 {
		text = "it asks for " + strings.Join(asks, " ")
	}
	w.right(StepService, "the Service is Coil's to serve, with %s; %s", plan.Count(len(s.Spec.Ports), "port", "ports"), text)
	return true
}

// leavingSince is since when the Service has been Coil's no more, as far as that is known.
func (w *serviceWalk) leavingSince() time.Time {
	if at := w.s.DeletionTimestamp; at != nil {
		return at.Time
	}
	return inventory.Changed(w.s).Time
}

// leaders judges whether controllers do their work.
func (w *serviceWalk) leaders() {
	if w.unread(StepLeader, KindLeases) {
		return
	}
	found := health.Leaders(LeasesOfServices, w.f.Leases, w.Now)
	if len(found) == 0 {
		w.right(StepLeader, "coil-lb-controller and coil-ipam-controller each have a leader")
		return
	}
	var names []string
	for _, f := range found {
		names = append(names, LeasesOfServices[slices.IndexFunc(LeasesOfServices, func(l health.Lease) bool { return l.Name == f.Name })].Controller)
	}
	w.wrong(StepLeader, "see that one runs: kubectl -n kube-system get pods -l 'app.kubernetes.io/component in ("+strings.Join(names, ",")+")'",
		"no %s leads: what is there stays, and nothing new is done", plan.Enumerate(names))
}

// LeasesOfServices are those of the controllers that Services need.
var LeasesOfServices = []health.Lease{{Name: plan.LBLease, Controller: "coil-lb-controller"}, {Name: plan.IPAMLease, Controller: "coil-ipam-controller"}}

// poolReasons are reasons for which an AddressClaim has no address, and that are the pool's, with what to do.
var poolReasons = map[string]string{
	v2.ReasonPoolNotFound:    "make the AddressPool",
	v2.ReasonPoolTerminating: "let the Service use another pool",
	v2.ReasonPoolExhausted:   "append a subnet to spec.subnets of the pool, or delete Services that use it",
	v2.ReasonPoolInvalid:     "do what the message says",
	v2.ReasonPoolDraining:    "let the Service use another pool, or have this one give addresses again: coilctl pools drain POOL --undo",
	v2.ReasonPoolSuspended:   "do what the message says",
	v2.ReasonClaimNamespace:  "add the namespace of coil-lb-controller's AddressClaims to spec.floatingNamespaces of the pool",
	v2.ReasonBlockSize:       "use a pool with blockSizeBits: 0",
}

// poolOfService judges the pool of the address.
func (w *serviceWalk) poolOfService() {
	if w.unread(StepPool, KindPools) {
		return
	}
	annotate := fmt.Sprintf("make it, or name another one: kubectl -n %s annotate service %s --overwrite %s=POOL", w.s.Namespace, w.s.Name, v2.AnnotationPool)
	name := w.s.Annotations[v2.AnnotationPool]
	if w.claim != nil {
		name = w.claim.Spec.Pool
	}
	assigned := w.condition(loadbalancer.ConditionAssigned)
	refused := func(reason loadbalancer.Reason) bool {
		return assigned != nil && assigned.Status != metav1.ConditionTrue && assigned.Reason == string(reason) && assigned.ObservedGeneration == w.s.Generation
	}
	p := w.pool(name)
	switch ready := w.notReady(); {
	case name != "" && p == nil:
		w.wrong(StepPool, annotate, "there is no AddressPool %s", name)
	case p != nil && p.Spec.BlockSizeBits != 0 && !w.has():
		w.wrong(StepPool, "name another one: blockSizeBits can't be changed", "blocks of AddressPool %s have more than one address: Services need a pool with blockSizeBits: 0", name)
	case p != nil && p.DeletionTimestamp != nil && !w.has():
		w.wrong(StepPool, poolReasons[v2.ReasonPoolTerminating], "AddressPool %s is deleted: it gives nothing new", name)
	case refused(loadbalancer.PoolNotFound):
		w.wrong(StepPool, annotate, "%s", assigned.Message)
	case refused(loadbalancer.FamilyMissing):
		w.wrong(StepPool, "do what the message says", "%s", assigned.Message)
	case ready != nil && poolReasons[ready.Reason] != "":
		w.wrong(StepPool, poolReasons[ready.Reason], "AddressPool %s gives no address: %s", name, ready.Message)
	case name == "":
		w.unknown(StepPool, "", "the Service names no pool: it is the --default-pool of coil-lb-controller")
	case loadbalancer.OfGateways(&v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{v2.LabelAnnounce: string(p.Spec.Announce)}}}):
		w.right(StepPool, "AddressPool %s has %d floating addresses in use; gateways have them", name, p.Status.Floating.Used)
	default:
		w.right(StepPool, "AddressPool %s has %d floating addresses in use; nodes have them (announce: %s)", name, p.Status.Floating.Used, p.Spec.Announce)
	}
}

// notReady is the condition that says why the claim has no address; nil if it has one, or doesn't say.
func (w *serviceWalk) notReady() *metav1.Condition {
	if w.claim == nil || w.has() {
		return nil
	}
	if c := meta.FindStatusCondition(w.claim.Status.Conditions, v2.ClaimReady); c != nil && c.Status == metav1.ConditionFalse {
		return c
	}
	return nil
}

// openstack judges what OpenStack provides, if the address comes from there.
func (w *serviceWalk) openstack() {
	if w.claim == nil {
		return
	}
	p := w.pool(w.claim.Spec.Pool)
	provided, allowed := meta.FindStatusCondition(w.claim.Status.Conditions, v2.ClaimProvided), meta.FindStatusCondition(w.claim.Status.Conditions, v2.ClaimAllowed)
	is := w.claim.Status.Provided
	const again = "do what the message says; it is asked again by itself"
	switch {
	case is == nil && provided == nil && (p == nil || p.Spec.OpenStack == nil):
	case provided != nil && provided.Status == metav1.ConditionFalse:
		w.wrong(StepOpenStack, again, "OpenStack doesn't have what the address needs (%s): %s", provided.Reason, provided.Message)
	case is == nil:
		w.soon(StepOpenStack, controllerLogs, "OpenStack hasn't provided an address yet")
	case allowed != nil && allowed.Status != metav1.ConditionTrue:
		w.wrong(StepOpenStack, again, "the ports of gateways may not use the address (%s): %s", allowed.Reason, allowed.Message)
	case allowed == nil:
		w.soon(StepOpenStack, controllerLogs, "the ports of gateways may not use the address yet")
	case is.FloatingIP != "":
		w.right(StepOpenStack, "port %s has the address, and the floating IP %s leads to it; ports of gateways may use it", is.PortID, is.FloatingIP)
	default:
		w.right(StepOpenStack, "port %s has the address; ports of gateways may use it", is.PortID)
	}
}
