package scale

import (
	"testing"
	"time"
)

func TestTimeout(t *testing.T) {
	for _, tc := range []struct {
		name, env string
		want      time.Duration
	}{
		{"unset", "", 10 * time.Second},
		{"fraction", "2.5", 25 * time.Second},
		{"not a number", "fast", 10 * time.Second},
		{"zero would cancel everything", "0", 10 * time.Second},
		{"negative would cancel everything", "-1", 10 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv(Env, tc.env)
			if got := Timeout(10 * time.Second); got != tc.want {
				t.Errorf("Timeout(10s) with %s=%q is %s, want %s", Env, tc.env, got, tc.want)
			}
		})
	}
}
