package observe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestProfilesAreForTheHostOnly(t *testing.T) {
	tests := []struct {
		remote string
		want   int
	}{
		{"127.0.0.1:4711", http.StatusOK},
		{"[::1]:4711", http.StatusOK},
		{"[::ffff:127.0.0.1]:4711", http.StatusOK},
		{"10.0.0.7:4711", http.StatusForbidden},
		{"[fd00::7]:4711", http.StatusForbidden},
		{"garbage", http.StatusForbidden},
	}
	for _, tt := range tests {
		t.Run(tt.remote, func(t *testing.T) {
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/debug/pprof/", nil)
			r.RemoteAddr = tt.remote
			local(func(w http.ResponseWriter, _ *http.Request) {})(w, r)
			if w.Code != tt.want {
				t.Errorf("status %d, want %d", w.Code, tt.want)
			}
		})
	}
}

func TestReadiness(t *testing.T) {
	h := NewHealth("record", "disk")
	ready := func() (int, string) {
		w := httptest.NewRecorder()
		h.serveReady(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		return w.Code, w.Body.String()
	}
	if code, text := ready(); code != http.StatusServiceUnavailable || !strings.Contains(text, "disk: starting") || !strings.Contains(text, "record: starting") {
		t.Errorf("at start: %d %q, want both conditions named", code, text)
	}
	started := func() bool {
		select {
		case <-h.Started():
			return true
		default:
			return false
		}
	}
	h.Set("record", nil)
	if started() {
		t.Error("it has started before anything was said about the disk")
	}
	h.Set("disk", errors.New("it is full"))
	if !started() {
		t.Error("it has not started though something was said about each condition")
	}
	if code, text := ready(); code != http.StatusServiceUnavailable || strings.TrimSpace(text) != "disk: it is full" {
		t.Errorf("with a full disk: %d %q", code, text)
	}
	h.Set("disk", nil)
	if code, _ := ready(); code != http.StatusOK {
		t.Errorf("when all hold: %d", code)
	}
}

func TestServeSaysWhatCannotBeListenedOn(t *testing.T) {
	err := Serve(t.Context(), Options{MetricsAddr: "256.0.0.1:1"}, NewRegistry(), NewHealth())
	if err == nil || !strings.Contains(err.Error(), "256.0.0.1:1") {
		t.Errorf("error %v does not name the address", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Serve(ctx, Options{MetricsAddr: "127.0.0.1:0", HealthAddr: "127.0.0.1:0"}, NewRegistry(), NewHealth()); err != nil {
		t.Errorf("an orderly end: %v", err)
	}
}

// unreadable is a metric that can't be read.
type unreadable struct{ *prometheus.Desc }

func (u unreadable) Describe(ch chan<- *prometheus.Desc) { ch <- u.Desc }
func (u unreadable) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.NewInvalidMetric(u.Desc, errors.New("the disk is broken"))
}

func TestUnreadableMetricHidesNoOther(t *testing.T) {
	g := prometheus.NewRegistry()
	up := prometheus.NewGauge(prometheus.GaugeOpts{Name: "up"})
	up.Set(1)
	g.MustRegister(up, unreadable{prometheus.NewDesc("addresses", "of the node", nil, nil)})
	w := httptest.NewRecorder()
	scrapes(g).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "up 1\n") {
		t.Errorf("%d %q, want the metric that can be read", w.Code, w.Body)
	}
}

// blocking is a metric that is read until end is closed.
type blocking struct {
	*prometheus.Desc
	begun, end chan struct{}
}

func (b blocking) Describe(ch chan<- *prometheus.Desc) { ch <- b.Desc }
func (b blocking) Collect(chan<- prometheus.Metric) {
	select {
	case b.begun <- struct{}{}:
	case <-b.end:
	}
	<-b.end
}

// Requests at the same time read the metrics once, and one remote has no more than four.
func TestScrapesAtOnceAreBounded(t *testing.T) {
	slow := blocking{prometheus.NewDesc("slow", "to read", nil, nil), make(chan struct{}), make(chan struct{})}
	g := prometheus.NewRegistry()
	g.MustRegister(slow)
	h := scrapes(g)
	const requests = 8 * maxScrapesOfOne
	get := func(remote int) int {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.RemoteAddr = fmt.Sprintf("192.0.2.%d:4000", remote)
		h.ServeHTTP(w, r)
		return w.Code
	}
	codes := make(chan int, requests)
	begun := make(chan struct{})
	for i := range requests {
		go func() {
			begun <- struct{}{}
			codes <- get(i / maxScrapesOfOne)
		}()
		<-begun
	}
	<-slow.begun // by the first one
	testkit.Eventually(t, 5*time.Second, "a remote has as many requests as it may", func() error {
		done := make(chan int, 1)
		go func() { done <- get(0) }()
		select {
		case code := <-done:
			if code != http.StatusServiceUnavailable {
				t.Errorf("one scrape of an address too many: %d", code)
			}
			return nil
		case <-slow.begun:
			t.Error("the metrics are read twice at the same time")
			return nil
		case <-time.After(testkit.Timeout(100 * time.Millisecond)):
			return errors.New("it waits for an answer")
		}
	})
	close(slow.end)
	answered := 0
	for range requests {
		if <-codes == http.StatusOK {
			answered++
		}
	}
	if answered < requests-maxScrapesOfOne {
		t.Errorf("%d of %d scrapes were answered", answered, requests)
	}
	if code := get(0); code != http.StatusOK {
		t.Errorf("a scrape after all others: %d", code)
	}
}

// An answer has what was counted before the request.
func TestScrapesAreFresh(t *testing.T) {
	g := prometheus.NewRegistry()
	n := prometheus.NewCounter(prometheus.CounterOpts{Name: "n_total"})
	g.MustRegister(n)
	h := scrapes(g)
	for i := range 3 {
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil)); !strings.Contains(w.Body.String(), fmt.Sprintf("\nn_total %d\n", i)) {
			t.Errorf("counted are %d, the answer is\n%s", i, w.Body)
		}
		n.Inc()
	}
}

