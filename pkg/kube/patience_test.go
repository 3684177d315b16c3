package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/pkg/testkit"
)

// apiServer is an API server in memory that has nothing, and refuses requests when it is told to.
type apiServer struct {
	retryAfter string // header of refusals; empty for none
	start      time.Time

	mu      sync.Mutex
	refuses bool
	hangs   bool
	seen    []seen
}

// seen is a request, and when it came.
type seen struct {
	at      time.Duration
	what    string
	refused bool
}

func newAPIServer(retryAfter string) *apiServer {
	return &apiServer{retryAfter: retryAfter, start: time.Now()}
}

func (s *apiServer) set(refuses bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuses = refuses
}

// count is the number of requests from a time on, until another.
func (s *apiServer) count(from, to time.Duration) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.seen {
		if r.at >= from && r.at < to {
			n++
		}
	}
	return n
}

// RoundTrip implements http.RoundTripper.
func (s *apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		r.Body.Close()
	}
	s.mu.Lock()
	refuses, hangs := s.refuses, s.hangs
	s.seen = append(s.seen, seen{time.Since(s.start), r.Method + " " + r.URL.Path, refuses})
	s.mu.Unlock()
	answer := &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Request: r}
	list := func(kind string) {
		answer.Body = io.NopCloser(strings.NewReader(`{"apiVersion":"v1","kind":"` + kind + `","metadata":{"resourceVersion":"1"}}`))
	}
	switch {
	case hangs:
		<-r.Context().Done()
		return nil, r.Context().Err()
	case refuses:
		answer.StatusCode = http.StatusTooManyRequests
		if s.retryAfter != "" {
			answer.Header.Set("Retry-After", s.retryAfter)
		}
		answer.Body = io.NopCloser(strings.NewReader("too many requests"))
	case r.URL.Query().Get("sendInitialEvents") == "true":
		answer.StatusCode = http.StatusUnprocessableEntity // as a server without WatchList
		answer.Body = io.NopCloser(strings.NewReader(`{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Invalid","code":422}`))
	case r.URL.Query().Get("watch") != "":
		events, end := io.Pipe()
		context.AfterFunc(r.Context(), func() { end.CloseWithError(r.Context().Err()) })
		answer.Body = events
	case strings.Contains(r.URL.Path, "/leases/"):
		list("Lease")
	default:
		list("NodeList")
	}
	return answer, nil
}

// clients are those of a program that has this API server.
func (s *apiServer) clients(t *testing.T) Clients {
	t.Helper()
	cfg := &rest.Config{Host: "http://server", Transport: s, QPS: -1}
	Patient(cfg)
	return testkit.Must(NewClients(cfg))(t)
}

func get(ctx context.Context, c rest.Interface, resource string) error {
	return c.Get().Resource(resource).Do(ctx).Error()
}

// While an API server refuses, a program with many watches and writes asks less and less often, and it is in sync soon after.
func TestPatience(t *testing.T) {
	const refused = 2 * time.Minute
	for _, retryAfter := range []string{"1", ""} {
		t.Run("Retry-After "+retryAfter, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPIServer(retryAfter)
				s.refuses = true
				c := s.clients(t)
				ctx, cancel := context.WithCancel(t.Context())
				var w Watches
				for i := range 8 {
					w.Add(NodeInformer(c.Core, fmt.Sprintf("metadata.name=n%d", i)), nil)
				}
				w.Start(ctx)
				var writers sync.WaitGroup
				for i := range 8 {
					writers.Go(func() {
						patch := c.Core.Patch(types.MergePatchType).Resource("nodes").Name(fmt.Sprint("n", i)).Body([]byte("{}"))
						for patch.Do(ctx).Error() != nil {
							time.Sleep(100 * time.Millisecond)
						}
					})
				}
				time.Sleep(refused)
				s.set(false)
				writers.Wait()
				for _, i := range w.informers {
					for !i.HasSynced() {
						time.Sleep(10 * time.Millisecond)
					}
				}
				if took := time.Since(s.start) - refused; took > longestPause+5*time.Second {
					t.Errorf("in sync %s after the API server took requests again", took)
				}
				first, middle, last := s.count(0, time.Second/2), s.count(time.Second/2, 30*time.Second), s.count(refused-time.Minute, refused)
				if first < 1 || first > 16 || middle > 8 || last < 1 || last > 4 {
					t.Errorf("%d requests at once, %d in the first half of a minute, %d in the last minute", first, middle, last)
				}
				cancel()
				w.Shutdown()
			})
		})
	}
}

// Requests of a program that was never refused, or is no more, wait for nothing.
func TestNoPatienceNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer("")
		c := s.clients(t)
		all := func() {
			t.Helper()
			began := time.Now()
			var group sync.WaitGroup
			for range 100 {
				group.Go(func() {
					if err := get(t.Context(), c.Core, "nodes"); err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
			if took := time.Since(began); took != 0 {
				t.Errorf("100 requests took %s", took)
			}
		}
		all()
		s.set(true)
		for range 5 {
			if err := get(t.Context(), c.Core, "nodes"); err == nil {
				t.Error("a refused request has no error")
			}
		}
		s.set(false)
		if err := get(t.Context(), c.Core, "nodes"); err != nil {
			t.Error(err)
		}
		all()
	})
}

