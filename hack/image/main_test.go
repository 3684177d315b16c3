package main

import "testing"

func TestSourceDate(t *testing.T) {
	for env, want := range map[string]int64{"": 0, "1700000000": 1700000000} {
		got, err := sourceDate(env)
		if err != nil || got.Unix() != want {
			t.Errorf("sourceDate(%q) = %v, %v; want %d", env, got, err, want)
		}
	}
	if _, err := sourceDate("yesterday"); err == nil {
		t.Error("no error for a date that isn't a number")
	}
}
