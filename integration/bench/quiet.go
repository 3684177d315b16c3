package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// usage is the processor time that processes have used, in ticks, by process ID. What
// a process has waited for counts for it.
type usage map[int]int

// ticksPerSecond is USER_HZ, which is 100 on all architectures that matter.
const ticksPerSecond = 100

// others returns the usage of processes that are neither this one, nor its descendants,
// nor the kernel's own.
func others() (usage, error) {
	type process struct{ parent, ticks int }
	all := map[int]process{}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		b, err := os.ReadFile(filepath.Join(dir, "stat"))
		if errors.Is(err, fs.ErrNotExist) || err != nil {
			continue // it has ended
		}
		pid, p, kernel, err := parseStat(string(b))
		if err != nil {
			return nil, err
		}
		if !kernel {
			all[pid] = process(p)
		}
	}
	mine := map[int]bool{os.Getpid(): true}
	var isMine func(pid int) bool
	isMine = func(pid int) bool {
		if known, ok := mine[pid]; ok {
			return known
		}
		p, ok := all[pid]
		mine[pid] = ok && p.parent != pid && isMine(p.parent)
		return mine[pid]
	}
	u := usage{}
	for pid, p := range all {
		if !isMine(pid) {
			u[pid] = p.ticks
		}
	}
	return u, nil
}

// parseStat reads a line of proc_pid_stat(5).
func parseStat(line string) (pid int, p struct{ parent, ticks int }, kernel bool, err error) {
	open, closed := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 0 || closed < open {
		return 0, p, false, fmt.Errorf("malformed stat %q", line)
	}
	f := strings.Fields(line[closed+1:]) // from field 3 on
	if len(f) < 15 {
		return 0, p, false, fmt.Errorf("malformed stat %q", line)
	}
	numbers := map[int]int{}
	for _, i := range []int{1, 6, 11, 12, 13, 14} {
		if numbers[i], err = strconv.Atoi(f[i]); err != nil {
			return 0, p, false, fmt.Errorf("malformed stat %q: %w", line, err)
		}
	}
	if pid, err = strconv.Atoi(strings.TrimSpace(line[:open])); err != nil {
		return 0, p, false, fmt.Errorf("malformed stat %q: %w", line, err)
	}
	const kthread = 0x00200000 // PF_KTHREAD, linux/sched.h
	p.parent = numbers[1]
	p.ticks = numbers[11] + numbers[12] + numbers[13] + numbers[14]
	return pid, p, numbers[6]&kthread != 0, nil
}

// since is the processor time that was used after before, in processors: 1 is one of
// them all the time.
func (u usage) since(before usage, elapsed time.Duration) float64 {
	sum := 0
	for pid, ticks := range u {
		if d := ticks - before[pid]; d > 0 {
			sum += d
		}
	}
	return float64(sum) / ticksPerSecond / elapsed.Seconds()
}

// disturbance runs do and returns how many processors others used meanwhile.
func disturbance(do func() error) (float64, error) {
	before, err := others()
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := do(); err != nil {
		return 0, err
	}
	elapsed := time.Since(begin)
	after, err := others()
	if err != nil {
		return 0, err
	}
	return after.since(before, elapsed), nil
}
