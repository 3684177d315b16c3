package preflight

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/probe"
)

// directKernel is the oldest kernel with resilient groups of nexthops, which the peering Direct needs.
var directKernel = version.MajorMinor(5, 14)

// ownImage stands for the image that routers have unless their Egress names another one.
const ownImage = "Coil's"

// egresses judges Egresses.
func (j *judge) egresses() {
	for _, e := range j.Egresses {
		subject := "Egress " + e.Namespace + "/" + e.Name
		for _, d := range e.Spec.Destinations {
			if p, err := netip.ParsePrefix(d); err != nil {
				j.add(Blocker, subject, "destination %q is no subnet in CIDR notation: correct it", d)
			} else if p != p.Masked() {
				j.add(Note, subject, "destination %s has host bits: it means %s, and must be written so when destinations change", p, p.Masked())
			}
		}
		if e.Spec.Addresses.For(v2.EgressAddressOfNode) && !j.Variant.IPAM() {
			j.add(Blocker, subject, "its clients leave by addresses of nodes (spec.addresses.use: Node), and with the variant %s nodes don't translate for routers: its clients "+
				"could reach nothing. Take spec.addresses away first", j.Variant)
		} else if e.Spec.Addresses != nil && !j.Variant.Addresses() {
			j.add(Blocker, subject, "it has addresses of AddressPool %s, and the variant %s has no AddressPools: its clients could reach nothing. Install the variant "+
				"egress-only-with-addresses, or take spec.addresses away first", e.Spec.Addresses.Pool, j.Variant)
		}
		d, err := egress.RouterDeployment(e, egress.RouterImage{Name: ownImage})
		if err != nil {
			j.add(Blocker, subject, "no router can be made of it: %s", oneLine(err))
			continue
		}
		for _, c := range d.Spec.Template.Spec.Containers {
			if c.Name == v2.EgressContainerName && (c.Image != ownImage || c.Command[0] != "/coil-egress") {
				j.add(Warning, subject, "its template names an image or a command for the container %s, which may not exist any more: take them out", c.Name)
			}
		}
	}
}

// ports judges the ports that other programs have declared to open in the network of nodes.
func (j *judge) ports() {
	ours := map[int32]string{}
	for program, ports := range programs {
		if j.Variant.has(program) {
			for _, p := range ports {
				ours[p] = program
			}
		}
	}
	if j.Variant.Egress() && j.Variant.Addresses() {
		ours[floatingPort] = nodeDaemon
	}
	for _, p := range j.Pods {
		if ofCoil(p) || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		owner := "Pod " + p.Namespace + "/" + p.Name
		if o := metav1.GetControllerOf(p); o != nil {
			owner = fmt.Sprintf("%s %s/%s", o.Kind, p.Namespace, o.Name)
		}
		for _, c := range p.Spec.Containers {
			for _, port := range c.Ports {
				n := port.HostPort
				if p.Spec.HostNetwork {
					n = port.ContainerPort
				}
				if program, ok := ours[n]; ok && (port.Protocol != corev1.ProtocolUDP || n == floatingPort) {
					j.addNode(p.Spec.NodeName, Blocker, "%s opens port %d, which %s needs: give one of them another (--metrics-addr, --health-addr, --floating-port)", owner, n, program)
				}
			}
		}
	}
}

// probes judges what was found on nodes.
func (j *judge) probes() {
	if j.Probes == nil {
		j.add(Note, "Nodes", "nobody looked at their kernels, network configurations and records (--skip-nodes)")
		return
	}
	for _, n := range j.Nodes {
		if !Runs(n) {
			continue
		}
		switch p := j.Probes[n.Name]; {
		case p.Result != nil:
			j.kernel(n.Name, p.Result)
			j.cni(n.Name, p.Result.CNI)
			j.record(n.Name, p.Result.Record)
			for _, problem := range p.Result.Problems {
				j.addNode(n.Name, Unknown, "%s", problem)
			}
		case p.Err != nil:
			j.addNode(n.Name, Unknown, "%s", oneLine(p.Err))
		case Away(n):
			j.addNode(n.Name, Warning, "its kubelet is away, so that nobody could look at it")
		default:
			j.addNode(n.Name, Unknown, "nobody looked at it: run preflight again")
		}
	}
}

func (j *judge) kernel(node string, r *probe.Result) {
	missing := Blocker
	hint := "install the kernel's package that has them"
	if r.ModulesUnlisted {
		missing, hint = Warning, "if the kernel has them built in, ignore this"
	}
	if len(r.MissingModules) > 0 {
		j.addNode(node, missing, "the kernel %s has no modules %s, without which nodes can't guard the addresses of pods: %s", r.Kernel, strings.Join(r.MissingModules, ", "), hint)
	}
	if !j.Variant.Egress() {
		return
	}
	if len(r.MissingEgressModules) > 0 {
		if len(j.Egresses) == 0 {
			missing = Warning
		}
		j.addNode(node, missing, "the kernel %s has no modules %s, without which pods can't use Egresses: %s", r.Kernel, strings.Join(r.MissingEgressModules, ", "), hint)
	}
	direct := slices.ContainsFunc(j.Egresses, func(e *v2.Egress) bool { return e.Spec.Peering == v2.EgressPeeringDirect })
	if v, err := version.ParseGeneric(r.Kernel); direct && (err != nil || v.LessThan(directKernel)) {
		j.addNode(node, Blocker, "the kernel %s is older than %s, and pods can't use Egresses with the peering Direct", r.Kernel, directKernel)
	}
}

// cni judges the network configurations of others on a node.
func (j *judge) cni(node string, files []probe.CNIFile) {
	for _, f := range files {
		switch {
		case f.Name == j.ConfName, slices.Contains(f.Plugins, "coil"), slices.Equal(f.Plugins, []string{"loopback"}):
		case !j.Variant.IPAM():
			j.addNode(node, Note, "/etc/cni/net.d/%s has the plugins %s: add coil to the end of them", f.Name, strings.Join(f.Plugins, ", "))
		case len(f.Plugins) == 0:
			j.addNode(node, Warning, "/etc/cni/net.d/%s can't be understood: remove it", f.Name)
		case f.Name < j.ConfName:
			j.addNode(node, Blocker, "/etc/cni/net.d/%s (%s) comes before %s, so that runtimes would use it and not Coil: remove the other network, or give Coil's file an earlier name (CNI_CONF_NAME, --cni-conf-name)",
				f.Name, strings.Join(f.Plugins, ", "), j.ConfName)
		default:
			j.addNode(node, Warning, "/etc/cni/net.d/%s (%s) isn't used any more: remove the other network", f.Name, strings.Join(f.Plugins, ", "))
		}
	}
}

func (j *judge) record(node string, r *probe.Record) {
	const file = "/var/lib/coil/coild.db"
	switch {
	case r == nil:
	case r.Damaged:
		j.addNode(node, Warning, "%s is no record of Coil: coild will set it aside, and make a new one of what the kernel and the API server have", file)
	case r.Version > r.Known:
		j.addNode(node, Warning, "%s has version %d of the schema, of a later Coil; this one knows %d. coild will set it aside, and make a new one of what the kernel and the API server have: "+
			"all free addresses of the node cool down first", file, r.Version, r.Known)
	}
}

// oneLine is the text of an error without line breaks.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
