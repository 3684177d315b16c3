// Package server answers the calls of the CNI plugin: it checks what they carry
// and turns errors into codes of CNI.
//
// It owns the gRPC socket. It must not know how a pod gets its address.
package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/emptypb"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/store"
)

// Assigner gives and takes addresses; see package assign.
type Assigner interface {
	Add(ctx context.Context, r node.AddRequest) (store.Allocation, error)
	Del(ctx context.Context, id attachment.ID) error
	Check(ctx context.Context, id attachment.ID, netns string, addrs []netip.Addr) error
	GC(ctx context.Context, valid []attachment.ID, called time.Time) error
}

// Egress lets pods use Egresses; see package egress.
type Egress interface {
	// Begin finds out which Egresses a pod asks for. The returned function completes the
	// pod's sandbox, or leaves nothing there.
	Begin(ctx context.Context, pod store.Pod) (func(context.Context, node.Sandbox) error, error)
	// Check names the differences of a sandbox from how it was made.
	Check(ctx context.Context, id attachment.ID) error
	// Forget forgets a sandbox.
	Forget(ctx context.Context, id attachment.ID) error
}

// Server implements cnirpc.CNIServer.
type Server struct {
	cnirpc.UnimplementedCNIServer
	// Ready is nil when ADD can be served, or says why not.
	Ready func() error
	// Started is closed when coild has started, ready or not.
	Started <-chan struct{}
	// Netns opens a network namespace by path and tells its inode.
	Netns func(path string) (store.Netns, error)
	// Assigner is nil if coild gives no addresses, and is chained behind a plugin that does.
	Assigner Assigner
	// PoolOf returns the name of the pool of a namespace.
	PoolOf func(ctx context.Context, namespace string) (string, error)
	// Egress is nil if annotations that ask for an Egress are ignored.
	Egress Egress
}

// startWait is for how long a call waits until coild has started.
const startWait = 2 * time.Second

// ready returns nil when calls can be served. While coild starts, which takes less than a second, it waits: the
// kubelet tries again only seconds after a refusal.
func (s *Server) ready(ctx context.Context) error {
	wait := time.NewTimer(startWait)
	defer wait.Stop()
	select {
	case <-s.Started:
	case <-wait.C:
	case <-ctx.Done():
	}
	return s.Ready()
}

// Add implements cnirpc.CNIServer.
func (s *Server) Add(ctx context.Context, args *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
	if err := s.ready(ctx); err != nil {
		return nil, fail(cnirpc.ErrorCode_TRY_AGAIN_LATER, "coild is not ready", err)
	}
	pod, err := podOf(args)
	if err != nil {
		return nil, err
	}
	chained := args.GetArgs()["IS_CHAINED"] == "true"
	switch {
	case chained && s.Assigner != nil:
		return nil, fail(cnirpc.ErrorCode_INVALID_NETWORK_CONFIG, "coil is chained behind another plugin",
			errors.New("let coil be the first plugin of the list, or run coild with --enable-ipam=false"))
	case !chained && s.Assigner == nil:
		return nil, fail(cnirpc.ErrorCode_INVALID_NETWORK_CONFIG, "coil is the first plugin of the list",
			errors.New("chain it behind the plugin that gives addresses, or run coild with --enable-ipam=true"))
	}
	var finish func(context.Context, node.Sandbox) error
	if s.Egress != nil {
		// First, since it takes no address.
		if finish, err = s.Egress.Begin(ctx, pod); err != nil {
			return nil, fail(codeOf(err), "set up egress of the pod", err)
		}
	}
	if chained {
		return s.addChained(ctx, args, pod, finish)
	}
	netns, err := s.Netns(args.GetNetns())
	if err != nil {
		return nil, fail(cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, "CNI_NETNS is not usable", err)
	}
	pool, err := s.PoolOf(ctx, pod.Namespace)
	if err != nil {
		return nil, fail(cnirpc.ErrorCode_TRY_AGAIN_LATER, "look up the pool of namespace "+pod.Namespace, err)
	}
	alloc, err := s.Assigner.Add(ctx, node.AddRequest{ID: idOf(args), Pod: pod, Netns: netns, Pool: pool, Finish: finish})
	if err != nil {
		return nil, fail(codeOf(err), "give the pod an address", err)
	}
	faultpoint.At(faultpoint.AddAnswering)
	return &cnirpc.AddResponse{Result: alloc.Result}, nil
}

// addChained completes the network of a pod that another plugin has attached, and answers with the result of that plugin.
func (s *Server) addChained(ctx context.Context, args *cnirpc.CNIArgs, pod store.Pod, finish func(context.Context, node.Sandbox) error) (*cnirpc.AddResponse, error) {
	prev, resp, err := passOn(args.GetStdinData())
	if err != nil || finish == nil {
		return resp, err
	}
	addrs, err := addrsOf(prev, args.GetIfname())
	if err != nil {
		return nil, fail(cnirpc.ErrorCode_DECODING_FAILURE, "the previous result is not usable", err)
	}
	addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() })
	at := node.Sandbox{ID: idOf(args), Pod: pod, Address: ipam.AddressOf(addrs...)}
	if at.Address == (ipam.Address{}) {
		return nil, fail(cnirpc.ErrorCode_INVALID_NETWORK_CONFIG, "the previous result is not usable",
			fmt.Errorf("it gives %s no address", args.GetIfname()))
	}
	if at.Netns, err = s.Netns(args.GetNetns()); err != nil {
		return nil, fail(cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, "CNI_NETNS is not usable", err)
	}
	if err := finish(ctx, at); err != nil {
		return nil, fail(codeOf(err), "set up egress of the pod", err)
	}
	return resp, nil
}

