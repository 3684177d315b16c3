package vm

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// The rate of the counter is found out while all processors are busy, too.
func TestTSCRate(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	for range 2 * runtime.NumCPU() {
		busy.Go(func() {
			for ctx.Err() == nil {
			}
		})
	}
	defer busy.Wait()
	defer cancel()
	want := measureTSC(time.Second)
	for range 5 {
		if got := measureTSC(50 * time.Millisecond); math.Abs(float64(got-want)) > float64(want)/1000 {
			t.Errorf("in 50 ms the counter's rate is %d kHz, in a second %d kHz", got, want)
		}
	}
}

// The clock of an emulated machine has the rate of the host's counter, whatever its kernel counts while it starts:
// bogomips are the rate by which its clock runs, in units of 500 kHz.
func TestClockRate(t *testing.T) {
	testkit.Need(t, testkit.VM)
	for _, series := range []string{"6.12", "6.1"}[:testkit.EgressForm.Times(1, 2)] {
		t.Run(series, func(t *testing.T) {
			var out bytes.Buffer
			err := Run(t.Context(), Options{
				Kernel: series, Accel: TCG, Memory: 512, Stdout: &out, Log: t.Output(), Args: []string{"sh", "-c", "cat /proc/cmdline; grep -m1 ^bogomips /proc/cpuinfo"},
			})
			if err != nil {
				t.Fatal(err)
			}
			if given := fmt.Sprintf(" tsc_early_khz=%d\n", tscKHz()); !strings.Contains(out.String(), given) {
				t.Errorf("the kernel isn't given%s", given)
			}
			_, value, _ := strings.Cut(out.String(), "bogomips\t: ")
			bogomips, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if got, want := bogomips*500, float64(tscKHz()); err != nil || math.Abs(got-want) > 5 {
				t.Errorf("the machine's clock runs by %.0f kHz (%q, %v), want %.0f", got, out.String(), err, want)
			}
		})
	}
}
