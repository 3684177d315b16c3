package convert

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// policy is one of EgressGateway's, and what was understood of it.
type policy struct {
	source[gatewayPolicy]
	cluster bool
	gateway string
	of      *gateway // nil if it isn't in the input
	names   pair     // that it names
	has     pair     // that it has, by its status
	dests   []netip.Prefix
	shared  bool // it gets the address that all get which name none
}

// byNode says whether the policy is to leave by the addresses of nodes.
func (p *policy) byNode() bool { return p.object.Spec.EgressIP.UseNodeIP }

// wants is the address that the policy names or, if it names none, has.
func (p *policy) wants() pair {
	if p.names != (pair{}) {
		return p.names
	}
	return p.has
}

// parsePolicies reads the policies of EgressGateway, and gives each to its gateway.
func (c *conversion) parsePolicies(gateways map[string]*gateway, byDefault string) error {
	ofNamespace := map[string]string{}
	for _, s := range c.in.namespaces {
		ofNamespace[s.origin.Name] = s.object.Metadata.Labels[labelDefault]
	}
	for _, s := range c.in.policies {
		p := &policy{source: s, cluster: s.origin.Namespace == ""}
		p.gateway = cmp.Or(s.object.Spec.EgressGatewayName, ofNamespace[s.origin.Namespace], byDefault)
		if err := p.parse(c); err != nil {
			return at(s.origin, err)
		}
		if p.of = gateways[p.gateway]; p.of != nil {
			p.choose(p.of)
			p.of.policies = append(p.of.policies, p)
		}
		c.parsed = append(c.parsed, p)
	}
	return nil
}

// parse checks a policy as the webhook there does.
func (p *policy) parse(c *conversion) (err error) {
	spec := p.object.Spec
	if p.names, err = spec.EgressIP.parse(); err != nil {
		return fmt.Errorf("spec.egressIP: %w", err)
	}
	if p.has, err = p.object.Status.EIP.parse(); err != nil {
		return fmt.Errorf("status.eip: %w", err)
	}
	switch n := p.names; {
	case p.byNode() && n != (pair{}):
		return errors.New("spec.egressIP: useNodeIP and an address exclude each other")
	case p.byNode():
		p.has = pair{}
	case n != (pair{}) && p.has.both() && (n.ipv4 == p.has.ipv4 || n.ipv6 == p.has.ipv6):
		p.names = p.has // there an address stands for the pair that it was given with
	}
	if !p.cluster && spec.AppliedTo.NamespaceSelector != nil {
		c.lost(p.origin, "spec.appliedTo.namespaceSelector", "this field isn't one of the EgressPolicy's", "make an EgressClusterPolicy, or take it out")
	}
	if _, err := metav1.LabelSelectorAsSelector(spec.AppliedTo.PodSelector); err != nil {
		return fmt.Errorf("spec.appliedTo.podSelector: %w", err)
	}
	if _, err := metav1.LabelSelectorAsSelector(spec.AppliedTo.NamespaceSelector); err != nil {
		return fmt.Errorf("spec.appliedTo.namespaceSelector: %w", err)
	}
	if s := spec.AppliedTo.PodSelector; s != nil && len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return errors.New("spec.appliedTo.podSelector is empty, which isn't allowed there either")
	} else if s == nil && len(spec.AppliedTo.PodSubnet) == 0 {
		return errors.New("spec.appliedTo has no podSelector")
	}
	p.dests, err = c.ranges(p.origin, "spec.destSubnet", spec.DestSubnet)
	return err
}

// ranges reads destinations. Those that Coil never captures are left out.
func (c *conversion) ranges(o Origin, field string, list []string) (all []netip.Prefix, err error) {
	for _, text := range list {
		p, hostBits, err := prefix(text, true)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", field, err)
		}
		if hostBits {
			c.note(o, field, fmt.Sprintf("%s has host bits: %s is meant", text, p), "")
		}
		if prefixes.Within(p, dataplane.LinkLocalRanges) {
			c.lost(o, field, text+" is link-local: no Egress captures it, and pods reach it as those of no policy do", "take it out")
			continue
		}
		all = append(all, p)
	}
	private := withPrivate(all)
	if len(private) > len(unique(all)) {
		c.note(o, field, "a range with public addresses covers neither private networks nor, with Coil, the cluster: private networks in it are listed, too", "take those out that aren't meant")
	}
	return private, nil
}

