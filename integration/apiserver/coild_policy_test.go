package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// write is something that a program may try; it changes nothing.
type write struct {
	name string
	do   func(context.Context, versioned.Interface) error
}

var dry = []string{metav1.DryRunAll}

func patchBlock(name, patch string, subresources ...string) write {
	return write{fmt.Sprintf("patch %s%s %s", name, subresources, patch), func(ctx context.Context, c versioned.Interface) error {
		_, err := c.CoilV2().AddressBlocks().Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{DryRun: dry}, subresources...)
		return err
	}}
}

func takeFinalizerOff(name string) write {
	return write{"take the finalizer off " + name, func(ctx context.Context, c versioned.Interface) error {
		b, err := c.CoilV2().AddressBlocks().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		b.Finalizers = nil
		_, err = c.CoilV2().AddressBlocks().Update(ctx, b, metav1.UpdateOptions{DryRun: dry})
		return err
	}}
}

func deleteBlock(name string) write {
	return write{"delete " + name, func(ctx context.Context, c versioned.Interface) error {
		return c.CoilV2().AddressBlocks().Delete(ctx, name, metav1.DeleteOptions{DryRun: dry})
	}}
}

func deleteRequest(name string) write {
	return write{"delete request " + name, func(ctx context.Context, c versioned.Interface) error {
		return c.CoilV2().BlockRequests().Delete(ctx, name, metav1.DeleteOptions{DryRun: dry})
	}}
}

func makeRequest(node string, labels map[string]string) write {
	return write{fmt.Sprintf("request for %s with labels %v", node, labels), func(ctx context.Context, c versioned.Interface) error {
		_, err := c.CoilV2().BlockRequests().Create(ctx, requestOf("new", node, labels), metav1.CreateOptions{DryRun: dry})
		return err
	}}
}

func makeClaim(node, block string) write {
	return write{fmt.Sprintf("claim of %s for %s", block, node), func(ctx context.Context, c versioned.Interface) error {
		r := requestOf("claim", node, labelNode(node))
		r.Spec.Claim = block
		_, err := c.CoilV2().BlockRequests().Create(ctx, r, metav1.CreateOptions{DryRun: dry})
		return err
	}}
}

func requestOf(name, node string, labels map[string]string) *v2.BlockRequest {
	return &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec:       v2.BlockRequestSpec{NodeName: node, PoolName: "p"},
	}
}

func labelNode(node string) map[string]string { return map[string]string{v2.LabelNode: node} }

// Writes of coild to its own blocks and requests, including requests in the form of 2.x.
var ownWrites = []write{
	patchBlock("p-0", `{"metadata":{"annotations":{"coil.cybozu.com/node-uid":"u"}}}`),
	patchBlock("p-0", `{"metadata":{"annotations":{"coil.cybozu.com/disowned-by":"u"}}}`),
	patchBlock("p-0", `{"status":{"allocated":1}}`, "status"),
	takeFinalizerOff("p-0"),
	deleteBlock("p-0"),
	makeRequest("a", labelNode("a")),
	makeRequest("a", nil), // as 2.x does
	makeClaim("a", "p-9"),
	deleteRequest("of-a"),
	deleteRequest("of-a-2x"),
}

// Writes that the coild of node a has no business with, though RBAC allows them.
var foreignWrites = []write{
	patchBlock("p-1", `{"metadata":{"annotations":{"coil.cybozu.com/node-uid":"u"}}}`),
	patchBlock("p-1", `{"metadata":{"labels":{"coil.cybozu.com/node":"a"}}}`),
	patchBlock("p-1", `{"status":{"allocated":0}}`, "status"),
	patchBlock("p-2", `{"metadata":{"labels":{"coil.cybozu.com/node":"a"}}}`),
	patchBlock("p-0", `{"metadata":{"labels":{"coil.cybozu.com/node":"b"}}}`),
	patchBlock("p-0", `{"metadata":{"labels":{"coil.cybozu.com/pool":"q"}}}`),
	patchBlock("p-0", `{"metadata":{"labels":{"coil.cybozu.com/reserved":null}}}`),
	patchBlock("p-0", `{"metadata":{"labels":{"coil.cybozu.com/announce":"Neighbor"}}}`),
	patchBlock("p-0", `{"metadata":{"labels":null}}`),
	patchBlock("p-0", `{"floating":{"claim":"c","coolDownSeconds":0,"owner":{"kind":"Egress","namespace":"n","name":"e","uid":"1"}}}`),
	takeFinalizerOff("p-1"),
	takeFinalizerOff("p-2"),
	deleteBlock("p-1"),
	deleteBlock("p-2"),
	makeRequest("b", labelNode("b")),
	makeRequest("b", labelNode("a")),
	makeRequest("b", nil),
	makeClaim("b", "p-9"),
	makeRequest("a", labelNode("b")),
	deleteRequest("of-b"),
}

