package convert

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// allocatorRandom is the allocator of EgressGateway that draws an unused address. Each other one gives the default.
const allocatorRandom = "rr"

// output is an Egress, and the destinations of a policy that has none.
type output struct {
	*v2.Egress
	all []netip.Prefix
}

// gateway is an EgressGateway, and the Egresses that it becomes.
type gateway struct {
	source[egressGateway]
	ipv4, ipv6 []entry
	first      pair // the default
	book       *addressBook
	strategy   v2.EgressAssignmentStrategy
	// floating has the addresses of the pool, node those of nodes. Either may be nil.
	floating, node *output
	pool           *v2.AddressPool
	// policies are those that name the gateway, in the order of the input.
	policies []*policy
}

// use is the Egress of a policy.
func (g *gateway) use(p *policy) *output {
	if p.byNode() || g.floating == nil {
		return g.node
	}
	return g.floating
}

// gateways converts EgressGateways, with all that their Egresses have to know of policies.
func (c *conversion) gateways() error {
	byName := map[string]*gateway{}
	sorted := slices.Clone(c.in.gateways)
	slices.SortStableFunc(sorted, func(a, b source[egressGateway]) int { return cmp.Compare(a.origin.Name, b.origin.Name) })
	byDefault := ""
	for _, s := range sorted {
		g := &gateway{source: s}
		if err := g.parse(); err != nil {
			return at(s.origin, err)
		}
		if g.object.Spec.ClusterDefault {
			if byDefault != "" {
				return at(s.origin, fmt.Errorf("spec.clusterDefault: EgressGateway %s has it, too, which isn't allowed there", byDefault))
			}
			byDefault = g.origin.Name
		}
		byName[g.origin.Name] = g
	}
	but, err := c.spared()
	if err != nil {
		return err
	}
	if err := c.parsePolicies(byName, byDefault); err != nil {
		return err
	}
	for _, s := range sorted {
		if err := c.gateway(byName[s.origin.Name], but); err != nil {
			return at(s.origin, err)
		}
	}
	c.defaults(byName)
	return nil
}

func at(o Origin, err error) error { return fmt.Errorf("%s: %s: %w", o.Place(), o.Object(), err) }

func (g *gateway) parse() (err error) {
	p := g.object.Spec.IPPools
	if g.ipv4, err = parseEntries(p.IPv4, true); err != nil {
		return fmt.Errorf("spec.ippools.ipv4: %w", err)
	}
	if g.ipv6, err = parseEntries(p.IPv6, false); err != nil {
		return fmt.Errorf("spec.ippools.ipv6: %w", err)
	}
	if g.first, err = (family{p.IPv4Default, p.IPv6Default}).parse(); err != nil {
		return fmt.Errorf("spec.ippools: the default: %w", err)
	}
	for _, d := range []struct {
		field string
		addr  netip.Addr
		in    []entry
	}{{"ipv4DefaultEIP", g.first.ipv4, g.ipv4}, {"ipv6DefaultEIP", g.first.ipv6, g.ipv6}} {
		if d.addr.IsValid() && !has(d.in, d.addr) {
			return fmt.Errorf("spec.ippools.%s: %s isn't an address of the pool", d.field, d.addr)
		}
	}
	if s := g.object.Spec.NodeSelector.Selector; s != nil {
		if _, err := metav1.LabelSelectorAsSelector(s); err != nil {
			return fmt.Errorf("spec.nodeSelector.selector: %w", err)
		}
	}
	return nil
}

