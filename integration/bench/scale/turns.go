package main

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// byTurns has two sides run by turns, each a set of processes, until done is closed: one side's are stopped for as long as the other's run. Both have the machine
// to themselves then, and whatever makes it faster or slower in a few seconds meets both alike. It returns for how long each side ran. Afterwards the first side runs, and
// the second one is stopped until resume is called.
func byTurns(length time.Duration, first, second []int, done <-chan struct{}) (ran [2]time.Duration, err error) {
	sides := [2][]int{first, second}
	turn := time.NewTicker(length)
	defer turn.Stop()
	for i := 0; ; i = 1 - i {
		if err := errors.Join(sendAll(sides[1-i], syscall.SIGSTOP), sendAll(sides[i], syscall.SIGCONT)); err != nil {
			return ran, errors.Join(err, resume(first))
		}
		began := time.Now()
		select {
		case <-done:
			ran[i] += time.Since(began)
			return ran, errors.Join(sendAll(second, syscall.SIGSTOP), resume(first))
		case <-turn.C:
			ran[i] += time.Since(began)
		}
	}
}

// resume has processes run that were stopped.
func resume(pids []int) error { return sendAll(pids, syscall.SIGCONT) }

func sendAll(pids []int, s syscall.Signal) error {
	var errs []error
	for _, pid := range pids {
		if err := syscall.Kill(pid, s); err != nil {
			errs = append(errs, fmt.Errorf("send %s to process %d: %w", s, pid, err))
		}
	}
	return errors.Join(errs...)
}
