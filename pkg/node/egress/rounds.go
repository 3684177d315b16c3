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

// mostAsking is as long as a round may take on a host that is busy; see echo.ErrLate.
const mostAsking = 2 * time.Second

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
	for _, r := range rounds {
		r.err = errSlow
		go func() {
			answers, err := m.cfg.Ask(ctx, r.client.Netns, askWait, r.questions)
			m.mu.Lock()
			r.client.asking = false
			m.mu.Unlock()
			outcomes <- outcome{r, answers, err}
		}()
	}
	timer := time.NewTimer(mostAsking)
	defer timer.Stop()
	for range rounds {
		select {
		case o := <-outcomes:
			o.round.answers, o.round.err = o.answers, o.err
		case <-timer.C:
			return
		}
	}
}
