package vm

import (
	"sync"
	"time"
)

// tscKHz is the rate of the host's time-stamp counter in kHz, which is that of an emulated machine's; 0 if there is
// none. The machine's kernel is told the rate. By itself it would count against an emulated PIT (arch/x86/kernel/tsc.c,
// pit_calibrate_tsc): when the host is busy meanwhile, its clock runs up to ten times too fast from then on.
var tscKHz = sync.OnceValue(func() int64 {
	return measureTSC(50 * time.Millisecond) // samples are exact to 1 us, so that this is to 40 ppm
})

// measureTSC counts for so long, and returns kHz.
func measureTSC(interval time.Duration) int64 {
	from := sampleTSC()
	time.Sleep(interval)
	to := sampleTSC()
	return int64(float64(to.cycles-from.cycles) / float64(to.at.Sub(from.at)) * 1e6)
}

type tscSample struct {
	at     time.Time
	cycles uint64
}

// sampleTSC reads the counter between two readings of the clock, and returns the sample for which these are the nearest.
func sampleTSC() tscSample {
	var best tscSample
	least := time.Duration(-1)
	for range 100 {
		before := time.Now()
		c := cycles()
		gap := time.Since(before)
		if least < 0 || gap < least {
			best, least = tscSample{before.Add(gap / 2), c}, gap
		}
	}
	return best
}