// choose decides whether the policy gets the address that all get.
func (p *policy) choose(g *gateway) {
	p.shared = !p.byNode() && p.names == (pair{}) && p.object.Spec.EgressIP.AllocatorPolicy != allocatorRandom &&
		(p.has == (pair{}) || g.first != (pair{}) && p.has.key() == g.first.key())
	if p.shared {
		p.has = g.first
	}
}

// policy converts one.
func (c *conversion) policy(p *policy) {
	spec := p.object.Spec
	if spec.Priority != nil {
		c.note(p.origin, "spec.priority", "nothing reads it there; with Coil the policy with the smallest destination decides, then the older one", "give smaller destinations to those that are to decide")
	}
	if len(spec.DestSubnet) > 0 && len(p.dests) == 0 { // none isn't all of them
		c.lost(p.origin, "spec.destSubnet", "no destination is left: the policy isn't made", "")
		return
	}
	use, dests := v2.EgressUse{OnFailure: c.OnFailure}, p.dests
	switch g := p.of; {
	case g == nil && p.gateway == "":
		c.note(p.origin, "spec.egressGatewayName", "it isn't set, and the input has no default: with Coil the default of the namespace decides, then that of the cluster", "set spec.egress, or convert it together with the EgressGateway")
	case g == nil:
		use.Egress = &v2.EgressReference{Namespace: c.EgressNamespace, Name: c.egressOf(p)}
		c.note(p.origin, "spec.egressGatewayName", "EgressGateway "+oneLine(p.gateway)+" isn't in the input, so that nothing is known of its addresses", "convert both together, or make Egress "+c.EgressNamespace+"/"+use.Egress.Name)
		if w := p.wants(); w != (pair{}) {
			use.Address = w.address()
		}
	default:
		e := g.use(p)
		use.Egress = &v2.EgressReference{Namespace: e.Namespace, Name: e.Name}
		if e == g.node {
			c.byNode(p, e)
		} else {
			use.Address = c.addressOf(g, p)
		}
		const family, instead = "the EgressGateway has no address of the family of ", "give it addresses of both families"
		if dests = g.reached(p); len(dests) == 0 && len(p.dests) > 0 {
			c.lost(p.origin, "spec.destSubnet", family+"any destination: the policy does nothing there, and isn't made", instead)
			return
		} else if len(dests) < len(p.dests) {
			c.note(p.origin, "spec.destSubnet", family+"some destinations: packets to these leave as those of other pods do, as they do there", instead)
		}
		if len(dests) == 0 && !slices.Equal(texts(e.all), e.Spec.Destinations) { // others have added destinations that aren't of this one
			dests = e.all
		}
	}
	if len(dests) > maxDestinations {
		c.lost(p.origin, "spec.destSubnet", fmt.Sprintf("a policy has %d destinations at most: the others are left out", maxDestinations), "join ranges, or make two policies")
		dests = dests[:maxDestinations]
	}
	use.Destinations = texts(dests)
	pods, cidrs, ok := c.selection(p)
	if !ok {
		return
	}
	m := metadata(p.origin.Namespace, p.origin.Name, p.object.Metadata)
	if p.cluster {
		made := &v2.EgressClusterPolicy{TypeMeta: ofKind("EgressClusterPolicy"), ObjectMeta: m}
		made.Spec.EgressUse, made.Spec.Pods, made.Spec.PodCIDRs = use, pods, cidrs
		if s := spec.AppliedTo.NamespaceSelector; s != nil {
			made.Spec.NamespaceSelector = *s
		}
		c.add(made, p.origin)
		return
	}
	made := &v2.EgressPolicy{TypeMeta: ofKind("EgressPolicy"), ObjectMeta: m}
	made.Spec.EgressUse, made.Spec.Pods, made.Spec.PodCIDRs = use, pods, cidrs
	c.add(made, p.origin)
}

