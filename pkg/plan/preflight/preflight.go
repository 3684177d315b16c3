// Package preflight judges a cluster before Coil is installed or updated on it: what will happen, and what stands against
// it.
//
// It owns the rules, and the words in which an admin reads of them. It must not know how the cluster was read.
package preflight

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/probe"
)

// Namespace has Coil's programs.
const Namespace = "kube-system"

// Variant is what is to be installed: the name of a folder of manifests/variants, or empty for manifests itself.
type Variant string

// Variants are those that there are.
var Variants = []Variant{"", "with-router", "with-services", "with-gateways", "ipam-only", "ipam-only-with-router", "egress-only", "egress-only-with-addresses"}

// folder is where the variant is.
func (v Variant) folder() string {
	if v == "" {
		return "manifests"
	}
	return "manifests/variants/" + string(v)
}

// IPAM says whether Coil gives pods their addresses.
func (v Variant) IPAM() bool { return !strings.HasPrefix(string(v), "egress-only") }

// Addresses says whether there are AddressPools, at least for floating addresses.
func (v Variant) Addresses() bool { return v != "egress-only" }

// Egress says whether pods can use Egresses.
func (v Variant) Egress() bool { return !strings.HasPrefix(string(v), "ipam-only") }

// Cluster is what was read of a cluster.
type Cluster struct {
	Variant Variant
	// This is the version of the program that judges.
	This string
	// Image is the one that is to be installed; empty if that isn't known.
	Image string
	// ConfName is the file name of the network configuration that it will have on nodes.
	ConfName string

	// Kubernetes is the version of the API server.
	Kubernetes string
	// Webhooks are all configurations of webhooks.
	Webhooks []Webhook
	// CRDs are the definitions of Coil's kinds.
	CRDs []CRD
	// DaemonSets, Deployments and ConfigMaps are those of Namespace.
	DaemonSets  []*appsv1.DaemonSet
	Deployments []*appsv1.Deployment
	ConfigMaps  []*corev1.ConfigMap
	Pools       []*v2.AddressPool
	Blocks      []*v2.AddressBlock
	Egresses    []*v2.Egress
	Nodes       []*corev1.Node
	Pods        []*corev1.Pod
	Services    []*networkingv1.ServiceCIDR
	// Probes has what was found on nodes, by their names; nil if nobody looked.
	Probes map[string]Probe
}

// Webhook is a configuration of webhooks.
type Webhook struct {
	// Kind is ValidatingWebhookConfiguration or MutatingWebhookConfiguration.
	Kind, Name string
	// Groups are the API groups of its rules.
	Groups []string
}

// CRD is the definition of a kind.
type CRD struct {
	Name string
	// Stored are the versions in which objects may be stored.
	Stored []string
}

// Probe is what was found on a node, or why that isn't known.
type Probe struct {
	Result *probe.Result
	Err    error
}

// Severity says what a finding means for the installation.
type Severity int

const (
	// Note is worth knowing.
	Note Severity = iota
	// Warning is something that gets worse, or isn't used any more.
	Warning
	// Unknown is something that couldn't be found out.
	Unknown
	// Blocker stands against the installation.
	Blocker
)

// Finding is something that an admin should know before the installation.
type Finding struct {
	Severity Severity
	// Subject is the object that the finding is about.
	Subject string
	// Text says what is the matter, and what to do.
	Text string
}

// Report is what Judge found. It is the same for the same cluster.
type Report struct {
	// Installed says which Coil is there, and This which one is to be installed.
	Installed, This string
	// Steps say what will happen.
	Steps []string
	// Findings are sorted, blockers first.
	Findings []Finding
}

// Worst is the severity of the worst finding; Note if there is none.
func (r Report) Worst() Severity {
	if len(r.Findings) == 0 {
		return Note
	}
	return r.Findings[0].Severity
}

// headings are those of the findings of each severity.
var headings = map[Severity]string{
	Blocker: "What stands against it:", Unknown: "What couldn't be found out:", Warning: "What to mind:", Note: "Good to know:",
}

// String is the report as an admin reads it.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "There is: %s\nTo be installed: %s\n\nWhat will happen:\n", r.Installed, r.This)
	for _, s := range r.Steps {
		fmt.Fprintf(&b, "- %s\n", s)
	}
	last := Severity(-1)
	for _, f := range r.Findings {
		if f.Severity != last {
			fmt.Fprintf(&b, "\n%s\n", headings[f.Severity])
		}
		fmt.Fprintf(&b, "- %s: %s\n", f.Subject, f.Text)
		last = f.Severity
	}
	switch r.Worst() {
	case Blocker:
		b.WriteString("\nDon't install it yet.\n")
	case Unknown:
		b.WriteString("\nNothing that was found stands against it.\n")
	default:
		b.WriteString("\nNothing stands against it.\n")
	}
	return b.String()
}

