package egress_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// ofRouters is an Egress whose routers have addresses.
func ofRouters() *v2.Egress {
	e := withAddresses()
	e.Spec.Addresses.Use = v2.EgressAddressOfRouter
	return e
}

// Nodes agree about who has an address; each router of a node has addresses of its own all the same.
func TestPlacesOfRouters(t *testing.T) {
	r, s, u := routerOn("a", "r", 3), routerOn("a", "s", 2), routerOn("b", "u", 1)
	ends, ended := routerOn("a", "ends", 4), routerOn("a", "ended", 4)
	ends.DeletionTimestamp, ended.DeletionTimestamp, ended.Status.Conditions = &metav1.Time{}, &metav1.Time{}, nil
	// has is an address that the first of some routers has.
	has := func(pods ...*corev1.Pod) v2.Floating {
		f := v2.Floating{Holding: v2.FloatingHolding{Holder: pods[0].Spec.NodeName, PodUID: pods[0].UID}}
		for _, p := range pods {
			f.Successors = append(f.Successors, v2.FloatingNode{Node: p.Spec.NodeName, Addresses: internalIPs(p.Spec.NodeName), PodUID: p.UID})
		}
		return f
	}
	for _, tt := range []struct {
		name    string
		routers []*corev1.Pod
		have    []v2.Floating
		want    string // where packets go, and whence the address moves
	}{
		{"as it is", []*corev1.Pod{r, s}, []v2.Floating{has(r), has(s)}, "r-uid, s-uid"},
		{"one of two goes to another router of the node", []*corev1.Pod{r, s}, []v2.Floating{has(r), has(r)}, "r-uid, s-uid"},
		{"its router is gone: it goes to another one of the node", []*corev1.Pod{s}, []v2.Floating{has(r)}, "s-uid"},
		{"one of two goes to another node", []*corev1.Pod{s, u}, []v2.Floating{has(s, u), has(s, u)}, "s-uid, u-uid from s-uid"},
		{"and by no other router of its node on the way", []*corev1.Pod{r, s, u}, []v2.Floating{has(r), has(s), has(s)}, "r-uid, s-uid, u-uid from s-uid"},
		{"fewer than routers stay where they are", []*corev1.Pod{r, s, u}, []v2.Floating{has(u), has(s)}, "u-uid, s-uid"},
		{"its router is gone, and its node has another one with an address: it goes by that until it has moved", []*corev1.Pod{s, u}, []v2.Floating{has(r), has(s)}, "u-uid from s-uid, s-uid"},
		{"its node has no router", []*corev1.Pod{u}, []v2.Floating{has(r)}, "u-uid"},
		{"its router ends, and the others have some", []*corev1.Pod{ends, r, u}, []v2.Floating{has(ends), has(r), has(u)}, "ends-uid, r-uid, u-uid"},
		{"as many stay as the others don't need", []*corev1.Pod{ends, r, u}, []v2.Floating{has(ends), has(ends), has(u)}, "ends-uid, r-uid, u-uid"},
		{"its router ends, and the only other one has none", []*corev1.Pod{ends, u}, []v2.Floating{has(ends)}, "u-uid from ends-uid"},
		{"and that is on the same node", []*corev1.Pod{ends, r}, []v2.Floating{has(ends)}, "r-uid"},
		{"its router has ended", []*corev1.Pod{ended, r}, []v2.Floating{has(ended)}, "r-uid"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var blocks []*v2.AddressBlock
			for i := range tt.have {
				b := floatingBlock(i)
				b.Floating = &tt.have[i]
				blocks = append(blocks, b)
			}
			apply(blocks, egress.Places(ofRouters(), blocks, tt.routers, internalIPs))
			var got []string
			for _, b := range blocks {
				text := string(b.Floating.Successors[0].PodUID)
				if b.Floating.MovingTo != "" {
					text += " from " + string(successorOn(b, b.Floating.Holding.Holder).PodUID)
				}
				got = append(got, text)
			}
			if text := strings.Join(got, ", "); text != tt.want {
				t.Errorf("addresses go to %s, want %s", text, tt.want)
			}
		})
	}
}

