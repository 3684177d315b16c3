package fencing

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// working is a block of a node that works, whose coild doesn't know the block.
func working() *Facts {
	cidr := "10.0.0.0/30"
	return &Facts{
		Block: &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: "default-0", Labels: map[string]string{v2.LabelNode: "n1", v2.LabelPool: "default"}}, IPv4: &cidr},
		Node: &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "uid-n1"},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		},
		Database: &inspection.Database{
			Node: inspection.Node{Name: "n1"}, Meta: map[string]string{"node_name": "n1", "node_uid": "uid-n1", "rebuilt_at": "x"},
			Blocks:    []inspection.DatabaseBlock{{Name: "default-7", IPv4: "10.0.0.28/30"}},
			Addresses: []inspection.DatabaseAddress{{IPv4: "10.0.0.28", State: "attached"}, {IPv4: "10.0.0.1", State: "cooling"}},
		},
		Pods: []*corev1.Pod{pod("other", "10.0.0.28")},
	}
}

func pod(name, addr string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: corev1.PodSpec{NodeName: "n1"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: addr}}},
	}
}

func (f *Facts) taint() {
	f.Node.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute}}
}

func (f *Facts) down() {
	f.Node.Status.Conditions[0].Status, f.Database, f.Unanswered = corev1.ConditionUnknown, nil, "i/o timeout"
}

// madeFor says for which Node the block was made.
func (f *Facts) madeFor(uid string) {
	f.Block.Annotations = map[string]string{v2.AnnotationNodeUID: uid}
}

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name    string
		do      func(f *Facts)
		fence   Fence
		refused string // of the first reason; empty if the block may be taken
	}{
		{"coild doesn't know the block", func(*Facts) {}, Unknown, ""},
		{"Node is gone", func(f *Facts) { f.Node, f.Database = nil, nil }, Gone, ""},
		{"machine is off", func(f *Facts) { f.down(); f.taint() }, Shutdown, ""},
		{"of this Node", func(f *Facts) { f.madeFor("uid-n1") }, Unknown, ""},
		{"of an earlier Node, which may be on another machine", func(f *Facts) { f.madeFor("uid-before") }, Replaced, ""},
		{"of an earlier Node, and the present one is off", func(f *Facts) { f.madeFor("uid-before"); f.down(); f.taint() }, Replaced, ""},
		{"of an earlier Node, and coild may have adopted it", func(f *Facts) { f.madeFor("uid-before"); f.down() }, None, "kubectl taint node n1"},
		{"of an earlier Node, and coild has adopted it", func(f *Facts) { f.madeFor("uid-before"); f.Database.Blocks[0].Name = "default-0" }, None, "gives a block back by itself"},
		{"machine is off, and a pod is left", func(f *Facts) { f.down(); f.taint(); f.Pods = append(f.Pods, pod("a", "10.0.0.2")) }, Shutdown, "1 pods have addresses of it"},
		{"Node is gone, and a pod is left", func(f *Facts) { f.Node, f.Database = nil, nil; f.Pods = append(f.Pods, pod("a", "10.0.0.2")) }, Gone, "kubectl -n shop delete pod a"},
		{"pod has ended", func(f *Facts) {
			f.Pods = append(f.Pods, pod("a", "10.0.0.2"))
			f.Pods[1].Status.Phase = corev1.PodSucceeded
		}, Unknown, ""},
		{"pod of another node", func(f *Facts) { f.Pods = append(f.Pods, pod("a", "10.0.0.2")); f.Pods[1].Spec.NodeName = "n2" }, Unknown, "1 pods have"},
		{"machine may run", func(f *Facts) { f.down() }, None, "kubectl taint node n1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"},
		{"no coild", func(f *Facts) { f.Database = nil }, None, "kubectl taint node n1"},
		{"taint of a Node that is ready", func(f *Facts) { f.taint() }, None, "its kubelet runs"},
		{"coild has the block", func(f *Facts) { f.Database.Blocks[0].Name = "default-0" }, None, "gives a block back by itself"},
		{"coild has an address of it", func(f *Facts) { f.Database.Addresses[1].State = "releasing" }, None, "10.0.0.1"},
		{"coild has what it doesn't understand", func(f *Facts) { f.Database.Addresses[0].IPv4 = "x" }, None, "the record has x"},
		{"record is of another Node", func(f *Facts) { f.Database.Meta["node_uid"] = "old" }, None, "another Node"},
		{"record of another name", func(f *Facts) { f.Database.Meta["node_name"] = "n2" }, None, "another Node"},
		{"record isn't rebuilt", func(f *Facts) { f.Database.Meta["rebuilt_at"] = "" }, None, "isn't whole"},
		{"record is damaged", func(f *Facts) { f.Database.Damage = []string{"x"} }, None, "isn't whole"},
		{"answer was cut", func(f *Facts) { f.Database.Truncated = "x" }, None, "isn't whole"},
		{"floating address", func(f *Facts) {
			f.Block.Labels = map[string]string{v2.LabelFloating: v2.FloatingValue}
		}, None, "released by its owner"},
		{"no node", func(f *Facts) { delete(f.Block.Labels, v2.LabelNode) }, None, "names no node"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := working()
			c.do(f)
			v := Judge(*f)
			said := strings.Join(v.Refused, "; ") + " // " + v.Held
			if v.Fence != c.fence || (len(v.Refused) == 0) != (c.refused == "") || !strings.Contains(said, c.refused) || v.Held == "" {
				t.Errorf("%+v", v)
			}
		})
	}
}
