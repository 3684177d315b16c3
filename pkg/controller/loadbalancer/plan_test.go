package loadbalancer

import (
	"testing"
	"time"
)

// Plans use a sixth of a processor, and less while a plan serves many Services; none is late by more than a second, or by three while it does.
func TestPause(t *testing.T) {
	for _, c := range []struct {
		took    time.Duration
		without int
		want    time.Duration
	}{
		{10 * time.Millisecond, 1, 50 * time.Millisecond},
		{10 * time.Millisecond, mostWaiting, 50 * time.Millisecond},
		{10 * time.Millisecond, mostWaiting + 1, 400 * time.Millisecond},
		{300 * time.Millisecond, 1, time.Second},
		{50 * time.Millisecond, 5000, 2 * time.Second},
		{300 * time.Millisecond, 5000, 3 * time.Second},
	} {
		if got := pause(c.took, c.without); got != c.want {
			t.Errorf("a plan took %s, %d Services have no address: the pause is %s, want %s", c.took, c.without, got, c.want)
		}
	}
}
