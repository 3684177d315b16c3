package routerhealth

import (
	"maps"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/kernel/echo"
)

// findings are how many routers of a circle have answered lately, how many answered the last question, and how many
// don't but haven't died yet. Routers that have never answered don't count.
type findings struct {
	lately, answering, wavering int
}

func (f *findings) count(r *router, now time.Time, by int) {
	switch {
	case r.last.IsZero():
		return
	case r.missed == 0:
		f.answering += by
	case !r.dead && r.missed < deathMisses:
		f.wavering += by
	}
	if now.Sub(r.last) < askEvery*time.Duration(deathMisses+r.waited) {
		f.lately += by
	}
}

// others returns the findings without one router.
func (c *circle) others(r *router, now time.Time) findings {
	if c.found == nil {
		c.found = &findings{}
		for _, o := range c.members {
			c.found.count(o.router, now, 1)
		}
	}
	f := *c.found
	f.count(r, now, -1)
	return f
}

// doubtful says whether all other routers of an Egress have become silent, one of them not for long
// enough: that one had better not get the flows of a router that became silent a moment before.
func (f findings) doubtful() bool { return f.answering == 0 && f.wavering > 0 }

// ties say how many routers of a circle know a pod, and whether one answered its last question.
type ties struct {
	known    int
	answered bool
}

// tiesOf are the ties of a pod, each counted once.
type tiesOf map[*circle]ties

func (t tiesOf) find(c *circle, p *pod) ties {
	if found, counted := t[c]; counted {
		return found
	}
	var found ties
	if len(p.answered) > 0 {
		for _, r := range c.members {
			if p.answered[r.addr] {
				found.known++
				found.answered = found.answered || p.missed[r.routerKey] == 0
			}
		}
	}
	t[c] = found
	return found
}

// hear notes the answers of routers. It returns the routers that died or came back, and the pods for which alone one
// did.
func (c *Checker) hear(asking []*sender) (changed []*member, pods map[types.NamespacedName]bool) {
	now := time.Now()
	var noted []*member
	// Answers first: a router that answers shows that others could.
	for _, pass := range []echo.Answer{echo.Given, echo.Missing, echo.Unknown} {
		for _, s := range asking {
			noted = append(noted, c.note(now, s, pass)...)
		}
	}
	others := make([]findings, len(noted))
	for i, r := range noted {
		others[i] = r.circle.others(r.router, now)
	}
	pods = map[types.NamespacedName]bool{}
	for _, s := range asking {
		if c.compare(s) {
			pods[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}] = true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, r := range noted {
		if r.judge(now, others[i].lately > 0, others[i].doubtful()) {
			changed = append(changed, r)
		}
	}
	return changed, pods
}

// note notes the answers of one kind to a pod, and returns the routers for which they count for all pods.
func (c *Checker) note(now time.Time, s *sender, alike echo.Answer) (noted []*member) {
	given, to := alike == echo.Given, tiesOf{}
	counts := make([]bool, len(s.about))
	for i, q := range s.about {
		counts[i] = q.turn && alike != echo.Unknown && s.answers[i] == alike && (q.known || !q.proven && (given || q.knownByOthers(to)))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, q := range s.about {
		if s.answers[i] != alike {
			continue
		}
		if given || alike == echo.Missing && q.known {
			s.heard(q.routerKey, given)
		}
		switch {
		case !q.turn:
		case q.known:
			q.router.turn++
		case !given:
			q.newTurn++
		}
		if counts[i] {
			q.note(now, given)
			if given {
				q.waited = 0
			}
			noted = append(noted, q.member)
		}
	}
	return noted
}

// knownByOthers says whether another router of the Egress knows a pod that this one has never answered. The router
// may not know a new pod yet: its silence counts only then, and only if no pod asks that it knows.
func (q question) knownByOthers(to tiesOf) bool {
	others := to.find(q.circle, q.end.pod).known
	if q.end.answered[q.addr] {
		others--
	}
	return others > 0
}

// compare notes which routers answer others but not the pod, whom other routers of the Egress do answer, and says whether
// one of them didn't before, or does now.
func (c *Checker) compare(s *sender) bool {
	to, differ := tiesOf{}, map[routerKey]bool{}
	for _, q := range s.about {
		// The router itself hasn't answered.
		if alone := s.missed[q.routerKey] >= deathMisses && to.find(q.circle, s.pod).answered; alone != s.alone[q.routerKey] {
			differ[q.routerKey] = alone
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.Copy(s.alone, differ)
	return len(differ) > 0
}

// heard notes whether a router has answered the pod.
func (p *pod) heard(key routerKey, given bool) {
	if !given {
		p.missed[key]++
		return
	}
	p.answered[key.addr] = true
	delete(p.missed, key)
}

// forget forgets the routers' answers to the pod; addrs are the addresses of these routers.
func (p *pod) forget(gone map[routerKey]bool, addrs map[netip.Addr]bool) {
	maps.DeleteFunc(p.answered, func(a netip.Addr, _ bool) bool { return addrs[a] })
	maps.DeleteFunc(p.missed, func(k routerKey, _ int) bool { return gone[k] })
	maps.DeleteFunc(p.alone, func(k routerKey, _ bool) bool { return gone[k] })
}
