package server

import (
	"cmp"
	"context"
	"fmt"
	"path"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/cnirpc"
)

// grpcCode is the gRPC code that goes with a code of CNI; Internal goes with all others.
var grpcCode = map[cnirpc.ErrorCode]codes.Code{
	cnirpc.ErrorCode_TRY_AGAIN_LATER:               codes.Unavailable,
	cnirpc.ErrorCode_PLUGIN_NOT_AVAILABLE:          codes.Unavailable,
	cnirpc.ErrorCode_LIMITED_CONNECTIVITY:          codes.Unavailable,
	cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES: codes.InvalidArgument,
	cnirpc.ErrorCode_INVALID_NETWORK_CONFIG:        codes.FailedPrecondition,
	cnirpc.ErrorCode_DECODING_FAILURE:              codes.InvalidArgument,
	cnirpc.ErrorCode_UNKNOWN_CONTAINER:             codes.NotFound,
}

// fail returns the error of a call: a gRPC status that carries a CNIError.
func fail(code cnirpc.ErrorCode, msg string, err error) error {
	st := status.New(cmp.Or(grpcCode[code], codes.Internal), fmt.Sprintf("%s: %v", msg, err))
	if with, err := st.WithDetails(&cnirpc.CNIError{Code: code, Msg: msg, Details: err.Error()}); err == nil {
		st = with
	}
	return st.Err()
}

// newDuration returns the metric of the calls of the plugin.
func newDuration(r prometheus.Registerer) *prometheus.HistogramVec {
	duration := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "coil_cni_request_duration_seconds",
		Help:    "Duration of the plugin's calls inside coild by method and gRPC code; the plugin's own start is not in it.",
		Buckets: prometheus.ExponentialBuckets(0.00025, 2.5, 14),
	}, []string{"method", "code"})
	r.MustRegister(duration)
	return duration
}

// intercept recovers from panics, and logs and measures each call. The plugin is
// the one that tells a caller about an error, so it is logged once, here.
func intercept(base klog.Logger, duration *prometheus.HistogramVec) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (resp any, err error) {
		start := time.Now()
		method := path.Base(info.FullMethod)
		logger := base.WithValues("method", method)
		if args, ok := req.(*cnirpc.CNIArgs); ok && args.GetContainerId() != "" {
			a := args.GetArgs()
			logger = logger.WithValues("pod", klog.KRef(a["K8S_POD_NAMESPACE"], a["K8S_POD_NAME"]),
				"containerID", args.GetContainerId(), "ifname", args.GetIfname())
		}
		defer func() {
			if p := recover(); p != nil {
				logger.Error(fmt.Errorf("panic: %v", p), "Call panicked", "stack", string(debug.Stack()))
				err = fail(cnirpc.ErrorCode_INTERNAL, "coild has a fault, see its log", fmt.Errorf("%v", p))
			}
			took := time.Since(start)
			duration.WithLabelValues(method, status.Code(err).String()).Observe(took.Seconds())
			if err != nil {
				logger.Info("Call failed", "took", took, "reason", status.Convert(err).Message())
				return
			}
			logger.V(4).Info("Call served", "took", took)
		}()
		return next(klog.NewContext(ctx, logger), req)
	}
}
