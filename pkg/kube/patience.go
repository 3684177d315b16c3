package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

const (
	// firstPause is the longest time from a refusal to the next request. It doubles with each further refusal.
	firstPause = time.Second
	// longestPause bounds it: so long after an API server takes requests again, each program has noticed.
	longestPause = 30 * time.Second
	// longestLeasePause is that of requests about Leases.
	longestLeasePause = 4 * time.Second
)

// errRefused tells why a request was never sent.
var errRefused = errors.New("the API server refuses requests (429 Too Many Requests)")

// Patient makes clients of cfg ask less and less often while the API server refuses requests: while it answers
// 429 (Too Many Requests, RFC 6585), which it does if it has more to do than it can. client-go alone sends a refused request
// again at the interval that the server names, a second, and all other requests as if nothing had happened; so thousands of
// nodes keep an API server from recovering.
//
//	answer                              requests of the program from then on
//	429                                 one after a pause, of a second at most; the others wait
//	429 to that one                     one after a pause of up to twice as long, at most 30 s
//	any other to that one               all at once
//	any to a request from before these  no change
//	none, the connection broke          one after the same pause
//
// The length of a pause is random, from half to all of what it may be, so that programs that were refused together don't come
// back together. Lists and watches are requests like all others. A request that waits fails when its context ends, with the
// context's error. Nothing is delayed before a refusal.
//
// Requests about Leases have a pace of their own, because the API server has a priority level of its own for them
// (leader-election, by the FlowSchema workload-leader-election). Refusals of others say nothing about them, and a leader
// that waited as long as these do would lose its Lease without need. Pauses between them are of 4 s at most, which is
// shorter than those between renewals. A leader that is refused so asks several times before it gives up, but not once a
// second as client-go alone would.
//
// An answer 429 to an Eviction says that a PodDisruptionBudget forbids it, and isn't a refusal.
func Patient(cfg *rest.Config) {
	all, leases := newPace(longestPause), newPace(longestLeasePause)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return &patient{next, all, leases} })
}

// patient sends the requests of all clients of a program.
type patient struct {
	next        http.RoundTripper
	all, leases *pace
}

// RoundTrip implements http.RoundTripper.
func (p *patient) RoundTrip(r *http.Request) (*http.Response, error) {
	own := p.all
	if strings.HasPrefix(r.URL.Path, "/apis/coordination.k8s.io/") {
		own = p.leases
	}
	ctx := r.Context()
	sent, err := own.wait(ctx)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // as each RoundTripper must
		}
		return nil, err
	}
	answer, err := p.next.RoundTrip(r)
	if err != nil || strings.HasSuffix(r.URL.Path, "/eviction") {
		return answer, err
	}
	own.answered(ctx, sent, answer.StatusCode == http.StatusTooManyRequests)
	return answer, nil
}

// WrappedRoundTripper implements k8s.io/apimachinery/pkg/util/net.RoundTripperWrapper.
func (p *patient) WrappedRoundTripper() http.RoundTripper { return p.next }

// pace says when requests are sent.
type pace struct {
	longest time.Duration

	mu sync.Mutex // of everything below
	// pause is how long the next pause may be; 0 while nothing is refused.
	pause time.Duration
	// turn is when the next request is sent, if pause isn't 0.
	turn time.Time
	// changes counts those of pause: the answer to a request that was sent before the last one is old.
	changes int
	// since is when the first of the refusals came.
	since time.Time
	// taken is closed when a request isn't refused any more.
	taken chan struct{}
}

func newPace(longest time.Duration) *pace { return &pace{longest: longest, taken: make(chan struct{})} }

// wait waits until a request may be sent, and returns what answered needs to know. The error is that of ctx.
func (p *pace) wait(ctx context.Context) (sent int, err error) {
	for {
		sent, left, taken := p.ask()
		if left <= 0 {
			return sent, nil
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-taken:
		case <-ctx.Done():
			err = fmt.Errorf("%w: %w", errRefused, ctx.Err())
		}
		timer.Stop()
		if err != nil {
			return 0, err
		}
	}
}

// ask gives the caller the turn, or says how long it is to wait, unless taken is closed before.
func (p *pace) ask() (sent int, left time.Duration, taken <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pause == 0 {
		return p.changes, 0, nil
	}
	if left = time.Until(p.turn); left <= 0 {
		p.turn = time.Now().Add(jittered(p.pause)) // that of the next one, should there be no answer
	}
	return p.changes, left, p.taken
}

// answered notes the answer to a request.
func (p *pace) answered(ctx context.Context, sent int, refused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sent != p.changes || !refused && p.pause == 0 {
		return
	}
	p.changes++
	log := klog.FromContext(ctx)
	if refused {
		if p.pause == 0 {
			p.since = time.Now()
		}
		if p.pause == firstPause { // a single refusal is no news
			log.Info("The API server refuses requests, and is asked less and less often", "longestPause", p.longest)
		}
		p.pause = min(max(2*p.pause, firstPause), p.longest)
		p.turn = time.Now().Add(jittered(p.pause))
		return
	}
	if p.pause > firstPause {
		log.Info("The API server takes requests again", "after", time.Since(p.since).Round(time.Second))
	}
	p.pause = 0
	close(p.taken)
	p.taken = make(chan struct{})
}

// jittered returns a random time from half of d to d.
func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }
