package preflight

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/probe"
)

// named is the metadata of an object in kube-system with Coil's labels.
func named(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Namespace: Namespace, Labels: map[string]string{
		"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": name,
	}}
}

func podSpec(name, command, image string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		HostNetwork: true, Containers: []corev1.Container{{Name: name, Image: image, Command: []string{command}}},
	}}
}

func node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

func pod(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "app"}, Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: ip}}},
	}
}

func block(index int32, node, ipv4 string) *v2.AddressBlock {
	return &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("default-%d", index), Labels: map[string]string{v2.LabelPool: "default", v2.LabelNode: node}},
		Index:      index, IPv4: &ipv4,
	}
}

func pool(name string, bits int32, subnets ...string) *v2.AddressPool {
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{BlockSizeBits: bits}}
	for _, s := range subnets {
		p.Spec.Subnets = append(p.Spec.Subnets, v2.SubnetSet{IPv4: &s})
	}
	return p
}

func egressOf(destination, template string) *v2.Egress {
	return &v2.Egress{ObjectMeta: metav1.ObjectMeta{Name: "nat", Namespace: "internet"}, Spec: v2.EgressSpec{
		Destinations: []string{destination}, Replicas: 2,
		Template: &v2.EgressPodTemplate{Spec: &runtime.RawExtension{Raw: []byte(template)}},
	}}
}

