package diagnosis

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// ago is a moment before now.
func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

// addr is the pod's address.
const addr = "10.0.0.1"

func comparison(topic inspection.Topic, object string) inspection.Comparison {
	return inspection.Comparison{Topic: topic, Object: object, Want: "so", Have: "so", OK: true}
}

func pool(name, subnet string) *v2.AddressPool {
	return &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: &subnet}}}}
}

func block(name, prefix, node string) *v2.AddressBlock {
	return &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, CreationTimestamp: ago(time.Hour), Labels: map[string]string{v2.LabelPool: "default", v2.LabelNode: node},
			Annotations: map[string]string{v2.AnnotationNodeUID: "uid-" + node},
		},
		IPv4: &prefix,
	}
}

// world is a pod that has all that it should have.
func world() *PodFacts {
	ready := []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	f := &PodFacts{
		Pod: &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart-0", UID: "pod-uid", Labels: map[string]string{"app": "cart"}, CreationTimestamp: ago(time.Hour)},
			Spec:       corev1.PodSpec{NodeName: "n1"},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: addr}}},
		},
		Namespace: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"team": "shop"}}},
	}
	f.Now = now
	f.Node = &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "uid-n1"},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
	f.Coilds = []*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "coild-x"}, Status: corev1.PodStatus{Conditions: ready}}}
	f.Pools = []*v2.AddressPool{pool("default", "10.0.0.0/24"), pool("other", "10.1.0.0/24")}
	f.Blocks = []*v2.AddressBlock{block("default-0", "10.0.0.0/30", "n1")}
	f.Answer = &inspection.Answer{
		Node: inspection.Node{Name: "n1", IPAM: true, Egress: true},
		Attachments: []inspection.Attachment{{
			Record: inspection.Record{
				ContainerID: "c1", IfName: "eth0", Namespace: "shop", Pod: "cart-0", PodUID: "pod-uid", State: "attached", Pool: "default", Block: "default-0",
				Addresses: []string{addr}, Netns: "/run/netns/c1", HostLink: "veth1", Since: now.Add(-time.Hour),
			},
			Objects: []inspection.Comparison{
				comparison(inspection.Veth, "MTU of veth1"), comparison(inspection.Inside, "address of eth0"), comparison(inspection.Routes, "route to "+addr),
				comparison(inspection.Ways, "way to "+addr), comparison(inspection.Sysctls, "net.ipv4.conf.veth1.rp_filter"), comparison(inspection.Guard, "group of veth1"),
			},
		}},
		Blocks: []inspection.Block{{Name: "default-0", Pool: "default", Size: 4, Allocated: 1}},
		Host: []inspection.Comparison{
			comparison(inspection.Rules, "rule 2000 (IPv4)"), comparison(inspection.Sysctls, "net/ipv4/ip_forward"), comparison(inspection.Guard, "table inet coil"),
			comparison(inspection.Blocks, "exported route of 10.0.0.0/30"),
		},
	}
	return f
}

// at is the attachment of the pod.
func (f *PodFacts) at() *inspection.Attachment { return &f.Answer.Attachments[0] }

// spoil lets the objects of topics be missing.
func (f *PodFacts) spoil(topics ...inspection.Topic) {
	for _, all := range [][]inspection.Comparison{f.at().Objects, f.Answer.Host} {
		for i := range all {
			if slices.Contains(topics, all[i].Topic) {
				all[i].OK, all[i].Have = false, ""
			}
		}
	}
}

// pend takes the address from the pod, which was made a while ago and waits for it.
func (f *PodFacts) pend(since time.Duration) {
	f.Pod.Status = corev1.PodStatus{Phase: corev1.PodPending}
	f.Pod.CreationTimestamp = ago(since)
	f.Answer.Attachments = nil
}

// ask lets the node ask for a block.
func (f *PodFacts) ask(since time.Duration, condition v2.BlockRequestConditionType, reason string) {
	r := &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "req-1", CreationTimestamp: ago(since)}, Spec: v2.BlockRequestSpec{NodeName: "n1", PoolName: "default"},
	}
	if condition != "" {
		r.Status.Conditions = []v2.BlockRequestCondition{{Type: condition, Status: corev1.ConditionTrue, Reason: reason, Message: "the reason is " + reason}}
	}
	f.Requests = append(f.Requests, r)
}

// condition gives the pool a condition.
func (f *PodFacts) condition(kind, reason string) {
	f.Pools[0].Status.Conditions = []metav1.Condition{{Type: kind, Status: metav1.ConditionTrue, Reason: reason, Message: "because of " + reason}}
}

// use lets the pod use an Egress, by its annotation, that has routers.
func (f *PodFacts) use() {
	f.Pod.Annotations = map[string]string{v2.AnnotationEgressPrefix + "internet": "nat"}
	f.addEgress()
}

func (f *PodFacts) addEgress() {
	f.Egresses = []*v2.Egress{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"},
		Status:     v2.EgressStatus{Conditions: []metav1.Condition{{Type: v2.EgressAvailable, Status: metav1.ConditionTrue, Message: "all is well"}}},
	}}
	f.at().Client = &inspection.Client{Egresses: []inspection.UsedEgress{{Name: "internet/nat", Destinations: 2}}, Tunnels: []string{"fou"}}
	f.at().Objects = append(f.at().Objects, comparison(inspection.Tunnels, "network of the client"))
}

// select lets a policy select the pod.
func (f *PodFacts) selectPod(accepted metav1.ConditionStatus) *v2.EgressPolicy {
	f.addEgress()
	p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "out", UID: types.UID("policy")}}
	p.Spec.Egress = &v2.EgressReference{Namespace: "internet", Name: "nat"}
	p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "cart"}}
	p.Status.Conditions = []metav1.Condition{{Type: v2.PolicyAccepted, Status: accepted, Reason: "X", Message: "says the controller"}}
	f.Policies = append(f.Policies, p)
	return p
}
