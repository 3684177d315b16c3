package coilctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube/listing"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// coildPods selects the pods of coild.
const coildPods = "app.kubernetes.io/name=coil,app.kubernetes.io/component=coild"

// heldBlocks selects the blocks that nodes hold, and floatingBlocks floating addresses.
const (
	heldBlocks     = "!" + v2.LabelFloating
	floatingBlocks = v2.LabelFloating + "=" + v2.FloatingValue
)

// clients are those of one cluster.
type clients struct {
	core kubernetes.Interface
	coil versioned.Interface
}

// of returns the client of a group: that of Coil, or the one without a name.
func (c clients) of(coils bool) rest.Interface {
	if coils {
		return c.coil.CoilV2().RESTClient()
	}
	return c.core.CoreV1().RESTClient()
}

// connect returns the clients of the cluster.
func (t *tool) connect() (clients, error) {
	core, err := t.core()
	if err != nil {
		return clients{}, err
	}
	coil, err := t.coil()
	return clients{core, coil}, err
}

// source is a kind of objects that commands read.
type source struct {
	// resource is such as "addresspools", which coils says to be of Coil's group.
	resource string
	coils    bool
	// read adds all objects.
	read func(context.Context, clients, *inventory.Objects) error
	// follow lists and watches; the result adds the objects of the moment.
	follow func(context.Context, *sync.WaitGroup, clients, listing.Follower) func(*inventory.Objects)
}

// sourceOf returns the source of a kind, whose objects are in a list of inventory.Objects.
func sourceOf[T any, P listing.Object[T]](resource string, coils bool, selector string, in func(*inventory.Objects) *[]P, trim func(*T)) source {
	at := func(c clients) listing.Source[T] {
		return listing.Source[T]{Client: c.of(coils), Resource: resource, Selector: selector, Trim: func(o *T) {
			if trim != nil {
				trim(o)
			}
			trimChanges(P(o))
		}}
	}
	return source{
		resource: resource, coils: coils,
		read: func(ctx context.Context, c clients, o *inventory.Objects) error {
			list := in(o)
			return listing.Each(ctx, at(c), func(p P) { *list = append(*list, p) })
		},
		follow: func(ctx context.Context, done *sync.WaitGroup, c clients, to listing.Follower) func(*inventory.Objects) {
			all := listing.Follow[T, P](ctx, done, at(c), to)
			return func(o *inventory.Objects) { *in(o) = all() }
		},
	}
}

// The kinds that commands read.
var (
	readPools    = sourceOf("addresspools", true, "", func(o *inventory.Objects) *[]*v2.AddressPool { return &o.Pools }, nil)
	readBlocks   = blocksWith("")
	readHeld     = blocksWith(heldBlocks)
	readFloating = blocksWith(floatingBlocks)
	readClaims   = sourceOf("addressclaims", true, "", func(o *inventory.Objects) *[]*v2.AddressClaim { return &o.Claims }, nil)
	readEgresses = sourceOf("egresses", true, "", func(o *inventory.Objects) *[]*v2.Egress { return &o.Egresses }, nil)
	readPolicies = sourceOf("egresspolicies", true, "", func(o *inventory.Objects) *[]*v2.EgressPolicy { return &o.Policies }, nil)
	readCluster  = sourceOf("egressclusterpolicies", true, "", func(o *inventory.Objects) *[]*v2.EgressClusterPolicy { return &o.ClusterPolicies }, nil)
	readGateways = sourceOf("loadbalancergateways", true, "", func(o *inventory.Objects) *[]*v2.LoadBalancerGateway { return &o.Gateways }, nil)
	readServices = sourceOf("services", false, "", func(o *inventory.Objects) *[]*corev1.Service { return &o.Services }, trimService)
	readNodes    = sourceOf("nodes", false, "", func(o *inventory.Objects) *[]*corev1.Node { return &o.Nodes }, trimNode)
	readCoilds   = sourceOf("pods", false, coildPods, func(o *inventory.Objects) *[]*corev1.Pod { return &o.Coilds }, trimPod)

	// everything is what status judges. It leaves out BlockRequests, which last for a moment: whether one gets an answer, the Lease of coil-ipam-controller and the
	// conditions of AddressPools tell.
	everything = []source{readPools, readBlocks, readClaims, readEgresses, readPolicies, readCluster, readGateways, readServices, readNodes, readCoilds}
)

func blocksWith(selector string) source {
	return sourceOf("addressblocks", true, selector, func(o *inventory.Objects) *[]*v2.AddressBlock { return &o.Blocks }, nil)
}

// trimChanges keeps of who has written an object only when that was last.
func trimChanges(o metav1.Object) {
	if at := inventory.Changed(o); !at.IsZero() {
		o.SetManagedFields([]metav1.ManagedFieldsEntry{{Time: &at}})
	}
}

