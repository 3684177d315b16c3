package diagnosis

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/store"
)

// The names of steps about a node's record, in the order in which they are walked. A step with several faults is there several times.
const (
	StepFile     = "file"
	StepIdentity = "identity"
	StepBlocks   = "blocks"
	StepRows     = "rows"
	StepTwice    = "twice"
	StepPods     = "pods"
	StepLacking  = "lacking"
	StepCooling  = "cooling"
)

// KindPods are all pods of a node, in Facts.Unread.
const KindPods = "pods"

// unsettled is how long an address may be on its way from one state to the next.
const unsettled = 10 * time.Minute

// DatabaseFacts are what is known of a node's record, and of what it should agree with.
type DatabaseFacts struct {
	// Facts have the Node, its coilds, all AddressPools and all AddressBlocks.
	Facts
	// Database is nil if coild doesn't tell; Facts.Unanswered says why.
	Database *inspection.Database
	// Pods are those that are bound to the node.
	Pods []*corev1.Pod
}

// databaseWalk compares a record.
type databaseWalk struct {
	walk
	db   *inspection.Database
	name string
	// pods are those of the node, by namespace/name; nil if they couldn't be read.
	pods map[string]*corev1.Pod
	// rows are those of an address. Values that are none are left out.
	rows map[netip.Addr][]inspection.DatabaseAddress
}

// Database compares a node's record of addresses with what the API server has: each fault is a step.
func Database(name string, f DatabaseFacts) Diagnosis {
	w := &databaseWalk{walk: walk{Facts: f.Facts}, db: f.Database, name: name, rows: map[netip.Addr][]inspection.DatabaseAddress{}}
	w.node(name)
	switch {
	case f.Database == nil && f.Unanswered != "":
		w.unknown(StepFile, "run it again with the right to make pods/exec in the namespace of coild", "coild doesn't tell its record: %s", f.Unanswered)
	case f.Database == nil:
		w.unknown(StepFile, "", "no coild was asked for its record")
	default:
		if _, unread := f.Unread[KindPods]; !unread {
			w.pods = map[string]*corev1.Pod{}
			for _, p := range f.Pods {
				w.pods[p.Namespace+"/"+p.Name] = p
			}
		}
		w.judge()
	}
	return Diagnosis{Subject: "Record of node " + name, Steps: w.steps}
}

// Confirmed is the second of two looks. A fault that the first look hasn't seen may be on its way, and is unknown.
func Confirmed(first, second Diagnosis) Diagnosis {
	steps := slices.Clone(second.Steps)
	for i, s := range steps {
		if s.State == Wrong && !slices.Contains(first.Steps, s) {
			steps[i].State, steps[i].Do = Unknown, "look again in a moment"
		}
	}
	second.Steps = steps
	return second
}

// judge walks through a record.
func (w *databaseWalk) judge() {
	w.file()
	w.identity()
	for _, a := range w.db.Addresses {
		for _, text := range a.Texts() {
			if x, err := netip.ParseAddr(text); err == nil {
				w.rows[x] = append(w.rows[x], a)
			}
		}
	}
	w.step(StepBlocks, w.blocksOfRecord, "%s", plan.Count(len(w.db.Blocks), "block of the record is the node's", "blocks of the record are the node's"))
	w.step(StepRows, w.values, "%s", plan.Count(len(w.db.Addresses), "row is within the range of its block", "rows are within the ranges of their blocks"))
	w.step(StepTwice, w.twice, "no address is there twice")
	held := slices.DeleteFunc(slices.Clone(w.db.Addresses), free)
	w.step(StepPods, func() { w.withoutPod(held) }, "%s", plan.Count(len(held), "address is a pod's of the node", "addresses are those of pods of the node"))
	w.step(StepLacking, w.lacking, "the addresses of all pods are in the record")
	w.step(StepCooling, func() { w.coolingOrStuck(held) }, "%s", plan.Count(len(w.db.Addresses)-len(held), "address that was freed has no pod", "addresses that were freed have no pod"))
}

// step walks one step, and says that it is right if nothing was found.
func (w *databaseWalk) step(name string, find func(), right string, args ...any) {
	before := len(w.steps)
	if find(); len(w.steps) == before {
		w.right(name, right, args...)
	}
}

