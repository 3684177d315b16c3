package main

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestScale(t *testing.T) {
	times := func(compute, exec, fsync float64) speed {
		by := func(d time.Duration, f float64) time.Duration { return time.Duration(float64(d) * f) }
		return speed{by(reference.compute, compute), by(reference.exec, exec), by(reference.fsync, fsync)}
	}
	for _, tt := range []struct {
		speed speed
		user  string
		want  float64
	}{
		{times(1, 1, 1), "", 1},
		{times(0.2, 0.1, 0.5), "", 1},
		{times(1.2, 1, 1), "", 1},
		{times(1.3, 1, 1), "", 1.5},
		{times(1, 2.1, 1), "", 2},
		{times(1, 1, 2), "", 1},
		{times(1, 1, 10), "", 2.5},
		{times(1, 1, 700), "", 4},
		{times(2, 1, 1), "2.5", 5},
		{times(1, 1, 1), "0.5", 0.5},
		{times(2, 1, 1), "fast", 2},
		{times(2, 1, 1), "-3", 2},
	} {
		if got := scaled(tt.speed.scale(), tt.user); got != tt.want {
			t.Errorf("%s, and the user's %q: scale %v, want %v", tt.speed, tt.user, got, tt.want)
		}
	}
}

// Tests get the product of both scales, and the line on the machine says so.
func TestRunScales(t *testing.T) {
	t.Setenv(scaleEnv, "2")
	slow := func(context.Context) (speed, error) {
		return speed{3 * reference.compute, reference.exec, reference.fsync}, nil
	}
	out, err := runOf(t.Context(), t, weather, options{packages: []string{"./late"}, run: "TestSteady", measure: slow})
	if err != nil {
		t.Error(err)
	}
	for _, want := range []string{"machine: computation 51 ms (3.0x), fork and exec ", "; COIL_TEST_TIMEOUT_SCALE=6\n", "TestSteady: scale 6\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	broken := func(context.Context) (speed, error) { return speed{}, os.ErrPermission }
	if _, err := runOf(t.Context(), t, weather, options{packages: []string{"./late"}, measure: broken}); !errors.Is(err, os.ErrPermission) {
		t.Errorf("a machine that can't be measured: %v", err)
	}
}

// COIL_GOTEST_MEASURE is how often to measure; the figures are the reference's where it was at rest.
func TestMeasure(t *testing.T) {
	times, _ := strconv.Atoi(os.Getenv("COIL_GOTEST_MEASURE"))
	for range max(times, 1) {
		s, err := measure(t.Context())
		if err != nil || s.compute <= 0 || s.exec <= 0 || s.fsync <= 0 {
			t.Fatalf("%+v, %v", s, err)
		}
		t.Logf("%s: scale %g", s, s.scale())
	}
	if _, err := median(3, func() error { return os.ErrClosed }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("an error of what is measured: %v", err)
	}
}

func TestSteps(t *testing.T) {
	var s steps
	look := func(wall, mono time.Duration) { s.look(wall, mono) }
	look(7*time.Second, 0)
	look(8*time.Second, time.Second)
	look(9*time.Second+time.Millisecond, 2*time.Second) // slewed
	if got := s.String(); got != "no step of the wall clock" {
		t.Error(got)
	}
	look(11*time.Second, 3*time.Second)  // a second forward
	look(10*time.Second, 4*time.Second)  // two back
	look(20*time.Second, 14*time.Second) // none
	if got := s.String(); got != "2 steps of the wall clock, the longest of -2s" {
		t.Error(got)
	}
}

func TestWatchLooksUntilTheEnd(t *testing.T) {
	var s steps
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.watch(ctx, time.Hour)
	if !s.seen || s.count != 0 {
		t.Errorf("%+v, want one look at the clocks", &s)
	}
}

// Processors are busy while something computes.
func TestProcessors(t *testing.T) {
	before, err := readProcessors()
	if err != nil {
		t.Fatal(err)
	}
	compute() // several ticks of 10 ms
	compute()
	compute()
	now, err := readProcessors()
	if share := now.busySince(before); err != nil || share <= 0 || share > 1 {
		t.Errorf("busy for %f of the time, %v", share, err)
	}
	if share := before.busySince(before); share != 0 {
		t.Errorf("busy for %f of no time", share)
	}
}
