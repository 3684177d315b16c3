package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit"
)

// writesOfService is how many writes a Service needs until it tells its address; so many of them are Events.
const writesOfService, eventsOfService = 9, 2

// example has a Service with an address, and the objects that controllers and nodes have written for it.
type example struct {
	pool    *v2.AddressPool
	parsed  ipam.Pool
	claim   *v2.AddressClaim
	block   *v2.AddressBlock
	service *corev1.Service
	events  []corev1.Event
}

// readExample reads what a Service got.
func readExample(ctx context.Context, r *rig.Rig, name string) (e example, err error) {
	services, events := r.Core.CoreV1().Services(shops), r.Core.CoreV1().Events(shops)
	var errs [3]error
	e.service, errs[0] = services.Get(ctx, name, metav1.GetOptions{})
	e.pool, errs[1] = r.Coil.CoilV2().AddressPools().Get(ctx, servicePool, metav1.GetOptions{})
	blocks, err := r.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelFloating + "=" + v2.FloatingValue})
	errs[2] = err
	if err := errors.Join(errs[:]...); err != nil {
		return e, err
	}
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, testkit.Timeout(30*time.Second), true, func(ctx context.Context) (bool, error) {
		told, err := events.List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
		if err == nil {
			e.events = told.Items
		}
		return len(e.events) >= eventsOfService, err
	})
	if err != nil {
		return e, fmt.Errorf("wait for Events of Service %s, there are %d: %w", name, len(e.events), err)
	}
	for i := range blocks.Items {
		if f := blocks.Items[i].Floating; f != nil && len(f.Ports) == 1 && f.Ports[0].Service == shops+"/"+name {
			e.block = &blocks.Items[i]
		}
	}
	if e.block == nil {
		return e, fmt.Errorf("Service %s has no AddressBlock", name)
	}
	if e.claim, err = r.Coil.CoilV2().AddressClaims(e.block.Floating.Owner.Namespace).Get(ctx, e.block.Floating.Claim, metav1.GetOptions{}); err != nil {
		return e, err
	}
	e.parsed, err = pools.Parse(e.pool.Spec)
	return e, err
}

// bareClient makes the writes that Services need to get their addresses, and nothing else. Its API server is its own: no controller watches.
type bareClient struct {
	example
	rig *rig.Rig
	// core and coil have the rights of coil-lb-controller, and ipam those of coil-ipam-controller: the API server does as much for each write, and stores as much.
	core       kubernetes.Interface
	coil, ipam versioned.Interface
	services   []*corev1.Service
	// served counts those that tell their addresses.
	served atomic.Int64
}

// newBareClient makes Services for a client that writes what an example got.
func newBareClient(ctx context.Context, o rig.Options, e example, services int) (b *bareClient, err error) {
	o.NoController = true
	b = &bareClient{example: e, services: make([]*corev1.Service, services)}
	if b.rig, err = rig.New(ctx, o); err != nil {
		return nil, err
	}
	var errs [4]error
	b.core, b.coil, errs[0] = b.rig.As("coil-lb-controller")
	_, b.ipam, errs[1] = b.rig.As("coil-ipam-controller")
	errs[2], errs[3] = b.rig.AllowServices(ctx), prepare(ctx, b.rig, 1)
	if err = errors.Join(errs[:]...); err == nil {
		err = each(ctx, services, func(ctx context.Context, i int) (err error) {
			b.services[i], err = b.rig.Core.CoreV1().Services(shops).Create(ctx, balanced(fmt.Sprint("bare-", i)), metav1.CreateOptions{})
			return err
		})
	}
	if err != nil {
		return nil, errors.Join(err, b.rig.Close())
	}
	return b, nil
}

// pids are the processes that work for it.
func (b *bareClient) pids() []int {
	etcd, server := b.rig.API.PIDs()
	return []int{server, etcd}
}

// serve writes all Services, one after the other.
func (b *bareClient) serve(ctx context.Context) error {
	return each(ctx, len(b.services), func(ctx context.Context, i int) error {
		err := b.write(ctx, i)
		if err == nil {
			b.served.Add(1)
		}
		return err
	})
}