// Del implements cnirpc.CNIServer. It needs no more than the container ID and
// the interface name.
func (s *Server) Del(ctx context.Context, args *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	if err := checkID(args); err != nil {
		return nil, err
	}
	if s.Assigner != nil {
		if err := s.Assigner.Del(ctx, idOf(args)); err != nil {
			return nil, fail(codeOf(err), "detach the pod", err)
		}
	}
	if s.Egress != nil {
		// Last: an ADD that was in progress has ended.
		if err := s.Egress.Forget(ctx, idOf(args)); err != nil {
			// It will be noticed that the network namespace is gone.
			klog.FromContext(ctx).Error(err, "Forgetting a sandbox failed")
		}
	}
	faultpoint.At(faultpoint.DelAnswering)
	return &emptypb.Empty{}, nil
}

// Check implements cnirpc.CNIServer.
func (s *Server) Check(ctx context.Context, args *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	if err := s.ready(ctx); err != nil {
		return nil, fail(cnirpc.ErrorCode_TRY_AGAIN_LATER, "coild is not ready", err)
	}
	if err := checkID(args); err != nil {
		return nil, err
	}
	var errs []error
	if s.Assigner != nil {
		addrs, err := previousAddrs(args.GetStdinData(), args.GetIfname())
		if err != nil {
			return nil, fail(cnirpc.ErrorCode_DECODING_FAILURE, "the previous result is not usable", err)
		}
		errs = append(errs, s.Assigner.Check(ctx, idOf(args), args.GetNetns(), addrs))
	}
	if s.Egress != nil {
		errs = append(errs, s.Egress.Check(ctx, idOf(args)))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fail(codeOf(err), "the pod's network is not as it was set up", err)
	}
	return &emptypb.Empty{}, nil
}

// GC implements cnirpc.CNIServer.
func (s *Server) GC(ctx context.Context, args *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	called := time.Now()
	if err := s.ready(ctx); err != nil {
		return nil, fail(cnirpc.ErrorCode_TRY_AGAIN_LATER, "coild is not ready", err)
	}
	valid, err := spec.ValidAttachments(args.GetStdinData())
	if err != nil {
		return nil, fail(cnirpc.ErrorCode_DECODING_FAILURE, "the list of valid attachments is not usable", err)
	}
	if s.Assigner == nil {
		return &emptypb.Empty{}, nil
	}
	if err := s.Assigner.GC(ctx, valid, called); err != nil {
		return nil, fail(codeOf(err), "release what is not valid", err)
	}
	return &emptypb.Empty{}, nil
}

// Status implements cnirpc.CNIServer.
func (s *Server) Status(context.Context, *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	err := s.Ready()
	switch {
	case errors.Is(err, node.ErrWithdrawn):
		return nil, fail(cnirpc.ErrorCode_LIMITED_CONNECTIVITY, "coild is not ready", err)
	case err != nil:
		return nil, fail(cnirpc.ErrorCode_PLUGIN_NOT_AVAILABLE, "coild is not ready", err)
	}
	return &emptypb.Empty{}, nil
}

func idOf(args *cnirpc.CNIArgs) attachment.ID {
	return attachment.ID{ContainerID: args.GetContainerId(), IfName: args.GetIfname()}
}

func checkID(args *cnirpc.CNIArgs) error {
	if args.GetContainerId() == "" || args.GetIfname() == "" {
		return fail(cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, "the attachment is not named",
			errors.New("CNI_CONTAINERID and CNI_IFNAME must be set"))
	}
	return nil
}

// podOf returns the pod of an ADD.
func podOf(args *cnirpc.CNIArgs) (store.Pod, error) {
	if err := checkID(args); err != nil {
		return store.Pod{}, err
	}
	a := args.GetArgs()
	pod := store.Pod{Namespace: a["K8S_POD_NAMESPACE"], Name: a["K8S_POD_NAME"], UID: a["K8S_POD_UID"]}
	if pod.Namespace == "" || pod.Name == "" {
		return store.Pod{}, fail(cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, "the pod is not named",
			errors.New("CNI_ARGS must have K8S_POD_NAMESPACE and K8S_POD_NAME"))
	}
	return pod, nil
}

// codeOf classifies errors of assignment.
func codeOf(err error) cnirpc.ErrorCode {
	is := func(targets ...error) bool {
		return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
	}
	switch {
	case is(node.ErrUnavailable, node.ErrDeleted, store.ErrReadOnly, context.Canceled, context.DeadlineExceeded):
		return cnirpc.ErrorCode_TRY_AGAIN_LATER
	case is(store.ErrNotFound, os.ErrNotExist):
		return cnirpc.ErrorCode_UNKNOWN_CONTAINER
	}
	return cnirpc.ErrorCode_INTERNAL
}
