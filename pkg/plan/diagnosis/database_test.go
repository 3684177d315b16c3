package diagnosis

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// recorded is the row of an address of block default-0.
func recorded(offset int, pod, state string) inspection.DatabaseAddress {
	return inspection.DatabaseAddress{
		ID: int64(offset + 1), IPv4: fmt.Sprint("10.0.0.", offset), State: state, Since: now.Add(-time.Hour).Format(inspection.TimeFormat), Pool: "default",
		Block: "default-0", BlockID: 1, Offset: offset, Namespace: "shop", Pod: pod, PodUID: "uid-" + pod, ContainerID: fmt.Sprint("c", offset), IfName: "eth0",
	}
}

func podAt(name string, addrs ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID("uid-" + name)}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, a := range addrs {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a})
	}
	return p
}

// sound is a record that agrees with everything.
func sound() *DatabaseFacts {
	f := &DatabaseFacts{Facts: world().Facts}
	f.Answer = nil
	f.Blocks = append(f.Blocks, block("default-1", "10.0.0.4/30", "n2"))
	f.Pods = []*corev1.Pod{podAt("a", "10.0.0.0"), podAt("b", "10.0.0.1"), podAt("host", "172.16.0.1"), podAt("other", "192.0.2.1"), podAt("done", "10.0.0.2")}
	f.Pods[2].Spec.HostNetwork, f.Pods[4].Status.Phase = true, corev1.PodSucceeded
	f.Database = &inspection.Database{
		Node: inspection.Node{Name: "n1", IPAM: true}, Schema: 2, Newest: 2, Meta: map[string]string{"node_name": "n1", "node_uid": "uid-n1", "rebuilt_at": "x", "created_at": "y"},
		Blocks:    []inspection.DatabaseBlock{{ID: 1, Name: "default-0", Pool: "default", IPv4: "10.0.0.0/30"}},
		Addresses: []inspection.DatabaseAddress{recorded(0, "a", "attached"), recorded(1, "b", "attached"), recorded(2, "done", "cooling")},
	}
	return f
}

