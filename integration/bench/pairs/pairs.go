// Package pairs compares measurements that are made in turns, so that other work on the machine meets all sides alike.
//
// It must not know what is measured.
package pairs

import (
	"math"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// InTurns measures all sides, so many times. Each time another one is the first.
func InTurns(times, sides int, measure func(side int) (float64, error)) ([][]float64, error) {
	values := make([][]float64, sides)
	for i := range times {
		for j := range sides {
			side := (i + j) % sides
			v, err := measure(side)
			if err != nil {
				return nil, err
			}
			values[side] = append(values[side], v)
		}
	}
	return values, nil
}

// Median is that of some values, at least one.
func Median(values []float64) float64 { return slices.Sorted(slices.Values(values))[len(values)/2] }

// Ratio is the median of ratios. It is between Low and High with a confidence of 95 %, however the ratios are distributed.
type Ratio struct{ Median, Low, High float64 }

// RatioOf is that of the pairs of two sides.
func RatioOf(dividends, divisors []float64) Ratio {
	ratios := make([]float64, len(dividends))
	for i := range dividends {
		ratios[i] = dividends[i] / divisors[i]
	}
	slices.Sort(ratios)
	// How many values are below the median is distributed binomially.
	n := len(ratios)
	off := int(math.Ceil(1.96 * math.Sqrt(float64(n)) / 2))
	return Ratio{ratios[n/2], ratios[max(0, n/2-off)], ratios[min(n-1, n/2+off)]}
}

// Urgent locks a goroutine to a thread that the kernel prefers to those of others, which then hardly
// change what is measured. The thread stays on the given processors; nil are all.
func Urgent(on *unix.CPUSet) error {
	runtime.LockOSThread() // until the goroutine ends, and the thread with it
	if on != nil {
		if err := unix.SchedSetaffinity(0, on); err != nil {
			return err
		}
	}
	return unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
}

// oneProcessor is the first one that the process may use.
func oneProcessor() (*unix.CPUSet, error) {
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(unix.Getpid(), &all); err != nil {
		return nil, err
	}
	first := 0
	for !all.IsSet(first) {
		first++ // the kernel lets no thread have none
	}
	one.Set(first)
	return &one, nil
}

// UrgentOnOne is Urgent on one processor, the same for all that call it.
func UrgentOnOne() error {
	one, err := oneProcessor()
	if err != nil {
		return err
	}
	return Urgent(one)
}
