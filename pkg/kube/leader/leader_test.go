package leader

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// server is an API server in memory that has one Lease.
type server struct {
	mu    sync.Mutex
	lease *coordinationv1.Lease
	// hangs makes it answer nothing any more.
	hangs bool
	// wrote is told of each write that succeeds.
	wrote func(holder string)
}

func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hangs {
		s.mu.Unlock()
		<-r.Context().Done()
		s.mu.Lock()
		return nil, r.Context().Err()
	}
	if r.Method == http.MethodGet {
		if s.lease == nil {
			return reply(http.StatusNotFound, metav1.Status{
				TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status:   metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
			})
		}
		return reply(http.StatusOK, s.lease)
	}
	next := &coordinationv1.Lease{}
	if err := json.NewDecoder(r.Body).Decode(next); err != nil {
		return nil, err
	}
	if s.lease != nil && next.ResourceVersion != s.lease.ResourceVersion {
		return nil, errors.New("conflict")
	}
	revision, _ := strconv.Atoi(next.ResourceVersion) // empty at first
	next.TypeMeta = metav1.TypeMeta{Kind: "Lease", APIVersion: "coordination.k8s.io/v1"}
	next.ResourceVersion = strconv.Itoa(revision + 1)
	s.lease = next
	s.wrote(*next.Spec.HolderIdentity)
	return reply(http.StatusOK, next)
}

func reply(code int, obj any) (*http.Response, error) {
	body, err := json.Marshal(obj)
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(body)),
	}, err
}

// times are the defaults of the programs.
var times = Election{LeaseDuration: 30 * time.Second, RenewDeadline: 20 * time.Second, RetryPeriod: 5 * time.Second}

func (s *server) run(ctx context.Context, e Election, work func(context.Context) error) error {
	e.Namespace, e.Name, e.Identity = "ns", "lease", "me"
	cfg := &rest.Config{Host: "http://server", Transport: s, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
	return Run(ctx, cfg, e, work)
}

// Another candidate leads once the lease wasn't renewed for its duration: no work may go on
// until then.
func TestWorkEndsBeforeTheLeaseDoes(t *testing.T) {
	for _, e := range []Election{
		times,
		{LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second},
		{LeaseDuration: 30 * time.Second, RenewDeadline: 29 * time.Second, RetryPeriod: 20 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			var renewed time.Time
			var last, took time.Duration
			s := &server{wrote: func(string) { renewed = time.Now() }}
			err := s.run(t.Context(), e, func(ctx context.Context) error {
				time.Sleep(time.Minute)
				if ctx.Err() != nil {
					t.Error("the work was ended though the lease was renewed")
				}
				s.mu.Lock()
				s.hangs = true
				last = time.Duration(*s.lease.Spec.LeaseDurationSeconds) * time.Second
				s.mu.Unlock()
				<-ctx.Done()
				took = time.Since(renewed)
				return nil
			})
			if err == nil || took == 0 || took >= last {
				t.Errorf("work went on for %s after the last renewal of a lease of %s: %v", took, last, err)
			}
		})
	}
}

// Another candidate leads as soon as the lease is released.
func TestLeaseIsReleasedAfterTheWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		working := true
		var holders []string
		s := &server{wrote: func(holder string) {
			holders = append(holders, holder)
			if holder == "" && working {
				t.Error("the lease was released while the work went on")
			}
		}}
		err := s.run(ctx, times, func(ctx context.Context) error {
			cancel()
			<-ctx.Done()
			time.Sleep(3 * time.Second)
			working = false
			return nil
		})
		if err != nil || holders[len(holders)-1] != "" {
			t.Errorf("holders %q, %v; want that it was released", holders, err)
		}
	})
}

// Work that doesn't end keeps the lease until that lapses by itself.
func TestLeaseOfEndlessWorkIsNotReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := &server{wrote: func(holder string) {
			if holder == "" {
				t.Error("the lease was released")
			}
		}}
		failed := errors.New("failed")
		err := s.run(ctx, times, func(context.Context) error {
			cancel()
			time.Sleep(time.Hour)
			return failed
		})
		if !errors.Is(err, failed) {
			t.Errorf("error is %v, want that of the work", err)
		}
	})
}