// spared reads the ranges that policies without destinations don't capture besides those of the cluster.
func (c *conversion) spared() (but []netip.Prefix, err error) {
	for _, s := range c.in.infos {
		spec, st := s.object.Spec, s.object.Status
		for _, text := range spec.ExtraCIDR {
			p, _, err := prefix(text, true)
			if err != nil {
				return nil, at(s.origin, fmt.Errorf("spec.extraCidr: %w", err))
			}
			but = append(but, p)
		}
		auto := spec.AutoDetect
		for _, set := range []struct {
			field string
			off   bool
		}{
			{"podCidrMode", auto.PodCIDRMode != nil && *auto.PodCIDRMode == ""}, {"clusterIP", auto.ClusterIP != nil && !*auto.ClusterIP}, {"nodeIP", auto.NodeIP != nil && !*auto.NodeIP},
		} {
			if set.off {
				c.lost(s.origin, "spec.autoDetect."+set.field, "the cluster's pods, Services and nodes aren't reached through an Egress, whatever is set",
					"list smaller private ranges of the cluster as destinations if they are meant to be")
			}
		}
		if len(spec.ExtraCIDR) == 0 {
			continue
		}
		known := slices.Concat(st.ClusterIP.IPv4, st.ClusterIP.IPv6)
		for _, name := range slices.Sorted(maps.Keys(st.PodCIDR)) {
			known = slices.Concat(known, st.PodCIDR[name].IPv4, st.PodCIDR[name].IPv6)
		}
		but = append(but, prefixes.Valid(known)...)
		c.note(s.origin, "spec.extraCidr", "Coil has no list of ranges that aren't captured: spec.destinations of the Egresses are all others",
			"see that none of these is a part of a range of pods or Services: a smaller private range than the cluster's is captured")
	}
	return prefixes.Aggregate(but), nil
}

// gateway makes the pool and the Egresses of an EgressGateway.
func (c *conversion) gateway(g *gateway, but []netip.Prefix) (err error) {
	g.addresses(c)
	if p := g.object.Spec.NodeSelector.Policy; p != "" {
		c.note(g.origin, "spec.nodeSelector.policy", "nothing reads it there; with Coil the numbers of addresses of two nodes differ by one at most", "for another strategy set spec.addresses.placement of the Egress")
	}
	if len(g.object.Status.NodeList) == 0 {
		c.note(g.origin, "spec.nodeSelector", "routers are on as many of these nodes as spec.replicas of the Egress says, which is 2, since the status names no node",
			"set it to the number of nodes that are to have addresses"+nodesBy(g.object.Spec.NodeSelector.Selector))
	}
	name := c.rename(g.origin.Name)
	if len(g.book.order) > 0 {
		if g.floating, err = c.egress(g, name, everything(len(g.ipv4) > 0, len(g.ipv6) > 0, but)); err != nil {
			return err
		}
		c.float(g)
	}
	if g.floating == nil || slices.ContainsFunc(g.policies, (*policy).byNode) {
		if g.floating != nil {
			name = c.rename(name + "-node")
		}
		if g.node, err = c.egress(g, name, everything(true, true, but)); err != nil {
			return err
		}
		g.node.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfNode}
		g.node.Spec.Default = g.floating == nil && g.object.Spec.ClusterDefault
		c.add(g.node.Egress, g.origin)
	}
	for _, p := range g.policies {
		e := g.use(p)
		e.Spec.Destinations = texts(unique(append(prefixes.Valid(e.Spec.Destinations), outside(g.reached(p), e.all)...)))
	}
	for _, e := range []*output{g.floating, g.node} {
		if e == nil || len(e.Spec.Destinations) <= maxDestinations {
			continue
		}
		c.lost(g.origin, "spec", fmt.Sprintf("Egress %s/%s would need %d destinations, and has %d at most", e.Namespace, e.Name, len(e.Spec.Destinations), maxDestinations), "share policies out to several EgressGateways first, or join ranges")
		e.Spec.Destinations = e.Spec.Destinations[:maxDestinations]
	}
	return nil
}

// reached are the destinations of a policy in whose family its Egress has addresses.
func (g *gateway) reached(p *policy) []netip.Prefix {
	if g.use(p) == g.node {
		return p.dests
	}
	return g.ofFamilies(p.dests)
}

// ofFamilies are the ranges in whose family the gateway has addresses.
func (g *gateway) ofFamilies(all []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool {
		return p.Addr().Is4() && len(g.ipv4) == 0 || !p.Addr().Is4() && len(g.ipv6) == 0
	})
}

