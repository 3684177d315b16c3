package claims_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// parsed returns a pool of blocks of one address.
func parsed(t *testing.T, ipv4, ipv6 string) ipam.Pool {
	t.Helper()
	var s v2.SubnetSet
	if ipv4 != "" {
		s.IPv4 = &ipv4
	}
	if ipv6 != "" {
		s.IPv6 = &ipv6
	}
	p, err := pools.Parse(v2.AddressPoolSpec{Subnets: []v2.SubnetSet{s}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestIndexes(t *testing.T) {
	for name, c := range map[string]struct {
		ipv4, ipv6 string
		list       []string
		want       []int32
		problems   []string // a part of each message
	}{
		"in the order of the list": {"10.0.0.0/28", "", []string{"10.0.0.9", "10.0.0.2-10.0.0.4", "10.0.0.12/31"}, []int32{9, 2, 3, 4, 12, 13}, nil},
		"each once":                {"10.0.0.0/28", "", []string{"10.0.0.2", "10.0.0.0/30", "10.0.0.2-10.0.0.2"}, []int32{2, 0, 1, 3}, nil},
		"one family stands for the pair": {"10.0.0.0/28", "fd00::/124",
			[]string{"10.0.0.3", "fd00::3", "fd00::5"}, []int32{3, 5}, nil},
		"the last address of all": {"", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0/124", []string{"ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}, []int32{14, 15}, nil},
		"outside": {"10.0.0.0/28", "", []string{"10.0.0.14-10.0.0.17", "fd00::1", "10.0.0.1"}, []int32{14, 15, 1},
			[]string{"10.0.0.16 isn't", "fd00::1 isn't"}},
		"nonsense": {"10.0.0.0/28", "", []string{"10.0.0.5/28", "10.0.0.9-10.0.0.8", "10.0.0.1-fd00::", "10.0.0.300", "10.0.0.1-", "10.0.0.0/33", "10.0.0.1"}, []int32{1},
			[]string{"10.0.0.0/28 is meant", "comes after", "one family", "no address", "no range", "no CIDR"}},
		"a range that never ends": {"", "fd00::/64", []string{"fd00::/64"}, nil, []string{"more than 1024"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, problems := claims.Indexes(c.list, parsed(t, c.ipv4, c.ipv6))
			if name == "a range that never ends" {
				got = got[v2.MaxClaimedAddresses:]
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("indexes %v, want %v", got, c.want)
			}
			if len(problems) != len(c.problems) {
				t.Fatalf("problems %v, want %q", problems, c.problems)
			}
			for i, want := range c.problems {
				if !strings.Contains(problems[i].Message, want) {
					t.Errorf("problem %q, want %q in it", problems[i].Message, want)
				}
			}
		})
	}
}

// Many lists of large ranges are bounded as a whole.
func TestIndexesAreBounded(t *testing.T) {
	got, problems := claims.Indexes([]string{"10.0.0.0/23", "10.0.4.0/23", "10.0.8.0/31"}, parsed(t, "10.0.0.0/16", ""))
	if len(got) != v2.MaxClaimedAddresses || len(problems) != 1 || !strings.Contains(problems[0].Message, "from 10.0.8.0 on") {
		t.Errorf("%d addresses, problems %v", len(got), problems)
	}
}

// world is a claim and the blocks that exist.
type world struct {
	claim   *v2.AddressClaim
	pool    ipam.Pool
	blocks  map[int32]*v2.AddressBlock
	foreign map[int32]bool
	at      int64
}

func (w *world) block(index int32) *v2.AddressBlock {
	w.at++
	b, _ := w.pool.Block(index)
	f := claims.Floating(w.claim)
	o := pools.NewFloating(&v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}}, index, b, f)
	o.CreationTimestamp = metav1.NewTime(time.Unix(w.at, 0))
	return o
}

