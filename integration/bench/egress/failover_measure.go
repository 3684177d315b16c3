package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/lab/proc"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	// heartbeats is what kubelets have: a quarter of a Lease.
	heartbeats = 10 * time.Second
	// asking is how often routers are asked whether they live; see package pkg/node/routerhealth.
	asking = time.Second
	// roundTimeout is for everything that one round waits for.
	roundTimeout = 10 * time.Minute
)

// variant is a client and a family.
type variant struct {
	egressClient
	family dataplane.Family
}

// measureFailover makes the stage and measures on it.
func (o *options) measureFailover(ctx context.Context) error {
	r := Failovers{Conditions: figures.Now()}
	f, err := o.newFailover(ctx, pflag.Arg(0))
	if err != nil {
		return err
	}
	defer f.proxy.Kill()
	l, err := answer()
	if err != nil {
		return err
	}
	defer l.Close()
	for _, v := range f.variants {
		r.Variants = append(r.Variants, Failover{Family: v.family.String(), Peering: string(v.peering), SourcePort: v.sourcePort()})
	}
	// When a Lease was renewed last, or a router asked, decides how soon it is missed: rounds have all phases.
	period := asking
	if f.has(v2.EgressPeeringService) {
		period = heartbeats
	}
	for i := range o.rounds {
		phase := period * time.Duration(2*i+1) / time.Duration(2*o.rounds)
		ctx, cancel := context.WithTimeout(ctx, roundTimeout)
		err := f.round(ctx, phase, r.Variants)
		cancel()
		if err != nil {
			return fmt.Errorf("round %d: %w; the end of kube-proxy's log:\n%s", i, err, proc.Tail(f.proxyLog, 20))
		}
	}
	r.Conditions.LoadAtEnd = figures.Load()
	return json.NewEncoder(os.Stdout).Encode(r)
}

// await waits for all variants of some peerings, and returns when each came.
func (f *failover) await(one func(variant) (time.Time, error), peerings ...v2.EgressPeering) ([]time.Time, error) {
	times, errs := make([]time.Time, len(f.variants)), make([]error, len(f.variants))
	var work sync.WaitGroup
	for i, v := range f.variants {
		if slices.Contains(peerings, v.peering) {
			work.Go(func() { times[i], errs[i] = one(v) })
		}
	}
	work.Wait()
	return times, errors.Join(errs...)
}

// round lets clients of Services use router1, and others both, cuts its node's power when the phase has
// come, and measures until they use router2.
func (f *failover) round(ctx context.Context, phase time.Duration, results []Failover) (err error) {
	others := startBeats(ctx, f, nodeClients, nodeB)
	defer func() { err = errors.Join(err, others.stop()) }()
	if err := f.prepareRound(ctx); err != nil {
		return err
	}
	stop, err := f.useBoth(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	unlisted, err := f.watchUnlisted(ctx)
	if err != nil {
		return err
	}
	if err := f.heartbeat(ctx, nodeA); err != nil {
		return err
	}
	select {
	case <-time.After(phase):
	case <-ctx.Done():
		return ctx.Err()
	}
	off := time.Now()
	// Its namespace goes later: that makes the kernel change its own code, for which an emulated
	// processor stands still for seconds.
	if err := netlab.Lines(ctx, "-n fabric link del router1"); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "power off %s after the last heartbeat\n", phase)
	passed, err := f.await(func(v variant) (time.Time, error) {
		if v.peering == v2.EgressPeeringDirect {
			return v.swept(ctx, nodeB)
		}
		return v.recovered(ctx, nodeB)
	}, v2.EgressPeeringService, v2.EgressPeeringDirect)
	if err != nil {
		return err
	}
	gone, err := unlisted()
	if err != nil {
		return err
	}
	for i, v := range f.variants {
		results[i].add(v.peering, off, gone[i], passed[i])
		fmt.Fprintf(os.Stderr, "%s, %s: recovered after %.2f s\n", v.family, v.name, seconds(passed[i].Sub(off)))
	}
	return f.removeA(ctx)
}

// add adds what a round has measured; gone is zero if nobody waited for it.
func (r *Failover) add(peering v2.EgressPeering, off, gone, passed time.Time) {
	r.FromPowerOff = append(r.FromPowerOff, seconds(passed.Sub(off)))
	if gone.IsZero() {
		return
	}
	r.Unlisted = append(r.Unlisted, seconds(gone.Sub(off)))
	if peering == v2.EgressPeeringService { // others don't wait for it
		r.FromUnlisted = append(r.FromUnlisted, seconds(passed.Sub(gone)))
	}
}

// prepareRound makes router1, and lets all clients of Services use it although router2 is ready too.
func (f *failover) prepareRound(ctx context.Context) (err error) {
	if err := errors.Join(netlab.Lines(ctx, routerA), f.addNode(ctx, nodeA)); err != nil {
		return err
	}
	beat := startBeats(ctx, f, nodeA)
	defer func() { err = errors.Join(err, beat.stop()) }()
	if err := f.makeRouter(ctx, nodeA); err != nil {
		return err
	}
	if !f.has(v2.EgressPeeringService) {
		return errors.Join(f.setRouters(ctx, nodeA, true), f.setRouters(ctx, nodeB, true))
	}
	if err := errors.Join(f.setRouters(ctx, nodeA, true), f.setRouters(ctx, nodeB, false)); err != nil {
		return err
	}
	byA := func(v variant) (time.Time, error) { return v.recovered(ctx, nodeA) }
	if _, err := f.await(byA, v2.EgressPeeringService); err != nil {
		return err
	}
	if err := f.setRouters(ctx, nodeB, true); err != nil {
		return err
	}
	if err := f.awaitProxy(ctx); err != nil {
		return err
	}
	// By the affinity of their Service they still use the first.
	_, err = f.await(byA, v2.EgressPeeringService)
	return err
}

