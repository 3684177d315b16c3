package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"time"
)

// scaleEnv is the environment variable by which testkit.Timeout scales waits.
const scaleEnv = "COIL_TEST_TIMEOUT_SCALE"

// speed is how long a machine takes for what tests do most.
type speed struct {
	compute time.Duration // a fixed computation on each of two processors at once
	exec    time.Duration // fork and exec of a small program, until it has ended
	fsync   time.Duration // a write of 4 KiB to a file in the folder for temporary files, and fsync
}

// reference is the speed by which scale is 1: that of a virtual machine with two processors (Intel Xeon,
// 2 GHz) and a virtio disk. The figures are medians of what measure found in a quarter of an hour, with a
// priority that leaves the time of others out:
//
//	go test -c -o /tmp/gotest.test ./hack/gotest
//	COIL_GOTEST_MEASURE=12 chrt -f 50 /tmp/gotest.test -test.v -test.run=TestMeasure
var reference = speed{compute: 17 * time.Millisecond, exec: 850 * time.Microsecond, fsync: 150 * time.Microsecond}

// Waits are never scaled by more than maxScale: a test that waits for what never comes would
// take the time of all others.
const maxScale = 4

// scale says by how much waits are to be longer than on the reference: as much as a computation, or a
// program that starts and writes a record, takes longer. A slow disk alone counts by what it adds to that.
// It comes in steps of a half, the first of them only at 1.25, because go test runs what it has cached
// again if the environment differs.
func (s speed) scale() float64 {
	slower := max(ratio(s.compute, reference.compute), ratio(s.exec+s.fsync, reference.exec+reference.fsync))
	return min(max(math.Round(2*slower)/2, 1), maxScale)
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

func (s speed) String() string {
	part := func(what string, a, b time.Duration) string {
		return fmt.Sprintf("%s %.3g ms (%.1fx)", what, float64(a)/float64(time.Millisecond), ratio(a, b))
	}
	return part("computation", s.compute, reference.compute) + ", " +
		part("fork and exec", s.exec, reference.exec) + ", " + part("fsync", s.fsync, reference.fsync)
}

// measure takes the speed of this machine, in half a second where that is the reference's.
func measure(ctx context.Context) (s speed, err error) {
	s.compute, err = median(7, func() error {
		var both sync.WaitGroup
		for range 2 {
			both.Go(compute)
		}
		both.Wait()
		return nil
	})
	if err != nil {
		return s, err
	}
	s.exec, err = median(41, func() error { return exec.CommandContext(ctx, "true").Run() })
	if err != nil {
		return s, err
	}
	f, err := os.CreateTemp("", "gotest-fsync-*")
	if err != nil {
		return s, err
	}
	defer os.Remove(f.Name())
	page := make([]byte, 4096)
	s.fsync, err = median(41, func() error {
		_, err := f.Write(page)
		return errors.Join(err, f.Sync())
	})
	return s, errors.Join(err, f.Close())
}

// compute is a fixed computation of the processor that reads and writes 1 MiB of memory at random.
func compute() {
	words := make([]uint64, 1<<17)
	x := uint64(88172645463325252)
	for range 4_000_000 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		words[x%uint64(len(words))] += x
	}
}

// median is how long do takes.
func median(times int, do func() error) (time.Duration, error) {
	var took []time.Duration
	for range times {
		begin := time.Now()
		if err := do(); err != nil {
			return 0, err
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	return took[times/2], nil
}

// processors is for how long all processors together did something, and did nothing, since the machine started, in ticks.
type processors struct{ busy, idle uint64 }

// readProcessors reads the sum of /proc/stat (proc_stat(5)): the fourth and fifth column are idle, and idle while a disk is
// waited for; the ninth and tenth, of guests, are in the first two already.
func readProcessors() (p processors, err error) {
	content, err := os.ReadFile("/proc/stat")
	if err != nil {
		return p, err
	}
	var column [8]uint64
	if _, err := fmt.Sscanf(string(content), "cpu %d %d %d %d %d %d %d %d",
		&column[0], &column[1], &column[2], &column[3], &column[4], &column[5], &column[6], &column[7]); err != nil {
		return p, fmt.Errorf("/proc/stat: %w", err)
	}
	for i, ticks := range column {
		if i == 3 || i == 4 {
			p.idle += ticks
		} else {
			p.busy += ticks
		}
	}
	return p, nil
}

// busySince is the share of the time since before, from 0 to 1.
func (p processors) busySince(before processors) float64 {
	busy, idle := p.busy-before.busy, p.idle-before.idle
	if busy+idle == 0 {
		return 0
	}
	return float64(busy) / float64(busy+idle)
}

// scaled is a scale multiplied with the one that the user has set.
func scaled(scale float64, user string) float64 {
	if f, err := strconv.ParseFloat(user, 64); err == nil && f > 0 {
		return scale * f
	}
	return scale
}

// steps are those of the wall clock against the monotonic clock: the wall clock was set, or the machine
// stood still.
type steps struct {
	mu      sync.Mutex
	seen    bool
	offset  time.Duration // wall clock less monotonic clock
	count   int
	longest time.Duration
}

// leastStep is longer than what a clock that is slewed gains in a second, and than a pause between the
// readings of two clocks.
const leastStep = 50 * time.Millisecond

// look compares both clocks: wall and mono are the time since any moments that stay the same.
func (s *steps) look(wall, mono time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	offset := wall - mono
	step := offset - s.offset
	s.offset = offset
	if s.seen && step.Abs() >= leastStep {
		s.count++
		if step.Abs() > s.longest.Abs() {
			s.longest = step
		}
	}
	s.seen = true
}

// watch looks at the clocks until ctx ends.
func (s *steps) watch(ctx context.Context, every time.Duration) {
	start := time.Now()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		now := time.Now() // has both clocks; Round takes the monotonic one away
		s.look(now.Round(0).Sub(start.Round(0)), now.Sub(start))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *steps) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count == 0 {
		return "no step of the wall clock"
	}
	return fmt.Sprintf("%d steps of the wall clock, the longest of %s", s.count, s.longest.Round(time.Millisecond))
}
