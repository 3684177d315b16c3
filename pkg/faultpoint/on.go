//go:build faultpoints

package faultpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// passages counts down to the passage at which the process ends, by point.
var passages = selected(os.Getenv(Env))

func selected(env string) map[Point]*atomic.Int64 {
	all := map[Point]*atomic.Int64{}
	for s := range strings.SplitSeq(env, ",") {
		name, number, _ := strings.Cut(s, "=")
		n, err := strconv.ParseInt(number, 10, 64)
		if name == "" || err != nil {
			continue
		}
		left := new(atomic.Int64)
		left.Store(n)
		all[Point(name)] = left
	}
	return all
}

// At marks a point.
func At(p Point) {
	left := passages[p]
	if left == nil || left.Add(-1) != 0 {
		return
	}
	fmt.Fprintf(os.Stderr, "Killed at fault point %s\n", p)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // until the signal comes
}

// held is the file that holds repairs; empty for none.
var held = os.Getenv(EnvHeld)

// Held says that repairs wait.
func Held() bool {
	if held == "" {
		return false
	}
	_, err := os.Stat(held)
	return err == nil
}