// byNode says what is to be known of a policy whose pods leave by the addresses of nodes.
func (c *conversion) byNode(p *policy, e *output) {
	if !p.byNode() {
		c.lost(p.origin, "spec.egressIP", "the EgressGateway has no addresses, so that the Egress has those of nodes", "give the EgressGateway addresses (spec.ippools), or set useNodeIP")
		return
	}
	c.note(p.origin, "spec.egressIP.useNodeIP", fmt.Sprintf("the pods leave by the addresses of all nodes that have routers of Egress %s/%s, where there one node has them; and their own addresses have to be Coil's", e.Namespace, e.Name),
		"tell partners all of these addresses; behind another network plugin give the policy a floating address")
}

// egressOf is the name of the Egress that a gateway outside of the input becomes, if nothing stands in the way.
func (c *conversion) egressOf(p *policy) string {
	alone := &conversion{names: map[string]bool{}}
	name := alone.rename(p.gateway)
	if p.byNode() {
		name = alone.rename(name + "-node")
	}
	return name
}

// addressOf returns the address that the policy has to name; nil if the Egress gives it the right one.
func (c *conversion) addressOf(g *gateway, p *policy) *v2.EgressAddress {
	want := p.wants()
	if p.shared && want == (pair{}) {
		want = g.first
	}
	if want == (pair{}) || p.shared && g.strategy == v2.EgressAssignmentDefault {
		return nil
	}
	field := "spec.egressIP"
	if p.names == (pair{}) {
		field = "status.eip"
	}
	have, ok := g.book.find(want)
	switch {
	case !ok:
		c.lost(p.origin, field, "the Egress doesn't have the address "+want.key().String()+": the policy isn't accepted, and drops what its pods send", "add the address to the AddressPool and to spec.addresses.list of the Egress, or name another one")
		return want.address()
	case want.both() && have != want && g.book.dual:
		c.lost(p.origin, field, fmt.Sprintf("%s and %s aren't a pair: %s has the partner %s", want.ipv4, want.ipv6, have.ipv4, have.ipv6), "put up with this partner, or make a pool in which they have equal offsets")
	case want.both() && !g.book.dual:
		c.lost(p.origin, field, "the EgressGateway has addresses of one family only", "give it addresses of both families")
	case !want.both() && g.book.dual && p.names != (pair{}) && !p.has.both():
		c.note(p.origin, field, fmt.Sprintf("an address stands for its pair: in the other family the pods leave by the partner of %s, where there packets leave with the node's address", want.key()), "")
	}
	return have.address()
}

// selection returns which pods are chosen.
func (c *conversion) selection(p *policy) (pods *metav1.LabelSelector, cidrs []string, ok bool) {
	to := p.object.Spec.AppliedTo
	if to.PodSelector != nil {
		if len(to.PodSubnet) > 0 {
			c.note(p.origin, "spec.appliedTo.podSubnet", "it does nothing there, and a policy of Coil has pods or podCIDRs: it is left out", "make a second policy with spec.podCIDRs if it is meant")
		}
		return to.PodSelector, nil, true
	}
	const most = 64
	for _, text := range to.PodSubnet {
		r, _, err := prefix(text, true)
		if err != nil {
			c.lost(p.origin, "spec.appliedTo.podSubnet", err.Error(), "correct it")
			continue
		}
		cidrs = append(cidrs, r.String())
	}
	if len(cidrs) > most {
		c.lost(p.origin, "spec.appliedTo.podSubnet", fmt.Sprintf("a policy has %d podCIDRs at most", most), "join ranges, or make two policies")
		cidrs = cidrs[:most]
	}
	if len(cidrs) == 0 {
		return nil, nil, false
	}
	c.note(p.origin, "spec.appliedTo.podSubnet", "it does nothing there; with Coil the policy selects pods by "+strings.Join(cidrs, ", "), "see that it is meant")
	return nil, cidrs, true
}