func TestDatabase(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(f *DatabaseFacts)
		// wrong are the steps, and says is of the first of them; of the last step that is unknown if none is wrong.
		wrong, says string
	}{
		{"sound", func(*DatabaseFacts) {}, "", ""},
		{"damaged file", func(f *DatabaseFacts) { f.Database.Damage = []string{"row 1 missing from index x", "row 2"} }, "file file", "row 1 missing from index x"},
		{"older schema", func(f *DatabaseFacts) { f.Database.Schema = 1 }, "file", "of version 1, and that of coild of version 2"},
		{"another node's", func(f *DatabaseFacts) { f.Database.Meta["node_name"] = "n7" }, "identity", `"n7"`},
		{"an earlier Node's", func(f *DatabaseFacts) { f.Database.Meta["node_uid"] = "old" }, "identity", "UID old"},
		{"not rebuilt", func(f *DatabaseFacts) { f.Database.Meta["rebuilt_at"] = "" }, "identity", "isn't rebuilt"},
		{"block that doesn't exist", func(f *DatabaseFacts) { f.Blocks = f.Blocks[1:] }, "blocks", "no AddressBlock of the name"},
		{"block of another node", func(f *DatabaseFacts) { f.Blocks[0].Labels[v2.LabelNode] = "n2" }, "blocks", `of node "n2"`},
		{"block of another range", func(f *DatabaseFacts) { f.Database.Blocks[0].IPv4 = "10.0.0.0/29" }, "blocks", "is 10.0.0.0/29 in the record, and 10.0.0.0/30"},
		{"block of another pool", func(f *DatabaseFacts) { f.Database.Blocks[0].Pool = "other" }, "blocks", `"other"`},
		{"block that the record lacks", func(f *DatabaseFacts) { f.Blocks[1].Labels[v2.LabelNode] = "n1" }, "blocks", "default-1 is the node's, and the record lacks it"},
		{"block that is new", func(f *DatabaseFacts) {
			f.Blocks[1].Labels[v2.LabelNode], f.Blocks[1].CreationTimestamp = "n1", ago(time.Second)
		}, "", ""},
		{"block that is deleted", func(f *DatabaseFacts) {
			at := ago(time.Hour)
			f.Blocks[1].Labels[v2.LabelNode], f.Blocks[1].DeletionTimestamp = "n1", &at
		}, "", ""},
		{"value that is no address", func(f *DatabaseFacts) { f.Database.Addresses[2].IPv4 = "10.0.0.02" }, "rows", `"10.0.0.02"`},
		{"value that is no time", func(f *DatabaseFacts) { f.Database.Addresses[2].Since = "yesterday" }, "rows", `"yesterday"`},
		{"address outside of its block", func(f *DatabaseFacts) {
			f.Database.Addresses[0].IPv4, f.Pods[0].Status.PodIPs[0].IP = "10.0.0.9", "10.0.0.9"
		}, "rows", "10.0.0.9 of pod shop/a (attached) isn't address 0 of block default-0"},
		{"address at another place", func(f *DatabaseFacts) { f.Database.Addresses[1].Offset = 3 }, "rows", "isn't address 3"},
		{"offset beyond the block", func(f *DatabaseFacts) { f.Database.Addresses[1].Offset = 4 }, "rows", "isn't address 4"},
		{"block that the row lacks", func(f *DatabaseFacts) { f.Database.Addresses[0].BlockID, f.Database.Addresses[0].Offset = 0, -1 }, "rows", "which the record lacks"},
		{"address for two pods in the record", func(f *DatabaseFacts) {
			more := recorded(1, "a", "attached")
			f.Database.Addresses = append(f.Database.Addresses, more)
		}, "twice", "10.0.0.1 for pod shop/b (attached), pod shop/a (attached)"},
		{"address of two pods of the API", func(f *DatabaseFacts) { f.Pods = append(f.Pods, podAt("c", "10.0.0.1")) }, "twice lacking", "kubelet tells 10.0.0.1 of pods shop/b, shop/c"},
		{"pod that doesn't exist", func(f *DatabaseFacts) { f.Pods = f.Pods[1:] }, "pods", "10.0.0.0 is of pod shop/a (attached)"},
		{"earlier pod of the name", func(f *DatabaseFacts) { f.Pods[0].UID = "new" }, "pods", "its UID was uid-a"},
		{"static pod", func(f *DatabaseFacts) {
			f.Pods[0].UID, f.Pods[0].Annotations = "mirror", map[string]string{corev1.MirrorPodAnnotationKey: "uid-a"}
		}, "", ""},
		{"pod without UID", func(f *DatabaseFacts) { f.Database.Addresses[0].PodUID = "" }, "", ""},
		{"pod that the record lacks", func(f *DatabaseFacts) { f.Database.Addresses = f.Database.Addresses[1:] }, "lacking", "shop/a has 10.0.0.0, which the record lacks"},
		{"pod with an address of another node's block", func(f *DatabaseFacts) { f.Pods = append(f.Pods, podAt("c", "10.0.0.5")) }, "lacking", "10.0.0.5"},
		{"behind another plugin", func(f *DatabaseFacts) {
			f.Database.Node.IPAM, f.Database.Addresses, f.Database.Blocks, f.Pods = false, nil, nil, f.Pods[:2]
		}, "", ""},
		{"address that is released under a pod", func(f *DatabaseFacts) { f.Database.Addresses[0] = recorded(0, "a", "cooling") }, "cooling", "released from pod shop/a (cooling)"},
		{"address that is released under a pod that is deleted", func(f *DatabaseFacts) {
			at := ago(time.Minute)
			f.Database.Addresses[0], f.Pods[0].DeletionTimestamp = recorded(0, "a", "cooling"), &at
		}, "", ""},
		{"address that stays between two states", func(f *DatabaseFacts) { f.Database.Addresses[0].State = "releasing" }, "cooling", "10.0.0.0 of pod shop/a (releasing)"},
		{"address on its way", func(f *DatabaseFacts) {
			f.Database.Addresses[0].State, f.Database.Addresses[0].Since = "pending", now.Add(-time.Minute).Format(inspection.TimeFormat)
		}, "", ""},
		{"no right to exec", func(f *DatabaseFacts) { f.Database, f.Unanswered = nil, "forbidden" }, "", "forbidden"},
		{"no right to list AddressBlocks", func(f *DatabaseFacts) { f.Blocks, f.Unread = nil, map[string]string{KindBlocks: "no right"} }, "", "AddressBlocks couldn't be read"},
		{"no right to list pods", func(f *DatabaseFacts) { f.Pods, f.Unread = nil, map[string]string{KindPods: "no right"} }, "", "pods couldn't be read"},
		{"too long", func(f *DatabaseFacts) { f.Database.Truncated = "3 addresses are left out" }, "", "3 addresses are left out"},
		{"no coild", func(f *DatabaseFacts) { f.Coilds, f.Database = nil, nil }, "node", "no pod of coild"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := sound()
			c.spoil(f)
			d := Database("n1", *f)
			if got := strings.Join(d.Wrong(), " "); got != c.wrong || d.Subject != "Record of node n1" {
				t.Fatalf("%s: wrong are %q, want %q:\n%+v", d.Subject, got, c.wrong, d.Steps)
			}
			seen := ""
			for _, s := range d.Steps {
				switch {
				case c.wrong == "" && s.State == Unknown:
					seen = s.Seen
				case s.State == Wrong && s.Do == "":
					t.Errorf("it isn't said what to do about %q", s.Seen)
				}
			}
			if c.wrong != "" {
				seen = find(d, d.Wrong()[0]).Seen
			}
			if !strings.Contains(seen, c.says) || c.says == "" && seen != "" {
				t.Errorf("%q isn't said: %q\n%+v", c.says, seen, d.Steps)
			}
		})
	}
}

// What only one of two looks has seen is no fault.
func TestConfirmed(t *testing.T) {
	first, second := sound(), sound()
	first.Pods = first.Pods[1:] // pod a is seen as gone once, and pod b twice
	first.Pods = first.Pods[1:]
	second.Pods = append(second.Pods[:1], second.Pods[2:]...)
	second.Database.Addresses[1].IPv4 = "nonsense" // seen once
	d := Confirmed(Database("n1", *first), Database("n1", *second))
	if wrong := strings.Join(d.Wrong(), " "); wrong != "" {
		t.Errorf("wrong are %q: %+v", wrong, d.Steps)
	}
	second.Database.Addresses[1].IPv4 = "10.0.0.1"
	d = Confirmed(Database("n1", *first), Database("n1", *second))
	if wrong := strings.Join(d.Wrong(), " "); wrong != "pods" || !strings.Contains(find(d, "pods").Seen, "pod shop/b") {
		t.Errorf("wrong are %q: %+v", wrong, d.Steps)
	}
}
