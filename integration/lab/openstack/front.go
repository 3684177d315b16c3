package openstack

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Front is a proxy before both programs: who logs in at its URL makes all calls through it.
type Front struct {
	identity, network *httptest.Server

	mu    sync.Mutex
	calls []Call
	fault func(Call) Fault
}

// Call is a call that came to a Front.
type Call struct {
	Method string
	// Path is that after /v3/ or /v2.0/, without a query.
	Path   string
	Query  url.Values
	Header http.Header
}

// String is the method and the path.
func (c Call) String() string { return c.Method + " " + c.Path }

// Writes says whether the call may change something, and is no login.
func (c Call) Writes() bool { return c.Method != http.MethodGet && c.Path != "auth/tokens" }

// Fault is what happens to a call. The zero value is nothing.
type Fault struct {
	// Latency delays the call.
	Latency time.Duration
	// Code is the answer, with Body; the program isn't asked.
	Code       int
	Body       string
	RetryAfter time.Duration
	// Lost says that the program is asked, and the connection cut in place of its answer.
	Lost bool
	// Down says that the connection is cut before the program is asked.
	Down bool
}

// NewFront returns a proxy without faults.
func (c *Cloud) NewFront() (*Front, error) {
	f := &Front{}
	identity, err := url.Parse(c.IdentityURL())
	if err != nil {
		return nil, err
	}
	network, err := url.Parse(c.NetworkURL())
	if err != nil {
		return nil, err
	}
	f.network = httptest.NewServer(f.handler(network, nil))
	// The list of services, which comes with a token, has Neutron itself.
	f.identity = httptest.NewServer(f.handler(identity, func(body []byte) []byte {
		return bytes.ReplaceAll(body, []byte(c.NetworkURL()), []byte(f.network.URL))
	}))
	return f, nil
}

// URL is that of Keystone through the proxy, for auth_url.
func (f *Front) URL() string { return f.identity.URL }

// Close ends the proxy.
func (f *Front) Close() {
	f.identity.Close()
	f.network.Close()
}

// SetFault chooses what happens to each call from now on; nil is nothing. The function is called by one goroutine at a time.
func (f *Front) SetFault(fault func(Call) Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fault = fault
}

// Calls returns the calls since the last time, and forgets them.
func (f *Front) Calls() []Call {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := f.calls
	f.calls = nil
	return all
}

// journal keeps a call, and returns what happens to it.
func (f *Front) journal(r *http.Request) Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	path := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/v3/"), "/v2.0/")
	c := Call{Method: r.Method, Path: path, Query: r.URL.Query(), Header: r.Header.Clone()}
	f.calls = append(f.calls, c)
	if f.fault == nil {
		return Fault{}
	}
	return f.fault(c)
}

func (f *Front) handler(to *url.URL, rewrite func([]byte) []byte) http.Handler {
	proxy := &httputil.ReverseProxy{
		ErrorLog: log.New(io.Discard, "", 0), // a client that gives up is no news
		// The host stays what the client has called: Neutron's links to the next page have it.
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to); r.Out.Host = r.In.Host },
		ModifyResponse: func(resp *http.Response) error {
			if rewrite == nil {
				return nil
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				return err
			}
			body = rewrite(body)
			resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
			resp.Header.Set("Content-Length", strconv.Itoa(len(body)))
			return nil
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fault := f.journal(r)
		if fault.Latency > 0 {
			select {
			case <-time.After(fault.Latency):
			case <-r.Context().Done():
			}
		}
		switch {
		case fault.Down:
			panic(http.ErrAbortHandler)
		case fault.Code != 0:
			if fault.RetryAfter > 0 {
				w.Header().Set("Retry-After", strconv.Itoa(int(fault.RetryAfter/time.Second)))
			}
			w.WriteHeader(fault.Code)
			_, _ = io.WriteString(w, fault.Body)
		case fault.Lost:
			proxy.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		default:
			proxy.ServeHTTP(w, r)
		}
	})
}
