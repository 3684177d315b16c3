package pools

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

func subnet(v4, v6 string) v2.SubnetSet {
	var s v2.SubnetSet
	if v4 != "" {
		s.IPv4 = &v4
	}
	if v6 != "" {
		s.IPv6 = &v6
	}
	return s
}

func TestPool(t *testing.T) {
	tests := []struct {
		name    string
		bits    int32
		subnets []v2.SubnetSet
		blocks  int64
		last    string
		err     string
	}{
		{"IPv4", 5, []v2.SubnetSet{subnet("10.0.0.0/24", "")}, 8, "10.0.0.224/27", ""},
		{"IPv6", 5, []v2.SubnetSet{subnet("", "fd00::/120")}, 8, "fd00::e0/123", ""},
		{"dual stack, two subnets", 4, []v2.SubnetSet{subnet("10.0.0.0/28", "fd00::/124"), subnet("10.1.0.0/27", "fd01::/123")}, 3, "10.1.0.16/28,fd01::10/124", ""},
		{"host bits of a pool of 2.x", 5, []v2.SubnetSet{subnet("10.0.0.77/24", "")}, 8, "10.0.0.224/27", ""},
		{"not a CIDR", 5, []v2.SubnetSet{subnet("10.0.0.0/24", ""), subnet("10.0.0/24", "")}, 0, "", "subnet 1: "},
		{"not a CIDR in IPv6", 5, []v2.SubnetSet{subnet("", "fd00::/129")}, 0, "", "subnet 0: "},
		{"empty strings", 5, []v2.SubnetSet{{IPv4: new(""), IPv6: new("")}}, 0, "", "neither an IPv4 nor an IPv6"},
		{"none", 5, nil, 0, "", "no subnet"},
		{"too small", 9, []v2.SubnetSet{subnet("10.0.0.0/24", "")}, 0, "", "smaller than a block"},
		{"overlapping", 5, []v2.SubnetSet{subnet("10.0.0.0/24", ""), subnet("10.0.0.128/25", "")}, 0, "", "overlaps subnet 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := Parse(v2.AddressPoolSpec{BlockSizeBits: tt.bits, Subnets: tt.subnets})
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error is %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil || p.Total() != tt.blocks {
				t.Fatalf("%d blocks, error %v; want %d", p.Total(), err, tt.blocks)
			}
			b, err := p.Block(int32(p.Total() - 1))
			if err != nil || b.String() != tt.last {
				t.Errorf("the last block is %s, %v; want %s", b, err, tt.last)
			}
		})
	}
}

// A spec is either refused with a reason, or its blocks are all different and inside of its subnets, and are the same when
// they are read from their objects.
func FuzzValidate(f *testing.F) {
	f.Add(int32(5), "10.0.0.0/16", "fd00::/112", "10.1.0.0/24", "fd01::/120", int32(7), int32(2047))
	f.Add(int32(0), "0.0.0.0/0", "", "", "", int32(math.MaxInt32), int32(math.MinInt32))
	f.Add(int32(16), "", "::/0", "", "", int32(0), int32(math.MaxInt32))
	f.Add(int32(4), "10.0.0.77/28", "", "10.0.0.90/28", "", int32(0), int32(1))
	f.Add(int32(-3), "::ffff:1.2.3.4/100", "1.2.3.4/5", "fe80::1%eth0/64", "0x7f.1/8", int32(0), int32(0))
	f.Fuzz(func(t *testing.T, bits int32, v4, v6, other4, other6 string, i, j int32) {
		spec := v2.AddressPoolSpec{BlockSizeBits: bits, Subnets: []v2.SubnetSet{{IPv4: &v4, IPv6: &v6}}}
		if other4 != "" || other6 != "" {
			spec.Subnets = append(spec.Subnets, subnet(other4, other6))
		}
		p, err := Parse(spec)
		if err != nil {
			if !strings.Contains(err.Error(), "subnet ") && !strings.Contains(err.Error(), "block size") {
				t.Errorf("the error %q names nothing of the spec", err)
			}
			return
		}
		subnets := ipam.Prefixes(&v4, &v6, &other4, &other6)
		last := int32(p.Total() - 1)
		blocks := map[int32]ipam.Block{}
		for _, index := range []int32{0, i, j, last / 2, last} {
			b, err := p.Block(index)
			if (err == nil) != (index >= 0 && index <= last) {
				t.Fatalf("block %d of %d: %v", index, p.Total(), err)
			}
			if err == nil {
				blocks[index] = b
			}
		}
		for index, b := range blocks {
			for _, prefix := range b.Prefixes() {
				if !prefixes.Within(prefix, subnets) {
					t.Errorf("block %d is %s, outside of %s", index, b, subnets)
				}
			}
			for other, o := range blocks {
				if index != other && (b.IPv4.Overlaps(o.IPv4) || b.IPv6.Overlaps(o.IPv6)) {
					t.Errorf("block %d is %s, block %d is %s", index, b, other, o)
				}
			}
			made := NewBlock(&v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "a-b.c"}}, index, b, Holder{NodeName: "n"})
			if read, err := ipam.ParseBlock(made.IPv4, made.IPv6); err != nil || read != b {
				t.Errorf("the object of block %s has %s, %v", b, read, err)
			}
			if pool, n, ok := SplitBlockName(made.Name); pool != "a-b.c" || n != index || !ok {
				t.Errorf("the name of block %d is %q", index, made.Name)
			}
		}
	})
}