// free says that nobody has the address of a row.
func free(a inspection.DatabaseAddress) bool { return a.State == string(store.Cooling) }

// restart is what has coild read everything anew.
func (w *databaseWalk) restart(why string) string {
	name := "coild of the node"
	if len(w.Coilds) > 0 {
		name = "pod " + w.Coilds[0].Namespace + "/" + w.Coilds[0].Name
	}
	return fmt.Sprintf("delete %s: when it starts again, %s; pods keep their network", name, why)
}

// file judges the file itself.
func (w *databaseWalk) file() {
	for _, d := range w.db.Damage {
		w.wrong(StepFile, w.restart("coild sets the file aside and makes it anew of what kernel and AddressBlocks have"), "SQLite finds the file damaged: %s", strings.ReplaceAll(d, "\n", "; "))
	}
	if w.db.Schema != w.db.Newest {
		w.wrong(StepFile, w.restart("coild brings the schema up to date"), "the schema is of version %d, and that of coild of version %d", w.db.Schema, w.db.Newest)
	}
	if !w.faulty(StepFile) {
		w.right(StepFile, "SQLite finds the file whole, and its schema is of version %d", w.db.Schema)
	}
	if w.db.Truncated != "" {
		w.unknown(StepFile, "look at the file itself: coilctl db dump", "%s", w.db.Truncated)
	}
}

// identity judges whose record it is.
func (w *databaseWalk) identity() {
	again := w.restart("coild adopts what this machine uses")
	switch name, uid := w.db.Meta["node_name"], w.db.Meta["node_uid"]; {
	case name != w.name:
		w.wrong(StepIdentity, again, "the record is that of node %q", name)
	case w.Node != nil && uid != "" && uid != string(w.Node.UID):
		w.wrong(StepIdentity, again, "the record is that of a Node with the UID %s, and the Node's is %s", uid, w.Node.UID)
	case w.db.Meta["rebuilt_at"] == "":
		w.wrong(StepIdentity, "see the log of coild: it is at work, or says what hinders it", "the record isn't rebuilt yet: blocks or pods may be missing")
	default:
		w.right(StepIdentity, "the record is that of this Node, made %s", w.db.Meta["created_at"])
	}
}

// blocksOfRecord compares blocks of the record with the AddressBlocks of the node.
func (w *databaseWalk) blocksOfRecord() {
	if w.unread(StepBlocks, KindBlocks) {
		return
	}
	for _, r := range w.db.Blocks {
		b := w.block(r.Name)
		switch {
		case b == nil:
			w.wrong(StepBlocks, w.restart("coild claims it if pods have its addresses, and forgets it otherwise"), "the record has block %s, and there is no AddressBlock of the name", r.Name)
		case !ofNode(b, w.name):
			w.wrong(StepBlocks, fmt.Sprintf("see coilctl blocks %s and the Events of both nodes; replace the pods of this node that have its addresses", r.Name),
				"the record has block %s, and AddressBlock %s is of node %q: both nodes may give the same address", r.Name, r.Name, b.Labels[v2.LabelNode])
		case ranges(r) != rangesOf(b):
			w.wrong(StepBlocks, "see who has changed the AddressBlock: its range never changes. The block gives no address as long as both differ",
				"block %s is %s in the record, and %s at the API server", r.Name, ranges(r), rangesOf(b))
		case r.Pool != b.Labels[v2.LabelPool]:
			w.wrong(StepBlocks, "see who has changed the label "+v2.LabelPool+" of the AddressBlock", "block %s is of pool %q in the record, and of %q at the API server", r.Name, r.Pool, b.Labels[v2.LabelPool])
		}
	}
	for _, b := range w.Blocks {
		has := slices.ContainsFunc(w.db.Blocks, func(r inspection.DatabaseBlock) bool { return r.Name == b.Name })
		if w.db.Node.IPAM && ofNode(b, w.name) && !has && b.DeletionTimestamp == nil && w.late(b.CreationTimestamp.Time) {
			w.wrong(StepBlocks, "see the log of coild, and the annotation "+v2.AnnotationNodeUID+" of the block: it may be of an earlier Node", "AddressBlock %s is the node's, and the record lacks it", b.Name)
		}
	}
}

// ranges are those of a recorded block, written as those of an AddressBlock.
func ranges(b inspection.DatabaseBlock) string { return rangesText(b.IPv4, b.IPv6) }

