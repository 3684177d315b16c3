package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/integration/audit"
	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/app/ipamcontroller"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/kube/leader"
)

const (
	// adds is how many pods are attached at once.
	adds = 200
	// latePods are those that wait for the late block meanwhile.
	latePods = 8
	latePool = "late"
)

// measureStall attaches pods to a fresh node while others wait for a block of another
// pool, which is late.
func measureStall(ctx context.Context, o options, rep *report) error {
	took, late, err := stall(ctx, o)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("%d ADDs at once on a fresh node, the block of another pool comes after %s", adds, o.delay)
	rep.Figures.Note(what+": p50", "ms", figures.Quantile(took, 0.5))
	rep.Figures.AtMost(what+": p99", "ms", figures.Quantile(took, 0.99), 300)
	rep.Figures.Note("the same, ADDs of the other pool, the quickest", "s", figures.Quantile(late, 0)/1000)
	return nil
}

// stall returns how long the ADDs took, and those that waited for the late block. It comes
// after the delay, and not before the last ADD of the first pool has been answered: an ADD
// that waits for it, too, fails.
func stall(ctx context.Context, o options) (took, late []time.Duration, err error) {
	r, err := rig.New(ctx, rig.Options{NoController: true, Log: o.log})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := errors.Join(
		r.AddPool(ctx, "default", 5, rig.Dual("10.0.0.0/16", "fd00::/112")),
		r.AddPool(ctx, latePool, 5, rig.Dual("10.1.0.0/16", "fd00:1::/112")),
		r.AddNamespace(ctx, latePool, latePool),
	); err != nil {
		return nil, nil, err
	}
	come := make(chan struct{})
	stop, err := delayedController(ctx, r, come)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	n, err := r.AddNode(ctx, rig.NodeOptions{})
	if err != nil {
		return nil, nil, err
	}
	pods := make([]*rig.Sandbox, adds+latePods)
	err = each(ctx, len(pods), func(ctx context.Context, i int) (err error) {
		namespace := metav1.NamespaceDefault
		if i >= adds {
			namespace = latePool
		}
		pods[i], err = n.NewSandbox(ctx, rig.SandboxOptions{Namespace: namespace})
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	waiting, waitCtx := errgroup.WithContext(ctx)
	began := time.Now()
	late = attach(waitCtx, waiting, pods[adds:])
	if err := awaitRequest(ctx, r); err != nil {
		return nil, nil, errors.Join(err, waiting.Wait())
	}
	earliest := time.After(o.delay)
	group, groupCtx := errgroup.WithContext(ctx)
	took = attach(groupCtx, group, pods[:adds])
	err = group.Wait()
	<-earliest
	held := time.Since(began)
	close(come)
	if err := errors.Join(err, waiting.Wait()); err != nil {
		return nil, nil, fmt.Errorf("%w; the end of coild's log:\n%s", err, n.Coild.Logs(20))
	}
	for _, d := range late {
		if d < held {
			return nil, nil, fmt.Errorf("an ADD of the other pool took %s: its block was not late", d)
		}
	}
	return took, late, r.AwaitClean(ctx, 10*time.Second)
}

// attach begins an ADD for each pod by a call of coild, since the plugins' processes
// would wait for each other rather than for coild. The times are set when group ends.
func attach(ctx context.Context, group *errgroup.Group, pods []*rig.Sandbox) []time.Duration {
	took := make([]time.Duration, len(pods))
	for i, s := range pods {
		group.Go(func() error {
			began := time.Now()
			_, err := s.AddRPC(ctx)
			took[i] = time.Since(began)
			return err
		})
	}
	return took
}

// awaitRequest waits until the node has asked for the late block.
func awaitRequest(ctx context.Context, r *rig.Rig) error {
	w, err := r.Coil.CoilV2().BlockRequests().Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	defer w.Stop()
	select {
	case <-w.ResultChan():
		return nil
	case <-time.After(10 * time.Second):
		return errors.New("the node has not asked for a block of the other pool")
	}
}

// delayedController runs coil-ipam-controller in this process, whose reads of the late
// pool wait for come to be closed: each block is preceded by one.
func delayedController(ctx context.Context, r *rig.Rig, come <-chan struct{}) (stop func() error, err error) {
	cfg, err := r.API.UserConfig(audit.User("coil-ipam-controller"), "system:serviceaccounts", "system:serviceaccounts:kube-system")
	if err != nil {
		return nil, err
	}
	cfg.WarningHandler = rest.NoWarnings{} // one about the name of the finalizer in each answer
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return &delayed{next, come} })
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- ipamcontroller.Run(ctx, cfg, &ipamcontroller.Options{
			GCInterval: time.Hour, Quarantine: 10 * time.Minute,
			Options: leading.Options{Election: leader.Election{
				Namespace:     metav1.NamespaceSystem,
				LeaseDuration: 30 * time.Second, RenewDeadline: 20 * time.Second, RetryPeriod: 300 * time.Millisecond,
			}},
		})
	}()
	return sync.OnceValue(func() error { cancel(); return <-ended }), nil
}

// delayed is a connection to the API server that holds up reads of the late pool.
type delayed struct {
	next http.RoundTripper
	come <-chan struct{}
}

func (d *delayed) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/addresspools/") && path.Base(r.URL.Path) == latePool {
		select {
		case <-d.come:
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
	return d.next.RoundTrip(r)
}
