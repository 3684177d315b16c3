// Package leader lets one of several processes work at a time.
//
// It owns the Lease that decides. It must not know what the leader does. Apart from
// package kube, since its client of all of Kubernetes' resources makes a program large.
package leader

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// Election says for which Lease a program stands.
type Election struct {
	Namespace string
	Name      string
	// Identity is this candidate's, usually the name of its pod.
	Identity string
	// LeaseDuration, RenewDeadline and RetryPeriod are those of client-go.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
}

// Run calls run while this candidate leads, with a context that ends when
// it leads no more, and returns after run has ended. That context ends RenewDeadline after
// the last renewal, which leaves run the rest of LeaseDuration to end before another
// candidate leads. Losing the lease is an error: the caller ends, and a new process stands
// again. The lease has a client of its
// own, so that a busy controller's rate limit can't starve the renewal. Nor can refusals of the
// controller's requests: see kube.Patient.
func Run(ctx context.Context, cfg *rest.Config, e Election, run func(context.Context) error) error {
	own := rest.CopyConfig(cfg)
	own.UserAgent += "/leader-election"
	own.Timeout = e.RenewDeadline / 2
	client, err := kubernetes.NewForConfig(own)
	if err != nil {
		return fmt.Errorf("client for lease %s: %w", e.Name, err)
	}
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, e.Namespace, e.Name,
		client.CoreV1(), client.CoordinationV1(), resourcelock.ResourceLockConfig{Identity: e.Identity})
	if err != nil {
		return fmt.Errorf("lease %s/%s: %w", e.Namespace, e.Name, err)
	}
	// OnStartedLeading runs on a goroutine of the elector's, which does not wait for it.
	ended := make(chan error, 1)
	electionCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	held := &heldLock{Interface: lock, life: e.RenewDeadline, lapse: time.AfterFunc(e.RenewDeadline, cancel), idle: make(chan struct{})}
	held.lapse.Stop() // until the lease is got
	defer held.lapse.Stop()
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:            held,
		Name:            e.Name,
		LeaseDuration:   e.LeaseDuration,
		RenewDeadline:   e.RenewDeadline,
		RetryPeriod:     e.RetryPeriod,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				klog.FromContext(ctx).Info("Leading", "lease", klog.KRef(e.Namespace, e.Name), "identity", e.Identity)
				ended <- run(ctx)
				close(held.idle)
				cancel()
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return fmt.Errorf("lease %s/%s: %w", e.Namespace, e.Name, err)
	}
	elector.Run(electionCtx)
	if !held.once.Load() {
		return nil // ctx ended before this candidate led
	}
	if err := <-ended; err != nil {
		return err
	}
	if ctx.Err() == nil {
		return fmt.Errorf("lease %s/%s was lost", e.Namespace, e.Name)
	}
	return nil
}

// heldLock knows whether this candidate ever got the lease. The elector has then
// started run, even if its goroutine is still to be scheduled.
//
// It also ends run in time, which the elector doesn't: that ends the context only after it
// has tried to renew for RenewDeadline, beginning RetryPeriod after the last success, and
// then to release for as long again.
type heldLock struct {
	resourcelock.Interface
	once atomic.Bool
	// lapse ends the context of run when the last renewal is older than life.
	lapse *time.Timer
	life  time.Duration
	// idle is closed when run has ended.
	idle chan struct{}
}

func (l *heldLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	began := time.Now()
	return l.wrote(began, l.Interface.Create(ctx, r))
}

// Update renews the lease, or releases it as soon as run has ended. A lease that can't be
// released lapses.
func (l *heldLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	if r.HolderIdentity == "" {
		select {
		case <-l.idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	began := time.Now()
	return l.wrote(began, l.Interface.Update(ctx, r))
}

// wrote takes the time before the write, as others may count from then on.
func (l *heldLock) wrote(began time.Time, err error) error {
	if err == nil {
		l.once.Store(true)
		l.lapse.Reset(time.Until(began.Add(l.life)))
	}
	return err
}
