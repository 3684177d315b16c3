package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit"
)

// example has a Service with an address, and the objects that controllers and nodes have written for it.
type example struct {
	pool    *v2.AddressPool
	parsed  ipam.Pool
	claim   *v2.AddressClaim
	block   *v2.AddressBlock
	service *corev1.Service
	events  []eventsv1.Event
}

// bareFigures are the pace of a client that only writes, in Services per second, and the processor time for each, in ms.
type bareFigures struct{ rate, server, etcd float64 }

func (f bareFigures) note(rep *report, who string) {
	rep.Figures.Note(who, "/s", f.rate)
	rep.Figures.Note(who+", processor time of kube-apiserver for each", "ms", f.server)
	rep.Figures.Note(who+", processor time of etcd for each", "ms", f.etcd)
}

// bareRate has a client write n Services, from the index first on. For each Service it makes the writes that the first one
// needed; of Events so many for each, all of the first one's if that is negative. All controllers and nodes have ended: the client has the API server to itself.
func (s *serving) bareRate(ctx context.Context, first, n int, events float64) (f bareFigures, err error) {
	e, err := s.example(ctx)
	if err != nil {
		return f, err
	}
	if events < 0 {
		events = float64(len(e.events))
	}
	services := make([]*corev1.Service, n)
	err = each(ctx, n, func(ctx context.Context, i int) (err error) {
		services[i], err = s.rig.Core.CoreV1().Services(shops).Create(ctx, balanced(fmt.Sprint("bare-", first+i)), metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return f, err
	}
	etcd, server := s.rig.API.PIDs()
	began := time.Now()
	used, err := usage(ctx, []int{server, etcd}, func(ctx context.Context) error {
		return each(ctx, n, func(ctx context.Context, i int) error {
			return s.bare(ctx, e, services[i], int32(s.services+s.changes+first+i), int(events*float64(i+1))-int(events*float64(i)))
		})
	})
	if err != nil {
		return f, err
	}
	took := time.Since(began).Seconds()
	return bareFigures{float64(n) / took, used[0] * took * 1000 / float64(n), used[1] * took * 1000 / float64(n)}, nil
}

// countEvents returns how many Events Services have.
func (s *serving) countEvents(ctx context.Context) (int, error) {
	l, err := s.rig.Core.EventsV1().Events(shops).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	return len(l.Items), nil
}

// example reads what the first Service got.
func (s *serving) example(ctx context.Context) (e example, err error) {
	services, events := s.rig.Core.CoreV1().Services(shops), s.rig.Core.EventsV1().Events(shops)
	var errs [3]error
	e.service, errs[0] = services.Get(ctx, serviceName(0), metav1.GetOptions{})
	e.pool, errs[1] = s.rig.Coil.CoilV2().AddressPools().Get(ctx, servicePool, metav1.GetOptions{})
	blocks, err := s.rig.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelFloating + "=" + v2.FloatingValue})
	errs[2] = err
	if err := errors.Join(errs[:]...); err != nil {
		return e, err
	}
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, testkit.Timeout(30*time.Second), true, func(ctx context.Context) (bool, error) {
		told, err := events.List(ctx, metav1.ListOptions{FieldSelector: "regarding.name=" + serviceName(0)})
		if err == nil {
			e.events = told.Items
		}
		return len(e.events) > 0, err
	})
	if err != nil {
		return e, fmt.Errorf("wait for Events of Service %s: %w", serviceName(0), err)
	}
	for i := range blocks.Items {
		if f := blocks.Items[i].Floating; f != nil && len(f.Ports) == 1 && f.Ports[0].Service == shops+"/"+serviceName(0) {
			e.block = &blocks.Items[i]
		}
	}
	if e.block == nil {
		return e, fmt.Errorf("Service %s has no AddressBlock", serviceName(0))
	}
	if e.claim, err = s.rig.Coil.CoilV2().AddressClaims(e.block.Floating.Owner.Namespace).Get(ctx, e.block.Floating.Claim, metav1.GetOptions{}); err != nil {
		return e, err
	}
	e.parsed, err = pools.Parse(e.pool.Spec)
	return e, err
}

// bare makes the writes for a Service, as coil-lb-controller, coil-ipam-controller and a node make them, and so many Events.
func (s *serving) bare(ctx context.Context, e example, service *corev1.Service, index int32, events int) error {
	ofClaims, ofBlocks, services := s.rig.Coil.CoilV2().AddressClaims(e.claim.Namespace), s.rig.Coil.CoilV2().AddressBlocks(), s.rig.Core.CoreV1().Services(shops)
	claim, err := ofClaims.Create(ctx, &v2.AddressClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: e.claim.Namespace, Name: service.Name, Labels: e.claim.Labels}, Spec: e.claim.Spec,
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	addresses, err := e.parsed.Block(index)
	if err != nil {
		return err
	}
	block, err := ofBlocks.Create(ctx, pools.NewFloating(e.pool, index, addresses, claims.Floating(claim)), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	claim.Status = e.claim.Status
	if _, err := ofClaims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return err
	}
	if service, err = kube.PatchMetadata(ctx, services, service, map[string]any{
		"finalizers": e.service.Finalizers, "annotations": map[string]any{
			loadbalancer.AnnotationAssigned: e.service.Annotations[loadbalancer.AnnotationAssigned], loadbalancer.AnnotationFloatingIP: nil,
		},
	}); err != nil {
		return err
	}
	f := e.block.Floating
	if block, err = kube.PatchAsRead(ctx, ofBlocks, block, map[string]any{
		"floating": map[string]any{"ports": f.Ports, "successors": f.Successors, "movingTo": nil, "announcers": nil},
	}); err != nil {
		return err
	}
	block.Floating.Holding = f.Holding
	if _, err := ofBlocks.Update(ctx, block, metav1.UpdateOptions{}); err != nil {
		return err
	}
	service.Status = e.service.Status
	if service, err = services.UpdateStatus(ctx, service, metav1.UpdateOptions{}); err != nil {
		return err
	}
	for i := range events {
		told := e.events[i%len(e.events)]
		regarding := told.Regarding
		regarding.Name, regarding.UID = service.Name, service.UID
		_, err := s.rig.Core.EventsV1().Events(shops).Create(ctx, &eventsv1.Event{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(service.Name, ".", i)}, EventTime: metav1.NowMicro(), ReportingController: "bare", ReportingInstance: "bare",
			Action: "ServeAddress", Type: told.Type, Reason: told.Reason, Note: told.Note, Regarding: regarding,
		}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
	}
	return nil
}
