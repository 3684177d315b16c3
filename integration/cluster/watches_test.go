package cluster

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/audit"
	"github.com/coil-net/coil/pkg/testkit"
)

// The programs of each node list and watch no more than their table says.
func TestProgramsWatchOnlyWhatTheyNeed(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 2, "10.76.0.0/28", "fd00:76::/124")
	e.start(t, ns, "p", 3, e.Nodes()...)
	e.running(t, ns, time.Minute)
	for _, account := range audited {
		t.Run(account, func(t *testing.T) {
			rs, err := auditLog.Requests(account)
			if err != nil {
				t.Fatal(err)
			}
			problems, err := audit.Problems(account, rs, e.Nodes())
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range problems {
				t.Error(p)
			}
		})
	}
}

// At rest, no program of Coil uses the processor.
func TestIdle(t *testing.T) {
	e := use(t)
	const span = 20 * time.Second
	ticks := func() map[string]int {
		all := map[string]int{}
		for _, node := range e.Nodes() {
			out, err := e.Exec(t.Context(), node, "sh", "-c", `for p in /proc/[0-9]*; do read -r line < $p/stat 2>/dev/null && echo "$line"; done`)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(out)) {
				open, closed := strings.Index(line, "("), strings.LastIndex(line, ")")
				program, f := line[open+1:closed], strings.Fields(line[closed+1:])
				if !strings.HasPrefix(program, "coil") || strings.HasPrefix(program, "coil-lab") {
					continue
				}
				var user, system int
				fmt.Sscan(f[11], &user)
				fmt.Sscan(f[12], &system)
				all[node+" "+program+" "+line[:open]] += user + system
			}
		}
		return all
	}
	// After a change programs finish what it started; the least of several spans counts.
	testkit.Eventually(t, 3*time.Minute, "Coil is idle", func() error {
		before := ticks()
		time.Sleep(span)
		var busy []string
		for who, n := range ticks() {
			// A hundred ticks are a second of a processor.
			if share := float64(n-before[who]) / (100 * span.Seconds()); share > 0.01 {
				busy = append(busy, fmt.Sprintf("%s uses %.1f %% of a processor", who, 100*share))
			}
		}
		if len(before) < 8 || len(busy) > 0 {
			return fmt.Errorf("of %d programs: %v", len(before), busy)
		}
		return nil
	})
}
