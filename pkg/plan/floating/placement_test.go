package floating_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/plan/floating"
)

// histories calls do with the random numbers of many histories.
func histories(t *testing.T, do func(t *testing.T, r *rand.Rand)) {
	for seed := range uint64(2000) {
		if do(t, rand.New(rand.NewPCG(seed, 3))); t.Failed() {
			t.Fatalf("in history %d", seed)
		}
	}
}

// names returns up to n names.
func names(r *rand.Rand, letter string, n int) []string {
	var all []string
	for _, i := range r.Perm(n)[:r.IntN(n+1)] {
		all = append(all, fmt.Sprint(letter, i))
	}
	return all
}

// Nodes and addresses come and go: all that a placement promises holds in each moment.
func TestPlacement(t *testing.T) {
	histories(t, func(t *testing.T, r *rand.Rand) {
		p := floating.Placement{Pack: r.IntN(2) == 0, MaxPerNode: r.IntN(4)}
		node := map[string]string{} // of each address
		for range 8 {
			nodes := names(r, "n", 6)
			var places []floating.Place
			for _, a := range names(r, "a", 12) {
				places = append(places, floating.Place{Address: a, Node: node[a]})
			}
			got := p.Successors(nodes, places)
			checkPlacement(t, p, nodes, places, got)
			for a, successors := range got {
				node[a] = successors[0]
			}
		}
	})
}

func checkPlacement(t *testing.T, p floating.Placement, nodes []string, places []floating.Place, got map[string][]string) {
	t.Helper()
	count, kept := map[string]int{}, 0
	for a, successors := range got {
		if !slices.Equal(slices.Sorted(slices.Values(successors)), slices.Sorted(slices.Values(nodes))) {
			t.Errorf("successors of %s are %v, of nodes %v", a, successors, nodes)
		}
		count[successors[0]]++
	}
	before := map[string]int{}
	var left, came []string
	for _, pl := range places {
		if had := slices.Contains(nodes, pl.Node); had && len(got[pl.Address]) == 0 {
			left = append(left, pl.Address)
		} else if !had && len(got[pl.Address]) > 0 {
			came = append(came, pl.Address)
		}
		before[pl.Node]++
		if s := got[pl.Address]; len(s) > 0 && s[0] == pl.Node {
			kept++
		}
	}
	if len(left) > 0 && len(came) > 0 {
		t.Errorf("%v lose their nodes, and %v, which had none, get one", left, came)
	}
	room := len(places)
	if p.MaxPerNode > 0 {
		room = p.MaxPerNode * len(nodes)
	}
	if want := min(len(places), room); len(nodes) > 0 && len(got) != want {
		t.Errorf("%d of %d addresses have a node, want %d; %+v, nodes %v", len(got), len(places), want, p, nodes)
	}
	var now, then []int
	for _, n := range nodes {
		now, then = append(now, count[n]), append(then, before[n])
	}
	slices.Sort(now)
	slices.Sort(then)
	if p.MaxPerNode > 0 && len(now) > 0 && slices.Max(now) > p.MaxPerNode {
		t.Errorf("nodes have %v addresses; %+v", count, p)
	}
	if !p.Pack && len(now) > 0 && slices.Max(now)-slices.Min(now) > 1 {
		t.Errorf("nodes have %v addresses, and differ by more than one", count)
	}
	// No arrangement with these numbers keeps more: the nodes with the most keep the most.
	most := 0
	for i := range now {
		most += min(now[i], then[i])
	}
	if kept != most {
		t.Errorf("%d addresses keep their node, want %d: before %v, now %v", kept, most, before, count)
	}
}

func TestPackFillsNodes(t *testing.T) {
	var places []floating.Place
	for i := range 7 {
		places = append(places, floating.Place{Address: fmt.Sprint("a", i)})
	}
	got := map[string]int{}
	for _, s := range (floating.Placement{Pack: true, MaxPerNode: 3}).Successors([]string{"n3", "n1", "n2", "n0"}, places) {
		got[s[0]]++
	}
	if want := map[string]int{"n0": 3, "n1": 3, "n2": 1}; !maps.Equal(got, want) {
		t.Errorf("nodes have %v addresses, want %v", got, want)
	}
}

// The addresses of a node don't all go to the same one when it fails, and stay there when another one comes.
func TestSuccessorsDiffer(t *testing.T) {
	var places []floating.Place
	for i := range 60 {
		places = append(places, floating.Place{Address: fmt.Sprint("a", i), Node: fmt.Sprint("n", i%4)})
	}
	four := (floating.Placement{}).Successors([]string{"n0", "n1", "n2", "n3"}, places)
	next := map[string]int{}
	for _, s := range four {
		if s[0] == "n0" {
			next[s[1]]++
		}
	}
	for _, n := range []string{"n1", "n2", "n3"} {
		if next[n] < 2 || next[n] > 9 {
			t.Errorf("of 15 addresses, %v go to each node when n0 fails", next)
		}
	}
	others := (floating.Placement{}).Successors([]string{"n4", "n3", "n2", "n1", "n0"}, places)
	for a, s := range others {
		without := slices.DeleteFunc(slices.Clone(s), func(n string) bool { return n == "n4" })
		if four[a][0] == s[0] && !slices.Equal(without, four[a]) {
			t.Errorf("successors of %s were %v and are %v when n4 has come", a, four[a], s)
		}
	}
}