// write makes the writes for a Service, as coil-lb-controller, coil-ipam-controller and a node make them.
func (b *bareClient) write(ctx context.Context, index int) error {
	service := b.services[index]
	services := b.core.CoreV1().Services(shops)
	claim, err := b.coil.CoilV2().AddressClaims(b.claim.Namespace).Create(ctx, &v2.AddressClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: b.claim.Namespace, Name: service.Name, Labels: b.claim.Labels}, Spec: b.claim.Spec,
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	addresses, err := b.parsed.Block(int32(index))
	if err != nil {
		return err
	}
	block, err := b.ipam.CoilV2().AddressBlocks().Create(ctx, pools.NewFloating(b.pool, int32(index), addresses, claims.Floating(claim)), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	claim.Status = b.claim.Status
	if _, err := b.ipam.CoilV2().AddressClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return err
	}
	if service, err = kube.PatchMetadata(ctx, services, service, map[string]any{
		"finalizers": b.service.Finalizers, "annotations": map[string]any{
			loadbalancer.AnnotationAssigned: b.service.Annotations[loadbalancer.AnnotationAssigned], loadbalancer.AnnotationFloatingIP: nil,
		},
	}); err != nil {
		return err
	}
	f := b.block.Floating
	if block, err = kube.PatchAsRead(ctx, b.coil.CoilV2().AddressBlocks(), block, map[string]any{
		"floating": map[string]any{"ports": f.Ports, "successors": f.Successors, "movingTo": nil, "announcers": nil},
	}); err != nil {
		return err
	}
	block.Floating.Holding = f.Holding
	if _, err := b.rig.Coil.CoilV2().AddressBlocks().Update(ctx, block, metav1.UpdateOptions{}); err != nil {
		return err
	}
	service.Status = b.example.service.Status
	if service, err = services.UpdateStatus(ctx, service, metav1.UpdateOptions{}); err != nil {
		return err
	}
	for i, told := range b.events[:eventsOfService] {
		about := told.InvolvedObject
		about.Name, about.UID, about.ResourceVersion = service.Name, service.UID, service.ResourceVersion
		told.ObjectMeta, told.InvolvedObject = metav1.ObjectMeta{Namespace: shops, Name: fmt.Sprint(service.Name, ".", i)}, about
		_, err := b.core.CoreV1().Events(shops).Create(ctx, &told, metav1.CreateOptions{})
		if err != nil {
			return err
		}
	}
	return nil
}

// pace is how fast Services get their addresses, in Services per second, and the processor time of programs for each, in ms.
type pace struct {
	rate float64
	used []float64
}

// newPace has the parts of processors that programs used while it took so long.
func newPace(services int, took, ran time.Duration, used []float64) (p pace) {
	p.rate = float64(services) / ran.Seconds()
	for _, part := range used {
		p.used = append(p.used, part*took.Seconds()*1000/float64(services))
	}
	return p
}

// note notes it.
func (p pace) note(rep *report, who string, programs ...string) {
	rep.Figures.Note(who, "/s", p.rate)
	for i, program := range programs {
		rep.Figures.Note(who+", processor time of "+program+" for each", "ms", p.used[i])
	}
}

// beside has the bare client write beside controllers, by turns, until do returns.
func (b *bareClient) beside(ctx context.Context, length time.Duration, controllers []int, services int, do func(context.Context) error) (theirs, own pace, err error) {
	done, writing := make(chan struct{}), make(chan error, 1)
	writes, stop := context.WithCancel(ctx)
	defer stop()
	var ran [2]time.Duration
	pids := slices.Concat(controllers, b.pids())
	began := time.Now()
	used, err := usage(ctx, pids, func(ctx context.Context) error {
		go func() { writing <- b.serve(writes) }()
		did := make(chan error, 1)
		go func() {
			did <- do(ctx)
			close(done)
		}()
		var err error
		ran, err = byTurns(length, controllers, b.pids(), done)
		return errors.Join(err, <-did)
	})
	took, served := time.Since(began), int(b.served.Load())
	stop()
	err = errors.Join(err, resume(b.pids()))
	if ended := <-writing; ctx.Err() == nil && !errors.Is(ended, context.Canceled) {
		err = errors.Join(err, ended, fmt.Errorf("the bare client has no Service left after %d", served))
	}
	if err != nil {
		return theirs, own, err
	}
	return newPace(services, took, ran[0], used[:len(controllers)]), newPace(served, took, ran[1], used[len(controllers):]), nil
}
