package openstack

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// cloud answers calls in a test.
type cloud func(*http.Request) (*http.Response, error)

func (c cloud) RoundTrip(r *http.Request) (*http.Response, error) { return c(r) }

func respond(r *http.Request, code int, headers ...string) *http.Response {
	resp := &http.Response{StatusCode: code, Request: r, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}"))}
	for i := 0; i < len(headers); i += 2 {
		resp.Header.Set(headers[i], headers[i+1])
	}
	return resp
}

// TestRepeated says which calls are made again, how often, and how long that takes.
func TestRepeated(t *testing.T) {
	for _, tt := range []struct {
		name, method, path string
		answers            []int // the last one stays
		after              string
		calls, code        int
		least, most        time.Duration
	}{
		{"fine", "GET", "/v2.0/ports", []int{200}, "", 1, 200, 0, 0},
		{"busy once", "GET", "/v2.0/ports", []int{429, 200}, "2", 2, 200, 2 * time.Second, 2 * time.Second},
		{"busy without a word", "PUT", "/v2.0/ports/x", []int{503, 503, 200}, "", 3, 200, 1200 * time.Millisecond, 1800 * time.Millisecond},
		{"busy for long", "DELETE", "/v2.0/ports/x", []int{503}, "", maxTries, 503, 2800 * time.Millisecond, 4200 * time.Millisecond},
		{"wants to be left alone", "GET", "/v2.0/ports", []int{429}, "60", 1, 429, 0, 0},
		{"wants more than there is", "GET", "/v2.0/ports", []int{429}, "3", 2, 429, 3 * time.Second, 3 * time.Second},
		{"not twice", "POST", "/v2.0/ports", []int{503}, "", 1, 503, 0, 0},
		{"login", "POST", "/identity/v3/auth/tokens", []int{503, 201}, "1", 2, 201, time.Second, time.Second},
		{"broken", "GET", "/v2.0/ports", []int{500}, "", 1, 500, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen []Call
				n := 0
				base := cloud(func(r *http.Request) (*http.Response, error) {
					if b, err := io.ReadAll(r.Body); string(b) != "body" || err != nil {
						t.Errorf("call %d has the body %q: %v", n, b, err)
					}
					code := tt.answers[min(n, len(tt.answers)-1)]
					n++
					return respond(r, code, "Retry-After", tt.after), nil
				})
				req, err := http.NewRequestWithContext(t.Context(), tt.method, "http://cloud"+tt.path, strings.NewReader("body"))
				if err != nil {
					t.Fatal(err)
				}
				start := time.Now()
				resp, err := newTransport(base, 1, func(c Call) { seen = append(seen, c) }).RoundTrip(req)
				took := time.Since(start)
				if err != nil || resp.StatusCode != tt.code || n != tt.calls || took < tt.least || took > tt.most {
					t.Errorf("%v after %d calls and %s, %v", resp, n, took, err)
				}
				if len(seen) != n || seen[n-1].Code != tt.code || seen[n-1].Method != tt.method {
					t.Errorf("observed are %+v", seen)
				}
			})
		})
	}
}

// TestBounded has more callers than calls may be made at a time, and one whose answer never comes.
func TestBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most, failed atomic.Int64
		tr := newTransport(cloud(func(r *http.Request) (*http.Response, error) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			if r.URL.Path == "/never" {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			time.Sleep(time.Second)
			return respond(r, 200), nil
		}), 4, func(c Call) {
			if c.Code == 0 {
				failed.Add(1)
			}
		})
		start := time.Now()
		var all sync.WaitGroup
		for i := range 21 {
			all.Go(func() {
				path := "http://cloud/v2.0/ports"
				if i == 0 {
					path = "http://cloud/never"
				}
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := tr.RoundTrip(req); (err != nil) != (i == 0) {
					t.Errorf("call %d: %v", i, err)
				} else if err != nil && !strings.Contains(explain("do it", err).Error(), "no answer in 30s") {
					t.Errorf("call %d: %v", i, err)
				}
			})
		}
		all.Wait()
		if most.Load() != 4 || failed.Load() != 1 || time.Since(start) < callTimeout {
			t.Errorf("%d calls at a time, %d without answer, all in %s", most.Load(), failed.Load(), time.Since(start))
		}
	})
}

func TestResource(t *testing.T) {
	for path, want := range map[string]string{
		"http://cloud:5000/v3/auth/tokens": "tokens", "/identity/v3/auth/tokens": "tokens", "/": "versions", "": "versions", "/v3/": "versions", "/v2.0/nets": "versions",
		"/v2.0/ports": "ports", "http://c/networking/v2.0/ports/1": "ports", "/v2.0/ports/1/tags": "ports/tags", "/v2.0/floatingips/1/tags": "floatingips/tags",
		"/v2.0/floatingips/": "floatingips", "/v2.0/subnets/1": "subnets",
	} {
		if got := resource(path); got != want {
			t.Errorf("%s is of %q, want %q", path, got, want)
		}
	}
}