// trimNode keeps of a Node what is judged or shown: its images alone are most of it.
func trimNode(n *corev1.Node) {
	system := n.Labels[corev1.LabelOSStable]
	if n.Labels = nil; system != "" {
		n.Labels = map[string]string{corev1.LabelOSStable: system}
	}
	n.Annotations, n.Spec = nil, corev1.NodeSpec{}
	n.Status = corev1.NodeStatus{Conditions: n.Status.Conditions, Addresses: n.Status.Addresses}
}

// trimService keeps of a Service what is judged or shown.
func trimService(s *corev1.Service) {
	assigned, taken := s.Annotations[loadbalancer.AnnotationAssigned]
	if s.Annotations = nil; taken {
		s.Annotations = map[string]string{loadbalancer.AnnotationAssigned: assigned}
	}
	s.Labels, s.OwnerReferences = nil, nil
	s.Spec = corev1.ServiceSpec{Type: s.Spec.Type, LoadBalancerClass: s.Spec.LoadBalancerClass, Ports: s.Spec.Ports}
}

// trimPod keeps of a pod what is judged or shown.
func trimPod(p *corev1.Pod) {
	p.Annotations, p.Labels, p.OwnerReferences = nil, nil, nil
	p.Spec = corev1.PodSpec{NodeName: p.Spec.NodeName}
	p.Status = corev1.PodStatus{Conditions: p.Status.Conditions, InitContainerStatuses: p.Status.InitContainerStatuses, ContainerStatuses: p.Status.ContainerStatuses}
}

// read reads objects, with one list of each kind. A kind that isn't installed has none: variants are without those that they leave out.
func (t *tool) read(ctx context.Context, kinds []source) (inventory.Objects, error) {
	c, err := t.connect()
	if err != nil {
		return inventory.Objects{}, err
	}
	var o inventory.Objects
	began := time.Now() // nothing is late because lists are slow
	errs, absent := make([]error, len(kinds)), make([]bool, len(kinds))
	var wait sync.WaitGroup
	for i, k := range kinds {
		wait.Go(func() {
			err := k.read(ctx, c, &o)
			if absent[i] = apierrors.IsNotFound(err); err != nil && !absent[i] {
				errs[i] = fmt.Errorf("list %s: %w", k.resource, err)
			}
		})
	}
	wait.Wait()
	o.Now = began.Add(t.clock.off())
	return o, refusals(append(errs, notInstalled(kinds, absent)))
}

// errNotInstalled: the API server doesn't know kinds.
var errNotInstalled = errors.New("no variant of Coil that has them is installed")

// notInstalled is the error that none of Coil's kinds is installed, of those that are read. One kind beside others doesn't tell.
func notInstalled(kinds []source, absent []bool) error {
	var names []string
	coils := 0
	for i, k := range kinds {
		if k.coils {
			coils++
		}
		if absent[i] {
			names = append(names, k.resource)
		}
	}
	if len(names) < coils || coils == 0 || coils == 1 && len(kinds) > 1 {
		return nil
	}
	return fmt.Errorf("the API server has no %s of coil.cybozu.com: %w", plan.Enumerate(names), errNotInstalled)
}

// refusals joins what an API server has refused. Where none has answered, one error tells as much as all.
func refusals(errs []error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if i := slices.IndexFunc(errs, func(err error) bool { return !errors.As(err, new(apierrors.APIStatus)) }); i >= 0 {
		return errs[i]
	}
	return errors.Join(errs...)
}

// leases adds the Leases of controllers that have to do with the objects.
func (t *tool) leases(ctx context.Context, o *inventory.Objects) error {
	c, err := t.connect()
	if err != nil {
		return err
	}
	return leasesOf(ctx, c, o)
}

func leasesOf(ctx context.Context, c clients, o *inventory.Objects) error {
	for _, wanted := range health.Leases(*o) {
		l, err := c.core.CoordinationV1().Leases(preflight.Namespace).Get(ctx, wanted.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return fmt.Errorf("get Lease %s: %w", wanted.Name, err)
		default:
			o.Leases = append(o.Leases, l)
		}
	}
	return nil
}

// rights says in a command's help which rights it needs.
func rights(kinds []source) string {
	var core, coil []string
	for _, k := range kinds {
		if k.coils {
			coil = append(coil, k.resource)
		} else {
			core = append(core, k.resource)
		}
	}
	var all []string
	if len(core) > 0 {
		all = append(all, "list "+strings.Join(core, ", "))
	}
	if len(coil) > 0 {
		slices.Sort(coil)
		all = append(all, "list "+strings.Join(coil, ", ")+" of coil.cybozu.com")
	}
	return strings.Join(all, "; ")
}
