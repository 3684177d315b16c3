package diagnosis

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

const (
	second = time.Second
	hour   = time.Hour
)

// is is a condition of an hour ago.
func is(kind string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, LastTransitionTime: ago(hour), ObservedGeneration: 1}
}

// serviceWorld is a Service at an address that a node has, with all that it should have.
func serviceWorld() *ServiceFacts {
	pod := world()
	f := &ServiceFacts{Facts: pod.Facts}
	f.Service = &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web", UID: "uid", Generation: 1, CreationTimestamp: ago(hour), Finalizers: []string{loadbalancer.Finalizer},
			Annotations: map[string]string{loadbalancer.AnnotationAssigned: "192.0.2.7", v2.AnnotationPool: "services"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(loadbalancer.Class), IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Name: "https", Port: 443, NodePort: 30443}}, Selector: map[string]string{"app": "web"},
		},
	}
	f.Service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.7"}}
	f.Service.Status.Conditions = []metav1.Condition{
		is(loadbalancer.ConditionAssigned, metav1.ConditionTrue, loadbalancer.ReasonAssigned, "It has 192.0.2.7"), is(loadbalancer.ConditionServed, metav1.ConditionTrue, "Served", "Node n1"),
	}
	services := pool("services", "192.0.2.0/28")
	services.Spec.Purpose, services.Spec.Announce = v2.PurposeFloating, v2.AnnounceNeighbor
	f.Pools = []*v2.AddressPool{services}
	f.Claims = []*v2.AddressClaim{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "lb-uid", UID: "claim", CreationTimestamp: ago(hour)}, Spec: v2.AddressClaimSpec{Pool: "services"},
		Status: v2.AddressClaimStatus{
			Addresses:  []v2.ClaimedAddress{{Block: "services-7", IPv4: "192.0.2.7"}},
			Conditions: []metav1.Condition{is(v2.ClaimReady, metav1.ConditionTrue, v2.ReasonAddressesHeld, "")},
		},
	}}
	b := block("services-7", "192.0.2.7/32", "")
	b.Labels = map[string]string{v2.LabelPool: "services", v2.LabelFloating: v2.FloatingValue, v2.LabelAnnounce: string(v2.AnnounceNeighbor)}
	b.ResourceVersion = "10"
	b.Floating = &v2.Floating{
		Owner: v2.FloatingOwner{Kind: "AddressClaim", Namespace: "kube-system", Name: "lb-uid", UID: "claim"}, Claim: "lb-uid",
		Ports:      []v2.FloatingPort{{Protocol: corev1.ProtocolTCP, Port: 443, Service: "shop/web"}},
		Successors: []v2.FloatingNode{{Node: "n1"}, {Node: "n2"}}, Holding: v2.FloatingHolding{Holder: "n1", Since: new(ago(hour))},
	}
	f.Blocks = []*v2.AddressBlock{b}
	f.Slices = []*discoveryv1.EndpointSlice{{
		Ports:     []discoveryv1.EndpointPort{{Name: new("https"), Port: new(int32(8443))}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, NodeName: new("n1")}},
	}}
	for _, name := range []string{plan.LBLease, plan.IPAMLease} {
		renewed := metav1.NewMicroTime(now)
		f.Leases = append(f.Leases, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{RenewTime: &renewed}})
	}
	f.Answer.Attachments = nil
	f.Answer.Address = []inspection.Comparison{comparison(inspection.Floating, "way to floating address 192.0.2.7")}
	return f
}

// drop takes the address from the Service, which waits for one.
func (f *ServiceFacts) drop(reason, message string) {
	f.Service.Status.LoadBalancer.Ingress, f.Service.Annotations[loadbalancer.AnnotationAssigned] = nil, ""
	f.Service.Status.Conditions = []metav1.Condition{
		is(loadbalancer.ConditionAssigned, metav1.ConditionFalse, reason, message), is(loadbalancer.ConditionServed, metav1.ConditionFalse, "WaitsForAddress", "It has no address"),
	}
	f.Claims[0].Status = v2.AddressClaimStatus{}
	f.Blocks = nil
	f.Node, f.Answer, f.Coilds = nil, nil, nil
}

