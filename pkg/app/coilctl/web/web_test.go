package web_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl/web"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/page"
	"github.com/coil-net/coil/pkg/testkit"
)

// site is a page of a cluster that has nothing but a pool.
type site struct {
	t   *testing.T
	url string

	mu sync.Mutex
	// followed is how often the cluster was followed so far, and now how many do at the moment.
	followed, now int
	pool          string
	changed       func()
	err           error
}

func newSite(t *testing.T, o web.Options) *site {
	t.Helper()
	s := &site{t: t, pool: "blue"}
	l := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	s.url = "http://" + l.Addr().String() + "/"
	o.Follow, o.Title = s.follow, "test"
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- web.Serve(ctx, l, o) }()
	t.Cleanup(func() {
		stop()
		select {
		case err := <-ended:
			testkit.Check(t, err)
		case <-time.After(testkit.Timeout(20 * time.Second)):
			t.Error("it goes on")
		}
		if s.counts() != 0 {
			t.Error("the cluster is followed when all has ended")
		}
	})
	return s
}

func (s *site) follow(ctx context.Context, done *sync.WaitGroup, changed func()) (func() page.Cluster, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	s.followed++
	s.now++
	s.changed = changed
	done.Go(func() {
		<-ctx.Done()
		s.mu.Lock()
		s.now--
		s.mu.Unlock()
	})
	return func() page.Cluster {
		s.mu.Lock()
		defer s.mu.Unlock()
		p := &v2.AddressPool{}
		p.Name = s.pool
		return page.Cluster{Objects: inventory.Objects{Pools: []*v2.AddressPool{p}}, Sources: []page.Source{{Resource: page.Pools, Known: true}}}
	}, nil
}

func (s *site) counts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// rename changes the pool.
func (s *site) rename(name string) {
	s.mu.Lock()
	s.pool = name
	changed := s.changed
	s.mu.Unlock()
	changed()
}

// look opens the stream; the result waits for a line that contains a text.
func (s *site) look() (wants func(text string), leave func()) {
	s.t.Helper()
	answer := testkit.Must(http.Get(s.url + "events"))(s.t)
	s.t.Cleanup(func() { answer.Body.Close() })
	lines := make(chan string, 100)
	go func() {
		for r := bufio.NewScanner(answer.Body); r.Scan(); {
			lines <- r.Text()
		}
		close(lines)
	}()
	return func(text string) {
		s.t.Helper()
		late := time.After(testkit.Timeout(20 * time.Second))
		for {
			select {
			case line, ok := <-lines:
				if !ok {
					s.t.Fatalf("the stream ends without %q", text)
				}
				if strings.Contains(line, text) {
					return
				}
			case <-late:
				s.t.Fatalf("there is no %q", text)
			}
		}
	}, func() { answer.Body.Close() }
}

// The cluster is followed once for all who look, from the first until a while after the last.
func TestNobodyLooks(t *testing.T) {
	s := newSite(t, web.Options{Linger: 100 * time.Millisecond})
	for _, file := range []string{"", "page.js", "page.css"} {
		if answer := testkit.Must(http.Get(s.url + file))(t); answer.StatusCode != http.StatusOK {
			t.Errorf("/%s is answered %s", file, answer.Status)
		}
	}
	if s.followed != 0 {
		t.Error("it is followed when nobody looks")
	}
	for round := 1; round <= 2; round++ {
		wants, leave := s.look()
		wants(`data: "test"`)
		wants(`"all":true,`)
		also, leaves := s.look()
		also(`"all":true,`)
		leave()
		s.rename(fmt.Sprint("green-", round))
		also(fmt.Sprintf(`{"pools":{"green-%d":`, round))
		if s.followed != round || s.counts() != 1 {
			t.Fatalf("it was followed %d times by the round %d, and is by %d", s.followed, round, s.counts())
		}
		leaves()
		testkit.Eventually(t, 20*time.Second, "it isn't followed any more", func() error {
			if n := s.counts(); n > 0 {
				return fmt.Errorf("by %d", n)
			}
			return nil
		})
	}
}