// nodesBy is a command that lists the nodes of a selector.
func nodesBy(s *metav1.LabelSelector) string {
	if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return ""
	}
	return ": kubectl get nodes -l '" + metav1.FormatLabelSelector(s) + "'"
}

// egress returns an Egress on the nodes of the gateway.
func (c *conversion) egress(g *gateway, name string, all []netip.Prefix) (*output, error) {
	template, err := g.template(name)
	if err != nil {
		return nil, err
	}
	e := &v2.Egress{TypeMeta: ofKind("Egress"), ObjectMeta: metadata(c.EgressNamespace, name, g.object.Metadata)}
	e.Spec.Replicas, e.Spec.Peering, e.Spec.Template, e.Spec.Destinations = 2, v2.EgressPeeringDirect, template, texts(all)
	if n := len(g.object.Status.NodeList); n > 0 {
		e.Spec.Replicas = int32(n)
	}
	return &output{e, all}, nil
}

// addresses decides which addresses the Egress has, how policies get them, and what to say of that.
func (g *gateway) addresses(c *conversion) {
	g.strategy = v2.EgressAssignmentDefault
	var named []pair
	if g.first != (pair{}) {
		named = append(named, g.first)
	}
	for _, p := range g.policies {
		if p.object.Spec.EgressIP.AllocatorPolicy == allocatorRandom && !p.byNode() && p.names == (pair{}) {
			g.strategy = v2.EgressAssignmentUnused
		}
		if w := p.wants(); w != (pair{}) {
			named = append(named, w)
		}
	}
	for _, n := range g.object.Status.NodeList {
		for _, eip := range n.EIPs {
			if p, err := eip.parse(); err == nil && p != (pair{}) {
				named = append(named, p)
			}
		}
	}
	g.book = bookOf(g.ipv4, g.ipv6, named)
	if len(g.book.order) == 0 {
		return
	}
	subnets, tooManySubnets := g.book.subnets(slices.Concat(g.ipv4, g.ipv6))
	g.pool = &v2.AddressPool{
		TypeMeta: ofKind("AddressPool"),
		Spec: v2.AddressPoolSpec{
			Purpose: v2.PurposeFloating, FloatingNamespaces: []string{c.EgressNamespace}, Announce: v2.AnnounceNeighbor, Subnets: subnets,
		},
	}
	const split = "make several AddressPools and Egresses, and share the policies out"
	if g.book.more {
		c.lost(g.origin, "spec.ippools", fmt.Sprintf("an Egress has %d addresses at most: the others are left out", maxAddresses), split)
	}
	if tooManySubnets {
		c.lost(g.origin, "spec.ippools", fmt.Sprintf("an AddressPool has %d subnets at most, and these addresses need more: some are left out", maxSubnets),
			"give ranges that CIDRs cover and, for both families, ones of equal offset; or "+split)
	}
	const bound = "addresses without a partner are left out: a dual-stack pool has pairs of both families"
	if g.book.left4 {
		c.note(g.origin, "spec.ippools.ipv4", bound, "for more clients than pairs add addresses of IPv6, or make an AddressPool and an Egress of IPv4 alone")
	}
	if g.book.left6 {
		c.note(g.origin, "spec.ippools.ipv6", bound, "for more clients than pairs add addresses of IPv4, or make an AddressPool and an Egress of IPv6 alone")
	}
}

// float gives the Egress of a gateway its addresses.
func (c *conversion) float(g *gateway) {
	g.pool.ObjectMeta = metadata("", g.floating.Name, g.object.Metadata)
	byDefault := slices.ContainsFunc(g.policies, func(p *policy) bool { return p.shared }) || g.strategy == v2.EgressAssignmentDefault
	if byDefault && g.first == (pair{}) {
		g.first = g.unnamed()
		c.note(g.origin, "spec.ippools", "it has no default address: "+g.first.key().String()+" is taken, where the cluster has drawn one when the EgressGateway was made",
			"convert what the cluster has (kubectl get -o yaml), which names the default")
	}
	a := &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: g.pool.Name}
	list, tooMany := g.book.list(g.first)
	if tooMany {
		c.lost(g.origin, "spec.ippools", fmt.Sprintf("spec.addresses.list of the Egress has %d entries at most: some addresses are left out", maxList), "give ranges in place of single addresses")
	}
	a.List, a.Shared = list, c.sharedOf(g, byDefault)
	a.Assignment = &v2.EgressAssignment{Strategy: g.strategy}
	if g.strategy == v2.EgressAssignmentUnused {
		a.Assignment.WhenFull = v2.EgressWhenFullRefuse
	}
	g.floating.Spec.Addresses, g.floating.Spec.Default = a, g.object.Spec.ClusterDefault
	c.add(g.pool, g.origin)
	c.add(g.floating.Egress, g.origin)
}