// refuse lets the claim say why it has no address.
func (f *ServiceFacts) refuse(reason, message string) {
	f.drop("WaitsForAddress", "AddressClaim kube-system/lb-uid gets no address")
	f.Claims[0].Status.Conditions = []metav1.Condition{is(v2.ClaimReady, metav1.ConditionFalse, reason, message)}
}

// serving is what the Service says of the place of its address.
func (f *ServiceFacts) serving(reason string) {
	f.Service.Status.Conditions[1] = is(loadbalancer.ConditionServed, metav1.ConditionFalse, reason, "")
}

// gateways lets gateways of these names have the address, which do what the block says.
func (f *ServiceFacts) gateways(names ...string) {
	f.Pools[0].Spec.Announce = v2.AnnounceGateway
	b := f.Blocks[0]
	b.Labels[v2.LabelAnnounce] = string(v2.AnnounceGateway)
	b.Floating.Successors, b.Floating.Holding = nil, v2.FloatingHolding{}
	f.Node, f.Answer, f.Coilds = nil, nil, nil
	for _, name := range names {
		f.Gateways = append(f.Gateways, &v2.LoadBalancerGateway{
			ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1, CreationTimestamp: ago(hour)}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"services"}},
			Status: v2.LoadBalancerGatewayStatus{
				LastContact: new(ago(second)), Applied: v2.GatewayState{Generation: 1, Blocks: "11"}, Conditions: []metav1.Condition{is(v2.GatewayApplied, metav1.ConditionTrue, v2.ReasonAllServed, "")},
			},
		})
	}
}

// elect lets gateways agree by VRRP, and each say its state.
func (f *ServiceFacts) elect(states ...string) {
	f.gateways("gw1", "gw2")
	f.Pools[0].Spec.VRRP = &v2.PoolVRRP{RouterID: 10, Instances: 1}
	for i, s := range states {
		f.Gateways[i].Status.VRRP = []v2.GatewayVRRPState{{RouterID: 10, Family: corev1.IPv4Protocol, State: s}}
	}
}

// cloud lets OpenStack provide the address, which gateways have.
func (f *ServiceFacts) cloud(provided, allowed metav1.Condition) {
	f.gateways("gw1")
	f.Pools[0].Spec.OpenStack = &v2.PoolOpenStack{SubnetIDs: []string{"subnet"}}
	st := &f.Claims[0].Status
	st.Provided = &v2.ProvidedAddress{PortID: "port", IPv4: "192.0.2.7"}
	for _, c := range []metav1.Condition{provided, allowed} {
		if c.Type != "" {
			meta.SetStatusCondition(&st.Conditions, c)
		}
	}
}

// local lets the Service have its address where its endpoints are.
func (f *ServiceFacts) local(node string) {
	f.Service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	f.Slices[0].Endpoints[0].NodeName = &node
}

// nodes are some that may not have the address.
func (f *ServiceFacts) nodes() {
	f.Blocks[0].Floating.Successors, f.Blocks[0].Floating.Holding = nil, v2.FloatingHolding{}
	f.Node, f.Answer, f.Coilds = nil, nil, nil
	for i := range 2 {
		n := world().Node
		n.Name, n.Labels = fmt.Sprint("n", i+1), map[string]string{corev1.LabelNodeExcludeBalancers: ""}
		f.Nodes = append(f.Nodes, n)
	}
}

