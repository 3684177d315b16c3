// Package observe lets people and Prometheus look into a program: metrics,
// health and profiles.
//
// It owns the HTTP servers for that. It must not know what a program does.
package observe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
)

// NewRegistry returns a registry with the metrics of the process and the Go runtime.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewBuildInfoCollector(),
	)
	return r
}

// Options says where to listen, as host:port; an empty address is "not at all".
type Options struct {
	MetricsAddr string
	HealthAddr  string
}

// Page is something else to be read.
type Page struct {
	Path    string
	Handler http.Handler
}

// Serve serves /metrics, further pages and, for callers on the same host, /debug/pprof at
// MetricsAddr, and /healthz, /readyz at HealthAddr until ctx ends. An address that can't be listened on is an error at once.
func Serve(ctx context.Context, o Options, g prometheus.Gatherer, h *Health, pages ...Page) error {
	metrics := http.NewServeMux()
	for _, p := range pages {
		metrics.Handle("GET "+p.Path, p.Handler)
	}
	metrics.Handle("GET /metrics", scrapes(g))
	metrics.HandleFunc("GET /debug/pprof/", local(pprof.Index))
	metrics.HandleFunc("GET /debug/pprof/profile", local(pprof.Profile))
	metrics.HandleFunc("GET /debug/pprof/trace", local(pprof.Trace))
	metrics.HandleFunc("GET /debug/pprof/symbol", local(pprof.Symbol))

	health := http.NewServeMux()
	health.HandleFunc("GET /healthz", h.serveLive)
	health.HandleFunc("GET /readyz", h.serveReady)

	group, ctx := errgroup.WithContext(ctx)
	for _, s := range []struct {
		name, addr string
		handler    http.Handler
	}{{"metrics", o.MetricsAddr, metrics}, {"health", o.HealthAddr, health}} {
		if s.addr == "" {
			continue
		}
		group.Go(func() error {
			l, err := new(net.ListenConfig).Listen(ctx, "tcp", s.addr)
			if err == nil {
				err = serve(ctx, l, newServer(s.handler))
			}
			if err != nil {
				return fmt.Errorf("serve %s at %s: %w", s.name, s.addr, err)
			}
			return nil
		})
	}
	return group.Wait()
}

// local serves callers on the same host only: a profile costs processor time and
// shows the work of the program, and some programs listen on the node's address.
func local(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if a, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || !a.Addr().Unmap().IsLoopback() {
			http.Error(w, "profiles are for callers at a loopback address only", http.StatusForbidden)
			return
		}
		h(w, r)
	}
}

// newServer returns a server whose connections are bounded in number and duration: every host that reaches the node's
// address may connect.
func newServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler:        h,
		ConnState:      new(bounded).state,
		ReadTimeout:    10 * time.Second, // of a request
		WriteTimeout:   30 * time.Second, // of its answer; package pprof extends it for profiles
		IdleTimeout:    30 * time.Second, // between two requests
		MaxHeaderBytes: 16 << 10,
	}
}

// serve serves requests at a listener until ctx ends.
func serve(ctx context.Context, l net.Listener, s *http.Server) error {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if s.Shutdown(grace) != nil {
			s.Close()
		}
	}()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-ended
	return nil
}