// useBoth makes the client that is direct, if there is one, and waits until it uses both routers.
func (f *failover) useBoth(ctx context.Context) (stop func() error, err error) {
	i := slices.IndexFunc(f.clients, func(c egressClient) bool { return c.peering == v2.EgressPeeringDirect })
	if i < 0 {
		return func() error { return nil }, nil
	}
	d, err := startDirect(ctx, f.core, f.clients[i], f.services[f.clients[i].name])
	if err != nil {
		return nil, err
	}
	_, err = f.await(func(v variant) (time.Time, error) { return time.Time{}, v.spread(ctx) }, v2.EgressPeeringDirect)
	if err != nil {
		return nil, errors.Join(err, d.stop(ctx))
	}
	return func() error { return d.stop(ctx) }, nil
}

func seconds(d time.Duration) float64 { return figures.Round(d.Seconds(), 2) }

// selector selects the EndpointSlices of all Services.
func (f *failover) selector() string {
	var names []string
	for _, c := range f.clients {
		names = append(names, c.name)
	}
	return discoveryv1.LabelServiceName + " in (" + strings.Join(names, ",") + ")"
}

// removeA removes what is left of the node, as an admin would, and waits until nobody lists it.
func (f *failover) removeA(ctx context.Context) error {
	var errs []error
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
	for _, c := range f.clients {
		errs = append(errs, f.core.CoreV1().Pods(metav1.NamespaceDefault).Delete(ctx, c.name+"-"+nodeA, now))
	}
	errs = append(errs, f.core.CoreV1().Nodes().Delete(ctx, nodeA, now), netlab.Lines(ctx, "netns del router1"))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		all, err := f.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: f.selector()})
		if err != nil {
			return false, err
		}
		return !slices.ContainsFunc(all.Items, func(s discoveryv1.EndpointSlice) bool { return lists(&s, nodeA) }), nil
	})
}

// awaitProxy waits until kube-proxy leads to both routers, for all Services and families.
func (f *failover) awaitProxy(ctx context.Context) error {
	for {
		out, err := exec.CommandContext(ctx, "nft", "list", "ruleset").CombinedOutput()
		if err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		missing := slices.ContainsFunc([]string{nodeA, nodeB}, func(n string) bool {
			a, want := routerEnds[n], len(f.clients)
			return strings.Count(string(out), "dnat to "+a.IPv4.String()+":") < want || strings.Count(string(out), "dnat to ["+a.IPv6.String()+"]:") < want
		})
		if !missing {
			return nil
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return fmt.Errorf("kube-proxy leads to both routers: %w; it has\n%s", ctx.Err(), out)
		}
	}
}

// watchUnlisted notes, from now on, when EndpointSlices stop listing router1 as ready. The
// function that it returns gives the times of all variants when all have. Without clients of Services nobody waits for that.
func (f *failover) watchUnlisted(ctx context.Context) (func() ([]time.Time, error), error) {
	gone := make([]time.Time, len(f.variants))
	if !f.has(v2.EgressPeeringService) {
		return func() ([]time.Time, error) { return gone, nil }, nil
	}
	w, err := f.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Watch(ctx, metav1.ListOptions{LabelSelector: f.selector()})
	if err != nil {
		return nil, err
	}
	missing := len(gone)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range w.ResultChan() {
			s, ok := e.Object.(*discoveryv1.EndpointSlice)
			if !ok {
				return
			}
			i := slices.IndexFunc(f.variants, func(v variant) bool {
				return v.name == s.Labels[discoveryv1.LabelServiceName] && v.family.String() == string(s.AddressType)
			})
			if e.Type != watch.Deleted && !lists(s, nodeA) && gone[i].IsZero() {
				gone[i] = time.Now()
				missing--
			}
			if missing == 0 {
				return
			}
		}
	}()
	return func() ([]time.Time, error) {
		select {
		case <-done:
		case <-ctx.Done():
		}
		w.Stop()
		<-done
		if missing > 0 {
			return nil, fmt.Errorf("%d EndpointSlices of %d still list the router", missing, len(gone))
		}
		return gone, nil
	}, nil
}

// lists says whether an EndpointSlice has a ready router on a node.
func lists(s *discoveryv1.EndpointSlice, node string) bool {
	return slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
		return e.NodeName != nil && *e.NodeName == node && (e.Conditions.Ready == nil || *e.Conditions.Ready)
	})
}

// beats keeps the nodes that have power alive.
type beats struct {
	cancel context.CancelFunc
	ended  chan error
}

func startBeats(ctx context.Context, f *failover, nodes ...string) *beats {
	ctx, cancel := context.WithCancel(ctx)
	b := &beats{cancel: cancel, ended: make(chan error, 1)}
	go func() {
		t := time.NewTicker(heartbeats)
		defer t.Stop()
		for {
			for _, n := range nodes {
				if err := f.heartbeat(ctx, n); err != nil && ctx.Err() == nil {
					b.ended <- err
					return
				}
			}
			select {
			case <-t.C:
			case <-ctx.Done():
				b.ended <- nil
				return
			}
		}
	}()
	return b
}

func (b *beats) stop() error {
	b.cancel()
	return <-b.ended
}
