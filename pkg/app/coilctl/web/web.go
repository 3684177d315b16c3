// Package web serves a page about a cluster to browsers.
//
// It owns how the page comes to browsers: its files, the changes as they happen, who may ask, and that the cluster is followed only while somebody looks. It must
// not know what is shown, nor where that comes from.
package web

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/coil-net/coil/pkg/plan/page"
)

//go:embed static
var files embed.FS

const (
	// linger is for how long the cluster is followed when nobody looks any more.
	linger = 10 * time.Second
	// heartbeat is how often a browser hears something if nothing changes, so that connections of browsers that are gone end.
	heartbeat = 15 * time.Second
	// patience is for how long a browser may take no byte. One that is slow misses what is in between.
	patience = 30 * time.Second
	// maxViewers bounds how many look.
	maxViewers = 64
)

// Options of a page.
type Options struct {
	// Title names the cluster.
	Title string
	// Follow follows the cluster until ctx ends, which done awaits, and calls changed after each change. The result returns what is known at the moment.
	Follow func(ctx context.Context, done *sync.WaitGroup, changed func()) (func() page.Cluster, error)
	// Remote lets in browsers of other computers.
	Remote bool
	// Linger is for how long the cluster is followed when nobody looks any more; 0 is the default.
	Linger time.Duration
	// Early is for how long the cluster is followed from the start on, as if somebody looked: whoever starts the page opens it soon, and finds it read.
	Early time.Duration
}

// server answers browsers.
type server struct {
	title string
	// remote is as of Options.
	remote bool
	live   *live
	// seats are taken by those who look.
	seats chan struct{}
	// closing ends the answers that go on.
	closing context.Context
}

// Serve serves the page at a listener, which it closes, until ctx ends.
func Serve(ctx context.Context, l net.Listener, o Options) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if o.Linger == 0 {
		o.Linger = linger
	}
	s := &server{
		title: o.Title, remote: o.Remote, seats: make(chan struct{}, maxViewers), closing: ctx,
		live: &live{follow: o.Follow, linger: o.Linger, moved: make(chan struct{}, 1), next: make(chan struct{})},
	}
	h := &http.Server{Handler: s.handler(), ReadHeaderTimeout: patience, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10}
	if o.Early > 0 {
		s.live.enter()
		defer time.AfterFunc(o.Early, s.live.leave).Stop()
	}
	var done sync.WaitGroup
	done.Go(func() { s.live.run(ctx) })
	ended := make(chan error, 1)
	done.Go(func() { ended <- h.Serve(l) })
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		// Answers that go on end by themselves now.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		err = h.Shutdown(end)
		cancel()
		if err != nil {
			err = h.Close()
		}
	}
	stop()
	done.Wait()
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// handler answers who may ask.
func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/events", s.events)
	mux.HandleFunc("/find", s.find)
	if static, err := fs.Sub(files, "static"); err == nil { // the name is right
		mux.Handle("/", http.FileServerFS(static))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range headers {
			w.Header().Set(name, value)
		}
		switch {
		case !s.knows(r.Host):
			// A page of others whose name leads here would read this one (DNS rebinding).
			http.Error(w, "the page isn't served under the name "+r.Host+": use localhost, or an address", http.StatusForbidden)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "the page only shows", http.StatusMethodNotAllowed)
		case foreign(r):
			http.Error(w, "pages of others may not ask", http.StatusForbidden)
		default:
			mux.ServeHTTP(w, r)
		}
	})
}

// headers have browsers load nothing but the page's own files, and show it to no other page.
var headers = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "no-referrer",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Cache-Control":                "no-store",
}

// knows says whether the page is served under the name of a request, whatever its port: ssh forwards others.
func (s *server) knows(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return strings.EqualFold(host, "localhost")
	}
	return s.remote || addr.IsLoopback()
}

// foreign says whether a page of others asks for what only this page needs.
func foreign(r *http.Request) bool {
	site := r.Header.Get("Sec-Fetch-Site") // of browsers alone
	return site != "" && site != "same-origin" && site != "none" && r.Header.Get("Sec-Fetch-Mode") != "navigate"
}

// events tells a browser what there is, and then what changes.
func (s *server) events(w http.ResponseWriter, r *http.Request) {
	select {
	case s.seats <- struct{}{}:
		defer func() { <-s.seats }()
	default:
		http.Error(w, "too many look", http.StatusServiceUnavailable)
		return
	}
	s.live.enter()
	defer s.live.leave()
	w.Header().Set("Content-Type", "text/event-stream")
	c := http.NewResponseController(w)
	send := func(text []byte) error {
		if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
		return c.Flush()
	}
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	// It is an event, for the browser to see that it is connected.
	title, err := json.Marshal(s.title)
	alive := []byte("event: alive\ndata: " + string(title) + "\n\n")
	if err != nil || send(alive) != nil {
		return
	}
	var seen int64
	for {
		text, now, next, err := s.live.since(seen)
		if err == nil && text != nil {
			err = send([]byte("data: " + string(text) + "\n\n"))
			seen = now
		}
		if err != nil {
			return // the browser asks again, if it is there
		}
		select {
		case <-r.Context().Done():
			return
		case <-s.closing.Done():
			return
		case <-next:
		case <-beat.C:
			if send(alive) != nil {
				return
			}
		}
	}
}

// find searches.
func (s *server) find(w http.ResponseWriter, r *http.Request) {
	result, ok := s.live.find(r.URL.Query().Get("q"))
	if !ok {
		http.Error(w, "nobody looks", http.StatusServiceUnavailable)
		return
	}
	answer(w, result)
}

// answer writes a value as JSON.
func answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value) // the browser may be gone
}
