package diagnosis

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/lbgateway"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// onNode judges the node that has the address.
func (w *serviceWalk) onNode() {
	if !w.has() || w.block == nil || loadbalancer.OfGateways(w.block) {
		return
	}
	if !w.f.NeedsNodes() || !w.unread(StepHolder, KindNodes) {
		w.holderStep()
	}
	f := w.block.Floating
	if f.Holding.Holder == "" {
		return
	}
	w.node(f.Holding.Holder)
	answer := w.answer(StepRoutes)
	if answer != nil && len(answer.Address) == 0 {
		w.unknown(StepRoutes, "", "coild of the node doesn't say what it has for the address: it may be of an earlier version")
	} else if answer != nil {
		w.compare(StepRoutes, "the kernel of the node takes packets for the address",
			repaired(answer.Node.Name, "another program deletes routes or tables"), of(answer.Address, inspection.Floating))
	}
}

// holderStep judges who has the address.
func (w *serviceWalk) holderStep() {
	f := w.block.Floating
	var may []string
	for _, n := range f.Successors {
		may = append(may, n.Node)
	}
	proxy := "see whether the Service proxy, such as kube-proxy, runs on the node, and serves the Service"
	switch w.serving {
	case loadbalancer.ReasonEndpoints:
		if len(may) == 0 {
			w.unknown(StepHolder, "", "no node may have the address as long as none has an endpoint (externalTrafficPolicy: Local)")
			break
		}
		w.unknown(StepHolder, "", "a node has the address for the other Services alone: none that may have it has an endpoint of this one (externalTrafficPolicy: Local)")
	case loadbalancer.ReasonNoNode:
		w.noNode()
	case loadbalancer.ReasonHolder:
		do := "see that coild runs on the nodes that may have it: " + plan.Enumerate(may)
		if len(may) == 0 {
			do = controllerLogs
		}
		w.soon(StepHolder, do, "%s", lower(w.why))
	case loadbalancer.ReasonBlocked:
		w.wrong(StepHolder, proxy, "%s", lower(w.why))
	default:
		if w.Node != nil && loadbalancer.ReadyNode(w.Node) && !loadbalancer.Serves(w.Node) {
			w.soon(StepHolder, controllerLogs, "the Node %s is excluded, or about to be deleted, and still has the address", w.Node.Name)
			break
		}
		if drops := w.site().Drops(); drops != "" {
			w.wrong(StepHolder, proxy, "%s", lower(drops))
			break
		}
		text := lower(w.why)
		if f.Holding.Since != nil {
			text += fmt.Sprintf(", since %s", f.Holding.Since.UTC().Format("2006-01-02 15:04:05 MST"))
		}
		if f.MovingTo != "" {
			text += ", and is to hand it over to " + f.MovingTo
		}
		w.right(StepHolder, "%s", text)
	}
}

// noNode says why no node may have the address.
func (w *serviceWalk) noNode() {
	excluded, ready := 0, 0
	for _, n := range w.f.Nodes {
		if loadbalancer.ReadyNode(n) {
			ready++
			if !loadbalancer.Serves(n) {
				excluded++
			}
		}
	}
	w.wrong(StepHolder, "take the label "+corev1.LabelNodeExcludeBalancers+" from some nodes, or add nodes", "no node may have the address: of %s %d are ready, and of these %d are excluded or about to be deleted",
		plan.Count(len(w.f.Nodes), "node", "nodes"), ready, excluded)
}

// lower has a sentence begin as the others of a walk do.
func lower(text string) string {
	if text == "" {
		return text
	}
	return strings.ToLower(text[:1]) + text[1:]
}

// onGateways judges the gateways that have the address.
func (w *serviceWalk) onGateways() {
	if !w.has() || w.block == nil || !loadbalancer.OfGateways(w.block) || w.unread(StepGateways, KindGateways) {
		return
	}
	at := w.site()
	at.Claim = at.Claim.DeepCopy()
	at.Claim.Status.Provided = nil // whether OpenStack lets them is another step
	reason, why := at.Served(w.s)
	pool := w.block.Labels[v2.LabelPool]
	var silent, refusing, behind []string
	for _, g := range w.f.Gateways {
		if !slices.Contains(g.Spec.Pools, pool) {
			continue
		}
		does := meta.FindStatusCondition(g.Status.Conditions, v2.GatewayApplied)
		switch refusal := loadbalancer.Refusal(g, w.s); {
		case refusal != "":
			refusing = append(refusing, fmt.Sprintf("gateway %s: %s", g.Name, refusal))
		case w.silent(g.Name):
			silent = append(silent, g.Name)
		case does != nil && does.ObservedGeneration < g.Generation && w.late(inventory.Changed(g).Time):
			behind = append(behind, g.Name)
		}
	}
	const agent = "see coil-lb-agent on the machine: systemctl status coil-lb-agent, journalctl -u coil-lb-agent"
	switch {
	case reason == loadbalancer.ReasonNoGateway:
		w.wrong(StepGateways, "name the pool in spec.pools of a LoadBalancerGateway, on whose machine coil-lb-agent runs", "%s", lower(why))
	case len(refusing) > 0:
		w.wrong(StepGateways, "do what the message says", "%s", strings.Join(refusing, "; "))
	case len(silent) > 0:
		w.wrong(StepGateways, agent+"; the machine goes on with what it knew", "nothing was heard for a minute of %s", plan.Enumerate(silent))
	case len(behind) > 0:
		w.wrong(StepGateways, agent, "what %s say they do is of a former spec", plan.Enumerate(behind))
	case reason != loadbalancer.ReasonServed:
		w.soon(StepGateways, agent, "%s", lower(why))
	default:
		w.elections(pool, lower(why))
	}
}