// Answers that take long leave as much time to everything else.
func TestSlowAnswersRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var s sharedAnswer
		begun := []time.Duration{}
		for n := range 4 {
			time.Sleep(time.Nanosecond) // an answer that begins now isn't for later calls
			s.get(t.Context(), func() *answer {
				begun = append(begun, time.Since(start).Truncate(time.Millisecond))
				time.Sleep(time.Duration(n) * 500 * time.Millisecond)
				return &answer{}
			})
		}
		if got, want := fmt.Sprint(begun), "[0s 250ms 1.25s 3.25s]"; got != want {
			t.Errorf("answers begin after %s, want %s", got, want)
		}
	})
}

// An answer is the one that was asked for.
func TestScrapeVariants(t *testing.T) {
	h := scrapes(NewRegistry())
	for accept, kind := range map[string]string{"": "text/plain", protobufType + ";proto=io.prometheus.client.MetricFamily;encoding=delimited": protobufType} {
		for _, encoding := range []string{"", "gzip"} {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
			r.Header.Set("Accept", accept)
			r.Header.Set("Accept-Encoding", encoding)
			h.ServeHTTP(w, r)
			if got := w.Header().Get("Content-Type"); !strings.HasPrefix(got, kind) || w.Header().Get("Content-Encoding") != encoding || w.Body.Len() == 0 {
				t.Errorf("asked for %q, %q: %q, %q, %d bytes", accept, encoding, got, w.Header().Get("Content-Encoding"), w.Body.Len())
			}
		}
	}
}

// stuck is a connection whose other end reads nothing.
type stuck struct {
	http.ResponseWriter
	begun, end chan struct{}
}

func (s stuck) Write(b []byte) (int, error) {
	s.begun <- struct{}{}
	<-s.end
	return len(b), nil
}

