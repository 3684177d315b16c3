package observe

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	// maxScrapesOfOne is how many requests for /metrics one remote address has at once. One ends when its answer is read.
	maxScrapesOfOne = 4
	// maxUnread is how many bytes of answers wait to be read. Tenants' names of objects make answers large.
	maxUnread = 32 << 20
	// scrapeEvery is how often metrics are read at most, for all requests that wait then. An answer that takes longer is followed by a
	// rest as long as that.
	scrapeEvery = 250 * time.Millisecond
)

// scrapes serves metrics. A metric that can't be read is left out: the others are wanted then, too. Requests that wait at
// the same time, of any number of remotes, cost no more than one. Nobody waits for somebody else to read an answer, and
// of too many unread ones the oldest end.
func scrapes(g prometheus.Gatherer) http.Handler {
	all := promhttp.HandlerFor(g, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
	serving := remotes{by: map[netip.Addr]int{}}
	var waiting unread
	shared := map[variant]*sharedAnswer{}
	for _, v := range []variant{{}, {gzip: true}, {protobuf: true}, {true, true}} {
		shared[v] = &sharedAnswer{}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		remote, _ := netip.ParseAddrPort(r.RemoteAddr) // net/http's own words
		from := remoteAddr(remote.Addr())
		if !serving.begin(from) {
			http.Error(w, fmt.Sprintf("%s has %d requests that aren't answered yet", from, maxScrapesOfOne), http.StatusServiceUnavailable)
			return
		}
		defer serving.end(from)
		v := variantOf(r)
		a := shared[v].get(r.Context(), func() *answer { return v.ask(all) })
		if a == nil {
			return // it was given up
		}
		defer waiting.add(a, http.NewResponseController(w))()
		a.writeTo(w)
	})
}

// variant is a kind of answer.
type variant struct{ gzip, protobuf bool }

const protobufType = "application/vnd.google.protobuf"

func variantOf(r *http.Request) variant {
	return variant{
		gzip:     strings.Contains(r.Header.Get("Accept-Encoding"), "gzip"),
		protobuf: strings.Contains(r.Header.Get("Accept"), protobufType),
	}
}

// ask asks a handler for the variant.
func (v variant) ask(h http.Handler) *answer {
	r := &http.Request{Method: http.MethodGet, URL: &url.URL{Path: "/metrics"}, Header: http.Header{}}
	if v.gzip {
		r.Header.Set("Accept-Encoding", "gzip")
	}
	if v.protobuf {
		r.Header.Set("Accept", protobufType+";proto=io.prometheus.client.MetricFamily;encoding=delimited")
	}
	a := &answer{header: http.Header{}}
	h.ServeHTTP(a, r)
	return a
}

// sharedAnswer is the latest answer of a variant.
type sharedAnswer struct {
	mu     sync.Mutex
	latest *answer
	begun  time.Time
	next   time.Time // when another one may be begun
}

// get returns an answer that was begun after the call, and is the same for all calls that wait. It is nil if ctx ends
// before.
func (s *sharedAnswer) get(ctx context.Context, make func() *answer) *answer {
	called := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest == nil || s.begun.Before(called) {
		timer := time.NewTimer(time.Until(s.next))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
		s.begun = time.Now()
		s.latest = make()
		s.next = time.Now().Add(max(time.Since(s.begun), scrapeEvery-time.Since(s.begun)))
	}
	return s.latest
}

// remotes counts the requests of remote addresses.
type remotes struct {
	mu sync.Mutex
	by map[netip.Addr]int
}

// begin says whether an address may have another request.
func (r *remotes) begin(a netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by[a] == maxScrapesOfOne {
		return false
	}
	r.by[a]++
	return true
}

func (r *remotes) end(a netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by[a]--; r.by[a] == 0 {
		delete(r.by, a)
	}
}

// unread are answers that are being sent, the oldest first. One that several remotes get counts once.
type unread struct {
	mu    sync.Mutex
	all   []*answer
	bytes int
}

// add adds an answer that is sent to another remote, and aborts the oldest ones if there are more than maxUnread bytes.
// The function that it returns must be called when the answer was sent.
func (u *unread) add(a *answer, to *http.ResponseController) (end func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !slices.Contains(u.all, a) {
		for len(u.all) > 0 && u.bytes+len(a.body) > maxUnread {
			for _, r := range u.all[0].readers {
				_ = r.SetWriteDeadline(time.Now())
			}
			u.remove(0)
		}
		u.all = append(u.all, a)
		u.bytes += len(a.body)
	}
	a.readers = append(a.readers, to)
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		a.readers = slices.DeleteFunc(a.readers, func(o *http.ResponseController) bool { return o == to })
		if i := slices.Index(u.all, a); i >= 0 && len(a.readers) == 0 {
			u.remove(i)
		}
	}
}

// remove must be called with mu held.
func (u *unread) remove(i int) {
	u.bytes -= len(u.all[i].body)
	u.all = slices.Delete(u.all, i, i+1)
}

// answer is one that isn't sent yet.
type answer struct {
	header  http.Header
	code    int
	body    []byte
	readers []*http.ResponseController // to which it is being sent; guarded by unread.mu
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(code int) {
	if a.code == 0 {
		a.code = code
	}
}

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	a.body = append(a.body, b...)
	return len(b), nil
}

func (a *answer) writeTo(w http.ResponseWriter) {
	maps.Copy(w.Header(), a.header)
	w.WriteHeader(cmp.Or(a.code, http.StatusOK))
	_, _ = w.Write(a.body) // an error is the remote's
}