// healthy is a cluster with an earlier version of this Coil.
func healthy() Cluster {
	c := Cluster{
		This: "v3.1.0 abc", ConfName: "10-coil.conflist", Kubernetes: "v1.33.0",
		Webhooks:    []Webhook{{"ValidatingWebhookConfiguration", "other", []string{"apps", "*"}}},
		CRDs:        []CRD{{"addresspools.coil.cybozu.com", []string{"v2"}}},
		DaemonSets:  []*appsv1.DaemonSet{{ObjectMeta: named("coild"), Spec: appsv1.DaemonSetSpec{Template: podSpec("coild", "/coild", "reg:5000/coil:v3.0.2")}}},
		Deployments: []*appsv1.Deployment{{ObjectMeta: named("coil-ipam-controller"), Spec: appsv1.DeploymentSpec{Replicas: new(int32(2)), Template: podSpec("c", "/c", "i")}}},
		ConfigMaps: []*corev1.ConfigMap{
			{ObjectMeta: named("coil-config"), Data: map[string]string{"cni_netconf": `{"cniVersion": "1.1.0", "plugins": [{"type": "coil"}, {"type": "portmap"}]}`}},
			{ObjectMeta: named("other"), Data: map[string]string{"cni_netconf": "x"}},
		},
		Pools:    []*v2.AddressPool{pool("default", 2, "10.1.0.0/24")},
		Blocks:   []*v2.AddressBlock{block(0, "a", "10.1.0.0/30"), block(1, "b", "10.1.0.4/30")},
		Egresses: []*v2.Egress{egressOf("0.0.0.0/0", `{"containers": [{"name": "egress", "resources": {}}, {"name": "side", "image": "x"}]}`)},
		Nodes:    []*corev1.Node{node("a"), node("b")},
		Pods:     []*corev1.Pod{pod("x", "a", "10.1.0.1"), pod("y", "b", "10.1.0.7")},
		Services: []*networkingv1.ServiceCIDR{{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12"}}}},
		Probes:   map[string]Probe{},
	}
	for _, n := range c.Nodes {
		c.Probes[n.Name] = Probe{Result: &probe.Result{
			Kernel: "6.1.0-56-amd64", Record: &probe.Record{Version: 1, Known: 2},
			CNI: []probe.CNIFile{{Name: "10-coil.conflist", Plugins: []string{"coil"}}, {Name: "99-loopback.conf", Plugins: []string{"loopback"}}},
		}}
	}
	return c
}

// two makes the Coil of a cluster one of 2.x.
func two(c *Cluster) {
	c.DaemonSets[0].Spec.Template = podSpec("coild", "coild", "example.org/coil:2.15.0")
	c.DaemonSets[0].Spec.Template.Spec.Containers[0].Args = []string{"--backend=nftables"}
}

func none(c *Cluster) { c.DaemonSets, c.Deployments, c.ConfigMaps = nil, nil, nil }

// TestFindings has each finding once.
func TestFindings(t *testing.T) {
	result := func(c *Cluster, node string) *probe.Result { return c.Probes[node].Result }
	for _, tt := range []struct {
		name string
		edit func(*Cluster)
		want []Finding // of texts a part
	}{
		{"healthy", func(*Cluster) {}, nil},
		{"old Kubernetes", func(c *Cluster) { c.Kubernetes = "v1.32.9-gke.1" }, []Finding{{Blocker, "Kubernetes v1.32.9-gke.1", "1.33 or later"}}},
		{"strange Kubernetes", func(c *Cluster) { c.Kubernetes = "main" }, []Finding{{Unknown, "Kubernetes main", "can't be understood"}}},
		{"webhooks", func(c *Cluster) {
			c.Webhooks = append(c.Webhooks, Webhook{"MutatingWebhookConfiguration", "renamed", []string{"apps", "coil.cybozu.com"}},
				Webhook{"ValidatingWebhookConfiguration", "coilv2-validating-ipam-webhook-configuration", nil})
		}, []Finding{{Blocker, "MutatingWebhookConfiguration renamed", "kubectl delete mutatingwebhookconfiguration renamed"},
			{Blocker, "ValidatingWebhookConfiguration coilv2-validating-ipam-webhook-configuration", "kubectl delete"}}},
		{"stored versions", func(c *Cluster) { c.CRDs[0].Stored = []string{"v1", "v2"} },
			[]Finding{{Blocker, "CustomResourceDefinition addresspools.coil.cybozu.com", "v1, v2"}}},
		{"Coil v1", func(c *Cluster) {
			none(c)
			c.DaemonSets = append(c.DaemonSets, &appsv1.DaemonSet{ObjectMeta: named("coil-node")})
			c.Deployments = append(c.Deployments, &appsv1.Deployment{ObjectMeta: named("coil-controllers")})
		}, []Finding{{Blocker, "DaemonSet coil-node", "dump"}, {Blocker, "Deployment coil-controllers", "dump"}}},
		{"Coil 2.x", two, []Finding{
			{Warning, "Coil 2.x", "(daemonset/coild, deployment/coil-ipam-controller)"},
			{Note, "ConfigMap coil-config", "portmap"}, {Note, "DaemonSet coild", "--backend=nftables"}}},
		{"an orphan", func(c *Cluster) {
			p := pod("coild-x", "a", "192.0.2.1")
			p.ObjectMeta, p.Spec.HostNetwork = named("coild"), true
			p.Labels[labelGeneration] = "1"
			c.Pods = append(c.Pods, p)
		}, []Finding{{Blocker, "Pod kube-system/coild", "label pod coild pod-template-generation-"}}},
		{"a version too far", func(c *Cluster) { c.This = "v3.2.1" }, []Finding{{Blocker, "Coil v3.0.2", "install 3.1 first"}}},
		{"a version too far back", func(c *Cluster) { c.DaemonSets[0].Spec.Template.Spec.Containers[0].Image = "coil:v3.3.0@sha256:ab" },
			[]Finding{{Blocker, "Coil v3.3.0", "go back to 3.2 first"}}},
		{"a version back", func(c *Cluster) { c.This = "v3.0.1" }, []Finding{{Note, "Coil v3.0.2", "goes back"}}},
		{"another variant", func(c *Cluster) { c.Variant = "egress-only" },
			[]Finding{{Blocker, "AddressBlocks default-0, default-1", "2 pods have addresses of them, and the variant egress-only gives none: no new pod could start"},
				{Warning, "Deployment coil-ipam-controller", "--variant"}}},
		{"floating addresses, which the variant hasn't", func(c *Cluster) {
			c.Variant, c.Blocks, c.Deployments = "egress-only", nil, nil
			c.Egresses[0].Spec.Addresses = &v2.EgressAddresses{Pool: "partners"}
		}, []Finding{{Blocker, "Egress internet/nat", "AddressPool partners, and the variant egress-only has no AddressPools"}}},
		{"floating addresses, which the variant has", func(c *Cluster) {
			c.Variant, c.Blocks, c.Pools = "egress-only-with-addresses", nil, nil
			c.Egresses[0].Spec.Addresses = &v2.EgressAddresses{Pool: "partners"}
		}, nil},
		{"addresses of nodes, which the variant doesn't give", func(c *Cluster) {
			c.Variant, c.Blocks, c.Pools = "egress-only-with-addresses", nil, nil
			c.Egresses[0].Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfNode}
		}, []Finding{{Blocker, "Egress internet/nat", "with the variant egress-only-with-addresses nodes don't translate for routers"}}},
		{"another variant, whose pods were moved", func(c *Cluster) { c.Variant, c.Pods, c.Deployments = "egress-only", nil, nil },
			[]Finding{{Blocker, "AddressBlocks default-0, default-1", "0 pods have addresses of them"}}},
		{"another variant, whose blocks are gone", func(c *Cluster) { c.Variant, c.Blocks, c.Deployments = "egress-only", nil, nil }, nil},
		{"the same variant, and blocks of the time before", func(c *Cluster) {
			c.Variant, c.Deployments = "egress-only", nil
			c.DaemonSets[0].Spec.Template.Spec.Containers[0].Args = []string{"--enable-ipam=false"}
		}, nil},
		{"a first variant without addresses, and blocks that nobody uses", func(c *Cluster) {
			none(c)
			c.Variant, c.Pods = "egress-only", nil
		}, nil},
		{"a first variant without addresses, and pods of Coil v1", func(c *Cluster) {
			none(c)
			c.Variant, c.Pods = "egress-only", c.Pods[:1]
			for _, b := range c.Blocks {
				b.Labels[v2.LabelReserved] = v2.ReservedValue
			}
		}, []Finding{{Blocker, "AddressBlocks default-0, default-1", "1 pod has an address of them"}}},
		{"an image of another version", func(c *Cluster) { c.Image = "reg:5000/coil:v3.1.1@sha256:ab" },
			[]Finding{{Warning, "Image reg:5000/coil:v3.1.1@sha256:ab", "this coil-migrator is of version v3.1.0"}}},
		{"an image of a version too far", func(c *Cluster) { c.Image = "coil:v3.2.0" },
			[]Finding{{Blocker, "Coil v3.0.2", "install 3.1 first"}, {Warning, "Image coil:v3.2.0", "ask the one"}}},
		{"an image of this version", func(c *Cluster) { c.Image = "coil:v3.1.0" }, nil},
		{"an image without a version", func(c *Cluster) { c.Image = "localhost:5000/coil" }, nil},
		{"a single node", func(c *Cluster) { c.Nodes, c.Blocks, c.Pods = c.Nodes[:1], c.Blocks[:1], c.Pods[:1] },
			[]Finding{{Warning, "Node a", "replicas"}}},
		{"a single node that is known", func(c *Cluster) {
			c.Nodes, c.Blocks, c.Pods = c.Nodes[:1], c.Blocks[:1], c.Pods[:1]
			c.Deployments[0].Spec.Replicas = new(int32(1))
		}, nil},
		{"an old cniVersion", func(c *Cluster) {
			c.ConfigMaps[0].Data["cni_netconf"] = `{"cniVersion": "0.4.0", "plugins": [{"type": "coil"}]}`
		},
			[]Finding{{Warning, "ConfigMap coil-config", `"0.4.0"`}}},
		{"no configuration", func(c *Cluster) { c.ConfigMaps[0].Data["cni_netconf"] = "none" }, nil},
		{"a broken configuration", func(c *Cluster) { c.ConfigMaps[0].Data["cni_netconf"] = "{" },
			[]Finding{{Warning, "ConfigMap coil-config", "can't be understood"}}},
		{"a pool that can't be used", func(c *Cluster) { c.Pools = append(c.Pools, pool("p", 20, "10.16.0.0/12")) },
			[]Finding{{Blocker, "AddressPool p", "block size of 20 bits"}}},
		{"a pool with host bits", func(c *Cluster) { c.Pools = append(c.Pools, pool("p", 2, "10.2.0.1/24")) },
			[]Finding{{Note, "AddressPool p", "10.2.0.1/24 has host bits: it means 10.2.0.0/24"}}},
		{"a pool with a long name", func(c *Cluster) { c.Pools = append(c.Pools, pool(strings.Repeat("p", 64), 2, "10.2.0.0/24")) },
			[]Finding{{Warning, "AddressPool " + strings.Repeat("p", 64), "63 characters"}}},
		{"a pool of addresses that pods can't have", func(c *Cluster) { c.Pools = append(c.Pools, pool("p", 2, "169.254.1.0/24", "0.1.0.0/24")) },
			[]Finding{{Warning, "AddressPool p", "0.1.0.0/24 has addresses"}, {Warning, "AddressPool p", "169.254.1.0/24 has addresses"}}},
		{"a pool with addresses of Services", func(c *Cluster) { c.Pools = append(c.Pools, pool("p", 2, "10.96.1.0/24")) },
			[]Finding{{Warning, "AddressPool p", "ServiceCIDR"}}},
		{"no default pool", func(c *Cluster) { c.Pools[0].Name = "other" }, []Finding{{Note, "AddressPool default", "doesn't exist"}}},
		{"a block without addresses", func(c *Cluster) { c.Blocks = append(c.Blocks, block(2, "a", "x")) },
			[]Finding{{Warning, "AddressBlock default-2", "can't be used"}}},
		{"a block of another index", func(c *Cluster) { c.Blocks = append(c.Blocks, block(2, "a", "10.1.0.12/30")) },
			[]Finding{{Warning, "AddressBlock default-2", "isn't block 2 of AddressPool default"}}},
		{"blocks of a Node that is gone", func(c *Cluster) { c.Blocks = append(c.Blocks, block(2, "z", "10.1.0.8/30")) },
			[]Finding{{Warning, "Node z", "1 AddressBlock."}}},
		{"reserved blocks of a Node that is gone", func(c *Cluster) {
			b := block(2, "z", "10.1.0.8/30")
			b.Labels[v2.LabelReserved] = v2.ReservedValue
			c.Blocks = append(c.Blocks, b)
		}, nil},
		{"blocks that overlap", func(c *Cluster) {
			for i, prefix := range []string{"10.9.0.0/29", "10.9.0.0/30", "10.9.0.4/30"} {
				b := block(int32(i+7), "a", prefix)
				b.Labels[v2.LabelPool] = "deleted"
				c.Blocks = append(c.Blocks, b)
			}
		}, []Finding{{Blocker, "AddressBlock default-8", "default-7"}, {Blocker, "AddressBlock default-9", "default-7"}}},
		{"pods outside of blocks", func(c *Cluster) {
			ended, host := pod("ended", "a", "10.1.0.4"), pod("host", "a", "192.0.2.1")
			ended.Status.Phase, host.Spec.HostNetwork = corev1.PodSucceeded, true
			c.Pods = append(c.Pods, pod("z", "a", "10.1.0.4"), pod("w", "a", "10.7.0.1"), ended, host)
		}, []Finding{{Warning, "Node a", "app/w (10.7.0.1), app/z (10.1.0.4)"}}},
		{"pods of another network", func(c *Cluster) { c.Blocks = nil }, nil},
		{"a destination that is no subnet", func(c *Cluster) { c.Egresses[0].Spec.Destinations = []string{"example.org"} },
			[]Finding{{Blocker, "Egress internet/nat", `"example.org"`}}},
		{"a destination with host bits", func(c *Cluster) { c.Egresses[0].Spec.Destinations = []string{"192.0.2.1/24"} },
			[]Finding{{Note, "Egress internet/nat", "192.0.2.0/24"}}},
		{"a template that can't be", func(c *Cluster) { c.Egresses[0] = egressOf("0.0.0.0/0", `{"hostNetwork": true}`) },
			[]Finding{{Blocker, "Egress internet/nat", "template.spec.hostNetwork"}}},
		{"a template with an image", func(c *Cluster) {
			c.Egresses[0] = egressOf("0.0.0.0/0", `{"containers": [{"name": "egress", "image": "coil:2"}]}`)
		},
			[]Finding{{Warning, "Egress internet/nat", "take them out"}}},
		{"a template with a command", func(c *Cluster) {
			c.Egresses[0] = egressOf("0.0.0.0/0", `{"containers": [{"name": "egress", "command": ["sh"]}]}`)
		},
			[]Finding{{Warning, "Egress internet/nat", "take them out"}}},
		{"no Egress is wanted", func(c *Cluster) {
			c.Variant, c.Egresses[0].Spec.Destinations = "ipam-only", []string{"x"}
			result(c, "a").MissingEgressModules = []string{"fou"}
		}, nil},
		{"ports of others", func(c *Cluster) {
			for i, n := range []string{"a", "b"} {
				p := pod(fmt.Sprintf("exporter-%d", i), n, "192.0.2.1")
				p.Spec.HostNetwork = true
				p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Name: "exporter", Controller: new(true)}}
				p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: 9384}, {ContainerPort: 9385, Protocol: corev1.ProtocolUDP}, {ContainerPort: 9388}, {ContainerPort: 9391, Protocol: corev1.ProtocolUDP}}}}
				c.Pods = append(c.Pods, p)
			}
			p := pod("mapped", "a", "10.1.0.2")
			p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: 9386}, {ContainerPort: 80, HostPort: 9397}}}}
			c.Pods = append(c.Pods, p)
		}, []Finding{{Blocker, "Node a", "Pod app/mapped opens port 9397, which coil-egress-controller needs"},
			{Blocker, "Nodes a, b", "DaemonSet app/exporter opens port 9384, which coild needs"},
			{Blocker, "Nodes a, b", "DaemonSet app/exporter opens port 9391, which coild needs"}}},
		{"nobody looked at nodes", func(c *Cluster) { c.Probes = nil }, []Finding{{Note, "Nodes", "--skip-nodes"}}},
		{"a node that can't be looked at", func(c *Cluster) { c.Probes["a"] = Probe{Err: errors.New("no\nimage")} },
			[]Finding{{Unknown, "Node a", "no; image"}}},
		{"a node that is away", func(c *Cluster) {
			delete(c.Probes, "a")
			c.Nodes[0].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
		}, []Finding{{Warning, "Node a", "away"}}},
		{"a node that is new", func(c *Cluster) { c.Nodes = append(c.Nodes, node("c")) }, []Finding{{Unknown, "Node c", "again"}}},
		{"a node with Windows", func(c *Cluster) {
			c.Nodes, c.Pods = append(c.Nodes, node("c")), append(c.Pods, pod("w", "c", "10.2.0.1"))
			c.Nodes[2].Labels = map[string]string{corev1.LabelOSStable: "windows"}
		}, nil},
		{"no nftables", func(c *Cluster) {
			for _, n := range []string{"a", "b"} {
				result(c, n).MissingModules = []string{"nf_tables", "nft_fib"}
			}
		}, []Finding{{Blocker, "Nodes a, b", "nf_tables, nft_fib"}}},
		{"no FoU", func(c *Cluster) { result(c, "b").MissingEgressModules = []string{"fou"} }, []Finding{{Blocker, "Node b", "fou"}}},
		{"no FoU and no Egress", func(c *Cluster) { c.Egresses, result(c, "b").MissingEgressModules = nil, []string{"fou"} },
			[]Finding{{Warning, "Node b", "fou"}}},
		{"a kernel without lists", func(c *Cluster) {
			result(c, "b").ModulesUnlisted, result(c, "b").MissingModules = true, []string{"nf_tables"}
		}, []Finding{{Warning, "Node b", "built in"}}},
		{"an old kernel", func(c *Cluster) {
			result(c, "b").Kernel, c.Egresses[0].Spec.Peering = "5.10.0-8-amd64", v2.EgressPeeringDirect
		}, []Finding{{Blocker, "Node b", "older than 5.14"}}},
		{"configurations of others", func(c *Cluster) {
			result(c, "a").CNI = []probe.CNIFile{{Name: "05-cilium.conflist", Plugins: []string{"cilium-cni"}}, {Name: "06-mine.conflist", Plugins: []string{"x", "coil"}},
				{Name: "07-broken.conf"}, {Name: "20-bridge.conf", Plugins: []string{"bridge"}}}
		}, []Finding{{Blocker, "Node a", "05-cilium.conflist (cilium-cni) comes before 10-coil.conflist"},
			{Warning, "Node a", "07-broken.conf can't"}, {Warning, "Node a", "20-bridge.conf (bridge) isn't used"}}},
		{"configurations of others, behind which Coil is wanted", func(c *Cluster) {
			none(c)
			c.Variant, c.Blocks = "egress-only", nil
			result(c, "a").CNI = []probe.CNIFile{{Name: "05-cilium.conflist", Plugins: []string{"cilium-cni"}}}
		}, []Finding{{Note, "Node a", "add coil to the end"}}},
		{"a record of a later version", func(c *Cluster) { result(c, "a").Record.Version = 3 }, []Finding{{Warning, "Node a", "cool down"}}},
		{"a record of another program", func(c *Cluster) { result(c, "a").Record = &probe.Record{Known: 2, Damaged: true} },
			[]Finding{{Warning, "Node a", "no record of Coil"}}},
		{"a folder that can't be read", func(c *Cluster) { result(c, "a").Problems = []string{"read /x: denied"} },
			[]Finding{{Unknown, "Node a", "denied"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := healthy()
			tt.edit(&c)
			got := Judge(c).Findings
			if len(got) != len(tt.want) {
				t.Fatalf("findings %+v, want %+v", got, tt.want)
			}
			for i, want := range tt.want {
				if got[i].Severity != want.Severity || got[i].Subject != want.Subject || !strings.Contains(got[i].Text, want.Text) {
					t.Errorf("finding %+v, want %+v", got[i], want)
				}
			}
		})
	}
}

