package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"

	"github.com/coil-net/coil/integration/egress/onepod"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// direct is a client that sends to the routers themselves, which the API server has.
type direct struct {
	egressClient
	informer *kube.Informer
	routers  discoverylisters.EndpointSliceLister
	pod      *onepod.Pod // nil before it is added
	cancel   context.CancelFunc
}

// startDirect makes the client as when its pod is added, on a node whose coild has just started: it
// knows nothing of how routers have lived in other rounds.
func startDirect(ctx context.Context, core kubernetes.Interface, c egressClient, s *corev1.Service) (*direct, error) {
	if err := netlab.Lines(ctx, c.network()); err != nil {
		return nil, err
	}
	d := &direct{egressClient: c}
	d.informer = kube.EndpointSliceInformer(core.DiscoveryV1().RESTClient(), s.Namespace, discoveryv1.LabelServiceName+"="+s.Name)
	d.routers = discoverylisters.NewEndpointSliceLister(d.informer.GetIndexer())
	changed := make(chan struct{}, 1)
	_, err := d.informer.AddEventHandler(reconcile.Handler(func(*discoveryv1.EndpointSlice) {
		select {
		case changed <- struct{}{}:
		default:
		}
	}))
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(ctx)
	d.cancel = cancel
	d.informer.Start(life.Done())
	if err := d.add(life, s, changed); err != nil {
		return nil, errors.Join(err, d.stop(ctx))
	}
	go func() {
		for {
			select {
			case <-changed:
				d.pod.Changed()
			case <-life.Done():
				return
			}
		}
	}()
	return d, nil
}

// add adds the pod as soon as all routers are listed: one that comes later has no flows before others
// have been idle for minutes.
func (d *direct) add(ctx context.Context, s *corev1.Service, changed <-chan struct{}) error {
	for !d.complete() {
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the routers of %s are listed: %w", d.name, ctx.Err())
		}
	}
	at, err := netnsOf(d.name)
	if err != nil {
		return err
	}
	d.pod, err = onepod.Start(ctx, onepod.Options{
		Name: d.name, Netns: at, Address: d.addr(), Egress: d.egress(), Service: s, Routers: d.listed,
		Repaired: func(out clientnet.Outcome) { fmt.Fprintf(os.Stderr, "repaired %+v\n", out) },
		Event:    func(format string, args ...any) { fmt.Fprintf(os.Stderr, "Event: "+format+"\n", args...) },
	})
	return err
}

// stop ends all that was started, and removes the client.
func (d *direct) stop(ctx context.Context) error {
	d.cancel()
	var err error
	if d.pod != nil {
		err = d.pod.Stop()
	}
	d.informer.Shutdown()
	return errors.Join(err, netlab.Lines(ctx, "link del "+d.name+"\nnetns del "+d.name))
}

// listed are the routers that the API server lists.
func (d *direct) listed() []client.Router {
	lists, _ := d.routers.List(labels.Everything()) // a cache has no error
	return client.RoutersOf(lists)
}

// complete says whether all routers are listed as ready, at all addresses.
func (d *direct) complete() bool {
	live := 0
	for _, r := range d.listed() {
		if r.State == client.RouterLive {
			live++
		}
	}
	return live == len(families)*len(routerEnds)
}