// Whoever starts the page finds the cluster followed, and it isn't followed for ever if nobody comes.
func TestEarly(t *testing.T) {
	s := newSite(t, web.Options{Early: time.Second, Linger: time.Millisecond})
	testkit.Eventually(t, 20*time.Second, "it is followed before anybody looks", func() error {
		if n := s.counts(); n != 1 {
			return fmt.Errorf("by %d", n)
		}
		return nil
	})
	testkit.Eventually(t, 20*time.Second, "it isn't followed any more", func() error {
		if n := s.counts(); n > 0 {
			return fmt.Errorf("by %d", n)
		}
		return nil
	})
	wants, leave := s.look()
	defer leave()
	wants(`"blue":`)
}

// Somebody who comes back soon finds the cluster followed.
func TestLinger(t *testing.T) {
	s := newSite(t, web.Options{Linger: time.Hour})
	for range 3 {
		wants, leave := s.look()
		wants(`"blue":`)
		leave()
	}
	if s.followed != 1 {
		t.Errorf("it was followed %d times", s.followed)
	}
}

// A cluster that can't be followed is a problem that the page tells.
func TestFollowFails(t *testing.T) {
	s := newSite(t, web.Options{})
	s.err = errors.New("no kubeconfig")
	wants, _ := s.look()
	wants(`"problem":"no kubeconfig"`)
}

// So many look at once, and no more.
func TestManyLook(t *testing.T) {
	s := newSite(t, web.Options{})
	var leave func()
	for range 64 {
		_, leave = s.look()
	}
	if answer := testkit.Must(http.Get(s.url + "events"))(t); answer.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("one more is answered %s", answer.Status)
	}
	leave()
	testkit.Eventually(t, 20*time.Second, "somebody else has the place", func() error {
		answer, err := http.Get(s.url + "events")
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		return nil
	})
}

// Pages of others get nothing, by whatever way, and nobody can change anything.
func TestStrangers(t *testing.T) {
	near, far := newSite(t, web.Options{}), newSite(t, web.Options{Remote: true})
	for _, tt := range []struct {
		s                        *site
		method, path, host, site string
		want                     int
	}{
		{near, "GET", "", "", "", 200},
		{near, "HEAD", "", "", "", 200},
		{near, "GET", "", "localhost:9000", "", 200},
		{near, "GET", "", "LOCALHOST", "", 200},
		{near, "GET", "", "[::1]:8580", "", 200},
		{near, "GET", "", "127.0.0.2", "", 200},
		{near, "GET", "", "10.0.0.1", "", 403},
		{near, "GET", "", "rebound.example:8580", "", 403},
		{near, "GET", "", "localhost.example", "", 403},
		{near, "GET", "page.js", "rebound.example", "", 403},
		{near, "GET", "events", "rebound.example", "", 403},
		{near, "GET", "find?q=a", "rebound.example", "", 403},
		{near, "POST", "", "", "", 405},
		{near, "DELETE", "events", "", "", 405},
		{near, "GET", "events", "", "cross-site", 403},
		{near, "GET", "events", "", "same-site", 403},
		{near, "GET", "find?q=a", "", "cross-site", 403},
		{near, "GET", "find?q=a", "", "same-origin", 503},
		{near, "GET", "../web.go", "", "", 404},
		{near, "GET", "static/", "", "", 404},
		{far, "GET", "", "10.0.0.1:8580", "", 200},
		{far, "GET", "", "[2001:db8::1]", "", 200},
		{far, "GET", "", "rebound.example", "", 403},
	} {
		r := testkit.Must(http.NewRequestWithContext(t.Context(), tt.method, tt.s.url+tt.path, nil))(t)
		r.Host = tt.host
		if tt.site != "" {
			r.Header.Set("Sec-Fetch-Site", tt.site)
			r.Header.Set("Sec-Fetch-Mode", "cors")
		}
		answer := testkit.Must(http.DefaultClient.Do(r))(t)
		_, err := io.Copy(io.Discard, answer.Body)
		testkit.Check(t, err, answer.Body.Close())
		if answer.StatusCode != tt.want {
			t.Errorf("%s /%s of host %q, from a page of %q: %s, want %d", tt.method, tt.path, tt.host, tt.site, answer.Status, tt.want)
		}
		if p := answer.Header.Get("Content-Security-Policy"); !strings.HasPrefix(p, "default-src 'none'; ") || strings.Contains(p, "unsafe") || answer.Header.Get("Set-Cookie") != "" {
			t.Errorf("/%s has the headers %v", tt.path, answer.Header)
		}
	}
	if near.followed+far.followed > 0 {
		t.Error("strangers had the cluster followed")
	}
}
