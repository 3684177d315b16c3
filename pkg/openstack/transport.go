package openstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

const (
	// callTimeout bounds each call, from its connection to the end of the answer.
	callTimeout = 30 * time.Second
	// maxPauses bounds the pauses between calls that are made again. The caller comes back later, and meanwhile does something else.
	maxPauses = 5 * time.Second
	maxTries  = 4
	// maxBody is more than an answer of Neutron has: a page of 1,000 ports is 1 MB.
	maxBody = 64 << 20
)

// transport makes calls: a few at a time, each with a timeout. It makes calls again that a busy cloud has refused.
type transport struct {
	base    http.RoundTripper
	slots   chan struct{}
	observe func(Call)
}

func newTransport(base http.RoundTripper, parallel int, observe func(Call)) *transport {
	return &transport{base: base, slots: make(chan struct{}, parallel), observe: observe}
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	for try, left := 1, maxPauses; ; try++ {
		resp, err := t.once(req)
		if err != nil || try == maxTries || !mayRepeat(req, resp) {
			return resp, err
		}
		pause := retryAfter(resp.Header)
		if pause == 0 {
			pause = 200 * time.Millisecond << try
			pause += rand.N(pause / 2)
		}
		if left -= pause; left < 0 {
			return resp, nil
		}
		select {
		case <-time.After(pause):
		case <-req.Context().Done():
			return resp, nil
		}
		if req, err = again(req); err != nil {
			return nil, err
		}
	}
}

// mayRepeat says whether a call was refused for now, and does no harm if it is done twice.
func mayRepeat(req *http.Request, resp *http.Response) bool {
	idempotent := req.Method != http.MethodPost || resource(req.URL.Path) == loginResource
	return idempotent && (resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable)
}

// again returns a copy of a request with a body that wasn't read yet.
func again(req *http.Request) (*http.Request, error) {
	next := req.Clone(req.Context())
	if req.GetBody == nil {
		return next, nil
	}
	body, err := req.GetBody()
	next.Body = body
	return next, err
}

// once makes a call, and reads the whole answer while it has its slot.
func (t *transport) once(req *http.Request) (resp *http.Response, err error) {
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	case <-req.Context().Done():
		return nil, context.Cause(req.Context())
	}
	start := time.Now()
	ctx, cancel := context.WithTimeoutCause(req.Context(), callTimeout, fmt.Errorf("no answer in %s", callTimeout))
	defer cancel()
	defer func() {
		if t.observe != nil {
			call := Call{Method: req.Method, Resource: resource(req.URL.Path), Took: time.Since(start)}
			if err == nil {
				call.Code = resp.StatusCode
			}
			t.observe(call)
		}
	}()
	if resp, err = t.base.RoundTrip(req.WithContext(ctx)); err != nil {
		return nil, cause(ctx, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		return nil, cause(ctx, err)
	}
	if len(body) > maxBody {
		return nil, fmt.Errorf("the answer has more than %d bytes", maxBody)
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp, nil
}

// cause adds to an error why its context has ended, if it has.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil && !errors.Is(err, why) {
		return fmt.Errorf("%w: %w", err, why)
	}
	return err
}

// loginResource is the resource of logins.
const loginResource = "tokens"

// resource names what a URL or its path is of, without IDs.
func resource(path string) string {
	if u, err := url.Parse(path); err == nil {
		path = u.Path
	}
	parts := strings.Split(strings.Trim(path, "/"), "/")
	parts = parts[1+slices.IndexFunc(parts, func(p string) bool { return p == "v3" || p == "v2.0" }):]
	switch {
	case len(parts) > 1 && parts[0] == "auth":
		return loginResource
	case len(parts) > 2:
		return parts[0] + "/" + parts[2]
	case len(parts) > 0 && slices.Contains([]string{"ports", "floatingips", "subnets"}, parts[0]):
		return parts[0]
	}
	return "versions"
}