// unnamed returns the first address that no policy names or has, if there is one.
func (g *gateway) unnamed() pair {
	named := map[pair]bool{}
	for _, p := range g.policies {
		if have, ok := g.book.find(p.wants()); ok {
			named[have] = true
		}
	}
	for _, p := range g.book.order {
		if !named[p] {
			return p
		}
	}
	return g.book.order[0]
}

// sharedOf returns the addresses that policies of several namespaces have: others belong to one namespace with Coil.
func (c *conversion) sharedOf(g *gateway, byDefault bool) (all []string) {
	users := map[pair]map[string]bool{}
	for _, p := range g.policies {
		if have, ok := g.book.find(p.wants()); ok {
			if users[have] == nil {
				users[have] = map[string]bool{}
			}
			users[have][p.origin.Namespace] = true
		}
	}
	first, _ := g.book.find(g.first)
	for _, p := range g.book.order {
		if len(users[p]) > 1 || byDefault && p == first {
			all = append(all, p.key().String())
		}
	}
	return all
}

// template puts routers on the nodes of the gateway.
func (g *gateway) template(egress string) (*v2.EgressPodTemplate, error) {
	s := g.object.Spec.NodeSelector.Selector
	if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return nil, nil
	}
	var pod struct {
		NodeSelector map[string]string                 `json:"nodeSelector,omitempty"`
		Affinity     *corev1.Affinity                  `json:"affinity,omitempty"`
		Spread       []corev1.TopologySpreadConstraint `json:"topologySpreadConstraints,omitempty"`
	}
	pod.NodeSelector = s.MatchLabels
	if len(s.MatchExpressions) > 0 {
		var term corev1.NodeSelectorTerm
		for _, e := range s.MatchExpressions {
			term.MatchExpressions = append(term.MatchExpressions, corev1.NodeSelectorRequirement{Key: e.Key, Operator: corev1.NodeSelectorOperator(e.Operator), Values: e.Values})
		}
		pod.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}},
		}}
		// With an affinity the controller leaves it to the template to keep routers apart.
		pod.Spread = []corev1.TopologySpreadConstraint{{
			MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.ScheduleAnyway,
			LabelSelector: &metav1.LabelSelector{MatchLabels: plan.RouterLabels(egress)},
		}}
	}
	text, err := json.Marshal(pod)
	if err != nil {
		return nil, err
	}
	return &v2.EgressPodTemplate{Spec: &runtime.RawExtension{Raw: text}}, nil
}

// defaults says what to do with Namespaces that name the gateway of their policies.
func (c *conversion) defaults(all map[string]*gateway) {
	for _, s := range c.in.namespaces {
		name := s.object.Metadata.Labels[labelDefault]
		g, ok := all[name]
		if !ok {
			c.note(s.origin, "metadata.labels", "EgressGateway "+oneLine(name)+", its default, isn't in the input", "give the Namespace the annotation "+v2.AnnotationEgress+": NAMESPACE/NAME of an Egress")
			continue
		}
		e := cmp.Or(g.floating, g.node)
		c.note(s.origin, "metadata.labels", "with Coil an annotation names the Egress of policies that name none",
			fmt.Sprintf("kubectl annotate namespace %s %s=%s/%s", s.origin.Name, v2.AnnotationEgress, e.Namespace, e.Name))
	}
}