// all returns the blocks in any order.
func (w *world) all(r *rand.Rand) []*v2.AddressBlock {
	var all []*v2.AddressBlock
	for i := range int32(16) {
		if b := w.blocks[i]; b != nil {
			all = append(all, b)
		}
	}
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// Claims change, others take addresses, blocks are deleted and lost: whatever happens, a claim keeps what it may keep, gets its own addresses
// back, and in the end has what it asks for, as far as there is.
func TestDecideHistories(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 5))
		w := &world{
			claim: &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "1"}, Spec: v2.AddressClaimSpec{Pool: "p", Count: new(int32(3))}},
			pool:  parsed(t, "10.0.0.0/28", ""), blocks: map[int32]*v2.AddressBlock{}, foreign: map[int32]bool{},
		}
		for step := range 20 {
			w.change(r)
			before := slices.Clone(w.claim.Status.Addresses)
			d := claims.Decide(claims.Facts{Claim: w.claim, Pool: w.pool, Blocks: w.all(r)})
			again := claims.Decide(claims.Facts{Claim: w.claim, Pool: w.pool, Blocks: w.all(r)})
			if !reflect.DeepEqual(d, again) {
				t.Fatalf("history %d, step %d: the decision depends on the order of the blocks:\n%s", seed, step, cmp.Diff(d, again))
			}
			has := w.do(d)
			w.claim.Status = claims.Status(w.claim, d, has, nil, nil, metav1.Now())
			w.check(t, before)
			if t.Failed() {
				t.Fatalf("history %d, step %d: spec %+v, before %v, now %v, decided %+v", seed, step, w.claim.Spec, before, w.claim.Status.Addresses, d)
			}
		}
	}
}

// change does something to the claim, or to the blocks.
func (w *world) change(r *rand.Rand) {
	i := int32(r.IntN(16))
	switch r.IntN(8) {
	case 0:
		w.claim.Spec.Addresses, w.claim.Spec.Count = nil, new(int32(r.IntN(8)))
	case 1:
		w.claim.Spec.Count, w.claim.Spec.Addresses = nil, []string{fmt.Sprintf("10.0.0.%d", r.IntN(20)), fmt.Sprintf("10.0.0.%d/31", 2*r.IntN(8))}
	case 2: // its cool-down ends
		if b := w.blocks[i]; b != nil && b.Floating.ReleasedAt != nil {
			delete(w.blocks, i)
		}
	case 3: // lost with a backup
		delete(w.blocks, i)
	case 4: // deleted by an admin
		if b := w.blocks[i]; b != nil {
			b.DeletionTimestamp, b.Floating.ReleasedAt = new(metav1.Now()), new(metav1.Now())
		}
	case 5: // somebody else's
		if w.blocks[i] == nil {
			w.foreign[i] = !w.foreign[i]
		}
	case 6: // another leader made one too many
		if w.blocks[i] == nil && !w.foreign[i] {
			w.blocks[i] = w.block(i)
		}
	case 7: // an end of what was deleted
		if b := w.blocks[i]; b != nil && b.DeletionTimestamp != nil {
			delete(w.blocks, i)
		}
	}
}

// do carries a decision out, and returns what the claim has.
func (w *world) do(d claims.Decision) []*v2.AddressBlock {
	has := slices.Clone(d.Keep)
	for _, b := range d.Release {
		b.Floating.ReleasedAt = new(metav1.Now())
	}
	for _, b := range d.Retake {
		b.Floating.ReleasedAt = nil
		has = append(has, b)
	}
	carve := func(i int32) bool {
		if w.blocks[i] != nil || w.foreign[i] {
			return false
		}
		w.blocks[i] = w.block(i)
		has = append(has, w.blocks[i])
		return true
	}
	for _, i := range d.Carve {
		carve(i)
	}
	for i := int32(0); i < 16 && d.Any > 0; i++ {
		if carve(i) {
			d.Any--
		}
	}
	return has
}

func (w *world) check(t *testing.T, before []v2.ClaimedAddress) {
	t.Helper()
	now := w.claim.Status.Addresses
	names := map[string]int{}
	for i, a := range now {
		if _, twice := names[a.Block]; twice {
			t.Errorf("%s is there twice", a.Block)
		}
		names[a.Block] = i
		_, index, _ := pools.SplitBlockName(a.Block)
		b := w.blocks[index]
		if b == nil || b.DeletionTimestamp != nil || b.Floating.ReleasedAt != nil || a.IPv4+"/32" != *b.IPv4 {
			t.Errorf("it has %v, whose block is %+v", a, b)
		}
	}
	used := 0
	for i, b := range w.blocks {
		if b.Floating.ReleasedAt == nil && b.DeletionTimestamp == nil {
			used++
			if _, ok := names[b.Name]; !ok {
				t.Errorf("block %d is used, and the status hasn't got it", i)
			}
		}
	}
	if w.claim.Spec.Count != nil {
		free := 16 - len(w.blocks)
		for i, f := range w.foreign {
			if f && w.blocks[i] == nil {
				free--
			}
		}
		want := int(*w.claim.Spec.Count)
		if used > want || used < want && free > 0 {
			t.Errorf("%d addresses, want %d; %d are free", used, want, free)
		}
	} else {
		indexes, _ := claims.Indexes(w.claim.Spec.Addresses, w.pool)
		var want []string
		for _, i := range indexes {
			if b := w.blocks[i]; b != nil && b.DeletionTimestamp == nil {
				want = append(want, b.Name)
			} else if b == nil && !w.foreign[i] {
				t.Errorf("10.0.0.%d is free, and it hasn't got it", i)
			}
		}
		var got []string
		for _, a := range now {
			got = append(got, a.Block)
		}
		if !slices.Equal(got, want) {
			t.Errorf("it has %v, want %v", got, want)
		}
		return
	}
	// Those that stay do so in their order, and nothing is given up for something new.
	last, kept := -1, 0
	for _, a := range before {
		if i, ok := names[a.Block]; ok {
			if kept++; i < last {
				t.Errorf("the order was %v and is %v", before, now)
			}
			last = i
		}
	}
	for _, a := range before {
		_, index, _ := pools.SplitBlockName(a.Block)
		_, stays := names[a.Block]
		if b := w.blocks[index]; !stays && b != nil && b.DeletionTimestamp == nil && len(now) > kept {
			t.Errorf("%s is given up while there is something new: before %v, now %v", a.Block, before, now)
		}
	}
}

