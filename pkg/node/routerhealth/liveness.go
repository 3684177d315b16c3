package routerhealth

import "time"

// A router is dead after so many questions in a row without an answer, and lives again after so
// many with one: more, up to a bound, if it died soon after it had come back.
const (
	deathMisses  = 3
	doubtMisses  = 6 // however much that is in doubt
	leastAnswers = 3
	mostAnswers  = 96
	// flapping is how soon.
	flapping = 5 * time.Minute
)

// liveness is whether a router answers. The zero value is one that wasn't asked yet, and counts as
// living.
//
//	lives, answers               lives
//	lives, 3 misses in a row     dead, unless that is in doubt: all others are silent, too, and
//	                             one of them not for so long yet; after 6, dead anyway
//	never answered               dead like that only if others of its Egress do: something
//	                             else may keep all questions away; while it isn't ready it
//	                             isn't asked
//	dead, answers in a row       lives after 3, after 6 when it dies soon again, ...
type liveness struct {
	dead bool
	// missed and answers are those in a row.
	missed, answers int
	// needed is how many answers a dead one has to give.
	needed int
	// last is the last answer, zero without any, and back when it came back.
	last, back time.Time
}

// deadAlready is a router that a former process found dead.
func deadAlready() liveness { return liveness{dead: true, needed: leastAnswers} }

// note counts a question that was answered, or not.
func (l *liveness) note(now time.Time, answer bool) {
	if !answer {
		l.missed++
		l.answers = 0
		return
	}
	l.missed = 0
	l.answers++
	l.last = now
}

// judge says whether the router is dead now and wasn't, or the other way round; others, whether
// other routers of the Egress answer, and doubt, whether all may become silent now.
func (l *liveness) judge(now time.Time, others, doubt bool) (changed bool) {
	if l.missed > 0 {
		if l.dead || l.missed < deathMisses || doubt && l.missed < doubtMisses || l.last.IsZero() && !others {
			return false
		}
		if l.needed > 0 && now.Sub(l.back) < flapping {
			l.needed = min(2*l.needed, mostAnswers)
		} else {
			l.needed = leastAnswers
		}
		l.dead = true
		return true
	}
	if !l.dead || l.answers < l.needed {
		return false
	}
	l.dead, l.back = false, now
	return true
}
