// Package diagnosis says what is right and what is wrong with one pod, address, node or Service: it walks from the objects of the API server to what its node has in the kernel, step
// by step, and says of each what is seen, and what to do.
//
// It owns which difference is a fault, whose fault it is, and which faults only follow from others. It must not know where objects and answers come from, nor how a walk is
// shown.
package diagnosis

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// State is what a step has found.
type State string

// The states.
const (
	Right State = "right"
	Wrong State = "wrong"
	// Unknown: it couldn't be read, or it waits for an earlier step that is wrong, or for a moment.
	Unknown State = "unknown"
)

// The names of steps, in the order in which they are walked.
const (
	StepPod       = "pod"
	StepNode      = "node"
	StepNamespace = "namespace"
	StepPool      = "pool"
	StepRequest   = "request"
	StepBlock     = "block"
	StepRecord    = "record"
	StepVeth      = "veth"
	StepRules     = "rules"
	StepRoutes    = "routes"
	StepGuard     = "guard"
	StepSysctls   = "sysctls"
	StepExport    = "export"
	StepPolicies  = "policies"
	StepRouter    = "router"
	StepTunnels   = "tunnels"
	StepPeers     = "peers"
	StepFloating  = "floating"
	StepConntrack = "conntrack"
	StepAddress   = "address"
)

// The names of steps about Services, beside those of pools, nodes and routes.
const (
	StepService   = "service"
	StepLeader    = "leader"
	StepOpenStack = "openstack"
	StepClaim     = "claim"
	StepStatus    = "status"
	StepHolder    = "holder"
	StepGateways  = "gateways"
	StepEndpoints = "endpoints"
	StepClients   = "clients"
)

// Step is one step of a walk.
type Step struct {
	Step  string `json:"step"`
	State State  `json:"state"`
	// Seen is a sentence that says what is there.
	Seen string `json:"seen"`
	// Do is a sentence that says what to do; empty if nothing is to be done.
	Do string `json:"do,omitempty"`
}

// Diagnosis is a walk.
type Diagnosis struct {
	// Subject is such as "Pod shop/cart-0".
	Subject string `json:"subject"`
	Steps   []Step `json:"steps"`
}

// Wrong returns the names of the steps that are wrong.
func (d Diagnosis) Wrong() (names []string) {
	for _, s := range d.Steps {
		if s.State == Wrong {
			names = append(names, s.Step)
		}
	}
	return names
}

// Facts are what a walk knows. A nil object doesn't exist, unless Unread has its kind.
type Facts struct {
	// Node is that of the pod, of the block, or the one that is asked about.
	Node *corev1.Node
	// Coilds are the pods of coild on the node.
	Coilds []*corev1.Pod
	Pools  []*v2.AddressPool
	// NoPools says that there is no such kind: another plugin gives pods their addresses.
	NoPools bool
	// Blocks are those of the node, and the one that has the address, whosever it is.
	Blocks []*v2.AddressBlock
	// Requests are the node's.
	Requests []*v2.BlockRequest
	Egresses []*v2.Egress
	// Policies are those of the pod's namespace.
	Policies        []*v2.EgressPolicy
	ClusterPolicies []*v2.EgressClusterPolicy
	// Answer is what coild says; nil if it doesn't answer, and Unanswered says why.
	Answer     *inspection.Answer
	Unanswered string
	// Routers are those of the Egresses that the pod uses; none if nobody asked them.
	Routers []AskedRouter
	// Services are the walks about those that are reached by the address that is asked about.
	Services []Diagnosis
	// FloatingIP is the AddressClaim with the address that is asked about as floating IP of OpenStack; nil if none has it.
	FloatingIP *v2.AddressClaim
	// Unread has the kinds of objects that couldn't be read, such as "AddressPools", with the reasons.
	Unread map[string]string
	Now    time.Time
}