// TestReport shows what an admin reads.
func TestReport(t *testing.T) {
	for _, tt := range []struct {
		name  string
		edit  func(*Cluster)
		worst Severity
		want  string
	}{
		{"an earlier version", func(*Cluster) {}, Note, `There is: Coil reg:5000/coil:v3.0.2
To be installed: Coil v3.1.0 abc, manifests

What will happen:
- coild is replaced on 2 nodes, a tenth of them at a time. No pod is restarted and no packet between pods is lost. A pod that starts or ends meanwhile waits for the new coild of its node.
- Pods with addresses of Coil (2) keep them and their routes.
- Routers of 1 Egress are replaced (2 pods), as the strategy of each Egress says.
- On 2 nodes the record of addresses gets version 2 of its schema. A copy of the former one stays beside it, in /var/lib/coil.

Nothing stands against it.
`},
		{"an image that nodes have", func(c *Cluster) {
			c.Image = "coil:v3.1.0"
			c.Deployments = append(c.Deployments, &appsv1.Deployment{ObjectMeta: named(egressController), Spec: appsv1.DeploymentSpec{Template: podSpec("c", "/c", c.Image)}})
			for i, image := range []string{c.Image, "coil:v3.0.2"} {
				p := pod("coild-x", c.Nodes[i].Name, "192.0.2.1")
				p.ObjectMeta, p.Spec.HostNetwork, p.Spec.Containers = named("coild"), true, []corev1.Container{{Name: "coild", Image: image}}
				c.Pods = append(c.Pods, p)
			}
			c.Probes["a"].Result.Record.Version = 2
		}, Note, `There is: Coil reg:5000/coil:v3.0.2
To be installed: Coil coil:v3.1.0, manifests

What will happen:
- coild of 1 node has the image already, and stays as it is unless its settings change.
- coild is replaced on 1 node, a tenth of them at a time. No pod is restarted and no packet between pods is lost. A pod that starts or ends meanwhile waits for the new coild of its node.
- Pods with addresses of Coil (2) keep them and their routes.
- On 1 node the record of addresses gets version 2 of its schema. A copy of the former one stays beside it, in /var/lib/coil.

Nothing stands against it.
`},
		{"the image that is there", func(c *Cluster) {
			c.Image = "reg:5000/coil:v3.1.0"
			c.DaemonSets[0].Spec.Template.Spec.Containers[0].Image = c.Image
			for _, n := range c.Nodes {
				p := pod("coild-x", n.Name, "192.0.2.1")
				p.ObjectMeta, p.Spec.HostNetwork, p.Spec.Containers = named("coild"), true, []corev1.Container{{Name: "coild", Image: c.Image}}
				c.Pods = append(c.Pods, p)
			}
			c.Egresses, c.Probes = nil, nil
		}, Note, `There is: Coil reg:5000/coil:v3.1.0
To be installed: Coil reg:5000/coil:v3.1.0, manifests

What will happen:
- coild of 2 nodes has the image already, and stays as it is unless its settings change.
- Pods with addresses of Coil (2) keep them and their routes.

Good to know:
- Nodes: nobody looked at their kernels, network configurations and records (--skip-nodes)

Nothing stands against it.
`},
		{"Coil 2.x whose objects were deleted", func(c *Cluster) {
			none(c)
			p := pod("coild-x", "a", "192.0.2.1")
			p.ObjectMeta, p.Spec = named("coild"), podSpec("coild", "coild", "coil:2.15").Spec
			c.Pods, c.Egresses, c.Variant = append(c.Pods, p), nil, "with-router"
			c.Probes = map[string]Probe{"a": {Err: errors.New("no image")}, "b": {Err: errors.New("no image")}}
		}, Unknown, `There is: Coil 2.x coil:2.15
To be installed: Coil v3.1.0 abc, manifests/variants/with-router

What will happen:
- coild is replaced on 2 nodes, a tenth of them at a time. No pod is restarted and no packet between pods is lost. A pod that starts or ends meanwhile waits for the new coild of its node.
- Pods with addresses of Coil (2) keep them and their routes.
- From then on, nodes drop what pods send from addresses that aren't theirs. For pods that forward for others, annotate their namespaces before: coil.cybozu.com/source-guard=off.
- From then on, a freed address is given again after a minute at the earliest, so that empty blocks go back to their pools later.

What couldn't be found out:
- Nodes a, b: no image

Nothing that was found stands against it.
`},
		{"Coil v1", func(c *Cluster) {
			none(c)
			c.DaemonSets = []*appsv1.DaemonSet{{ObjectMeta: named("coil-node")}}
			c.Pools, c.Blocks, c.Egresses, c.Variant = nil, nil, nil, "ipam-only"
		}, Blocker, `There is: Coil v1
To be installed: Coil v3.1.0 abc, manifests/variants/ipam-only

What will happen:
- coild is started on 2 nodes. Nothing changes for pods that run there.
- Pods that start afterwards have addresses of Coil. Those that run now (2) keep theirs.
- On 2 nodes the record of addresses gets version 2 of its schema. A copy of the former one stays beside it, in /var/lib/coil.

What stands against it:
- DaemonSet coil-node: it is Coil v1: move its data first (coil-migrator dump)

Good to know:
- AddressPool default: it doesn't exist: pods of namespaces without the annotation coil.cybozu.com/pool can't start before it does

Don't install it yet.
`},
		{"no Coil", func(c *Cluster) {
			none(c)
			c.Pools, c.Blocks, c.Egresses, c.CRDs, c.Probes = nil, nil, nil, nil, nil
			c.Kubernetes = "v1.30.1"
		}, Blocker, `There is: no Coil
To be installed: Coil v3.1.0 abc, manifests

What will happen:
- coild is started on 2 nodes. Nothing changes for pods that run there.
- Pods that start afterwards have addresses of Coil. Those that run now (2) keep theirs.

What stands against it:
- Kubernetes v1.30.1: Coil needs 1.33 or later: upgrade Kubernetes first

Good to know:
- AddressPool default: it doesn't exist: pods of namespaces without the annotation coil.cybozu.com/pool can't start before it does
- Nodes: nobody looked at their kernels, network configurations and records (--skip-nodes)

Don't install it yet.
`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := healthy()
			tt.edit(&c)
			r := Judge(c)
			if diff := cmp.Diff(tt.want, r.String()); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
			if r.Worst() != tt.worst {
				t.Errorf("the worst is %d, want %d", r.Worst(), tt.worst)
			}
		})
	}
}
