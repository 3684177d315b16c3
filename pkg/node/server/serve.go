package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/observe"
)

// drain is for how long running calls may go on at the end.
const drain = 5 * time.Second

const (
	// window is how much of a request may come before it is read, in bytes; GC lists all
	// attachments of a node.
	window = 1 << 20
	// bufferSize is that of a connection's reads and writes, in bytes.
	bufferSize = 4 << 10
)

// Serve answers at the unix socket until ctx ends, then lets running calls end.
func (s *Server) Serve(ctx context.Context, socket string, r prometheus.Registerer) error {
	l, err := observe.Listen(ctx, socket)
	if err != nil {
		return fmt.Errorf("listen at %s: %w", socket, err)
	}
	logger := klog.FromContext(ctx).WithName("cni")
	g := grpc.NewServer(
		grpc.UnaryInterceptor(intercept(logger, newDuration(r))),
		// Each connection is for one small call of the plugin: no bandwidth is worth being
		// measured, by a ping before each answer, and no large buffer is filled.
		grpc.StaticConnWindowSize(window), grpc.StaticStreamWindowSize(window),
		grpc.ReadBufferSize(bufferSize), grpc.WriteBufferSize(bufferSize),
	)
	cnirpc.RegisterCNIServer(g, s)
	reflection.Register(g)

	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-ctx.Done()
		hard := time.AfterFunc(drain, g.Stop)
		defer hard.Stop()
		g.GracefulStop()
	}()
	if err := g.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve at %s: %w", socket, err)
	}
	<-ended
	return nil
}
