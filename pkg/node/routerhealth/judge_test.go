package routerhealth

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Findings that are counted once for all routers of an Egress are those that each would have by looking at all others.
func TestOthers(t *testing.T) {
	now := time.Unix(1000, 0)
	seen := map[findings]bool{}
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		c := &circle{}
		for range 1 + rng.IntN(4) {
			r := &router{liveness: liveness{missed: rng.IntN(5), dead: rng.IntN(3) == 0}}
			if rng.IntN(3) > 0 {
				r.last = now.Add(-time.Duration(rng.IntN(5)) * time.Second)
			}
			c.members = append(c.members, &member{router: r, circle: c})
		}
		for _, r := range c.members {
			answer, living, doubt := false, false, false
			for _, o := range c.members {
				if o == r || o.last.IsZero() {
					continue
				}
				answer = answer || now.Sub(o.last) < 3*time.Second
				living = living || o.missed == 0
				doubt = doubt || o.missed > 0 && !o.dead && o.missed < 3
			}
			got := c.others(r.router, now)
			seen[got] = true
			if (got.lately > 0) != answer || got.doubtful() != (doubt && !living) {
				t.Fatalf("seed %d: others answer %t, doubt %t; want %t, %t", seed, got.lately > 0, got.doubtful(), answer, doubt && !living)
			}
		}
	}
	if len(seen) < 10 {
		t.Errorf("only %d findings", len(seen))
	}
}

// A router whose question had to wait has answered lately, if it answered the last one.
func TestWaitingIsNoSilence(t *testing.T) {
	now := time.Unix(1000, 0)
	for waited, want := range map[int]bool{0: false, 7: false, 8: true} {
		other := &router{liveness: liveness{last: now.Add(-10 * time.Second)}, waited: waited}
		c := &circle{members: []*member{{router: other}, {router: &router{}}}}
		if got := c.others(c.members[1].router, now).lately > 0; got != want {
			t.Errorf("an answer 10 s ago, waited for %d: %t", waited, got)
		}
	}
}
