package page

import (
	"context"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// writers is how many objects are made at once.
const writers = 32

// each does something with all objects of a kind.
func each[T any](t *testing.T, objects []T, do func(context.Context, T) error) {
	t.Helper()
	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(writers)
	for _, o := range objects {
		g.Go(func() error { return do(ctx, o) })
	}
	testkit.Check(t, g.Wait())
}

// write writes the pools, nodes, coilds, blocks and Leases of a cluster, and their status.
func (b *builder) write(core kubernetes.Interface, coil versioned.Interface) {
	made, told := metav1.CreateOptions{}, metav1.UpdateOptions{}
	each(b.t, b.Pools, func(ctx context.Context, want *v2.AddressPool) error {
		got, err := coil.CoilV2().AddressPools().Create(ctx, want, made)
		if err == nil {
			want.UID, got.Status = got.UID, want.Status
			_, err = coil.CoilV2().AddressPools().UpdateStatus(ctx, got, told)
		}
		return err
	})
	each(b.t, b.Nodes, func(ctx context.Context, want *corev1.Node) error {
		got, err := core.CoreV1().Nodes().Create(ctx, want, made)
		if err == nil {
			got.Status = want.Status
			_, err = core.CoreV1().Nodes().UpdateStatus(ctx, got, told)
		}
		return err
	})
	each(b.t, b.Coilds, func(ctx context.Context, want *corev1.Pod) error {
		pods, o := core.CoreV1().Pods(want.Namespace), want.DeepCopy()
		o.Labels = map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild"}
		o.Spec.Containers = []corev1.Container{{Name: "coild", Image: "registry.example.com/coil:3.0.0"}}
		got, err := pods.Create(ctx, o, made)
		if err == nil {
			got.Status = want.Status
			_, err = pods.UpdateStatus(ctx, got, told)
		}
		return err
	})
	uids := map[string]types.UID{}
	for _, p := range b.Pools {
		uids[p.Name] = p.UID
	}
	each(b.t, b.Blocks, func(ctx context.Context, want *v2.AddressBlock) error {
		want.OwnerReferences[0].UID = uids[want.Labels[v2.LabelPool]]
		got, err := coil.CoilV2().AddressBlocks().Create(ctx, want, made)
		if err == nil && want.Status.Allocated > 0 {
			got.Status = want.Status
			_, err = coil.CoilV2().AddressBlocks().UpdateStatus(ctx, got, told)
		}
		return err
	})
	for _, l := range b.Leases {
		testkit.Must(core.CoordinationV1().Leases(l.Namespace).Create(b.t.Context(), l, made))(b.t)
	}
}

// A large cluster is there at once, too, when "coilctl serve" reads it from an API server.
func TestLargeServed(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	api := newAPI(t)
	core, coil := testkit.Must(kubernetes.NewForConfig(api.RESTConfig()))(t), testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t)
	b := large(t, testkit.OperateForm.Times(30, 5000), testkit.OperateForm.Times(120, 20000))
	b.write(core, coil)
	url, _ := serve(t, operator(t, api, core))
	p := atOnce(t, b, url, func() {
		o := testkit.Must(coil.CoilV2().AddressBlocks().Get(t.Context(), b.Blocks[0].Name, metav1.GetOptions{}))(t)
		o.Status.Allocated, o.Status.Cooling = 7, 21
		testkit.Must(coil.CoilV2().AddressBlocks().UpdateStatus(t.Context(), o, metav1.UpdateOptions{}))(t)
	})
	p.Silent()
}