// apply writes places into blocks.
func apply(blocks []*v2.AddressBlock, places map[string]egress.Place) {
	for _, b := range blocks {
		if p, changed := places[b.Name]; changed {
			b.Floating.Successors, b.Floating.MovingTo, b.Floating.Standby = p.Successors, p.MovingTo, p.Standby
		}
	}
}

func successorOn(b *v2.AddressBlock, node string) (found v2.FloatingNode) {
	for _, n := range b.Floating.Successors {
		if n.Node == node {
			found = n
		}
	}
	return found
}

// scaled is an Egress whose routers come and go: by scaling, to none and back as well, by updates and with their nodes.
type scaled struct {
	*rand.Rand
	graceful bool
	blocks   []*v2.AddressBlock
	routers  []*corev1.Pod
	made     int
}

func (s *scaled) change() {
	switch s.IntN(6) {
	case 0: // to none
		s.routers = nil
	case 1: // a node with all its routers
		node := fmt.Sprint("node-", s.IntN(4))
		s.routers = slices.DeleteFunc(s.routers, func(p *corev1.Pod) bool { return p.Spec.NodeName == node })
	case 2:
		if len(s.routers) > 0 {
			i := s.IntN(len(s.routers))
			s.routers = slices.Delete(slices.Clone(s.routers), i, i+1)
		}
	case 3: // it forwards for a while
		if s.graceful && len(s.routers) > 0 {
			i := s.IntN(len(s.routers))
			s.routers[i] = s.routers[i].DeepCopy()
			s.routers[i].DeletionTimestamp = &metav1.Time{}
		}
	default:
		for range 1 + s.IntN(3) {
			s.made++
			s.routers = append(s.routers, routerOn(fmt.Sprint("node-", s.IntN(4)), fmt.Sprint("router-", s.made), 1000-s.made))
		}
	}
}

// follow lets nodes hold what they are told to, in some random order; a node whose router is gone holds nothing.
func (s *scaled) follow(all bool) {
	for _, b := range s.blocks {
		f := b.Floating
		if here := successorOn(b, f.Holding.Holder); f.Holding.Holder != "" && !s.has(here) {
			f.Holding = v2.FloatingHolding{}
		}
		if first := f.Successors; len(first) > 0 && s.has(first[0]) && (all || s.IntN(3) > 0) {
			f.Holding = v2.FloatingHolding{Holder: first[0].Node, PodUID: first[0].PodUID, Since: &metav1.Time{}}
		}
	}
}

func (s *scaled) has(n v2.FloatingNode) bool {
	return slices.ContainsFunc(s.routers, func(p *corev1.Pod) bool { return p.UID == n.PodUID && p.Spec.NodeName == n.Node })
}

// firsts are the routers that have the addresses when nodes have followed: where an address moves to, else its holder, else the first one of its
// successors that is there.
func (s *scaled) firsts() map[string]string {
	firsts := map[string]string{}
	for _, b := range s.blocks {
		firsts[b.Name] = ""
		about := slices.Clone(b.Floating.Successors)
		if b.Floating.MovingTo != "" && !s.has(about[0]) {
			about = slices.Insert(about, 0, v2.FloatingNode{Node: b.Floating.Holding.Holder, PodUID: b.Floating.Holding.PodUID})
		}
		if i := slices.IndexFunc(about, s.has); i >= 0 {
			firsts[b.Name] = string(about[i].PodUID)
		}
	}
	return firsts
}

