package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	// servicePool is the pool of the Services' addresses.
	servicePool = "services"
	// servingNodes is how many nodes may have them.
	servingNodes = 100
	shops        = "shops"
	// renewsAsUsual has a controller renew its Lease as often as by default. Controllers of the rig renew theirs more often, and the bare client has no Lease.
	renewsAsUsual = "--leader-election-retry-period=5s"
	// mostTurn is for how long controllers and bare client run by turns, and turnOfService so where there are few Services.
	mostTurn, turnOfService = 3 * time.Second, 5 * time.Millisecond
)

// serving is a cluster with Services of the class. Its nodes are played: the first one that may have an address has it.
type serving struct {
	options
	rig        *rig.Rig
	controller *rig.Program
}

// measureServices measures coil-lb-controller with many Services: how fast they get addresses that nodes have, compared by turns with a client that only writes; how late one more
// Service is; and its memory. Each Service has an address of its own.
func measureServices(ctx context.Context, o options, rep *report) (err error) {
	s := &serving{options: o}
	if s.rig, err = rig.New(ctx, rig.Options{Log: o.log, ControllerFlags: []string{renewsAsUsual}}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.rig.Close()) }()
	if err := prepare(ctx, s.rig, min(servingNodes, s.nodes)); err != nil {
		return err
	}
	stop, err := s.playNodes(ctx)
	if err != nil {
		return err
	}
	defer stop()
	told, err := s.watchTold(ctx)
	if err != nil {
		return err
	}
	if s.controller, err = s.rig.NewLBController(ctx, servicePool); err != nil {
		return err
	}
	s.controller.Args = append(s.controller.Args, renewsAsUsual)
	defer func() { s.controller.Kill() }()
	// One Service has its address before the others are there.
	if err := errors.Join(s.controller.Start(), s.make(ctx, serviceName(0)), s.await(ctx, told, 1)); err != nil {
		return err
	}
	e, err := readExample(ctx, s.rig, serviceName(0))
	if err != nil {
		return err
	}
	s.controller.Stop()
	bare, err := newBareClient(ctx, rig.Options{Log: o.log}, e, 2*s.services)
	if err != nil {
		return err
	}
	if err := errors.Join(s.all(ctx, told, bare, rep), bare.rig.Close()); err != nil {
		return err
	}
	if err := s.more(ctx, rep); err != nil {
		return err
	}
	now, peak, err := memory(s.controller.PID())
	if err != nil {
		return err
	}
	rep.Figures.Note("services: resident memory of coil-lb-controller at the end", "MiB", now)
	rep.Figures.Note("services: resident memory of coil-lb-controller, most of the whole run", "MiB", peak)
	return nil
}

// all measures how fast all but the first Service get addresses, beside a bare client.
func (s *serving) all(ctx context.Context, told func() int, bare *bareClient, rep *report) error {
	if err := each(ctx, s.services, func(ctx context.Context, i int) error { return s.make(ctx, serviceName(i+1)) }); err != nil {
		return err
	}
	before, err := s.countEvents(ctx)
	if err != nil {
		return err
	}
	if err := s.controller.Start(); err != nil {
		return err
	}
	etcd, server := s.rig.API.PIDs()
	theirs, own, err := bare.beside(ctx, min(mostTurn, time.Duration(s.services)*turnOfService), []int{server, etcd, s.controller.PID(), s.rig.Controller.PID()}, s.services,
		func(ctx context.Context) error { return s.await(ctx, told, 1+s.services) })
	if err != nil {
		return fmt.Errorf("%w; the end of the controller's log:\n%s", err, s.controller.Logs(20))
	}
	after, err := s.countEvents(ctx)
	if err != nil {
		return err
	}
	// client-go's recorder drops Events of a burst: the controllers have written fewer than a Service needs.
	events := float64(after-before) / float64(s.services)
	what := fmt.Sprintf("services: %d get addresses", s.services)
	rep.Figures.Note(what+", from the start of the controller", "s", float64(s.services)/theirs.rate)
	theirs.note(rep, what, "kube-apiserver", "etcd", "coil-lb-controller", "coil-ipam-controller")
	rep.Figures.Note(what+", Events for each until then", "", events)
	own.note(rep, what+", bare client", "kube-apiserver", "etcd")
	rep.Figures.Note(what+", writes of controllers and nodes by the bare client's", "", theirs.rate*(writesOfService-eventsOfService+events)/(own.rate*writesOfService))
	rep.Figures.AtLeast(what+", controller by bare client", "", theirs.rate/own.rate, 0.8)
	return nil
}

