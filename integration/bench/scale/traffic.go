package main

import (
	"cmp"
	"context"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// traffic is what programs ask an API server for. It can refuse all of it.
type traffic struct {
	mu       sync.Mutex
	began    time.Time
	seconds  []int          // requests of each second since
	kinds    map[string]int // requests by verb and resource
	excess   int            // requests that the API server itself has answered 429
	refusing bool
	// watches end one watch each that is open.
	watches map[*watched]bool
}

func newTraffic() *traffic {
	t := &traffic{watches: map[*watched]bool{}}
	t.reset()
	return t
}

// reset begins to count anew.
func (t *traffic) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.began, t.seconds, t.kinds, t.excess = time.Now(), nil, map[string]int{}, 0
}

// refuse lets each request be answered 429 from now on, or no more. Watches that are open end then, as those of an API server
// that is started again.
func (t *traffic) refuse(refuse bool) {
	t.mu.Lock()
	t.refusing = refuse
	var open []*watched
	if refuse {
		open = slices.Collect(maps.Keys(t.watches))
	}
	t.mu.Unlock()
	for _, w := range open {
		w.end()
	}
}

// count counts a request and says whether it is refused.
func (t *traffic) count(r *http.Request) (refused bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	second := int(time.Since(t.began) / time.Second)
	for len(t.seconds) <= second {
		t.seconds = append(t.seconds, 0)
	}
	t.seconds[second]++
	t.kinds[verbAndResource(r)]++
	return t.refusing
}

// answered counts the answer of the API server, nil if there was none.
func (t *traffic) answered(answer *http.Response) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if answer != nil && answer.StatusCode == http.StatusTooManyRequests {
		t.excess++
	}
}

// open is the number of watches that are open.
func (t *traffic) open() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.watches)
}

// rate is the number of requests per second from one second to another.
func (t *traffic) rate(from, to int) float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	sum := 0
	for _, n := range t.seconds[min(from, len(t.seconds)):min(to, len(t.seconds))] {
		sum += n
	}
	return float64(sum) / float64(to-from)
}

// tooMany is the number of requests that the API server itself has answered 429.
func (t *traffic) tooMany() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.excess
}

// peak is the number of requests of the second that had most.
func (t *traffic) peak() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Max(append(t.seconds, 0))
}

// byKind returns the number of requests by verb and resource, the most frequent first.
func (t *traffic) byKind() (kinds []string, counts map[string]int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	counts = maps.Clone(t.kinds)
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	}), counts
}

// to returns a connection of a program to the API server, whose requests are counted.
func (t *traffic) to(next http.RoundTripper) http.RoundTripper { return &counting{t, next} }

type counting struct {
	*traffic
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (c *counting) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.count(r) {
		if r.Body != nil {
			r.Body.Close()
		}
		return &http.Response{
			StatusCode: http.StatusTooManyRequests, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
			Header: http.Header{"Retry-After": {"1"}, "Content-Type": {"text/plain; charset=utf-8"}},
			Body:   io.NopCloser(strings.NewReader("Too many requests, please try again later.\n")),
		}, nil
	}
	if !isWatch(r) {
		answer, err := c.next.RoundTrip(r)
		c.answered(answer)
		return answer, err
	}
	ctx, end := context.WithCancel(r.Context())
	answer, err := c.next.RoundTrip(r.WithContext(ctx))
	if c.answered(answer); err != nil {
		end()
		return nil, err
	}
	w := &watched{ReadCloser: answer.Body, t: c.traffic, end: end}
	c.mu.Lock()
	c.watches[w] = true
	c.mu.Unlock()
	answer.Body = w
	return answer, nil
}

// watched is the answer of a watch.
type watched struct {
	io.ReadCloser
	t   *traffic
	end context.CancelFunc
}

// Close implements io.Closer.
func (w *watched) Close() error {
	w.end()
	w.t.mu.Lock()
	delete(w.t.watches, w)
	w.t.mu.Unlock()
	return w.ReadCloser.Close()
}

func isWatch(r *http.Request) bool { return r.URL.Query().Get("watch") != "" }

// verbAndResource is what a request asks for, in Kubernetes' words, such as "watch namespaces".
func verbAndResource(r *http.Request) string {
	path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	path = path[min(map[string]int{"api": 2, "apis": 3}[path[0]], len(path)):]
	if len(path) > 2 && path[0] == "namespaces" {
		path = path[2:]
	}
	resource, named := "", len(path) > 1
	if len(path) > 0 {
		resource = path[0]
	}
	if len(path) > 2 {
		resource += "/" + path[2]
	}
	verb := map[string]string{
		http.MethodGet: "list", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete",
	}[r.Method]
	switch {
	case isWatch(r):
		verb = "watch"
	case verb == "list" && named:
		verb = "get"
	}
	return verb + " " + resource
}
