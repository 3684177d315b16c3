package apiserver

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// change patches the spec of a pool.
func (c *cluster) change(t testing.TB, pool, spec string) {
	t.Helper()
	testkit.Must(c.coil.CoilV2().AddressPools().Patch(t.Context(), pool, types.MergePatchType, []byte(`{"spec":`+spec+`}`), metav1.PatchOptions{}))(t)
}

// says waits until a condition of a pool is so.
func (c *cluster) says(t testing.TB, pool, kind, status, words string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%s of %s is %q, with %q", kind, pool, status, words), func() error {
		p, err := c.coil.CoilV2().AddressPools().Get(t.Context(), pool, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, is := range p.Status.Conditions {
			if is.Type == kind && string(is.Status) == status && strings.Contains(is.Message, words) && is.ObservedGeneration == p.Generation {
				return nil
			}
			if is.Type == kind && status == "" {
				return fmt.Errorf("it is there: %+v", is)
			}
		}
		if status != "" {
			return fmt.Errorf("conditions are %+v", p.Status.Conditions)
		}
		return nil
	})
}

// closed waits until the label of a block that says whether it gives addresses has a value.
func (c *cluster) closed(t testing.TB, block, want string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%s is labelled %q", block, want), func() error {
		b, err := c.coil.CoilV2().AddressBlocks().Get(t.Context(), block, metav1.GetOptions{})
		if err == nil && b.Labels[v2.LabelClosed] != want {
			err = fmt.Errorf("labels are %v", b.Labels)
		}
		return err
	})
}

// A pool excludes addresses of a block that exists, then drains, then gives blocks again.
func TestControllerExcludesAndDrains(t *testing.T) {
	c := ipamCluster(t)
	c.run(t, c.serviceAccount(t), options())
	n := c.node(t, "n1")
	gets := func(name, pool, want string) {
		t.Helper()
		c.ask(t, name, n, pool)
		if r := c.answer(t, name); r.Status.AddressBlockName != want {
			t.Fatalf("the node got %+v, want %s", r.Status, want)
		}
	}
	c.pool(t, "blue", 2, v4("10.0.0.0/28"))
	gets("r1", "blue", "blue-0")
	c.change(t, "blue", `{"exclude":["10.0.0.1","10.0.0.4-10.0.0.7"]}`)
	c.closed(t, "blue-0", v2.ClosedExcluded)
	c.says(t, "blue", v2.PoolExcludedInUse, "True", "Excluded addresses are in blue-0: 0 addresses are in use on 1 node")
	gets("r2", "blue", "blue-2")
	testkit.Eventually(t, 20*time.Second, "excluded blocks that don't exist don't count", func() error {
		p, err := c.coil.CoilV2().AddressPools().Get(t.Context(), "blue", metav1.GetOptions{})
		if err == nil && p.Status.Blocks.Summary != "2/3" {
			err = fmt.Errorf("it says %+v", p.Status)
		}
		return err
	})
	if err := c.drop(t.Context(), c.block(t, "blue-0")); err != nil {
		t.Fatal(err)
	}
	c.says(t, "blue", v2.PoolExcludedInUse, "False", "")

	c.change(t, "blue", `{"drain":true}`)
	c.closed(t, "blue-2", v2.ClosedDrain)
	c.says(t, "blue", v2.PoolDrained, "False", "1 block is held by n1")
	c.ask(t, "r3", n, "blue")
	if got := failed(c.answer(t, "r3")); got == nil || got.Reason != v2.ReasonPoolDraining || !strings.Contains(got.Message, "AddressPool blue drains and gives nothing new") {
		t.Errorf("the answer is %+v", got)
	}
	if _, err := c.coil.CoilV2().AddressClaims("default").Create(t.Context(), &v2.AddressClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "drained", Namespace: "default"}, Spec: v2.AddressClaimSpec{Pool: "single", Count: new(int32(1))},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	single := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "single"}, Spec: v2.AddressPoolSpec{Drain: true, Subnets: []v2.SubnetSet{v4("10.1.0.0/28")}}}
	testkit.Must(c.coil.CoilV2().AddressPools().Create(t.Context(), single, metav1.CreateOptions{}))(t)
	testkit.Eventually(t, 20*time.Second, "the claim is refused", func() error {
		a, err := c.coil.CoilV2().AddressClaims("default").Get(t.Context(), "drained", metav1.GetOptions{})
		if err == nil && (len(a.Status.Conditions) == 0 || a.Status.Conditions[0].Reason != v2.ReasonPoolDraining) {
			err = fmt.Errorf("it says %+v", a.Status)
		}
		return err
	})
	c.change(t, "single", `{"drain":null}`)
	testkit.Eventually(t, 40*time.Second, "the claim has an address when the pool drains no longer", func() error {
		a, err := c.coil.CoilV2().AddressClaims("default").Get(t.Context(), "drained", metav1.GetOptions{})
		if err == nil && len(a.Status.Addresses) != 1 {
			err = fmt.Errorf("it says %+v", a.Status)
		}
		return err
	})

	c.change(t, "blue", `{"drain":null}`)
	c.closed(t, "blue-2", "")
	c.says(t, "blue", v2.PoolDrained, "", "")
	gets("r4", "blue", "blue-3")
	c.change(t, "blue", `{"drain":true}`)
	for _, b := range []string{"blue-2", "blue-3"} {
		if err := c.drop(t.Context(), c.block(t, b)); err != nil {
			t.Fatal(err)
		}
	}
	c.says(t, "blue", v2.PoolDrained, "True", "it can be deleted")
	testkit.Eventually(t, 20*time.Second, "an Event names the excluded block", func() error {
		es, err := c.core.EventsV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.kind=AddressPool,regarding.name=blue,reason=PoolExcludedInUse"})
		if err == nil && (len(es.Items) == 0 || es.Items[0].Type != corev1.EventTypeWarning) {
			err = errors.New("there is none")
		}
		return err
	})
}
