package preflight

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// maxPoolName is how long a name may be that is the value of a label.
const maxPoolName = 63

// thisNetwork is 0.0.0.0/8 (RFC 1122, 3.2.1.3).
var thisNetwork = netip.MustParsePrefix("0.0.0.0/8")

// pools judges AddressPools by the rules of this version's definitions.
func (j *judge) pools() {
	for _, p := range j.Pools {
		subject := "AddressPool " + p.Name
		if _, err := pools.Parse(p.Spec); err != nil {
			j.add(Blocker, subject, "this version can't use it (%s): move its pods to another pool, and delete it", oneLine(err))
		}
		if len(p.Name) > maxPoolName {
			j.add(Warning, subject, "a name of more than %d characters can't be in the label of a block: the pool gives no address; make another one", maxPoolName)
		}
		for _, s := range p.Spec.Subnets {
			for _, text := range []*string{s.IPv4, s.IPv6} {
				if text == nil {
					continue
				}
				prefix, err := netip.ParsePrefix(*text)
				if err != nil {
					continue // pools.Parse said so
				}
				if prefix != prefix.Masked() {
					j.add(Note, subject, "%s has host bits: it means %s, as before, and new subnets must be written so", prefix, prefix.Masked())
				}
				if a := prefix.Addr(); prefix.Bits() >= 8 && (!a.IsGlobalUnicast() || prefixes.Within(prefix, []netip.Prefix{thisNetwork})) {
					j.add(Warning, subject, "%s has addresses that pods can't have: make another pool for its namespaces", prefix)
				}
			}
		}
		if c := pools.Overlapping(p, pools.Others{Pools: j.Pools, Nodes: j.Nodes, Services: j.Services}); c.Status == metav1.ConditionTrue {
			j.add(Warning, subject, "its addresses may be given twice. %s", c.Message)
		}
	}
	if j.Variant.IPAM() && !slices.ContainsFunc(j.Pools, func(p *v2.AddressPool) bool { return p.Name == v2.DefaultPool }) {
		j.add(Note, "AddressPool "+v2.DefaultPool, "it doesn't exist: pods of namespaces without the annotation %s can't start before it does", v2.AnnotationPool)
	}
}

// held is a range of a block.
type held struct {
	netip.Prefix
	block *v2.AddressBlock
}

// blocks judges AddressBlocks.
func (j *judge) blocks() {
	byPool := map[string]ipam.Pool{}
	for _, p := range j.Pools {
		if pool, err := pools.Parse(p.Spec); err == nil {
			byPool[p.Name] = pool
		}
	}
	exists := sets.New[string]()
	for _, n := range j.Nodes {
		exists.Insert(n.Name)
	}
	gone := map[string]int{}
	var all []held
	for _, b := range j.Blocks {
		subject, node := "AddressBlock "+b.Name, b.Labels[v2.LabelNode]
		block, err := ipam.ParseBlock(b.IPv4, b.IPv6)
		if err != nil {
			j.add(Warning, subject, "its addresses can't be used: %s", oneLine(err))
			continue
		}
		for _, p := range block.Prefixes() {
			all = append(all, held{p, b})
		}
		if pool, ok := byPool[b.Labels[v2.LabelPool]]; ok {
			if want, err := pool.Block(b.Index); err != nil || want != block {
				j.add(Warning, subject, "%s isn't block %d of AddressPool %s: when its pods have ended, delete it", block, b.Index, b.Labels[v2.LabelPool])
			}
		}
		if b.Labels[v2.LabelReserved] != v2.ReservedValue && !exists.Has(node) {
			gone[node]++
		}
	}
	for node, n := range gone {
		j.add(Warning, "Node "+node, "it doesn't exist, and has %s. They are freed ten minutes after the controllers are installed: if its machine runs, its pods lose their addresses to others", plan.Count(n, "AddressBlock", "AddressBlocks"))
	}
	// Sorted, a prefix comes before those inside of it, and prefixes overlap only so.
	slices.SortFunc(all, func(a, b held) int { return a.Compare(b.Prefix) })
	var outer held
	for _, h := range all {
		if !outer.IsValid() || !outer.Overlaps(h.Prefix) {
			outer = h
			continue
		}
		j.add(Blocker, "AddressBlock "+h.block.Name, "it has addresses of AddressBlock %s, so that two pods may have the same one: delete one of the two, after the pods that have its addresses", outer.block.Name)
	}
}

// addresses counts the pods whose addresses are in the blocks of their nodes, and the others, which it returns by node.
func (j *judge) addresses() map[string][]string {
	blocks := map[string][]netip.Prefix{}
	for _, b := range j.Blocks {
		node := b.Labels[v2.LabelNode]
		blocks[node] = append(blocks[node], ipam.Prefixes(b.IPv4, b.IPv6)...)
	}
	linux := sets.New(j.linux()...)
	outside := map[string][]string{}
	for _, p := range j.Pods {
		if p.Spec.HostNetwork || len(p.Status.PodIPs) == 0 || !linux.Has(p.Spec.NodeName) || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		node := p.Spec.NodeName
		i := slices.IndexFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool {
			a, err := netip.ParseAddr(ip.IP)
			return err != nil || !prefixes.Within(netip.PrefixFrom(a, a.BitLen()), blocks[node])
		})
		if i < 0 {
			j.own++
			continue
		}
		j.foreign++
		outside[node] = append(outside[node], fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, p.Status.PodIPs[i].IP))
	}
	return outside
}

// pods judges the addresses of pods.
func (j *judge) pods() {
	outside := j.addresses()
	if j.installed.fresh() || len(j.Blocks) == 0 {
		return
	}
	for _, node := range slices.Sorted(maps.Keys(outside)) {
		pods := outside[node]
		slices.Sort(pods)
		j.add(Warning, "Node "+node, "the addresses of %s are in none of its blocks, so that others may get them: restart %s", plan.Enumerate(pods), plan.Count(len(pods), "pod", "pods"))
	}
}

// withoutIPAM judges what follows from addresses that Coil has given, when a variant is installed that gives none. Blocks that
// an earlier Coil has left, of which no pod has an address, do no harm.
func (j *judge) withoutIPAM() {
	j.addresses()
	if j.installed.chained || j.own == 0 && j.installed.fresh() {
		return
	}
	var names []string
	for _, b := range j.Blocks {
		if j.own > 0 || b.Labels[v2.LabelReserved] != v2.ReservedValue {
			names = append(names, b.Name)
		}
	}
	if len(names) > 0 {
		slices.Sort(names)
		j.add(Blocker, "AddressBlocks "+plan.Enumerate(names), "%s of them, and the variant %s gives none: no new pod could start. "+
			"Install another variant, or install another network that gives addresses first, and restart these pods, until the blocks are gone",
			plan.Count(j.own, "pod has an address", "pods have addresses"), j.Variant)
	}
}
