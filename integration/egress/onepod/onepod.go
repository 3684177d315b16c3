// Package onepod keeps one client pod of one Egress up to date by what coild does that with
// (pkg/node/egress, pkg/node/routerhealth, pkg/clientnet), in the real kernel, without coild and an API server.
//
// It owns the objects that the manager asks a cluster for. It must not know what is tested or
// measured by them.
package onepod

import (
	"context"
	"errors"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/egress"
	"github.com/coil-net/coil/pkg/node/routerhealth"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// Options are the pod and what it uses.
type Options struct {
	Name    string // of the pod
	Netns   store.Netns
	Address ipam.Address
	Egress  *v2.Egress
	Service *corev1.Service // of the Egress, nil if there is none
	// Routers are those of the Egress as they are now.
	Routers func() []client.Router
	// Repaired is told what was not as it was made, and Event what an Event would say.
	Repaired func(clientnet.Outcome)
	Event    func(format string, args ...any)
}

// Pod is kept up to date until Stop.
type Pod struct {
	manager *egress.Manager
	health  *routerhealth.Checker
	key     types.NamespacedName
	cancel  context.CancelFunc
	running sync.WaitGroup
	ended   [2]error
}

// Start makes the pod a client as when it is added, on a node whose coild has just started: it knows
// nothing of how routers have lived.
func Start(ctx context.Context, o Options) (*Pod, error) {
	kernel := clientnet.New(dataplane.ProtocolNode, clientnet.FoU{}, nil)
	c := cluster{o}
	p := &Pod{key: types.NamespacedName{Namespace: o.Egress.Namespace, Name: o.Egress.Name}}
	p.health = routerhealth.New(kernel, c, c)
	p.manager = egress.New(egress.Config{
		Port: dataplane.FouPort, Protocol: dataplane.ProtocolNode, Drift: 10 * time.Second, Available: func() error { return nil },
		Repaired: func(_ context.Context, out clientnet.Outcome) { o.Repaired(out) }, Health: p.health,
	}, c, kernel, nothing{}, c, reconcile.NewMetrics(nil))
	pod := store.Pod{Namespace: o.Egress.Namespace, Name: o.Name, UID: o.Name}
	finish, err := p.manager.Begin(ctx, pod)
	if err != nil {
		return nil, err
	}
	sandbox := node.Sandbox{ID: attachment.ID{ContainerID: o.Name, IfName: "eth0"}, Pod: pod, Netns: o.Netns, Address: o.Address}
	if err := finish(ctx, sandbox); err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	p.running.Go(func() { p.ended[0] = p.manager.Run(life) })
	p.running.Go(func() { p.ended[1] = p.health.Run(life, p.manager) })
	return p, nil
}

// Changed says that the Egress or its routers did.
func (p *Pod) Changed() { p.manager.EgressChanged(p.key) }

// Stop leaves the pod as it is. The error says why the manager ended before.
func (p *Pod) Stop() error {
	p.cancel()
	p.running.Wait()
	return errors.Join(p.ended[:]...)
}

// cluster is an egress.Cluster and an egress.Recorder.
type cluster struct{ o Options }

func (c cluster) Pod(_ context.Context, pod store.Pod, _ bool) (*metav1.PartialObjectMetadata, error) {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID),
		Annotations: map[string]string{v2.AnnotationEgressPrefix + c.o.Egress.Namespace: c.o.Egress.Name},
	}}, nil
}

func (c cluster) Namespace(_ context.Context, name string, _ bool) (*metav1.PartialObjectMetadata, error) {
	return nil, apierrors.NewNotFound(corev1.Resource("namespaces"), name)
}

func (c cluster) Egress(context.Context, types.NamespacedName, bool) (*v2.Egress, error) {
	return c.o.Egress, nil
}

func (c cluster) Service(_ context.Context, name types.NamespacedName, _ bool) (*corev1.Service, error) {
	if c.o.Service == nil {
		return nil, apierrors.NewNotFound(corev1.Resource("services"), name.Name)
	}
	return c.o.Service, nil
}

func (cluster) HostNetwork(context.Context, types.NamespacedName) (bool, error) { return false, nil }

func (cluster) Policies(context.Context, *metav1.PartialObjectMetadata, bool) ([]policy.Policy, map[string]string, error) {
	return nil, nil, nil
}

func (c cluster) Routers(types.NamespacedName) []client.Router { return c.o.Routers() }
func (c cluster) Holder(string) (types.UID, bool)              { return "", false }

func (c cluster) Eventf(_, _ runtime.Object, _, _, _, note string, args ...any) {
	c.o.Event(note, args...)
}

// nothing is a store.Clients in which nothing stays.
type nothing struct{}

func (nothing) SetClient(context.Context, store.Client) error         { return nil }
func (nothing) ForgetClients(context.Context, ...attachment.ID) error { return nil }
func (nothing) ListClients(context.Context) ([]store.Client, error)   { return nil, nil }