// Whatever routers come and go: the addresses stay the Egress's, each router has one if there are enough, their numbers differ by at most
// one, and none moves without a reason.
func TestAddressesFollowRouters(t *testing.T) {
	for seed := range uint64(300) {
		s := &scaled{Rand: rand.New(rand.NewPCG(seed, 7))}
		for i := range 1 + s.IntN(9) {
			s.blocks = append(s.blocks, floatingBlock(i))
		}
		for step := range 30 {
			s.change()
			before := s.firsts()
			places := egress.Places(ofRouters(), s.blocks, s.routers, internalIPs)
			if len(s.routers) == 0 && len(places) > 0 {
				t.Fatalf("seed %d, step %d: without routers %v is written", seed, step, places)
			}
			apply(s.blocks, places)
			if again := egress.Places(ofRouters(), s.blocks, s.routers, internalIPs); len(again) > 0 {
				t.Fatalf("seed %d, step %d: a second look changes %v", seed, step, again)
			}
			if len(s.routers) > 0 {
				if problem := s.check(before); problem != "" {
					t.Fatalf("seed %d, step %d: %s", seed, step, problem)
				}
			}
			s.follow(step%4 == 0)
			if again := egress.Places(ofRouters(), s.blocks, s.routers, internalIPs); s.moved(again) {
				t.Fatalf("seed %d, step %d: when nodes have followed, addresses move once more: %v", seed, step, again)
			}
		}
	}
}

// moved says whether another router is to have an address.
func (s *scaled) moved(places map[string]egress.Place) bool {
	return slices.ContainsFunc(s.blocks, func(b *v2.AddressBlock) bool {
		p, changed := places[b.Name]
		return changed && p.Successors[0].PodUID != b.Floating.Successors[0].PodUID
	})
}

// check returns what is wrong with the places of addresses, which before had the routers of before.
func (s *scaled) check(before map[string]string) string {
	counts, had := map[string]int{}, map[string]int{}
	for _, p := range s.routers {
		counts[string(p.UID)], had[string(p.UID)] = 0, 0
	}
	stayed := 0
	for name, uid := range s.firsts() {
		if _, alive := counts[uid]; !alive {
			return fmt.Sprintf("%s is to be with %q, which isn't there", name, uid)
		}
		counts[uid]++
		if _, alive := had[before[name]]; alive {
			had[before[name]]++
		}
		if uid == before[name] {
			stayed++
		}
	}
	numbers, former := slices.Sorted(maps.Values(counts)), slices.Sorted(maps.Values(had))
	if numbers[len(numbers)-1]-numbers[0] > 1 {
		return fmt.Sprintf("routers have %v addresses", numbers)
	}
	// With these numbers no more can stay: the routers with the most keep the most.
	most := 0
	for i := range numbers {
		most += min(numbers[i], former[i])
	}
	if stayed != most {
		return fmt.Sprintf("%d addresses stay, want %d: routers had %v, and have %v", stayed, most, former, numbers)
	}
	for _, b := range s.blocks {
		var nodes []string
		for _, n := range b.Floating.Successors {
			nodes = append(nodes, n.Node)
		}
		if slices.Sort(nodes); len(slices.Compact(slices.Clone(nodes))) != len(nodes) {
			return fmt.Sprintf("%s has two successors on one node: %v", b.Name, nodes)
		}
		holder := b.Floating.Holding
		if here := (v2.FloatingNode{Node: holder.Holder, PodUID: holder.PodUID}); s.has(here) && successorOn(b, holder.Holder).PodUID != holder.PodUID &&
			b.Floating.Successors[0].Node != holder.Holder {
			return fmt.Sprintf("%s is with %s, and has to leave that before it has moved: %+v", b.Name, holder.PodUID, b.Floating)
		}
	}
	return ""
}

