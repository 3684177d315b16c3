package announce

import "time"

// pauses are those after an announcement, before it is repeated: packets may be lost, and a switch may learn late that a port is there.
var pauses = []time.Duration{time.Second, time.Second, 3 * time.Second}

// turns are the announcements that are still to be made.
type turns []turn

// turn is one of some spots. left are the pauses between those that follow.
type turn struct {
	at    time.Time
	left  []time.Duration
	spots []spot
}

// add has spots announced again after each pause. They were announced just now.
func (t *turns) add(now time.Time, spots []spot) {
	*t = append(*t, turn{now.Add(pauses[0]), pauses[1:], spots})
}

// next is when the next turn is; zero if there is none.
func (t turns) next() time.Time {
	var next time.Time
	for _, u := range t {
		if next.IsZero() || u.at.Before(next) {
			next = u.at
		}
	}
	return next
}

// due returns the spots whose turn has come.
func (t *turns) due(now time.Time) []spot {
	var spots []spot
	var rest turns
	for _, u := range *t {
		if u.at.After(now) {
			rest = append(rest, u)
			continue
		}
		spots = append(spots, u.spots...)
		if len(u.left) > 0 {
			rest = append(rest, turn{u.at.Add(u.left[0]), u.left[1:], u.spots})
		}
	}
	*t = rest
	return spots
}
