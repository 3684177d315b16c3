package routerhealth

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/coil-net/coil/pkg/kernel/echo"
)

const (
	// mostAsking is as long as a round may take on a host that is busy, see echo.ErrLate, and longAsking as long as it
	// takes on others, though a router doesn't answer.
	mostAsking = 2 * time.Second
	longAsking = 2 * askWait
	// muteFor is for how long the rounds of a namespace are given no more than longAsking, once one has taken longer: pods
	// that take turns would make each round take mostAsking.
	muteFor = time.Minute
)

// errSlow: the round of a pod goes on.
var errSlow = errors.New("it takes the kernel too long to send from the pod")

// outcome is the result of a pod's questions.
type outcome struct {
	of      *sender
	answers []echo.Answer
	err     error
	took    time.Duration
}

// do asks the questions of a pod.
func (c *Checker) do(ctx context.Context, s *sender) outcome {
	start := time.Now()
	questions := make([]echo.Question, len(s.about))
	for i, q := range s.about {
		questions[i] = echo.Question{Link: s.to[q.addr], From: q.end.source, To: q.addr}
	}
	answers, err := c.net.Ask(ctx, s.Netns, askWait, questions)
	c.mu.Lock()
	defer c.mu.Unlock()
	s.asking = false
	return outcome{s, answers, err, time.Since(start)}
}

// askAll lets pods ask, and waits for none longer than mostAsking: a program in a pod may give its links rules that take
// long. Nothing is known of the answers then, and the pod isn't asked again until it has come back.
func (c *Checker) askAll(ctx context.Context, all []*sender) {
	outcomes := make(chan outcome, len(all))
	patient := 0 // pods that are waited for
	for _, s := range all {
		s.answers = make([]echo.Answer, len(s.about)) // all are Unknown
		s.err, s.late = errSlow, true                 // until it has come back
		if !s.mute {
			patient++
		}
		go func() { outcomes <- c.do(ctx, s) }()
	}
	if patient == 0 { // it is the host, not the pods
		patient = len(all)
		for _, s := range all {
			s.mute = false
		}
	}
	long, most := time.NewTimer(longAsking), time.NewTimer(mostAsking)
	defer long.Stop()
	defer most.Stop()
	for left, waits := len(all), true; left > 0 && (waits || patient > 0); {
		select {
		case o := <-outcomes:
			left--
			copy(o.of.answers, o.answers)
			o.of.err, o.of.late = o.err, o.took > longAsking
			if !o.of.mute {
				patient--
			}
		case <-long.C:
			waits = false
		case <-most.C:
			patient = 0
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(c.muted, func(_ string, until time.Time) bool { return until.Before(now) })
	for _, s := range all {
		if s.late {
			c.muted[s.Namespace] = now.Add(muteFor)
		}
	}
}