func TestBlockNames(t *testing.T) {
	for _, tt := range []struct {
		name, pool string
		index      int32
		ok         bool
	}{
		{"default-0", "default", 0, true},
		{"default-2147483647", "default", math.MaxInt32, true},
		{"a-1-2", "a-1", 2, true},
		{"a.b-3", "a.b", 3, true},
		{"default-2147483648", "", 0, false},
		{"default-01", "", 0, false},
		{"default-+1", "", 0, false},
		{"default--1", "default-", 1, true}, // which no pool can be named
		{"default-", "", 0, false},
		{"default", "", 0, false},
		{"-5", "", 0, false},
		{"", "", 0, false},
	} {
		pool, index, ok := SplitBlockName(tt.name)
		if pool != tt.pool || index != tt.index || ok != tt.ok {
			t.Errorf("SplitBlockName(%q) = %q, %d, %t", tt.name, pool, index, ok)
		}
		if ok && BlockName(pool, index) != tt.name {
			t.Errorf("BlockName(%q, %d) = %q", pool, index, BlockName(pool, index))
		}
	}
}

func TestBlockPools(t *testing.T) {
	for _, tt := range []struct {
		name, label string
		want        []string
	}{
		{"a-1", "a", []string{"a"}},
		{"a-1", "", []string{"a"}},
		{"a-1", "b", []string{"b", "a"}},
		{"strange", "b", []string{"b"}},
		{"strange", "", nil},
	} {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: tt.name, Labels: map[string]string{v2.LabelPool: tt.label}}}
		if diff := cmp.Diff(tt.want, BlockPools(b)); diff != "" {
			t.Errorf("pools of block %s with label %q (-want +got):\n%s", tt.name, tt.label, diff)
		}
	}
}

func TestNewBlock(t *testing.T) {
	pool := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "pool-uid"}}
	p, err := Parse(v2.AddressPoolSpec{BlockSizeBits: 5, Subnets: []v2.SubnetSet{subnet("10.0.0.0/24", "fd00::/120")}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := p.Block(3)
	if err != nil {
		t.Fatal(err)
	}
	got := NewBlock(pool, 3, b, Holder{NodeName: "node", NodeUID: "node-uid", RequestUID: "request-uid"})
	want := &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name: "default-3",
			Labels: map[string]string{
				"coil.cybozu.com/pool": "default", "coil.cybozu.com/node": "node", "coil.cybozu.com/request": "request-uid",
			},
			Annotations: map[string]string{"coil.cybozu.com/node-uid": "node-uid"},
			Finalizers:  []string{"coil.cybozu.com"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "coil.cybozu.com/v2", Kind: "AddressPool", Name: "default", UID: "pool-uid",
				Controller: new(true), BlockOwnerDeletion: new(true),
			}},
		},
		Index: 3, IPv4: new("10.0.0.96/27"), IPv6: new("fd00::60/123"),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("block (-want +got):\n%s", diff)
	}
	for announce, label := range map[v2.PoolAnnounce]string{"": "", v2.AnnounceRoute: "", v2.AnnounceNeighbor: "Neighbor"} {
		pool.Spec.Announce = announce
		for _, o := range []*v2.AddressBlock{NewBlock(pool, 3, b, Holder{NodeName: "node"}), NewFloating(pool, 3, b, v2.Floating{})} {
			if value, ok := o.Labels[v2.LabelAnnounce]; value != label || ok != (label != "") {
				t.Errorf("a block of a pool that is announced by %q has labels %v", announce, o.Labels)
			}
		}
	}
	if back, err := ipam.ParseBlock(got.IPv4, got.IPv6); err != nil || back != b {
		t.Errorf("the block is read back as %s, %v", back, err)
	}
}