// A remote that doesn't read an answer keeps no other from one, and the link-local addresses of a link are one remote.
func TestUnreadScrapesKeepNobody(t *testing.T) {
	h := scrapes(NewRegistry())
	w := stuck{httptest.NewRecorder(), make(chan struct{}), make(chan struct{})}
	get := func(w http.ResponseWriter, remote string) {
		r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.RemoteAddr = remote
		h.ServeHTTP(w, r)
	}
	var running sync.WaitGroup
	defer running.Wait()
	defer close(w.end)
	var remotes []string
	for i := range 40 {
		remotes = append(remotes, fmt.Sprintf("192.0.2.%d:4000", i))
	}
	for i := range maxScrapesOfOne {
		remotes = append(remotes, fmt.Sprintf("[fe80::%d%%veth1]:4000", i+1))
	}
	for _, remote := range remotes {
		running.Go(func() { get(stuck{httptest.NewRecorder(), w.begun, w.end}, remote) })
	}
	for range remotes {
		<-w.begun
	}
	for remote, want := range map[string]int{
		"192.0.2.100:4000": http.StatusOK, "[fe80::9%veth2]:4000": http.StatusOK, "[fe80::9%veth1]:4000": http.StatusServiceUnavailable,
	} {
		w := httptest.NewRecorder()
		if get(w, remote); w.Code != want {
			t.Errorf("%s gets %d, want %d", remote, w.Code, want)
		}
	}
}

// large is a metric whose text is long.
type large struct{ *prometheus.Desc }

func (l large) Describe(ch chan<- *prometheus.Desc) { ch <- l.Desc }
func (l large) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(l.Desc, prometheus.GaugeValue, 1, strings.Repeat("x", maxUnread*5/8))
}

// Answers that nobody reads don't fill the memory: the oldest end. One that several remotes get counts once.
func TestUnreadScrapesAreBounded(t *testing.T) {
	g := prometheus.NewRegistry()
	g.MustRegister(large{prometheus.NewDesc("large", "to read", []string{"name"}, nil)})
	server := httptest.NewServer(scrapes(g))
	defer server.Close()
	ask := func(accept string) net.Conn {
		c, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := fmt.Fprintf(c, "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: %s\r\n\r\n", accept); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil { // it is answered
			t.Fatal(err)
		}
		return c
	}
	read := func(c net.Conn) (n int64, err error) {
		if err := c.SetReadDeadline(time.Now().Add(testkit.Timeout(20 * time.Second))); err != nil {
			return 0, err
		}
		return io.CopyN(io.Discard, c, maxUnread*5/8)
	}
	first, second := ask("text/plain"), ask("text/plain")
	if n, err := read(second); err != nil {
		t.Errorf("the second of two that get the same ends after %d bytes: %v", n, err)
	}
	latest := ask(protobufType)
	if n, err := read(latest); err != nil {
		t.Errorf("the latest answer ends after %d bytes: %v", n, err)
	}
	if n, err := read(first); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the oldest answer goes on after %d bytes: %v", n, err)
	}
}

func TestConnectionsEnd(t *testing.T) {
	if s := newServer(nil); s.ReadTimeout <= 0 || s.WriteTimeout <= 0 || s.IdleTimeout <= 0 {
		t.Errorf("limits of the programs: %s, %s, %s", s.ReadTimeout, s.WriteTimeout, s.IdleTimeout)
	}
	for name, send := range map[string]string{
		"idle after an answer": "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"half a request":       "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf",
		"no request":           "",
	} {
		t.Run(name, func(t *testing.T) {
			l := testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			handler := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
			short := newServer(handler)
			short.ReadTimeout, short.WriteTimeout, short.IdleTimeout = 50*time.Millisecond, time.Minute, 50*time.Millisecond
			go func() { ended <- serve(ctx, l, short) }()
			c := testkit.Must(net.Dial("tcp", l.Addr().String()))(t)
			defer c.Close()
			if _, err := fmt.Fprint(c, send); err != nil {
				t.Fatal(err)
			}
			if err := c.SetReadDeadline(time.Now().Add(testkit.Timeout(10 * time.Second))); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, bufio.NewReader(c)); err != nil {
				t.Errorf("the connection wasn't closed: %v", err)
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}