// Routers for which there is no address are named, with what to do; one that gets one soon, too.
func TestRoutersWithoutAddress(t *testing.T) {
	r, s := routerOn("a", "r", 2), routerOn("a", "s", 1)
	ending := routerOn("b", "ending", 1)
	ending.DeletionTimestamp = &metav1.Time{}
	held := func(i int, p *corev1.Pod) *v2.AddressBlock {
		b := floatingBlock(i)
		b.Floating.Holding = v2.FloatingHolding{Holder: p.Spec.NodeName, PodUID: p.UID}
		b.Floating.Successors = []v2.FloatingNode{{Node: p.Spec.NodeName, PodUID: p.UID}}
		return b
	}
	for _, tt := range []struct {
		name           string
		blocks         []*v2.AddressBlock
		use            v2.EgressAddressUse
		reason, advice string
	}{
		{"one each", []*v2.AddressBlock{held(0, r), held(1, s)}, v2.EgressAddressOfRouter, egress.ReasonAddressesHeld, ""},
		{"too few", []*v2.AddressBlock{held(0, s)}, v2.EgressAddressOfRouter, egress.ReasonTooFewAddresses, "Routers r have no address, and get no clients: there are 1 addresses for 2 routers. Add"},
		{"both with one", []*v2.AddressBlock{held(0, r), held(1, r)}, v2.EgressAddressOfRouter, egress.ReasonRouterWithoutAddress, "Routers s have no address yet"},
		{"on no node", []*v2.AddressBlock{held(0, r), floatingBlock(1)}, v2.EgressAddressOfRouter, egress.ReasonNoHolder, "No node has 198.51.100.1"},
		{"of clients", []*v2.AddressBlock{held(0, s)}, v2.EgressAddressOfClient, egress.ReasonAddressesHeld, ""},
	} {
		e := ofRouters()
		e.Spec.Addresses.Use = tt.use
		facts := egress.Facts{Egress: e, Claim: egress.AddressClaim(e), Blocks: tt.blocks, Routers: []*corev1.Pod{ending, r, s}, Now: metav1.Now()}
		facts.Claim.Status.Conditions = []metav1.Condition{{Type: v2.ClaimReady, Status: metav1.ConditionTrue}}
		for i, b := range tt.blocks {
			facts.Claim.Status.Addresses = append(facts.Claim.Status.Addresses, v2.ClaimedAddress{Block: b.Name, IPv4: fmt.Sprint("198.51.100.", i)})
		}
		c := meta.FindStatusCondition(egress.Status(facts).Conditions, v2.EgressAddressesReady)
		if c == nil || c.Reason != tt.reason || !strings.HasPrefix(c.Message, tt.advice) || (c.Status == metav1.ConditionTrue) != (tt.advice == "") {
			t.Errorf("%s: condition %+v, want the reason %s and %q", tt.name, c, tt.reason, tt.advice)
		}
	}
}

// Routers that are ending keep what others don't need, and give up the rest for these.
func TestAddressesOfEndingRouters(t *testing.T) {
	stayed := 0
	for seed := range uint64(300) {
		s := &scaled{Rand: rand.New(rand.NewPCG(seed, 8)), graceful: true}
		for i := range 1 + s.IntN(9) {
			s.blocks = append(s.blocks, floatingBlock(i))
		}
		for step := range 30 {
			s.change()
			apply(s.blocks, egress.Places(ofRouters(), s.blocks, s.routers, internalIPs))
			if again := egress.Places(ofRouters(), s.blocks, s.routers, internalIPs); len(again) > 0 {
				t.Fatalf("seed %d, step %d: a second look changes %v", seed, step, again)
			}
			counts, ready := map[string]int{}, 0
			for _, uid := range s.firsts() {
				counts[uid]++
			}
			lacking, kept := 0, 0
			for _, p := range s.routers {
				switch n := counts[string(p.UID)]; {
				case p.DeletionTimestamp != nil:
					kept += n
				case n == 0:
					lacking++
					ready++
				default:
					ready++
				}
			}
			if ready > 0 && lacking != max(0, ready-len(s.blocks)) {
				t.Fatalf("seed %d, step %d: %d of %d routers have none of %d addresses, %d of which are with routers that end", seed, step, lacking, ready, len(s.blocks), kept)
			}
			stayed += kept
			s.follow(s.IntN(2) == 0)
		}
	}
	if stayed == 0 {
		t.Error("no router that ends keeps an address")
	}
}
