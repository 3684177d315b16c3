package coilctl

import (
	"net/http"
	"sync"
	"time"
)

// clock is how far the clock of the API server is ahead of this computer's. What is late, and how old objects are, is judged by times that the cluster has written.
type clock struct {
	mu    sync.Mutex // guards ahead
	ahead time.Duration
}

// off is how far the API server's clock is ahead, as far as its answers tell; it is 0 as long as there is none.
func (c *clock) off() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ahead
}

// now is the time of the cluster.
func (t *tool) now() time.Time { return time.Now().Add(t.clock.off()) }

// learn reads the Date of an answer, which has whole seconds. Clocks that may be equal are taken for equal.
func (c *clock) learn(date string, sent, got time.Time) {
	at, err := http.ParseTime(date)
	if err != nil {
		return // a proxy may have taken it out
	}
	var ahead time.Duration
	switch end := at.Add(time.Second); {
	case at.After(got):
		ahead = at.Sub(got)
	case end.Before(sent):
		ahead = end.Sub(sent)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead = ahead
}

// listening has the answers to a client tell the time.
func (c *clock) listening(to http.RoundTripper) http.RoundTripper { return &listener{c, to} }

type listener struct {
	clock *clock
	to    http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (l *listener) RoundTrip(r *http.Request) (*http.Response, error) {
	sent := time.Now()
	answer, err := l.to.RoundTrip(r)
	if err == nil && answer != nil {
		l.clock.learn(answer.Header.Get("Date"), sent, time.Now())
	}
	return answer, err
}

// WrappedRoundTripper is for client-go, which looks for the transport below.
func (l *listener) WrappedRoundTripper() http.RoundTripper { return l.to }
