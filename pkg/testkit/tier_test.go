package testkit

import (
	"testing"
	"time"
)

// The weather scales waits and no bound of a figure; emulated processors scale both.
func TestScales(t *testing.T) {
	for _, tt := range []struct {
		timeouts, limits string
		wait, limit      time.Duration
	}{
		{"", "", time.Second, time.Second},
		{"3.5", "", 3500 * time.Millisecond, time.Second},
		{"40", "10", 40 * time.Second, 10 * time.Second},
		{"0", "-1", time.Second, time.Second},
		{"fast", "fast", time.Second, time.Second},
	} {
		t.Setenv("COIL_TEST_TIMEOUT_SCALE", tt.timeouts)
		t.Setenv("COIL_TEST_LIMIT_SCALE", tt.limits)
		if wait, limit := Timeout(time.Second), Limit(time.Second); wait != tt.wait || limit != tt.limit {
			t.Errorf("scales %q and %q: a wait of %s and a limit of %s, want %s and %s", tt.timeouts, tt.limits, wait, limit, tt.wait, tt.limit)
		}
	}
}
