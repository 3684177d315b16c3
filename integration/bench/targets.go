package main

import "github.com/coil-net/coil/integration/bench/figures"

// targets holds the figures against what they have to reach. A figure that wasn't
// measured has none.
func targets(rows []Row, d Daemon) figures.Figures {
	find := func(system, op string, concurrency, existing int, family string) (Row, bool) {
		for _, r := range rows {
			if r.System == system && r.Op == op && r.Concurrency == concurrency && r.Existing == existing && r.Family == family {
				return r, true
			}
		}
		return Row{}, false
	}
	var all figures.Figures
	add, ok := find("coil", "ADD", 1, 0, ipv4)
	if ok {
		all.AtMost("ADD, one at a time, p50", "ms", add.P50, 2.5)
	}
	kernel, ok1 := find("kernel", "ADD", 1, 0, ipv4)
	exec, ok2 := find("exec", "ADD", 1, 0, ipv4)
	if ok && ok1 && ok2 {
		all.AtMost("ADD, one at a time, p50, by that of exec and kernel together", "", add.P50/(exec.P50+kernel.P50), 1.8)
	}
	if dualStack, ok2 := find("coil", "ADD", 1, 0, dual); ok && ok2 {
		all.AtMost("ADD, one at a time, p50, dual stack more than IPv4", "ms", dualStack.P50-add.P50, 1)
	}
	many, ok := find("coil", "ADD", 8, 0, ipv4)
	if ok {
		all.AtLeast("ADD, 8 at once", "/s", many.Rate, 600)
	}
	if del, ok := find("coil", "DEL", 1, 0, ipv4); ok {
		all.AtMost("DEL, one at a time, p50", "ms", del.P50, 5)
	}
	if del, ok := find("coil", "DEL", 8, 0, ipv4); ok {
		all.AtLeast("DEL, 8 at once, until the links are gone", "/s", del.Rate, 600)
	}
	failures := 0
	for _, r := range rows {
		if r.System == "coil" {
			failures += r.Failures
		}
	}
	all.AtMost("calls of Coil that failed", "", float64(failures), 0)
	if d.Churned == 0 {
		return all
	}
	all.AtMost("ADDs and DELs that failed while links came and went", "", float64(d.ChurnFailures), 0)
	all.AtLeast("pods attached and detached meanwhile", "", float64(d.Churned), 10000)
	all.AtMost("coild, from its start to the first ADD, 1000 pods", "ms", d.Restart, 300)
	all.AtMost("coild, resident memory, 250 pods", "MiB", d.RSS, 40)
	all.AtMost("coild, idle, 250 pods", "% of a processor", d.Idle*100, 0.1)
	return all
}