// elections judges which gateways have the pool's addresses, if they agree by VRRP.
func (w *serviceWalk) elections(pool, served string) {
	p := w.pool(pool)
	if p == nil || p.Spec.VRRP == nil {
		w.right(StepGateways, "%s", served)
		return
	}
	masters := loadbalancer.Masters(w.f.Gateways, w.pool, w.silent)
	var none, several, texts []string
	for e, names := range masters {
		if e.Pool != pool {
			continue
		}
		id := fmt.Sprintf("%d (%s)", e.ID, e.Family)
		switch {
		case len(names) == 0:
			none = append(none, id)
		case len(names) > 1:
			several = append(several, fmt.Sprintf("%s: %s", id, strings.Join(names, ", ")))
		default:
			texts = append(texts, fmt.Sprintf("%s of %s", names[0], id))
		}
	}
	for _, list := range [][]string{none, several, texts} {
		slices.Sort(list)
	}
	switch {
	case len(none) > 0:
		w.wrong(StepGateways, "see that keepalived runs on the gateways: systemctl status keepalived", "no gateway is the master of the virtual router ID %s", plan.Enumerate(none))
	case len(several) > 0:
		w.wrong(StepGateways, "let firewalls pass IP protocol 112 (VRRP) between the addresses of spec.vrrp.sources", "several gateways say that they are the master of the virtual router ID %s", strings.Join(several, "; "))
	case len(texts) == 0:
		w.soon(StepGateways, "see that keepalived runs on the gateways: systemctl status keepalived", "no gateway tells of an election of AddressPool %s", pool)
	default:
		w.right(StepGateways, "%s; master are %s", served, plan.Enumerate(texts))
	}
}

// endpoints judges where connections to the Service go.
func (w *serviceWalk) endpoints() {
	if w.unread(StepEndpoints, KindSlices) {
		return
	}
	var ready, serving, other int
	for _, s := range w.f.Slices {
		for _, e := range s.Endpoints {
			switch c := e.Conditions; {
			case c.Ready == nil || *c.Ready:
				ready++
			case c.Serving != nil && *c.Serving:
				serving++
			default:
				other++
			}
		}
	}
	seen := fmt.Sprintf("%d ready, %d terminating that still serve, %d that aren't ready", ready, serving, other)
	see := fmt.Sprintf("see kubectl -n %s get endpointslices -l %s=%s, and the pods that the selector selects", w.s.Namespace, discoveryv1.LabelServiceName, w.s.Name)
	if len(w.s.Spec.Selector) == 0 {
		see = "the Service has no selector: see whoever is to write its EndpointSlices"
	}
	forwards, err := w.toPods()
	var without []string
	for _, to := range forwards {
		text := portText(to.Port)
		if len(to.Endpoints) == 0 && !slices.Contains(without, text) {
			without = append(without, text)
		}
	}
	holder, _ := w.f.Holder()
	switch {
	case err != nil:
		w.unknown(StepEndpoints, "", "%v", err) // which the step of clients says
	case ready+serving == 0:
		w.wrong(StepEndpoints, see, "the Service has no endpoint that serves (%s): connections are refused, or dropped with externalTrafficPolicy: Local", seen)
	case len(without) > 0:
		w.wrong(StepEndpoints, see+"; the names of its ports must be those of the EndpointSlices", "no endpoint serves port %s: %s", plan.Enumerate(without), seen)
	case w.serving == loadbalancer.ReasonEndpoints:
		w.soon(StepEndpoints, see, "no node that may have the address has an endpoint (externalTrafficPolicy: Local): %s", seen)
	case holder != "" && loadbalancer.NeedsEndpoints(w.s) && !loadbalancer.WithEndpoints(w.f.Slices)[holder]:
		w.soon(StepEndpoints, controllerLogs, "node %s, which has the address, has no endpoint (externalTrafficPolicy: Local): connections are dropped there; %s", holder, seen)
	default:
		w.right(StepEndpoints, "%s", seen)
	}
}

// portText is such as "TCP 443".
func portText(p ruleset.Port) string {
	for name, number := range plan.Protocols {
		if number == p.Protocol {
			return fmt.Sprintf("%s %d", name, p.Port)
		}
	}
	return fmt.Sprint(p.Port)
}

// toPods are the endpoints of each port in each family of the Service, as a gateway that sends to pods has them.
func (w *serviceWalk) toPods() ([]lbgateway.Forward, error) {
	f := lbgateway.Facts{Spec: v2.LoadBalancerGatewaySpec{Endpoints: v2.EndpointsPod}, Service: w.s, Slices: w.f.Slices}
	for _, family := range w.s.Spec.IPFamilies {
		a := netip.IPv4Unspecified()
		if family == corev1.IPv6Protocol {
			a = netip.IPv6Unspecified()
		}
		for _, p := range w.s.Spec.Ports {
			f.Places = append(f.Places, lbgateway.Place{Address: a, Protocol: cmp.Or(p.Protocol, corev1.ProtocolTCP), Port: p.Port})
		}
	}
	return lbgateway.Forwards(f)
}

// clients judges which clients are let in.
func (w *serviceWalk) clients() {
	_, err := w.toPods()
	policies := w.condition(loadbalancer.ConditionPolicies)
	switch ranges := w.s.Spec.LoadBalancerSourceRanges; {
	case err != nil:
		w.wrong(StepClients, "correct the Service", "%v", err)
	case policies != nil && policies.Status != metav1.ConditionTrue:
		w.wrong(StepClients, "do what the message says", "%s", lower(policies.Message))
	case len(ranges) > 0:
		w.right(StepClients, "only clients of %s are let in (spec.loadBalancerSourceRanges)", strings.Join(ranges, ", "))
	default:
		w.right(StepClients, "clients of all addresses are let in")
	}
}
