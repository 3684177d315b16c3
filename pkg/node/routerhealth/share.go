package routerhealth

import (
	"cmp"
	"context"
	"hash/maphash"
	"maps"
	"slices"

	"k8s.io/klog/v2"
)

// mostQuestions is how many a node asks in a round. One with 100 pods, of which each uses 64 Egresses of four routers in
// two families, which are 512 routers, has 1,024 at most in turn; six times as many when all routers become silent at
// about the same time; and 13,000 when a quarter of them comes back that each pod has missed answers of, and so asks
// for itself.
//
// If there are more, each namespace has its share: questions of its pods delay no question that pods of another
// can ask. The other questions are asked in the next rounds, and no router is held to be silent meanwhile.
const mostQuestions = 16384

// seed is that of all hashes of this process.
var seed = maphash.MakeSeed()

// place identifies a question; by its hash a question is always at the same place of a queue.
type place struct {
	routerKey
	pod   *pod // nil of all that can ask in turn
	known bool
}

// wish is a question that pods of a namespace have.
type wish struct {
	question
	place place
	hash  uint64
}

// wishes are the wishes of a namespace: questions to routers in turn, and questions of pods for themselves.
// Neither kind waits for the other.
type wishes struct {
	queues [2][]wish
	next   [2]uint64 // see Checker
	popped int
}

// pop takes the next wish that isn't fulfilled yet. asked are the places of the routers that a pod in turn asks already.
func (w *wishes) pop(asked map[place]bool) (wish, bool) {
	for range w.queues {
		i := w.popped % len(w.queues)
		w.popped++
		for len(w.queues[i]) > 0 {
			first := w.queues[i][0]
			w.queues[i], w.next[i] = w.queues[i][1:], first.hash+1
			if !first.turn || !asked[first.place] {
				return first, true
			}
		}
	}
	return wish{}, false
}

// share chooses questions when there are too many: of each namespace one after the other. A router that pods of
// several namespaces can ask in turn is asked by that which comes to it first.
func (c *Checker) share(members []*member) (all []question) {
	type pair struct {
		of *sender
		to *member
	}
	chosen := map[pair]int{} // which of all
	asked := map[place]bool{}
	namespaces := c.wishes(members)
	names := slices.Collect(maps.Keys(namespaces)) // in another order each time
	for len(names) > 0 && len(all) < mostQuestions {
		left := names[:0]
		for _, name := range names {
			if len(all) == mostQuestions {
				break
			}
			q, ok := namespaces[name].pop(asked)
			if !ok {
				continue
			}
			left = append(left, name)
			if q.turn {
				asked[q.place] = true
			}
			p := pair{q.end.sender, q.member}
			if i, twice := chosen[p]; twice {
				all[i].turn = all[i].turn || q.turn
				continue
			}
			chosen[p] = len(all)
			all = append(all, q.question)
		}
		names = left
	}
	c.next = map[string][2]uint64{}
	for name, w := range namespaces {
		c.next[name] = w.next
	}
	for _, r := range members {
		if !asked[place{r.routerKey, nil, r.proven}] && slices.ContainsFunc(r.ends, func(e end) bool { return !e.absent }) {
			r.waited++
		}
	}
	return all
}

// wishes returns all that there is to ask, by namespace.
func (c *Checker) wishes(members []*member) map[string]*wishes {
	all := map[string]*wishes{}
	add := func(queue int, q question, p place) {
		w := all[q.end.Namespace]
		if w == nil {
			w = &wishes{next: c.next[q.end.Namespace]}
			all[q.end.Namespace] = w
		}
		w.queues[queue] = append(w.queues[queue], wish{q, p, maphash.Comparable(seed, p)})
	}
	inTurn := func(r *member, ends []end, turn int, known bool) {
		seen := map[string]bool{}
		for i := range ends {
			e := ends[(turn+i)%len(ends)]
			if !seen[e.Namespace] {
				seen[e.Namespace] = true
				add(0, question{r, e, known, true}, place{r.routerKey, nil, known})
			}
		}
	}
	var pods enquirers
	for _, r := range members {
		pods.sort(r)
		inTurn(r, pods.takers, r.turn, true)
		inTurn(r, pods.unknown, r.newTurn, false)
		for _, e := range pods.old {
			if pods.asksItself(r, e) {
				add(1, question{r, e, true, false}, place{r.routerKey, e.pod, true})
			}
		}
	}
	for _, w := range all {
		for i, q := range w.queues {
			slices.SortFunc(q, func(a, b wish) int { return cmp.Compare(a.hash-w.next[i], b.hash-w.next[i]) })
		}
	}
	return all
}

// tellWhether logs when the node begins, and ends, to have too many questions.
func (c *Checker) tellWhether(ctx context.Context, questions int) {
	if crowded := questions > mostQuestions; crowded != c.crowded {
		c.crowded = crowded
		klog.FromContext(ctx).Info("Pods of the node have more questions to routers of Egresses than are asked in a second: the others wait",
			"questions", questions, "asked", min(questions, mostQuestions))
	}
}