func rangesOf(b *v2.AddressBlock) string {
	var four, six string
	if b.IPv4 != nil {
		four = *b.IPv4
	}
	if b.IPv6 != nil {
		six = *b.IPv6
	}
	return rangesText(four, six)
}

func rangesText(cidrs ...string) string {
	var texts []string
	for _, text := range cidrs {
		if p, err := netip.ParsePrefix(text); err == nil {
			text = p.String()
		}
		if text != "" {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, ",")
}

// values judges rows by themselves, and with their block.
func (w *databaseWalk) values() {
	do := w.restart("coild sets a file with such a row aside and makes it anew of what kernel and AddressBlocks have")
	for _, a := range w.db.Addresses {
		for _, text := range a.Texts() {
			if x, err := netip.ParseAddr(text); err != nil || x.String() != text {
				w.wrong(StepRows, do, "row %d of %s has %q, which isn't an address as Coil writes it", a.ID, whose(a), text)
			}
		}
		if _, ok := a.Entered(); !ok {
			w.wrong(StepRows, do, "row %d of %s is since %q, which is no time", a.ID, whose(a), a.Since)
		}
		i := slices.IndexFunc(w.db.Blocks, func(b inspection.DatabaseBlock) bool { return b.ID == a.BlockID })
		switch {
		case a.BlockID == 0 && !free(a):
			w.wrong(StepRows, "replace the pod: nobody keeps others from its address", "%s of %s is of block %q, which the record lacks", addressesOf(a), whose(a), a.Block)
		case i < 0: // SQLite has found that it is missing
		case !within(w.db.Blocks[i], a):
			w.wrong(StepRows, do, "%s of %s isn't address %d of block %s, which is %s", addressesOf(a), whose(a), a.Offset, w.db.Blocks[i].Name, ranges(w.db.Blocks[i]))
		}
	}
}

// addressesOf are those of a row.
func addressesOf(a inspection.DatabaseAddress) string { return strings.Join(a.Texts(), ",") }

// whose names who has the address of a row, or had it.
func whose(a inspection.DatabaseAddress) string {
	return fmt.Sprintf("pod %s/%s (%s)", a.Namespace, a.Pod, a.State)
}

// within says that the addresses of a row are those of its place in a block. What isn't understood is judged elsewhere.
func within(b inspection.DatabaseBlock, a inspection.DatabaseAddress) bool {
	optional := func(text string) *string {
		if text == "" {
			return nil
		}
		return &text
	}
	block, err := ipam.ParseBlock(optional(b.IPv4), optional(b.IPv6))
	if err != nil {
		return false
	}
	if a.Offset < 0 || a.Offset >= block.Size() {
		return false
	}
	at := block.At(a.Offset).Addrs()
	return !slices.ContainsFunc(a.Texts(), func(text string) bool {
		x, err := netip.ParseAddr(text)
		return err == nil && !slices.Contains(at, x)
	})
}

// twice looks for addresses that two have.
func (w *databaseWalk) twice() {
	for _, x := range sorted(w.rows) {
		var names []string
		for _, a := range w.rows[x] {
			if !free(a) {
				names = append(names, whose(a))
			}
		}
		if len(names) > 1 {
			w.wrong(StepTwice, "delete all of these pods but one", "the record has %s for %s", x, plan.Enumerate(names))
		}
	}
	of := map[netip.Addr][]string{}
	for _, p := range w.networked() {
		for _, x := range podAddresses(p) {
			of[x] = append(of[x], p.Namespace+"/"+p.Name)
		}
	}
	for _, x := range sorted(of) {
		if len(of[x]) > 1 {
			w.wrong(StepTwice, "delete all of these pods but one", "kubelet tells %s of pods %s", x, plan.Enumerate(of[x]))
		}
	}
}

// sorted are the keys of a map.
func sorted[T any](m map[netip.Addr]T) []netip.Addr {
	var all []netip.Addr
	for x := range m {
		all = append(all, x)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// networked are the pods of the node that have a network of their own, in order. One that is deleted may have lost it, and still tells its addresses.
func (w *databaseWalk) networked() (all []*corev1.Pod) {
	for _, p := range w.pods {
		if !p.Spec.HostNetwork && p.DeletionTimestamp == nil && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *corev1.Pod) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	return all
}

// podAddresses are those that kubelet tells.
func podAddresses(p *corev1.Pod) (all []netip.Addr) {
	for _, ip := range p.Status.PodIPs {
		if x, err := netip.ParseAddr(ip.IP); err == nil {
			all = append(all, x.Unmap())
		}
	}
	return all
}

// withoutPod looks for addresses of pods that don't exist.
func (w *databaseWalk) withoutPod(held []inspection.DatabaseAddress) {
	if w.unread(StepPods, KindPods) {
		return
	}
	const do = "if a sandbox of it runs on the node (crictl pods), remove that (crictl stopp, crictl rmp); otherwise coild releases the address when it has found the link gone twice (--sweep-interval)"
	for _, a := range held {
		p := w.pods[a.Namespace+"/"+a.Pod]
		switch {
		case a.Namespace == "" || a.Pod == "": // the runtime didn't tell
		case p == nil:
			w.wrong(StepPods, do, "%s is of %s, and there is no such pod on the node", addressesOf(a), whose(a))
		case a.PodUID != "" && a.PodUID != plan.PodUID(p) && a.PodUID != string(p.UID):
			w.wrong(StepPods, do, "%s is of an earlier %s: its UID was %s", addressesOf(a), whose(a), a.PodUID)
		}
	}
}

// lacking looks for pods whose addresses the record lacks, or has for others.
func (w *databaseWalk) lacking() {
	if w.unread(StepLacking, KindPods, KindPools, KindBlocks) {
		return
	}
	if !w.db.Node.IPAM {
		return // they are another plugin's
	}
	for _, p := range w.networked() {
		w.lackingOf(p)
	}
}

// lackingOf tells of the first address of a pod that the record lacks, or has for another one: a pod's addresses are one row.
func (w *databaseWalk) lackingOf(p *corev1.Pod) {
	for _, x := range podAddresses(p) {
		rows := slices.DeleteFunc(slices.Clone(w.rows[x]), free)
		switch mine := slices.ContainsFunc(rows, func(a inspection.DatabaseAddress) bool { return a.Namespace == p.Namespace && a.Pod == p.Name }); {
		case mine || !w.coils(x):
		case len(rows) > 0:
			w.wrong(StepLacking, "delete the pod: its successor gets an address of its own", "pod %s/%s has %s, which the record has for %s", p.Namespace, p.Name, x, whose(rows[0]))
			return
		case len(w.rows[x]) > 0: // the step about cooling tells
		default:
			w.wrong(StepLacking, w.restart("coild records the links that the kernel has")+"; or delete the pod. Until then another pod may get the address", "pod %s/%s has %s, which the record lacks", p.Namespace, p.Name, x)
			return
		}
	}
}

// coils says that an address is of a pool, or of a block that isn't a floating address.
func (w *databaseWalk) coils(x netip.Addr) bool {
	return slices.ContainsFunc(w.Pools, func(p *v2.AddressPool) bool {
		return slices.ContainsFunc(pools.Prefixes(p), func(r netip.Prefix) bool { return r.Contains(x) })
	}) || slices.ContainsFunc(w.Blocks, func(b *v2.AddressBlock) bool { return !pools.IsFloating(b) && contains(b, x) })
}

// coolingOrStuck looks for pods with an address that the record gives to the next one, and for addresses that stay between two states.
func (w *databaseWalk) coolingOrStuck(held []inspection.DatabaseAddress) {
	for _, p := range w.networked() {
		for _, x := range podAddresses(p) {
			if rows := w.rows[x]; len(rows) > 0 && !slices.ContainsFunc(rows, func(a inspection.DatabaseAddress) bool { return !free(a) }) {
				w.wrong(StepCooling, "delete the pod: another one gets the address otherwise", "pod %s/%s has %s, which the record has released from %s", p.Namespace, p.Name, x, whose(rows[0]))
			}
		}
	}
	for _, a := range held {
		since, ok := a.Entered()
		if ok && a.State != string(store.Attached) && w.Now.Sub(since) > unsettled {
			w.wrong(StepCooling, w.restart("coild ends what was begun"), "%s of %s is so since %s", addressesOf(a), whose(a), a.Since)
		}
	}
}
