package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/app/egresscontroller"
	"github.com/coil-net/coil/pkg/testkit"
)

// refusal is an answer of the API server that it didn't do what was asked.
func refusal(r *http.Request, code int, reason string) *http.Response {
	body := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"injected"}`, reason, code)
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Request: r, ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": []string{"application/json"}}, Body: io.NopCloser(strings.NewReader(body)),
	}
}

// While the API server refuses some writes and the answers to others are lost, clients come
// and go: what is listed in the end is who is there, once.
func TestEgressThroughFaults(t *testing.T) {
	c := newEgressCluster(t)
	var n, refused, lost atomic.Int64
	cfg := intercept(c.account(t), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		if r.Method == http.MethodGet || strings.Contains(r.URL.Path, "/leases") {
			return next.RoundTrip(r)
		}
		switch i := n.Add(1); {
		case i%3 == 0:
			refused.Add(1)
			return refusal(r, http.StatusTooManyRequests, "TooManyRequests"), nil
		case i%5 == 0:
			refused.Add(1)
			return refusal(r, http.StatusInternalServerError, "InternalError"), nil
		case i%7 == 0:
			resp, err := next.RoundTrip(r)
			if err != nil {
				return nil, err
			}
			resp.Body.Close()
			lost.Add(1)
			return nil, errors.New("connection reset")
		}
		return next.RoundTrip(r)
	})
	c.startWith(t, cfg, egressOptions())
	c.egress(t, "nat", "destinations: [0.0.0.0/0, '::/0']")
	c.deployment(t, "nat", "it exists", exists)
	var pods []*corev1.Pod
	var want []string
	for i := range 40 {
		name, v4, v6 := fmt.Sprint("client-", i), fmt.Sprint("10.50.0.", i+1), fmt.Sprintf("fd00:50::%x", i+1)
		pods = append(pods, c.client(t, c.ns, name, "nat", v4, v6))
		if i%2 == 1 {
			want = append(want, name+" "+v4, name+" "+v6)
			continue
		}
		c.kill(t, pods[i])
	}
	c.requireClients(t, "nat", want...)
	endpoints := 0
	for _, s := range c.slices(t, "nat") {
		endpoints += len(s.Endpoints)
	}
	if endpoints != len(want) {
		t.Errorf("%d endpoints for %d addresses", endpoints, len(want))
	}
	if refused.Load() == 0 || lost.Load() == 0 {
		t.Errorf("%d writes were refused, and %d answers were lost: that shows nothing", refused.Load(), lost.Load())
	}
}

// A leader that is cut off from the API server ends, another one goes on, and the first writes
// nothing more.
func TestEgressLeaderCutOff(t *testing.T) {
	c := newEgressCluster(t)
	var cut atomic.Bool
	var rec recorder
	cfg := intercept(rec.wrap(c.account(t)), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		if cut.Load() {
			return nil, errors.New("no route to the API server")
		}
		return next.RoundTrip(r)
	})
	o := egressOptions()
	o.Election.LeaseDuration, o.Election.RenewDeadline = 3*time.Second, 2*time.Second
	first := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(cancel)
	go func() { first <- egresscontroller.Run(ctx, cfg, o) }()
	c.egress(t, "nat", "destinations: [0.0.0.0/0]")
	c.client(t, c.ns, "before", "nat", "10.51.0.1")
	c.requireClients(t, "nat", "before 10.51.0.1")
	second := egressOptions()
	second.Election.LeaseDuration, second.Election.RenewDeadline = 3*time.Second, 2*time.Second
	c.startWith(t, c.account(t), second)

	cut.Store(true)
	rec.take()
	c.client(t, c.ns, "after", "nat", "10.51.0.2")
	c.requireClients(t, "nat", "before 10.51.0.1", "after 10.51.0.2")
	select {
	case err := <-first:
		if err == nil {
			t.Error("the first ended without an error")
		}
	case <-time.After(testkit.Timeout(20 * time.Second)):
		t.Fatal("the first one goes on")
	}
	cut.Store(false)
	c.client(t, c.ns, "later", "nat", "10.51.0.3")
	c.requireClients(t, "nat", "before 10.51.0.1", "after 10.51.0.2", "later 10.51.0.3")
	if w := rec.take(); len(w) > 0 {
		t.Errorf("the first one wrote %v", w)
	}
}
