// Package selftest plans what "coilctl selftest" does in a cluster, and judges what it has seen: which pods there are, whom each of them asks, and what is wrong.
//
// It owns the pods, the questions with their answers, and the words of verdicts. It must not know how pods are made or asked, nor how a verdict is shown.
package selftest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// State is what a check has found.
type State string

// The states.
const (
	Right State = "right"
	Wrong State = "wrong"
	// Skipped: there is nothing to check, or it can't be checked; the sentence says why.
	Skipped State = "skipped"
)

// The names of checks, in their order.
const (
	CheckNodes     = "nodes"
	CheckPods      = "pods"
	CheckAddresses = "addresses"
	CheckRoutes    = "routes"
	CheckMTU       = "mtu"
	CheckEgress    = "egress"
	CheckPolicies  = "policies"
	CheckServices  = "services"
)

// Check is a check with its verdict.
type Check struct {
	Check string `json:"check"`
	// Subject is what was checked, such as "n1 -> n2".
	Subject string `json:"subject"`
	State   State  `json:"state"`
	// Seen is a sentence that says what was seen.
	Seen string `json:"seen"`
	// Do has the commands that explain it, or says what to do; empty if nothing is to be done.
	Do string `json:"do,omitempty"`
	// Found is what coilctl why says is wrong with the pods, asked while they were there.
	Found []string `json:"found,omitempty"`
	// Pods are the names of those that it was about.
	Pods []string `json:"pods,omitempty"`
}

// Report is a selftest.
type Report struct {
	Namespace string  `json:"namespace"`
	Image     string  `json:"image"`
	Checks    []Check `json:"checks"`
}

// Count is how many checks have a state.
func (r Report) Count(s State) (n int) {
	for _, c := range r.Checks {
		if c.State == s {
			n++
		}
	}
	return n
}

// Failed are the names of the pods of checks that are wrong.
func (r Report) Failed() (pods []string) {
	for _, c := range r.Checks {
		if c.State == Wrong {
			pods = append(pods, c.Pods...)
		}
	}
	slices.Sort(pods)
	return slices.Compact(pods)
}

// ContainerOf is the container of coild, by the DaemonSets that run it: the one on the most nodes, since others may be about to go.
func ContainerOf(sets []*appsv1.DaemonSet) (c corev1.Container, found bool) {
	most := slices.SortedStableFunc(slices.Values(sets), func(a, b *appsv1.DaemonSet) int {
		return -cmp.Compare(a.Status.DesiredNumberScheduled, b.Status.DesiredNumberScheduled)
	})
	for _, s := range most {
		for _, c := range s.Spec.Template.Spec.Containers {
			if c.Name == containerCoild {
				return c, true
			}
		}
	}
	return c, false
}

// containerCoild is the container of coild in its pods.
const containerCoild = "coild"

// GivesAddresses says whether a coild gives pods their addresses, by its arguments.
func GivesAddresses(coild corev1.Container) bool {
	return !slices.ContainsFunc(slices.Concat(coild.Command, coild.Args), func(a string) bool {
		return slices.Contains([]string{"--enable-ipam=false", "--enable-ipam=0", "--enable-ipam=f", "--enable-ipam=F", "--enable-ipam=False", "--enable-ipam=FALSE"}, a)
	})
}

// Choice says which nodes are to be tested.
type Choice struct {
	Nodes []*corev1.Node
	// Coilds are the pods of coild.
	Coilds []*corev1.Pod
	// Names are those of the nodes that were chosen; none are all.
	Names []string
	// Tolerate takes nodes with taints, too.
	Tolerate bool
}

// Choose returns the names of the nodes that are tested, sorted, and a check for each other one.
func (c Choice) Choose() (names []string, left []Check) {
	for _, name := range c.Names {
		if !slices.ContainsFunc(c.Nodes, func(n *corev1.Node) bool { return n.Name == name }) {
			left = append(left, Check{Check: CheckNodes, Subject: name, State: Wrong, Seen: "there is no such Node", Do: "kubectl get nodes"})
		}
	}
	nodes := slices.SortedFunc(slices.Values(c.Nodes), func(a, b *corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	for _, n := range nodes {
		if len(c.Names) > 0 && !slices.Contains(c.Names, n.Name) {
			continue
		}
		why, do := c.unfit(n)
		if why == "" {
			names = append(names, n.Name)
			continue
		}
		check := Check{Check: CheckNodes, Subject: n.Name, State: Skipped, Seen: why}
		if len(c.Names) > 0 { // it was asked for
			check.State, check.Do = Wrong, do
		}
		left = append(left, check)
	}
	return names, left
}

// unfit says why no pod is started on a node, and the command that explains it.
func (c Choice) unfit(n *corev1.Node) (why, do string) {
	i := slices.IndexFunc(c.Coilds, func(p *corev1.Pod) bool { return p.Spec.NodeName == n.Name && p.DeletionTimestamp == nil })
	switch ready := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}); {
	case i < 0:
		return "no coild is on the node", "coilctl why node " + n.Name
	case !ready:
		return "the Node isn't ready", "coilctl why node " + n.Name
	}
	for _, t := range n.Spec.Taints {
		if !c.Tolerate && t.Effect != corev1.TaintEffectPreferNoSchedule {
			return fmt.Sprintf("the Node has the taint %s:%s", t.Key, t.Effect), "use --tolerate-all"
		}
	}
	return "", ""
}

// Batches splits nodes into parts of at most so many, which is two or more. Each begins with the last node of the one before, so that all nodes are linked.
func Batches(nodes []string, most int) (all [][]string) {
	for len(nodes) > most {
		all = append(all, nodes[:most])
		nodes = nodes[most-1:]
	}
	return append(all, nodes)
}

// Pod is a pod of a selftest.
type Pod struct {
	Name, Node string
	Addrs      []netip.Addr
}

// PodOf reads a pod.
func PodOf(p *corev1.Pod) Pod {
	pod := Pod{Name: p.Name, Node: p.Spec.NodeName}
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			pod.Addrs = append(pod.Addrs, a.Unmap())
		}
	}
	return pod
}

// Pair is who asks whom, by their places in a list.
type Pair struct {
	From, To int
	// Ring says that the two are neighbours in the ring of all, which try the MTU, too.
	Ring bool
}

// Pairs are the pairs of n pods: a ring, and a few others at random. So each pod asks and is asked, and the number of questions grows with the number of pods.
func Pairs(n int, r *rand.Rand) (pairs []Pair) {
	if n < 2 {
		return nil
	}
	for i := range n {
		pairs = append(pairs, Pair{i, (i + 1) % n, true})
	}
	for range min(max(2, n/4), n*(n-2)) {
		for {
			p := Pair{From: r.IntN(n), To: r.IntN(n)}
			if p.From != p.To && !slices.ContainsFunc(pairs, func(o Pair) bool { return o.From == p.From && o.To == p.To }) {
				pairs = append(pairs, p)
				break
			}
		}
	}
	return pairs
}

// Questions are what one pod asks another, by each family that both have.
func Questions(from, to Pod, port uint16, mtu bool) (all []Question) {
	for _, a := range to.Addrs {
		if !slices.ContainsFunc(from.Addrs, func(own netip.Addr) bool { return own.Is4() == a.Is4() }) {
			continue
		}
		at := netip.AddrPortFrom(a, port)
		all = append(all, Question{UDP, at}, Question{TCP, at})
		if mtu {
			all = append(all, Question{MTU, at})
		}
	}
	return all
}