// Each set-up that is broken in one way has this one fault, and says what is seen and what to do.
func TestBrokenServices(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(f *ServiceFacts)
		wrong string   // the steps that are wrong
		says  []string // of the first of them, what is seen and what to do
	}{
		{"without a class", func(f *ServiceFacts) {
			f.drop("", "")
			f.Service.Spec.LoadBalancerClass, f.Service.Annotations, f.Service.Status.Conditions = nil, nil, nil
		}, "service", []string{"no class", "spec.loadBalancerClass: coil.cybozu.com/lb", "--serve-without-class"}},
		{"hangs in its end", func(f *ServiceFacts) { f.Service.DeletionTimestamp = new(ago(hour)) }, "service", []string{"still has what Coil wrote", "load-balancer-cleanup"}},
		{"of another type by now", func(f *ServiceFacts) { f.Service.Spec.Type = corev1.ServiceTypeClusterIP }, "service", []string{"another type"}},
		{"no coil-lb-controller leads", func(f *ServiceFacts) { f.Leases = f.Leases[1:] }, "leader", []string{"no coil-lb-controller leads", "component in (coil-lb-controller)"}},
		{"a leader went away before the address came", func(f *ServiceFacts) {
			f.drop("WaitsForAddress", "")
			f.Leases[1].Spec.RenewTime = &metav1.MicroTime{Time: now.Add(-hour)}
		}, "leader", []string{"no coil-ipam-controller leads"}},
		{"no pool", func(f *ServiceFacts) {
			f.drop("PoolNotFound", "There is no AddressPool services")
			f.Pools, f.Claims = nil, nil
		}, "pool", []string{"no AddressPool services", "annotate service web"}},
		{"no default pool", func(f *ServiceFacts) {
			f.drop("PoolNotFound", `There is no AddressPool "dmz"`)
			f.Claims = nil
			delete(f.Service.Annotations, v2.AnnotationPool)
		}, "pool", []string{`no AddressPool "dmz"`}},
		{"pool of pods", func(f *ServiceFacts) { f.drop("PoolNotFound", ""); f.Claims = nil; f.Pools[0].Spec.BlockSizeBits = 5 }, "pool", []string{"more than one address", "blockSizeBits: 0"}},
		{"pool without the family", func(f *ServiceFacts) { f.drop("FamilyMissing", "It needs an address of IPv6"); f.Claims = nil }, "pool", []string{"an address of IPv6"}},
		{"pool is exhausted", func(f *ServiceFacts) { f.refuse(v2.ReasonPoolExhausted, "all 16 are taken") }, "pool", []string{"all 16 are taken", "append a subnet"}},
		{"pool drains", func(f *ServiceFacts) { f.refuse(v2.ReasonPoolDraining, "it drains") }, "pool", []string{"it drains", "--undo"}},
		{"pool is for other namespaces", func(f *ServiceFacts) { f.refuse(v2.ReasonClaimNamespace, "not for kube-system") }, "pool", []string{"spec.floatingNamespaces"}},
		{"address is excluded", func(f *ServiceFacts) { f.refuse(v2.ReasonAddressExcluded, "192.0.2.9 is excluded") }, "claim", []string{"AddressExcluded", "192.0.2.9 is excluded"}},
		{"nobody answers the claim", func(f *ServiceFacts) { f.drop("WaitsForAddress", "") }, "claim", []string{"no coil-ipam-controller has answered"}},
		{"nobody makes a claim", func(f *ServiceFacts) { f.drop("WaitsForAddress", ""); f.Claims = nil }, "claim", []string{"no AddressClaim", "component=coil-lb-controller"}},
		{"address in use", func(f *ServiceFacts) { f.drop("AddressInUse", "Service shop/api has 192.0.2.7"); f.Claims = nil }, "claim", []string{"Service shop/api", "wanted-addresses"}},
		{"asks for nonsense", func(f *ServiceFacts) { f.drop("Invalid", `"x" isn't an address`); f.Claims = nil }, "claim", []string{`"x" isn't an address`, "correct"}},
		{"another host has it", func(f *ServiceFacts) {
			f.Blocks[0].Status.Conditions = []metav1.Condition{is(v2.BlockConflicting, metav1.ConditionTrue, v2.ReasonOtherHost, "02:00:00:00:00:01 has it")}
		}, "claim", []string{"02:00:00:00:00:01", "hardware address"}},
		{"block is gone", func(f *ServiceFacts) { f.Blocks = nil }, "claim", []string{"no AddressBlock"}},
		{"stale status", func(f *ServiceFacts) {
			f.Service.Annotations[loadbalancer.AnnotationAssigned] = "192.0.2.9"
			f.Service.Status.LoadBalancer.Ingress[0].IP = "192.0.2.9"
		}, "status", []string{"tells 192.0.2.9", "192.0.2.7"}},
		{"status doesn't tell", func(f *ServiceFacts) { f.Service.Status.LoadBalancer.Ingress = nil }, "status", []string{"doesn't tell 192.0.2.7"}},
		{"change wasn't followed", func(f *ServiceFacts) { f.Service.Generation = 2 }, "status", []string{"generation 1", "2 by now"}},
		{"ports aren't in the block", func(f *ServiceFacts) { f.Service.Spec.Ports[0].Port = 80 }, "holder", []string{"doesn't have the ports"}},
		{"no holder", func(f *ServiceFacts) {
			f.Blocks[0].Floating.Holding = v2.FloatingHolding{}
			f.Node, f.Answer, f.Coilds = nil, nil, nil
		}, "holder", []string{"no node answers", "coild runs on the nodes that may have it: n1, n2"}},
		{"no node may have it", func(f *ServiceFacts) { f.nodes() }, "holder", []string{"2 nodes 2 are ready", "exclude-from-external-load-balancers"}},
		{"no Service proxy", func(f *ServiceFacts) {
			f.Blocks[0].Status.Conditions = []metav1.Condition{is(v2.BlockForwardingBlocked, metav1.ConditionTrue, v2.ReasonPacketsDropped, "node n1: no proxy translates")}
		}, "holder", []string{"no proxy translates", "kube-proxy"}},
		{"an announcer without Service proxy", func(f *ServiceFacts) {
			f.Blocks[0].Floating.Announcers.Nodes = []string{"n1", "n3"}
			f.Blocks[0].Status.Conditions = []metav1.Condition{is(v2.BlockForwardingBlocked, metav1.ConditionTrue, v2.ReasonPacketsDropped, "node n3: no proxy translates")}
		}, "holder", []string{"node n3", "kube-proxy"}},
		{"holder's Node isn't ready", func(f *ServiceFacts) { f.Node.Status.Conditions[0].Status = corev1.ConditionUnknown }, "node", []string{"n1 isn't ready"}},
		{"holder is excluded", func(f *ServiceFacts) { f.Node.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""} }, "holder", []string{"is excluded"}},
		{"holder has no route", func(f *ServiceFacts) { f.Answer.Address[0].OK, f.Answer.Address[0].Have = false, "" }, "routes", []string{"way to floating address 192.0.2.7 is missing"}},
		{"no gateway", func(f *ServiceFacts) { f.gateways() }, "gateways", []string{"no LoadBalancerGateway names AddressPool services", "spec.pools"}},
		{"gateway is silent", func(f *ServiceFacts) { f.gateways("gw1", "gw2"); f.Gateways[1].Status.LastContact = new(ago(hour)) }, "gateways", []string{"nothing was heard", "gw2", "journalctl"}},
		{"gateway can't", func(f *ServiceFacts) {
			f.gateways("gw1")
			f.Gateways[0].Status.Errors = []v2.GatewayError{{Service: "shop/web", Message: "port 443 has no NodePort"}}
		}, "gateways", []string{"gateway gw1: port 443 has no NodePort"}},
		{"gateway's kernel refuses", func(f *ServiceFacts) {
			f.gateways("gw1")
			f.Gateways[0].Status.Conditions = []metav1.Condition{is(v2.GatewayApplied, metav1.ConditionFalse, v2.ReasonKernelRefused, "no such file")}
		}, "gateways", []string{"gw1: no such file"}},
		{"gateway is behind", func(f *ServiceFacts) { f.gateways("gw1"); f.Gateways[0].Status.Applied.Blocks = "9" }, "gateways", []string{"waits for gw1", "coil-lb-agent"}},
		{"gateway does a former spec", func(f *ServiceFacts) { f.gateways("gw1"); f.Gateways[0].Generation = 2 }, "gateways", []string{"gw1", "former spec"}},
		{"no master", func(f *ServiceFacts) { f.elect("BACKUP", "FAULT") }, "gateways", []string{"no gateway is the master", "10 (IPv4)", "keepalived"}},
		{"two masters", func(f *ServiceFacts) { f.elect("MASTER", "MASTER") }, "gateways", []string{"several gateways", "gw1, gw2", "protocol 112"}},
		{"quota of OpenStack", func(f *ServiceFacts) {
			f.drop("QuotaExceeded", "")
			f.Pools[0].Spec.OpenStack = &v2.PoolOpenStack{}
			f.Claims[0].Status.Conditions = []metav1.Condition{
				is(v2.ClaimProvided, metav1.ConditionFalse, "QuotaExceeded", "Quota exceeded for resources: ['port']"), is(v2.ClaimReady, metav1.ConditionFalse, v2.ReasonWaitsForOpenStack, "waits"),
			}
		}, "openstack", []string{"QuotaExceeded", "['port']"}},
		{"OpenStack allows no pair", func(f *ServiceFacts) {
			f.cloud(is(v2.ClaimProvided, metav1.ConditionTrue, "", ""), is(v2.ClaimAllowed, metav1.ConditionFalse, v2.ReasonPairsRefused, "no room for a pair"))
		}, "openstack", []string{"may not use the address", "no room for a pair"}},
		{"no pairs are written", func(f *ServiceFacts) { f.cloud(is(v2.ClaimProvided, metav1.ConditionTrue, "", ""), metav1.Condition{}) }, "openstack", []string{"may not use the address yet"}},
		{"no endpoints", func(f *ServiceFacts) { f.Slices = nil }, "endpoints", []string{"no endpoint that serves", "get endpointslices -l kubernetes.io/service-name=web"}},
		{"no endpoint is ready", func(f *ServiceFacts) {
			f.Slices[0].Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false)}
		}, "endpoints", []string{"1 that aren't ready"}},
		{"a port has other endpoints", func(f *ServiceFacts) { f.Slices[0].Ports[0].Name = new("http") }, "endpoints", []string{"no endpoint serves port TCP 443", "names of its ports"}},
		{"holder has no endpoint", func(f *ServiceFacts) { f.local("n2") }, "endpoints", []string{"node n1", "externalTrafficPolicy: Local"}},
		{"no node has an endpoint", func(f *ServiceFacts) {
			f.local("n9")
			f.nodes()
			f.serving("NoEndpoints")
		}, "endpoints", []string{"no node that may have the address has an endpoint"}},
		{"no node has an endpoint, beside another Service", func(f *ServiceFacts) {
			f.local("n9")
			f.Nodes = []*corev1.Node{world().Node}
			f.Blocks[0].Floating.Ports = append(f.Blocks[0].Floating.Ports, v2.FloatingPort{Protocol: corev1.ProtocolTCP, Port: 80, Service: "shop/other"})
			f.serving("NoEndpoints")
		}, "endpoints", []string{"no node that may have the address has an endpoint", "get endpointslices"}},
		{"NetworkPolicies aren't honoured", func(f *ServiceFacts) {
			f.gateways("gw1")
			f.Service.Status.Conditions = append(f.Service.Status.Conditions, is(loadbalancer.ConditionPolicies, metav1.ConditionFalse, loadbalancer.ReasonMasquerade, "Pods don't see clients"))
		}, "clients", []string{"pods don't see clients"}},
		{"ranges of clients", func(f *ServiceFacts) { f.Service.Spec.LoadBalancerSourceRanges = []string{"10/8"} }, "clients", []string{`"10/8"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := serviceWorld()
			c.spoil(f)
			d := Service(*f)
			if got := strings.Join(d.Wrong(), " "); got != c.wrong || d.Subject != "Service shop/web" {
				t.Fatalf("%s: wrong are %q, want %q:\n%+v", d.Subject, got, c.wrong, d.Steps)
			}
			s := find(d, d.Wrong()[0])
			for _, text := range c.says {
				if !strings.Contains(s.Seen+" // "+s.Do, text) {
					t.Errorf("%q isn't said: %s // %s", text, s.Seen, s.Do)
				}
			}
			for _, s := range d.Steps {
				if s.Seen == "" || s.State == Wrong && s.Do == "" {
					t.Errorf("%+v says too little", s)
				}
			}
		})
	}
}

// Nothing is wrong with these, though they aren't all alike.
func TestHealthyServices(t *testing.T) {
	onNode := []string{"service", "leader", "pool", "claim", "status", "holder", "node", "routes", "endpoints", "clients"}
	atGateways := []string{"service", "leader", "pool", "claim", "status", "gateways", "endpoints", "clients"}
	for _, c := range []struct {
		name    string
		make    func(f *ServiceFacts)
		right   []string
		unknown []string
		says    string // of any step
	}{
		{"on a node", func(*ServiceFacts) {}, onNode, nil, "node n1 answers for the address, since 2026-01-02 02:04:05 UTC"},
		{"shared", func(f *ServiceFacts) {
			f.Blocks[0].Floating.Ports = append(f.Blocks[0].Floating.Ports, v2.FloatingPort{Protocol: corev1.ProtocolTCP, Port: 80, Service: "shop/api"})
		}, onNode, nil, "which the Service shares with shop/api"},
		{"announced by routes", func(f *ServiceFacts) {
			f.Blocks[0].Floating.Announcers.All = true
			f.Nodes = []*corev1.Node{f.Node}
		}, onNode, nil, "all other nodes that may have it"},
		{"with endpoints where it is", func(f *ServiceFacts) { f.local("n1") }, onNode, nil, ""},
		{"with endpoints that end", func(f *ServiceFacts) {
			f.Slices[0].Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		}, onNode, nil, "1 terminating that still serve"},
		{"for some clients", func(f *ServiceFacts) { f.Service.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8"} }, onNode, nil, "only clients of 10.0.0.0/8"},
		{"at gateways", func(f *ServiceFacts) { f.gateways("gw1", "gw2") }, atGateways, nil, "gateways serve the address: gw1, gw2"},
		{"at gateways that elect", func(f *ServiceFacts) { f.elect("BACKUP", "MASTER") }, atGateways, nil, "master are gw2 of 10 (IPv4)"},
		{"from OpenStack", func(f *ServiceFacts) {
			f.cloud(is(v2.ClaimProvided, metav1.ConditionTrue, "", ""), is(v2.ClaimAllowed, metav1.ConditionTrue, "", ""))
			f.Claims[0].Status.Provided.FloatingIP = "203.0.113.5"
			f.Service.Annotations[loadbalancer.AnnotationFloatingIP], f.Service.Status.LoadBalancer.Ingress[0].IP = "203.0.113.5", "203.0.113.5"
		}, append(slices.Clone(atGateways), "openstack"), nil, "floating IP 203.0.113.5"},
		{"new", func(f *ServiceFacts) {
			f.drop("", "")
			f.Claims, f.Service.Status.Conditions, f.Service.Annotations = nil, nil, nil
			f.Service.CreationTimestamp = ago(second)
		}, []string{"service", "leader", "endpoints", "clients"}, []string{"pool", "claim", "status"}, "--default-pool"},
		{"moves", func(f *ServiceFacts) {
			f.Blocks[0].Floating.Holding.Holder = ""
			f.Blocks[0].ManagedFields = []metav1.ManagedFieldsEntry{{Time: new(ago(second))}}
			f.Node, f.Answer, f.Coilds = nil, nil, nil
		}, []string{"service", "leader", "pool", "claim", "status", "endpoints", "clients"}, []string{"holder"}, "no node answers for the address yet"},
		{"gives its address back", func(f *ServiceFacts) { f.Service.DeletionTimestamp = new(ago(second)) }, []string{"leader"}, []string{"service"}, "given back"},
		{"of another type", func(f *ServiceFacts) {
			f.Service.Spec.Type, f.Service.Annotations, f.Service.Status.Conditions = corev1.ServiceTypeClusterIP, nil, nil
		}, []string{"service"}, nil, "type ClusterIP"},
		{"of another controller", func(f *ServiceFacts) {
			*f.Service.Spec.LoadBalancerClass, f.Service.Annotations, f.Service.Status.Conditions = "example.org/lb", nil, nil
		}, []string{"service"}, nil, "another controller"},
		{"of another class, waiting", func(f *ServiceFacts) {
			f.drop("", "")
			*f.Service.Spec.LoadBalancerClass, f.Service.Annotations, f.Service.Status.Conditions = "example.org/lb", nil, nil
		}, nil, []string{"service"}, "example.org/lb"},
		{"of another plugin's node", func(f *ServiceFacts) { f.Answer, f.Unanswered = nil, "forbidden" },
			[]string{"service", "leader", "pool", "claim", "status", "holder", "node", "endpoints", "clients"}, []string{"routes"}, "forbidden"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := serviceWorld()
			c.make(f)
			d := Service(*f)
			var right, unknown, seen []string
			for _, s := range d.Steps {
				seen = append(seen, s.Seen)
				switch s.State {
				case Right:
					right = append(right, s.Step)
				case Unknown:
					unknown = append(unknown, s.Step)
				default:
					t.Errorf("wrong: %+v", s)
				}
			}
			slices.Sort(right)
			if want := slices.Sorted(slices.Values(c.right)); !slices.Equal(right, want) {
				t.Errorf("right are %q, want %q", right, want)
			}
			if !slices.Equal(unknown, c.unknown) {
				t.Errorf("unknown are %q, want %q", unknown, c.unknown)
			}
			if text := strings.Join(seen, "\n"); !strings.Contains(text, c.says) {
				t.Errorf("%q isn't said:\n%s", c.says, text)
			}
		})
	}
}

// What can't be read makes its steps unknown, and nothing wrong.
func TestUnreadServices(t *testing.T) {
	for kind, steps := range map[string]string{
		KindLeases: "leader", KindPools: "pool", KindClaims: "claim status", KindBlocks: "claim", KindSlices: "endpoints", KindNode: "node", KindCoilds: "node",
	} {
		f := serviceWorld()
		f.Unread = map[string]string{kind: "forbidden"}
		switch kind {
		case KindLeases:
			f.Leases = nil
		case KindPools:
			f.Pools = nil
		case KindClaims:
			f.Claims, f.Node, f.Answer = nil, nil, nil
		case KindBlocks:
			f.Blocks, f.Node, f.Answer = nil, nil, nil
		case KindSlices:
			f.Slices = nil
		case KindNode:
			f.Node = nil
		case KindCoilds:
			f.Coilds = nil
		}
		d := Service(*f)
		var unknown []string
		for _, s := range d.Steps {
			if s.State == Unknown && strings.Contains(s.Seen, "forbidden") {
				unknown = append(unknown, s.Step)
			}
		}
		if len(d.Wrong()) > 0 || strings.Join(unknown, " ") != steps {
			t.Errorf("%s: unknown are %q, want %q; wrong are %q:\n%+v", kind, unknown, steps, d.Wrong(), d.Steps)
		}
	}
}

// An address of Services leads to what is known of these.
func TestAddressOfServices(t *testing.T) {
	a := serviceWorld()
	b := serviceWorld()
	b.Slices = nil
	f := serviceWorld().Facts
	f.Services = []Diagnosis{Service(*a), Service(*b), {Subject: "Service shop/gone", Steps: []Step{{Step: StepService, State: Unknown, Seen: "forbidden"}}}}
	d := Address(netip.MustParseAddr("192.0.2.7"), f)
	var states []State
	for _, s := range d.Steps {
		if s.Step == StepService {
			states = append(states, s.State)
		}
	}
	if !slices.Equal(states, []State{Right, Wrong, Unknown}) {
		t.Errorf("%+v", d.Steps)
	}
	if got := ServicesAt(f.Blocks[0]); !slices.Equal(got, []string{"shop/web"}) {
		t.Errorf("the block has %q", got)
	}
}