// account returns a client that acts as a ServiceAccount whose token is of a pod on a node; an empty
// one is a token that names none.
func account(t *testing.T, api *controlplane.API, name, node string) versioned.Interface {
	t.Helper()
	cfg := api.RESTConfig()
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:kube-system:" + name,
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"},
	}
	if node != "" {
		cfg.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
	}
	return testkit.Must(versioned.NewForConfig(cfg))(t)
}

// TestCoildOfOneNode tries what one node's coild may do with AddressBlocks and BlockRequests, and
// what it may not.
func TestCoildOfOneNode(t *testing.T) {
	api := own(t, controlplane.Options{})
	err := installCRDs(t.Context(), api.RESTConfig(), readCRDs)
	for _, file := range []string{"coild.yaml", "coild-ipam.yaml", "coild-ipam-node.yaml", "coil-ipam-controller.yaml"} {
		err = errors.Join(err, installRBAC(t.Context(), api.RESTConfig(), file))
	}
	if err != nil {
		t.Fatal(err)
	}
	admin := testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t).CoilV2()
	for i, node := range []string{"a", "b", ""} {
		b := &v2.AddressBlock{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p-%d", i), Finalizers: []string{v2.Finalizer}, Labels: map[string]string{v2.LabelPool: "p"}},
			Index:      int32(i), IPv4: new(fmt.Sprintf("10.0.0.%d/32", i)),
		}
		if node != "" {
			b.Labels[v2.LabelNode] = node
			b.Labels[v2.LabelReserved] = v2.ReservedValue
		}
		testkit.Must(admin.AddressBlocks().Create(t.Context(), b, metav1.CreateOptions{}))(t)
	}
	for _, r := range []*v2.BlockRequest{requestOf("of-a", "a", labelNode("a")), requestOf("of-a-2x", "a", nil), requestOf("of-b", "b", labelNode("b"))} {
		testkit.Must(admin.BlockRequests().Create(t.Context(), r, metav1.CreateOptions{}))(t)
	}
	coild := account(t, api, "coild", "a")
	// The API server follows policies, as rights, a moment after they were made.
	testkit.Eventually(t, 30*time.Second, "the policies are in force", func() error {
		for _, w := range slices.Concat(foreignWrites[:1], foreignWrites[len(foreignWrites)-1:]) {
			if err := w.do(t.Context(), coild); !apierrors.IsForbidden(err) {
				return fmt.Errorf("%s: %w", w.name, errors.Join(err, errors.New("not forbidden")))
			}
		}
		return nil
	})
	for _, w := range foreignWrites {
		if err := w.do(t.Context(), coild); !apierrors.IsForbidden(err) {
			t.Errorf("coild of a node: %s: %v, want forbidden", w.name, err)
		}
	}
	for _, w := range ownWrites {
		if err := w.do(t.Context(), coild); err != nil {
			t.Errorf("coild of a node: %s: %v", w.name, err)
		}
	}
	for _, w := range slices.Concat(ownWrites, foreignWrites) {
		if err := w.do(t.Context(), account(t, api, "coild", "")); err != nil {
			t.Errorf("coild whose token names no node: %s: %v", w.name, err)
		}
	}
	controller := account(t, api, "coil-ipam-controller", "a")
	for _, w := range []write{
		patchBlock("p-1", `{"metadata":{"annotations":{"coil.cybozu.com/node-gone":"2026-01-01T00:00:00Z u"}}}`),
		patchBlock("p-1", `{"metadata":{"finalizers":null}}`),
		deleteBlock("p-1"),
	} {
		if err := w.do(t.Context(), controller); err != nil {
			t.Errorf("coil-ipam-controller: %s: %v", w.name, err)
		}
	}
}
