package pools

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func statusPool(name string, subnets ...v2.SubnetSet) *v2.AddressPool {
	return &v2.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 3},
		Spec:       v2.AddressPoolSpec{BlockSizeBits: 5, Subnets: subnets},
	}
}

func statusBlock(node string, allocated int32) *v2.AddressBlock {
	return &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: "b-" + node, Labels: map[string]string{v2.LabelNode: node}},
		Status:     v2.AddressBlockStatus{Allocated: allocated},
	}
}

func TestPoolStatus(t *testing.T) {
	blocks := func(n int) (bs []*v2.AddressBlock) {
		for i := range n {
			bs = append(bs, statusBlock(fmt.Sprintf("n%d", i), 2))
		}
		return bs
	}
	reserved := statusBlock("n0", 0)
	reserved.Labels[v2.LabelReserved] = v2.ReservedValue
	floating := func(owner string, released bool) *v2.AddressBlock {
		b := statusBlock("", 0)
		b.Floating = &v2.Floating{Owner: v2.FloatingOwner{Summary: owner}}
		if released {
			b.Floating.ReleasedAt = new(metav1.Now())
		}
		return b
	}
	deleted := statusPool("p", subnet("10.0.0.0/24", ""))
	deleted.DeletionTimestamp = new(metav1.Now())
	type conditions map[string]string // type: "status reason words"
	fine := "False NoOverlap "
	tests := []struct {
		name      string
		facts     Facts
		blocks    string
		addresses string
		want      conditions
	}{
		{"unused", Facts{Pool: statusPool("p", subnet("10.0.0.0/24", ""))}, "0/8", "0/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine}},
		{"dual stack counts pairs", Facts{Pool: statusPool("p", subnet("10.0.0.0/24", "fd00::/120")), Blocks: blocks(3)}, "3/8", "6/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine}},
		{"exhausted", Facts{Pool: statusPool("p", subnet("10.0.0.0/26", "")), Blocks: blocks(2)}, "2/2", "4/64",
			conditions{v2.PoolExhausted: "True AllBlocksTaken All 2 blocks are taken: append a subnet", v2.PoolOverlapping: fine}},
		{"invalid", Facts{Pool: statusPool("p", subnet("10.0.0.0/24", ""), subnet("nonsense", "")), Blocks: blocks(1)}, "1/0", "2/0",
			conditions{v2.PoolExhausted: "Unknown PoolInvalid subnet 1", v2.PoolOverlapping: fine}},
		{"huge", Facts{Pool: statusPool("p", subnet("", "fd00::/64"))}, "0/2147483648", "0/68719476736",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine}},
		{"overlaps", Facts{Pool: statusPool("p", subnet("10.0.0.0/24", "")), Overlapping: metav1.Condition{Type: v2.PoolOverlapping, Status: metav1.ConditionTrue, Reason: ReasonOverlap, Message: "others"}}, "0/8", "0/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: "True AddressesUsedByOthers others"}},
		{"terminating with blocks", Facts{Pool: deleted, Blocks: append(blocks(5), statusBlock("n1", 0), reserved)}, "7/8", "10/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine,
				v2.PoolTerminating: "True BlocksInUse 7 blocks are held by n0, n1, n2 and 2 more; a node gives a block back when no pod has an address of it; 1 of them is reserved"}},
		{"terminating with a block of nobody", Facts{Pool: deleted, Blocks: []*v2.AddressBlock{statusBlock("", 0)}}, "1/8", "0/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine, v2.PoolTerminating: "True BlocksInUse 1 block is held by (no node: b-)"}},
		{"terminating with floating addresses", Facts{Pool: deleted, Blocks: []*v2.AddressBlock{
			statusBlock("n0", 0), floating("Egress a/b", false), floating("Egress a/b", false), floating("Egress a/c", true)}}, "4/8", "0/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine,
				v2.PoolTerminating: "True BlocksInUse 1 block is held by n0; a node gives a block back when no pod has an address of it; " +
					"3 floating addresses belong to Egress a/b, Egress a/c (cools down)"}},
		{"terminating with a floating address", Facts{Pool: deleted, Blocks: []*v2.AddressBlock{floating("Egress a/b", false)}}, "1/8", "0/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine, v2.PoolTerminating: "True BlocksInUse 1 floating address belongs to Egress a/b"}},
		{"terminating without blocks", Facts{Pool: deleted}, "0/8", "0/256",
			conditions{v2.PoolExhausted: "False BlocksAvailable ", v2.PoolOverlapping: fine, v2.PoolTerminating: "True NoBlocks "}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.facts.Now = metav1.NewTime(time.Unix(1000, 0))
			if tt.facts.Overlapping.Type == "" {
				tt.facts.Overlapping = Overlapping(tt.facts.Pool, Others{})
			}
			got := Status(tt.facts)
			if got.Blocks.Summary != tt.blocks || got.Addresses.Summary != tt.addresses || got.ObservedGeneration != 3 {
				t.Errorf("blocks %+v, addresses %+v, generation %d", got.Blocks, got.Addresses, got.ObservedGeneration)
			}
			if len(got.Conditions) != len(tt.want) {
				t.Errorf("conditions are %+v", got.Conditions)
			}
			var floats v2.FloatingUsage
			for _, b := range tt.facts.Blocks {
				if b.Floating != nil && b.Floating.ReleasedAt != nil {
					floats.Cooling++
				} else if b.Floating != nil {
					floats.Used++
				}
			}
			if got.Floating != floats {
				t.Errorf("floating addresses %+v, want %+v", got.Floating, floats)
			}
			for typ, want := range tt.want {
				f := strings.SplitN(want, " ", 3)
				c := meta.FindStatusCondition(got.Conditions, typ)
				if c == nil || string(c.Status) != f[0] || c.Reason != f[1] || !strings.Contains(c.Message, f[2]) || strings.Contains(c.Message, "\n") ||
					c.ObservedGeneration != 3 || !c.LastTransitionTime.Equal(&tt.facts.Now) {
					t.Errorf("condition is %+v, want %q", c, want)
				}
			}
		})
	}
}

func TestPoolStatusIsStable(t *testing.T) {
	f := Facts{Pool: statusPool("p", subnet("10.0.0.0/26", "")), Now: metav1.NewTime(time.Unix(1000, 0)), LastIndex: new(int32(1))}
	f.Overlapping = Overlapping(f.Pool, Others{})
	f.Pool.Status = Status(f)
	f.Now, f.LastIndex = metav1.NewTime(time.Unix(2000, 0)), nil
	if diff := cmp.Diff(f.Pool.Status, Status(f)); diff != "" {
		t.Errorf("the status changes with nothing but time (-before +after):\n%s", diff)
	}
	before := f.Pool.Status.DeepCopy()
	f.Blocks = []*v2.AddressBlock{statusBlock("a", 0), statusBlock("b", 0)}
	after := Status(f)
	if diff := cmp.Diff(*before, f.Pool.Status); diff != "" {
		t.Errorf("the pool that was given is changed:\n%s", diff)
	}
	full, other := meta.FindStatusCondition(after.Conditions, v2.PoolExhausted), meta.FindStatusCondition(after.Conditions, v2.PoolOverlapping)
	if full.LastTransitionTime != f.Now || other.LastTransitionTime == f.Now {
		t.Errorf("transitions are at %s and %s, want only the first one now", full.LastTransitionTime, other.LastTransitionTime)
	}
	if after.LastIndex == nil || *after.LastIndex != 1 {
		t.Errorf("the last index that isn't known better is %v, want 1 as before", after.LastIndex)
	}
}