func TestStatus(t *testing.T) {
	w := &world{
		claim: &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", Generation: 4}, Spec: v2.AddressClaimSpec{Pool: "p", Count: new(int32(2))}},
		pool:  parsed(t, "10.0.0.0/28", "fd00::/124"),
	}
	has := []*v2.AddressBlock{w.block(7), w.block(2)}
	st := claims.Status(w.claim, claims.Decision{}, has, nil, nil, metav1.Now())
	want := []v2.ClaimedAddress{{Block: "p-7", IPv4: "10.0.0.7", IPv6: "fd00::7"}, {Block: "p-2", IPv4: "10.0.0.2", IPv6: "fd00::2"}}
	if diff := cmp.Diff(want, st.Addresses); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	if c := st.Conditions[0]; st.Summary != "2/2" || st.ObservedGeneration != 4 || c.Status != metav1.ConditionTrue || c.Reason != v2.ReasonAddressesHeld {
		t.Errorf("the status is %+v", st)
	}
	w.claim.Status = st
	if diff := cmp.Diff(st, claims.Status(w.claim, claims.Decision{}, has, nil, nil, metav1.NewTime(time.Now().Add(time.Hour)))); diff != "" {
		t.Errorf("nothing but time has changed, and the status has:\n%s", diff)
	}
	var problems []claims.Problem
	for i := range 12 {
		problems = append(problems, claims.Problem{Reason: fmt.Sprintf("R%d", i), Message: fmt.Sprintf("message %d", i)})
	}
	st = claims.Status(w.claim, claims.Decision{}, has[:1], nil, problems, metav1.Now())
	if c := st.Conditions[0]; st.Summary != "1/2" || c.Status != metav1.ConditionFalse || c.Reason != "R0" || !strings.HasSuffix(c.Message, "message 9; and 2 more") {
		t.Errorf("with problems: %+v", st)
	}
}

func TestOwner(t *testing.T) {
	c := &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "1"}}
	if o := claims.Owner(c); o != (v2.FloatingOwner{Kind: "AddressClaim", Namespace: "ns", Name: "c", UID: "1", Summary: "AddressClaim ns/c"}) {
		t.Errorf("a claim without an owner is %+v", o)
	}
	c.OwnerReferences = []metav1.OwnerReference{{Kind: "Other", Name: "o", UID: "3"}, {Kind: "Egress", Name: "nat", UID: "2", Controller: new(true)}}
	if o := claims.Owner(c); o != (v2.FloatingOwner{Kind: "Egress", Namespace: "ns", Name: "nat", UID: "2", Summary: "Egress ns/nat"}) {
		t.Errorf("the owner is %+v", o)
	}
}