// prepare makes the pool, and nodes that may have its addresses.
func prepare(ctx context.Context, r *rig.Rig, nodes int) error {
	err := errors.Join(r.AddPool(ctx, servicePool, 0, rig.Dual("198.18.0.0/18", "2001:db8:ffff::/114")), r.AddNamespace(ctx, shops, ""))
	if err != nil {
		return err
	}
	return each(ctx, nodes, func(ctx context.Context, i int) error {
		n := nodeObject(i)
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprint("172.16.0.", i+1)}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		_, err := r.Core.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
		return err
	})
}

func serviceName(i int) string { return fmt.Sprintf("service-%05d", i) }

// make makes a Service.
func (s *serving) make(ctx context.Context, name string) error {
	_, err := s.rig.Core.CoreV1().Services(shops).Create(ctx, balanced(name), metav1.CreateOptions{})
	return err
}

// balanced is a Service of the class.
func balanced(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(loadbalancer.Class), Ports: []corev1.ServicePort{{Port: servicePort}},
		AllocateLoadBalancerNodePorts: new(false), // there are fewer
	}}
}

// playNodes has nodes take addresses until stop is called.
func (s *serving) playNodes(ctx context.Context) (stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	blocks := kube.FloatingBlockInformer(s.rig.Coil.CoilV2())
	take := func(o any) {
		b, ok := o.(*v2.AddressBlock)
		if !ok || b.Floating == nil || len(b.Floating.Successors) == 0 || b.Floating.Holding.Holder != "" {
			return
		}
		b = b.DeepCopy()
		b.Floating.Holding.Holder = b.Floating.Successors[0].Node
		// A conflict is followed by an event.
		if _, err := s.rig.Coil.CoilV2().AddressBlocks().Update(ctx, b, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil {
			fmt.Fprintln(s.log, "a node can't take an address:", err)
		}
	}
	work := make(chan any, 4*s.services)
	if _, err := blocks.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(o any) { work <- o }, UpdateFunc: func(_, o any) { work <- o }}); err != nil {
		cancel()
		return nil, err
	}
	for range parallel {
		go func() {
			for {
				select {
				case o := <-work:
					take(o)
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	go blocks.Run(ctx.Done())
	return cancel, nil
}

// countEvents returns how many Events Services have.
func (s *serving) countEvents(ctx context.Context) (int, error) {
	l, err := s.rig.Core.EventsV1().Events(shops).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	return len(l.Items), nil
}

// watchTold returns a function that counts the Services that tell addresses. A list of all of them, again and again, would cost the API server much of what is measured,
// and so would events in another encoding than that of coil-lb-controller's.
func (s *serving) watchTold(ctx context.Context) (count func() int, err error) {
	core, err := kubernetes.NewForConfig(kube.Protobuf(s.rig.API.RESTConfig()))
	if err != nil {
		return nil, err
	}
	informer := informers.NewSharedInformerFactoryWithOptions(core, 0, informers.WithNamespace(shops)).Core().V1().Services().Informer()
	var told atomic.Int64
	_, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(before, after any) {
		if tells(after) && !tells(before) {
			told.Add(1)
		}
	}})
	go informer.Run(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		err = errors.Join(err, ctx.Err())
	}
	return func() int { return int(told.Load()) }, err
}

func tells(o any) bool {
	s, ok := o.(*corev1.Service)
	return ok && len(s.Status.LoadBalancer.Ingress) > 0
}

// await waits until as many Services tell addresses.
func (s *serving) await(ctx context.Context, told func() int, n int) error {
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, testkit.Timeout(madeTimeout), true, func(context.Context) (bool, error) { return told() >= n, nil })
	if err != nil {
		return fmt.Errorf("wait until %d Services tell addresses, %d do: %w", n, told(), err)
	}
	return nil
}

// more makes Services one after the other, and measures how late each one tells its address.
func (s *serving) more(ctx context.Context, rep *report) error {
	var all []time.Duration
	for i := range s.changes {
		name := fmt.Sprint("more-", i)
		began := time.Now()
		if err := s.make(ctx, name); err != nil {
			return err
		}
		err := wait.PollUntilContextTimeout(ctx, 2*time.Millisecond, testkit.Timeout(30*time.Second), true, func(ctx context.Context) (bool, error) {
			o, err := s.rig.Core.CoreV1().Services(shops).Get(ctx, name, metav1.GetOptions{ResourceVersion: "0"})
			if apierrors.IsNotFound(err) {
				return false, nil
			}
			return err == nil && len(o.Status.LoadBalancer.Ingress) > 0, err
		})
		if err != nil {
			return fmt.Errorf("wait until %s tells an address: %w", name, err)
		}
		all = append(all, time.Since(began))
	}
	what := fmt.Sprintf("services: one more beside %d, until it tells its address, ", s.services)
	rep.Figures.Note(what+"median", "ms", figures.Quantile(all, 0.5))
	rep.Figures.Note(what+"p99", "ms", figures.Quantile(all, 0.99))
	return nil
}