// Judge says what will happen to a cluster, and what stands against it.
func Judge(c Cluster) Report {
	j := judge{Cluster: c, nodes: map[Finding][]string{}}
	j.installed = j.install()
	j.kubernetes()
	j.programs()
	j.config()
	if c.Variant.Addresses() {
		j.pools()
	}
	if c.Variant.IPAM() {
		j.blocks()
		j.pods()
	} else {
		j.withoutIPAM()
	}
	if c.Variant.Egress() {
		j.egresses()
	}
	j.ports()
	j.probes()
	for f, nodes := range j.nodes {
		slices.Sort(nodes)
		f.Subject = "Node " + nodes[0]
		if len(nodes) > 1 {
			f.Subject = "Nodes " + plan.Enumerate(nodes)
		}
		j.findings = append(j.findings, f)
	}
	slices.SortFunc(j.findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(b.Severity, a.Severity), cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Text, b.Text))
	})
	return Report{
		Installed: j.installed.String(), This: fmt.Sprintf("Coil %s, %s", cmp.Or(c.Image, c.This), c.Variant.folder()),
		Steps: j.steps(), Findings: j.findings,
	}
}

// judge collects findings.
type judge struct {
	Cluster
	installed installed
	findings  []Finding
	// nodes has the nodes of findings that are the same on several, which become one; the subjects are empty.
	nodes map[Finding][]string
	// own and foreign count the pods whose addresses are in the blocks of their nodes, and the others.
	own, foreign int
}

func (j *judge) add(s Severity, subject, format string, args ...any) {
	j.findings = append(j.findings, Finding{s, subject, fmt.Sprintf(format, args...)})
}

// addNode adds a finding about a node.
func (j *judge) addNode(node string, s Severity, format string, args ...any) {
	f := Finding{Severity: s, Text: fmt.Sprintf(format, args...)}
	if !slices.Contains(j.nodes[f], node) {
		j.nodes[f] = append(j.nodes[f], node)
	}
}

// linux returns the names of the Nodes that get a coild.
func (j *judge) linux() []string {
	var names []string
	for _, n := range j.Nodes {
		if Runs(n) {
			names = append(names, n.Name)
		}
	}
	return names
}

// Runs says whether coild runs on a Node.
func Runs(n *corev1.Node) bool { return cmp.Or(n.Labels[corev1.LabelOSStable], "linux") == "linux" }

// Away says whether nothing is heard of a Node's kubelet, so that no pod can be started there.
func Away(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
}

// steps say what will happen, provided that what stands against it was removed.
func (j *judge) steps() []string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	nodes, same := len(j.linux()), j.same()
	if j.installed.fresh() {
		add("coild is started on %s. Nothing changes for pods that run there.", plan.Count(nodes, "node", "nodes"))
		if j.Variant.IPAM() {
			add("Pods that start afterwards have addresses of Coil. Those that run now (%d) keep theirs.", j.own+j.foreign)
		}
	} else {
		if same > 0 {
			add("coild of %s has the image already, and stays as it is unless its settings change.", plan.Count(same, "node", "nodes"))
		}
		if n := nodes - same; n > 0 || same == 0 {
			add("coild is replaced on %s, a tenth of them at a time. No pod is restarted and no packet between pods is lost. A pod that starts or ends meanwhile waits for the new coild of its node.", plan.Count(n, "node", "nodes"))
		}
		if j.Variant.IPAM() {
			add("Pods with addresses of Coil (%d) keep them and their routes.", j.own)
		}
	}
	if n := len(j.Egresses); n > 0 && j.Variant.Egress() && !j.routersStay() {
		routers := int32(0)
		for _, e := range j.Egresses {
			routers += e.Spec.Replicas
		}
		add("Routers of %s are replaced (%s), as the strategy of each Egress says.", plan.Count(n, "Egress", "Egresses"), plan.Count(int(routers), "pod", "pods"))
	}
	older := slices.DeleteFunc(slices.Collect(maps.Values(j.Probes)), func(p Probe) bool {
		return p.Result == nil || p.Result.Record == nil || p.Result.Record.Damaged || p.Result.Record.Version == 0 || p.Result.Record.Version >= p.Result.Record.Known
	})
	if len(older) > 0 {
		add("On %s the record of addresses gets version %d of its schema. A copy of the former one stays beside it, in /var/lib/coil.",
			plan.Count(len(older), "node", "nodes"), older[0].Result.Record.Known)
	}
	if j.installed.generation == coil2 {
		add("From then on, nodes drop what pods send from addresses that aren't theirs. For pods that forward for others, annotate their namespaces before: %s=%s.", v2.AnnotationSourceGuard, v2.SourceGuardOff)
		add("From then on, a freed address is given again after a minute at the earliest, so that empty blocks go back to their pools later.")
	}
	return all
}
