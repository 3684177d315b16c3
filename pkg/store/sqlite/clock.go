package sqlite

import (
	"time"

	"golang.org/x/sys/unix"
)

// Clock tells both times that a record needs.
type Clock interface {
	// Now is the wall clock, which may jump.
	Now() time.Time
	// Boottime is CLOCK_BOOTTIME: the time since the machine booted, sleep
	// included. It never goes back within a boot.
	Boottime() time.Duration
}

// systemClock is the kernel's.
type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) Boottime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // nothing has cooled down then: the safe side
	}
	return time.Duration(ts.Nano())
}

// timeFormat is ISO 8601 in UTC, as the CHECKs of the schema want it.
const timeFormat = "2006-01-02T15:04:05.000Z"

func formatTime(t time.Time) string { return t.UTC().Format(timeFormat) }

// roundUp is t in the precision of timeFormat. It rounds up, so that a state that was
// entered after a moment never looks as if it was entered before.
func roundUp(t time.Time) time.Time {
	return t.UTC().Add(time.Millisecond - 1).Truncate(time.Millisecond)
}

// stamp is a point in the order in which addresses were freed; the zero one is before all.
type stamp struct {
	bootID     string
	boottimeMS int64
	seq        int64
}

// cooled says whether an address that was freed at f has rested for the cool-down.
// An address that was freed in another boot has rested at least as long as the
// machine is up, or it was seen to have cooled down in that boot. Of two stamps,
// the one with the smaller seq never cools later.
func (s *Store) cooled(f stamp, boottime time.Duration) bool {
	if f.seq <= s.cooledSeq.Load() {
		return true
	}
	rested := boottime
	if f.bootID == s.bootID {
		rested -= time.Duration(f.boottimeMS) * time.Millisecond
	}
	return rested >= s.coolDown
}
