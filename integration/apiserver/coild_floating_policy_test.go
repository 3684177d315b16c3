package apiserver

import (
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// floatingBlocks are floating addresses as their controllers made them. Those with a holder are in epoch 3.
var floatingBlocks = map[string]v2.Floating{
	"f-0": {Successors: nodesOf("a", "b"), Holding: v2.FloatingHolding{Holder: "a", Contender: "b"}, MovingTo: "b"},
	"f-1": {Successors: nodesOf("a", "b"), Holding: v2.FloatingHolding{Holder: "b"}},
	"f-2": {Successors: nodesOf("b"), Holding: v2.FloatingHolding{Holder: "b", Contender: "b"}},
	"f-3": {Successors: nodesOf("a")},
	"f-4": {Successors: nodesOf("b")},
	"f-5": {Successors: nodesOf("a"), Holding: v2.FloatingHolding{Holder: "a"}, ReleasedAt: &metav1.Time{Time: time.Unix(1, 0)}},
	"f-6": {Successors: nodesOf("a"), ReleasedAt: &metav1.Time{Time: time.Unix(1, 0)}},
	"f-7": {},
	"f-8": {Holding: v2.FloatingHolding{Holder: "a"}},
}

func nodesOf(names ...string) (all []v2.FloatingNode) {
	for _, n := range names {
		all = append(all, v2.FloatingNode{Node: n, Addresses: []string{"10.0.0.1"}, PodUID: "pod"})
	}
	return all
}

// patchHolder writes a holder, with the label, and other fields of floating.holding.
func patchHolder(block, holder, fields string) write {
	name := "null"
	if holder != "" {
		name = fmt.Sprintf("%q", holder)
	}
	return patchBlock(block, fmt.Sprintf(
		`{"metadata":{"labels":{"coil.cybozu.com/floating-holder":%s}},"floating":{"holding":{"holder":%s%s}}}`, name, name, fields))
}

// Writes of the coild of node a in the protocol of floating addresses.
var holdersWrites = []write{
	patchHolder("f-0", "a", `,"claims":7,"contender":null,"podUID":"pod","voters":[{"node":"b"}]`),
	patchHolder("f-0", "b", `,"epoch":4,"handedOver":true,"since":"2026-01-01T00:00:00Z"`),
	patchHolder("f-0", "", `,"epoch":4,"handedOver":true,"podUID":null,"since":null,"contender":null`),
	patchHolder("f-1", "a", `,"epoch":4,"handedOver":null,"podUID":"pod"`),
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/floating-holder":"b"}},"floating":{"movingTo":null,"holding":{"holder":"b","epoch":4}}}`),
	patchHolder("f-1", "b", `,"contender":"a"`),
	patchHolder("f-2", "b", `,"contender":"a"`),
	patchHolder("f-3", "a", `,"epoch":1`),
	patchHolder("f-5", "", `,"epoch":4`),
	patchHolder("f-8", "a", `,"claims":1`),
	patchHolder("f-8", "", `,"epoch":4`),
}

// Writes to floating addresses that are none of a's coild's business.
var strangersWrites = []write{
	patchHolder("f-0", "c", `,"epoch":4`),                                  // no successor
	patchHolder("f-0", "b", `,"epoch":4,"contender":"c"`),                  // whose name it is not
	patchHolder("f-0", "b", `,"epoch":3`),                                  // an epoch that another holder has
	patchHolder("f-0", "b", `,"epoch":5`),                                  //
	patchHolder("f-0", "a", `,"epoch":4`),                                  //
	patchHolder("f-0", "a", `,"epoch":null`),                               //
	patchHolder("f-1", "", `,"epoch":4`),                                   // another node's
	patchHolder("f-1", "b", `,"claims":1`),                                 //
	patchHolder("f-1", "b", `,"podUID":"mine"`),                            //
	patchHolder("f-1", "b", `,"voters":[{"node":"a"}]`),                    //
	patchHolder("f-1", "b", `,"handedOver":true`),                          //
	patchHolder("f-1", "b", `,"since":"2026-01-01T00:00:00Z"`),             //
	patchHolder("f-1", "b", `,"contender":"c"`),                            //
	patchHolder("f-2", "a", `,"epoch":4`),                                  // of which it is no successor
	patchHolder("f-3", "b", `,"epoch":1`),                                  // for another node
	patchHolder("f-4", "a", `,"epoch":1`),                                  //
	patchHolder("f-4", "b", `,"epoch":1`),                                  //
	patchHolder("f-5", "a", `,"claims":1`),                                 // released
	patchHolder("f-6", "a", `,"epoch":1`),                                  //
	patchHolder("f-7", "a", `,"epoch":1`),                                  // for nobody
	patchBlock("f-0", `{"floating":{"holding":{"holder":"b","epoch":4}}}`), // without the label
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/floating-holder":"b"}}}`),
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/floating-holder":null}}}`),
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/floating":null}}}`),
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/reserved":null}}}`),
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/pool":"q"}}}`),
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/node":"a"}}}`),
	patchBlock("f-0", `{"metadata":{"labels":null}}`),
	patchBlock("f-0", `{"metadata":{"annotations":{"coil.cybozu.com/node-uid":"u"}}}`),
	patchBlock("f-0", `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"a","uid":"u"}]}}`),
	patchBlock("f-0", `{"floating":null}`),
	patchBlock("f-0", `{"floating":{"owner":{"uid":"2"}}}`),
	patchBlock("f-0", `{"floating":{"claim":"d"}}`),
	patchBlock("f-0", `{"floating":{"coolDownSeconds":7}}`),
	patchBlock("f-0", `{"floating":{"releasedAt":"2026-01-01T00:00:00Z"}}`),
	patchBlock("f-5", `{"floating":{"releasedAt":null}}`),
	patchBlock("f-0", `{"floating":{"successors":[{"node":"a"}]}}`),
	patchBlock("f-3", `{"floating":{"successors":null}}`),
	patchBlock("f-0", `{"floating":{"movingTo":null}}`),
	patchBlock("f-1", `{"floating":{"movingTo":"a"}}`),
	patchBlock("f-0", `{"metadata":{"labels":{"coil.cybozu.com/floating-holder":"b"}},"floating":{"movingTo":"c","holding":{"holder":"b","epoch":4}}}`),
	patchBlock("f-0", `{"status":{"allocated":1}}`, "status"),
	takeFinalizerOff("f-0"),
	deleteBlock("f-0"),
}

// A node's coild changes who holds a floating address as the protocol says, and nothing else of it.
func TestCoildHoldsFloatingAddresses(t *testing.T) {
	api := own(t, controlplane.Options{})
	err := installCRDs(t.Context(), api.RESTConfig(), readCRDs)
	for _, file := range []string{"coild.yaml", "coild-ipam.yaml", "coild-ipam-node.yaml"} {
		err = errors.Join(err, installRBAC(t.Context(), api.RESTConfig(), file))
	}
	if err != nil {
		t.Fatal(err)
	}
	admin := testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t).CoilV2()
	for name, f := range floatingBlocks {
		f.Claim, f.Owner = "c", v2.FloatingOwner{Kind: "Egress", Namespace: "n", Name: "e", UID: "1"}
		index := int32(name[2] - '0')
		b := &v2.AddressBlock{
			ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{v2.Finalizer}, Labels: map[string]string{
				v2.LabelPool: "f", v2.LabelFloating: v2.FloatingValue, v2.LabelReserved: v2.ReservedValue,
			}},
			Index: index, IPv4: new(fmt.Sprintf("10.0.1.%d/32", index)), Floating: &f,
		}
		if f.Holding.Holder != "" {
			b.Labels[v2.LabelFloatingHolder], b.Floating.Holding.Epoch = f.Holding.Holder, 3
		}
		testkit.Must(admin.AddressBlocks().Create(t.Context(), b, metav1.CreateOptions{}))(t)
	}
	coild := account(t, api, "coild", "a")
	// The API server follows policies, as rights, a moment after they were made.
	testkit.Eventually(t, 30*time.Second, "the policies are in force", func() error {
		if err := strangersWrites[0].do(t.Context(), coild); !apierrors.IsForbidden(err) {
			return fmt.Errorf("not forbidden: %w", err)
		}
		return holdersWrites[0].do(t.Context(), coild)
	})
	for _, w := range holdersWrites {
		if err := w.do(t.Context(), coild); err != nil {
			t.Errorf("%s: %v", w.name, err)
		}
	}
	for _, w := range strangersWrites {
		if err := w.do(t.Context(), coild); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want forbidden", w.name, err)
		}
	}
}
