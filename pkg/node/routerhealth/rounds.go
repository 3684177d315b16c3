package routerhealth

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/coil-net/coil/pkg/kernel/echo"
)

// round is what one pod asks, and hears.
type round struct {
	*sender
	about   []question
	answers []echo.Answer // none if nothing could be asked
	err     error
}

// answer returns that to a question.
func (r *round) answer(i int) echo.Answer {
	if i < len(r.answers) {
		return r.answers[i]
	}
	return echo.Unknown
}

const (
	// mostAsking is as long as a round may take on a host that is busy, see echo.ErrLate, and longAsking as long as it
	// takes on others, though a router doesn't answer.
	mostAsking = 2 * time.Second
	longAsking = 2 * askWait
	// muteFor is for how long the rounds of a namespace are given no more than longAsking, once one has taken longer: pods
	// that take turns would make each round take mostAsking.
	muteFor = time.Minute
)

// errSlow is of a pod whose round goes on.
var errSlow = errors.New("it takes the kernel too long to send from the pod")

// outcome is what came of a round.
type outcome struct {
	round   *round
	answers []echo.Answer
	err     error
	took    time.Duration
}

// do asks the questions of a round.
func (c *Checker) do(ctx context.Context, r *round) outcome {
	start := time.Now()
	questions := make([]echo.Question, len(r.about))
	for i, q := range r.about {
		questions[i] = echo.Question{Link: r.to[q.addr], From: q.end.source, To: q.addr}
	}
	answers, err := c.net.Ask(ctx, r.Netns, askWait, questions)
	c.mu.Lock()
	defer c.mu.Unlock()
	r.asking = false
	return outcome{r, answers, err, time.Since(start)}
}

// askAll does rounds, and waits for no pod longer than mostAsking: a program in a pod may give its links rules
// that take long. Nothing is known of the answers then, and the pod isn't asked again until it has come back.
func (c *Checker) askAll(ctx context.Context, rounds []*round) {
	outcomes := make(chan outcome, len(rounds))
	patient := 0 // pods that are waited for
	for _, r := range rounds {
		r.err = errSlow
		if !r.mute {
			patient++
		}
		go func() { outcomes <- c.do(ctx, r) }()
	}
	if patient == 0 { // it is the host, not the pods
		patient = len(rounds)
		for _, r := range rounds {
			r.mute = false
		}
	}
	long, most := time.NewTimer(longAsking), time.NewTimer(mostAsking)
	defer long.Stop()
	defer most.Stop()
	var late []*round
	for left, waits := len(rounds), true; left > 0 && (waits || patient > 0); {
		select {
		case o := <-outcomes:
			left--
			o.round.answers, o.round.err = o.answers, o.err
			if !o.round.mute {
				patient--
			}
			if o.took > longAsking {
				late = append(late, o.round)
			}
		case <-long.C:
			waits = false
		case <-most.C:
			patient = 0
		}
	}
	for _, r := range rounds {
		if errors.Is(r.err, errSlow) {
			late = append(late, r)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(c.muted, func(_ string, until time.Time) bool { return until.Before(now) })
	for _, r := range late {
		c.muted[r.Namespace] = now.Add(muteFor)
	}
}
