package egress

import (
	"context"
	"errors"
	"time"

	"github.com/coil-net/coil/pkg/kernel/echo"
)

// round is what one client asks, and hears.
type round struct {
	client    *sandbox
	mute      bool // see sandbox
	questions []echo.Question
	about     []question
	answers   []echo.Answer // none if nothing could be asked
	err       error
}

// ask adds a question.
func (r *round) ask(q question) {
	r.questions = append(r.questions, echo.Question{Link: q.end.to[q.addr], From: q.end.source, To: q.addr})
	r.about = append(r.about, q)
}

// answer returns that to a question.
func (r *round) answer(i int) echo.Answer {
	if i < len(r.answers) {
		return r.answers[i]
	}
	return echo.Unknown
}

const (
	// mostAsking is as long as a round may take on a host that is busy; see echo.ErrLate.
	mostAsking = 2 * time.Second
	// muteFor is for how long others don't wait for a client that couldn't ask, or not in time: two that take turns
	// would make each round take mostAsking.
	muteFor = time.Minute
)

// errSlow is of a client whose round goes on.
var errSlow = errors.New("it takes the kernel too long to send from the pod")

// askAll does rounds, and waits for no client longer than mostAsking: a program in a pod may give its links rules
// that take long. Nothing is known of the answers then, and the client isn't asked again until it has come back.
func (m *Manager) askAll(ctx context.Context, rounds []*round) {
	type outcome struct {
		round   *round
		answers []echo.Answer
		err     error
	}
	outcomes := make(chan outcome, len(rounds))
	awaited := 0
	for _, r := range rounds {
		r.err = errSlow
		if !r.mute {
			awaited++
		}
		go func() {
			answers, err := m.cfg.Ask(ctx, r.client.Netns, askWait, r.questions)
			m.mu.Lock()
			r.client.asking = false
			m.mu.Unlock()
			outcomes <- outcome{r, answers, err}
		}()
	}
	if awaited == 0 {
		awaited = len(rounds)
		for _, r := range rounds {
			r.mute = false
		}
	}
	timer := time.NewTimer(mostAsking)
	defer timer.Stop()
	for awaited > 0 {
		select {
		case o := <-outcomes:
			o.round.answers, o.round.err = o.answers, o.err
			if !o.round.mute {
				awaited--
			}
		case <-timer.C:
			return
		}
	}
}