// Many requests that are refused at once are one refusal, and an answer from before it ends no pause.
func TestRefusalsAtOnce(t *testing.T) {
	p := newPace(longestPause)
	ctx := t.Context()
	before, _, _ := p.ask()
	for range 10 {
		p.answered(ctx, before, true)
	}
	if p.answered(ctx, before, false); p.pause != firstPause {
		t.Errorf("the pause is %s, want %s", p.pause, firstPause)
	}
	for n, want := range []time.Duration{2, 4, 8, 16, 30, 30} {
		p.turn = time.Time{}
		sent, left, _ := p.ask()
		if _, next, _ := p.ask(); left > 0 || next <= 0 {
			t.Errorf("the turn comes in %s, the next in %s", left, next)
		}
		if p.answered(ctx, sent, true); p.pause != want*time.Second {
			t.Errorf("after %d further refusals the pause is %s, want %d s", n+1, p.pause, want)
		}
		if left := time.Until(p.turn); left < p.pause/2-time.Second || left > p.pause {
			t.Errorf("after %d further refusals the next turn is in %s, the pause is %s", n+1, left, p.pause)
		}
	}
}

// A request that waits ends with its context, and others aren't kept up by one that gets no answer.
func TestPatienceEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer("")
		c := s.clients(t)
		s.set(true)
		for len(s.seen) < 7 { // until pauses are long
			if err := get(t.Context(), c.Core, "nodes"); err == nil {
				t.Fatal("a refused request has no error")
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		err := get(ctx, c.Core, "nodes")
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, errRefused) || took != 5*time.Second {
			t.Errorf("a request of 5 s ended after %s: %v", took, err)
		}
		if n := len(s.seen); n != 7 {
			t.Errorf("%d requests were sent, want 7", n)
		}
		set := func(hangs bool) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.refuses, s.hangs = false, hangs
		}
		set(true)
		hanging, giveUp := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() { _ = get(hanging, c.Core, "nodes") })
		time.Sleep(longestPause) // it has the turn by then
		set(false)
		began = time.Now()
		if err := get(t.Context(), c.Core, "nodes"); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > longestPause || len(s.seen) != 9 {
			t.Errorf("behind a request without an answer another took %s, with %d requests in all", took, len(s.seen))
		}
		giveUp()
		group.Wait()
	})
}

// A leader isn't kept from its Lease by refusals of others, and asks for it seldom when it is refused itself.
func TestLeasesHaveTheirOwnPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer("")
		cfg := &rest.Config{Host: "http://server", Transport: s}
		Patient(cfg)
		client := &http.Client{Transport: testkit.Must(rest.TransportFor(cfg))(t)}
		ask := func(path string) int {
			t.Helper()
			answer, err := client.Post("http://server"+path, "application/json", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			testkit.Check(t, answer.Body.Close())
			return answer.StatusCode
		}
		const lease = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/l"
		s.set(true)
		for range 6 {
			ask("/api/v1/nodes")
		}
		s.set(false)
		began := time.Now()
		if code := ask(lease); code != http.StatusOK || time.Since(began) != 0 {
			t.Errorf("a Lease: %d after %s", code, time.Since(began))
		}
		s.set(true)
		ask(lease)
		for n := range 10 {
			began := time.Now()
			ask(lease)
			if took := time.Since(began); took > longestLeasePause || took < firstPause/2 || n > 3 && took < longestLeasePause/2 {
				t.Errorf("a Lease is asked for %s after refusal %d", took, n+1)
			}
		}
	})
}

// A PodDisruptionBudget that forbids an eviction says nothing about the API server.
func TestRefusedEvictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer("")
		c := s.clients(t)
		s.set(true)
		for range 5 {
			if err := c.Core.Post().Namespace("ns").Resource("pods").Name("p").SubResource("eviction").Body([]byte("{}")).Do(t.Context()).Error(); err == nil {
				t.Error("a refused eviction has no error")
			}
		}
		s.set(false)
		if err := get(t.Context(), c.Core, "nodes"); err != nil || time.Since(s.start) != 0 {
			t.Errorf("the next request: %v, after %s", err, time.Since(s.start))
		}
	})
}

// A program whose configuration is that of Config is patient with a server that it reaches by TCP.
func TestConfigIsPatient(t *testing.T) {
	var mu sync.Mutex
	var times []time.Time
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if times = append(times, time.Now()); len(times) == 1 {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"NodeList","items":[{"metadata":{"name":"n"}}]}`))
	}))
	defer server.Close()
	cfg := testkit.Must(Config(kubeconfig(t, server.URL), "program"))(t)
	c := testkit.Must(NewClients(cfg))(t)
	list := func() (nodes corev1.NodeList, err error) {
		return nodes, c.Core.Get().Resource("nodes").Do(t.Context()).Into(&nodes)
	}
	if _, err := list(); err == nil {
		t.Error("a refused request has no error")
	}
	if nodes, err := list(); err != nil || len(nodes.Items) != 1 {
		t.Errorf("%d Nodes, %v", len(nodes.Items), err)
	}
	if len(times) != 2 || times[1].Sub(times[0]) < firstPause/2 {
		t.Errorf("requests came at %v, want two, the second half of %s later at least", times, firstPause)
	}
}