func TestCooling(t *testing.T) {
	base := time.Unix(10000, 0)
	b := &v2.AddressBlock{Floating: &v2.Floating{CoolDownSeconds: 3600, ReleasedAt: new(metav1.NewTime(base))}}
	for name, c := range map[string]struct {
		seen, now, want time.Duration
		fresh           bool
	}{
		"just released":                     {0, 0, time.Hour, true},
		"nearly over":                       {0, 59 * time.Minute, time.Minute, true},
		"over":                              {0, time.Hour, 0, true},
		"long over":                         {0, 5 * time.Hour, 0, true},
		"noted by a clock that was behind":  {2 * time.Hour, 2*time.Hour + time.Minute, 59 * time.Minute, true},
		"another leader's":                  {30 * time.Minute, 50 * time.Minute, 10*time.Minute + time.Second, false},
		"another leader's, found late":      {59 * time.Minute, time.Hour, 9 * time.Minute, false},
		"another leader's, over":            {30 * time.Minute, time.Hour + time.Second, 0, false},
		"another's, by a clock behind":      {5 * time.Hour, 5*time.Hour + time.Minute, 9 * time.Minute, false},
		"another's, by a clock ahead":       {-5 * time.Hour, -5*time.Hour + time.Minute, 59 * time.Minute, false},
		"another's, by a clock ahead, over": {-5 * time.Hour, -4 * time.Hour, 0, false},
	} {
		if got := claims.Cooling(b, claims.Release{Seen: base.Add(c.seen), Fresh: c.fresh}, base.Add(c.now)); got != c.want {
			t.Errorf("%s: %s left, want %s", name, got, c.want)
		}
	}
	b.Floating.CoolDownSeconds = 0
	if got := claims.Cooling(b, claims.Release{Seen: base}, base.Add(time.Second)); got != 0 {
		t.Errorf("%s of no cool-down", got)
	}
}

// Blocks of another pool, which a claim of this name had before, and of another range aren't taken for those of the pool.
func TestBlocksOfAnotherPool(t *testing.T) {
	w := &world{claim: &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}, Spec: v2.AddressClaimSpec{Pool: "p"}}, pool: parsed(t, "10.0.0.0/28", "")}
	used, cooling, moved := w.block(1), w.block(2), w.block(3)
	used.Name, cooling.Name = "old-1", "old-2"
	cooling.Floating.ReleasedAt = new(metav1.Now())
	moved.IPv4 = new("10.9.0.3/32")
	for name, spec := range map[string]v2.AddressClaimSpec{
		"counted": {Pool: "p", Count: new(int32(3))}, "listed": {Pool: "p", Addresses: []string{"10.0.0.1-10.0.0.3"}},
	} {
		w.claim.Spec = spec
		d := claims.Decide(claims.Facts{Claim: w.claim, Pool: w.pool, Blocks: []*v2.AddressBlock{used, cooling, moved}})
		if len(d.Keep)+len(d.Retake) > 0 || len(d.Release) != 2 || len(d.Carve)+d.Any != 3 {
			t.Errorf("%s: %+v", name, d)
		}
	}
	used.Labels[v2.LabelNode] = "n1"
	if key := claims.Key(used); key != "" {
		t.Errorf("a node's block is of claim %s", key)
	}
}

// What a block lost comes back with the patch.
func TestTaken(t *testing.T) {
	w := &world{claim: &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "1"}, Spec: v2.AddressClaimSpec{CoolDownSeconds: 5}}, pool: parsed(t, "10.0.0.0/28", "")}
	b := w.block(3)
	if claims.Outdated(b, w.claim) || claims.Key(b) != "ns/c" {
		t.Errorf("a new block is outdated, or has the key %q", claims.Key(b))
	}
	for name, spoil := range map[string]func(*v2.AddressBlock){
		"a label":   func(b *v2.AddressBlock) { delete(b.Labels, v2.LabelReserved) },
		"the mark":  func(b *v2.AddressBlock) { b.Labels[v2.LabelFloating] = "no" },
		"the field": func(b *v2.AddressBlock) { b.Floating = nil },
		"the owner": func(b *v2.AddressBlock) { b.Floating.Owner.UID = "0" },
		"a release": func(b *v2.AddressBlock) { b.Floating.ReleasedAt = new(metav1.Now()) },
		"cool-down": func(b *v2.AddressBlock) { b.Floating.CoolDownSeconds = 6 },
	} {
		spoiled := b.DeepCopy()
		spoil(spoiled)
		if !claims.Outdated(spoiled, w.claim) {
			t.Errorf("without %s it isn't outdated", name)
		}
		patch := claims.Taken(spoiled, w.claim)
		f := patch["floating"].(map[string]any)
		if released, ok := f["releasedAt"]; !ok || released != nil || f["owner"] != claims.Owner(w.claim) || f["coolDownSeconds"] != int32(5) {
			t.Errorf("without %s the patch is %v", name, patch)
		}
		if m, ok := patch["metadata"]; ok != (name == "a label" || name == "the mark") || ok && len(m.(map[string]any)["labels"].(map[string]string)) != 1 {
			t.Errorf("without %s the patch of the metadata is %v", name, m)
		}
	}
}