// The kinds of objects in Facts.Unread.
const (
	KindNode            = "Node"
	KindCoilds          = "pods of coild"
	KindNamespace       = "Namespace"
	KindPools           = "AddressPools"
	KindBlocks          = "AddressBlocks"
	KindRequests        = "BlockRequests"
	KindEgresses        = "Egresses"
	KindPolicies        = "EgressPolicies"
	KindClusterPolicies = "EgressClusterPolicies"
	KindEvents          = "Events"
	KindRouters         = "pods of routers"
	KindLeases          = "Leases"
	KindClaims          = "AddressClaims"
	KindGateways        = "LoadBalancerGateways"
	KindSlices          = "EndpointSlices"
	KindNodes           = "Nodes"
)

// walk collects steps.
type walk struct {
	Facts
	steps []Step
}

func (w *walk) add(step string, state State, do, format string, args ...any) {
	w.steps = append(w.steps, Step{Step: step, State: state, Seen: fmt.Sprintf(format, args...), Do: do})
}

func (w *walk) right(step, format string, args ...any) { w.add(step, Right, "", format, args...) }

func (w *walk) wrong(step, do, format string, args ...any) { w.add(step, Wrong, do, format, args...) }

func (w *walk) unknown(step, do, format string, args ...any) {
	w.add(step, Unknown, do, format, args...)
}

// unread says that a kind of objects couldn't be read, if so.
func (w *walk) unread(step string, kinds ...string) bool {
	for _, kind := range kinds {
		if why, is := w.Unread[kind]; is {
			w.unknown(step, "read it with the rights that --help names", "%s couldn't be read: %s", kind, why)
			return true
		}
	}
	return false
}

// faulty says whether one of some steps is wrong.
func (w *walk) faulty(steps ...string) bool {
	return slices.ContainsFunc(w.steps, func(s Step) bool { return s.State == Wrong && slices.Contains(steps, s.Step) })
}

// firstWrong is the first step that is wrong; empty if none is.
func (w *walk) firstWrong() string {
	if wrong := (Diagnosis{Steps: w.steps}).Wrong(); len(wrong) > 0 {
		return wrong[0]
	}
	return ""
}

// late says whether something that began then has taken longer than it may.
func (w *walk) late(since time.Time) bool { return w.Now.Sub(since) > health.Patience }

// pool returns the pool of a name, nil if there is none.
func (w *walk) pool(name string) *v2.AddressPool {
	if i := slices.IndexFunc(w.Pools, func(p *v2.AddressPool) bool { return p.Name == name }); i >= 0 {
		return w.Pools[i]
	}
	return nil
}

// block returns the block of a name, nil if there is none.
func (w *walk) block(name string) *v2.AddressBlock {
	if i := slices.IndexFunc(w.Blocks, func(b *v2.AddressBlock) bool { return b.Name == name }); i >= 0 {
		return w.Blocks[i]
	}
	return nil
}

// shown are the first of some comparisons, for a sentence.
func shown(all []inspection.Comparison) string {
	const most = 3
	var texts []string
	for _, c := range all {
		texts = append(texts, c.String())
	}
	if n := len(texts); n > most {
		texts = append(texts[:most], fmt.Sprintf("and %d more", n-most))
	}
	return strings.ReplaceAll(strings.Join(texts, "; "), "\n", "; ")
}

// of are the comparisons of some topics.
func of(all []inspection.Comparison, topics ...inspection.Topic) []inspection.Comparison {
	return slices.DeleteFunc(slices.Clone(all), func(c inspection.Comparison) bool { return !slices.Contains(topics, c.Topic) })
}

// compare judges comparisons as a step. right is what to say if all agree.
func (w *walk) compare(step, right, do string, all []inspection.Comparison) {
	var differ, hidden []inspection.Comparison
	for _, c := range inspection.Wrong(all) {
		if c.Unknown != "" {
			hidden = append(hidden, c)
		} else {
			differ = append(differ, c)
		}
	}
	switch {
	case len(differ) > 0:
		w.wrong(step, do, "%s", shown(differ))
	case len(hidden) > 0:
		w.unknown(step, "ask again", "%s", shown(hidden))
	default:
		w.right(step, "%s", right)
	}
}
