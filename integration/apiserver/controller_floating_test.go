package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// addressClaim makes an AddressClaim.
func (c *cluster) addressClaim(t testing.TB, name, pool string, spec v2.AddressClaimSpec) *v2.AddressClaim {
	t.Helper()
	spec.Pool = pool
	o := &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
	return testkit.Must(c.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).Create(t.Context(), o, metav1.CreateOptions{}))(t)
}

// claimHas waits until the status of a claim is about its latest spec, and has a summary.
func (c *cluster) claimHas(t testing.TB, name, summary string) *v2.AddressClaim {
	t.Helper()
	var got *v2.AddressClaim
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("claim %s has %s", name, summary), func() (err error) {
		if got, err = c.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if got.Status.Summary != summary || got.Status.ObservedGeneration != got.Generation {
			return fmt.Errorf("it has %s: %+v", got.Status.Summary, got.Status.Conditions)
		}
		return nil
	})
	return got
}

func claimed(c *v2.AddressClaim) []string {
	var all []string
	for _, a := range c.Status.Addresses {
		all = append(all, strings.Trim(a.IPv4+","+a.IPv6, ","))
	}
	return all
}

func (c *cluster) patchClaim(t testing.TB, name, patch string) {
	t.Helper()
	testkit.Must(c.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
}

// A claim gets addresses, fewer, others and its own again; the pool, the blocks and Events tell of it; a deleted pool waits and names the owner.
func TestFloatingAddresses(t *testing.T) {
	c := ipamCluster(t)
	p := c.pool(t, "partners", 0, dual("198.51.100.0/29", "2001:db8::/125"))
	n := c.node(t, "n1")
	c.run(t, c.serviceAccount(t), options())
	c.ask(t, "r", n, "partners")
	if b := c.answer(t, "r").Status.AddressBlockName; b != "partners-0" {
		t.Fatalf("the node has block %q", b)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "shop", Namespace: metav1.NamespaceDefault},
		Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "c", Image: "i"}}, AutomountServiceAccountToken: new(false)}}
	pod = testkit.Must(c.core.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{}))(t)
	pod.Status.PodIP, pod.Status.PodIPs = "198.51.100.0", []corev1.PodIP{{IP: "198.51.100.0"}, {IP: "2001:db8::"}}
	testkit.Must(c.core.CoreV1().Pods(pod.Namespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}))(t)
	t.Cleanup(func() {
		testkit.Check(t, c.core.CoreV1().Pods(pod.Namespace).Delete(context.WithoutCancel(t.Context()), pod.Name, *metav1.NewDeleteOptions(0)))
	})

	c.addressClaim(t, "nat", "partners", v2.AddressClaimSpec{Count: new(int32(3)), CoolDownSeconds: 3600})
	got := c.claimHas(t, "nat", "3/3")
	want := []string{"198.51.100.1,2001:db8::1", "198.51.100.2,2001:db8::2", "198.51.100.3,2001:db8::3"}
	if !slices.Equal(claimed(got), want) || !meta.IsStatusConditionTrue(got.Status.Conditions, v2.ClaimReady) {
		t.Errorf("the claim has %v, %+v", claimed(got), got.Status.Conditions)
	}
	b := c.block(t, "partners-2")
	if b.Labels[v2.LabelNode] != "" || b.Labels[v2.LabelReserved] != "true" || b.Labels[v2.LabelFloating] != "true" || b.Floating.Owner.UID != got.UID {
		t.Errorf("the block is %+v with labels %v", b.Floating, b.Labels)
	}
	c.patchClaim(t, "nat", `{"spec":{"count":1}}`)
	c.claimHas(t, "nat", "1/1")
	testkit.Eventually(t, 20*time.Second, "the pool counts them", func() error {
		p, err := c.coil.CoilV2().AddressPools().Get(t.Context(), "partners", metav1.GetOptions{})
		if err == nil && p.Status.Floating != (v2.FloatingUsage{Used: 1, Cooling: 2}) {
			err = fmt.Errorf("%+v", p.Status)
		}
		return err
	})
	// Addresses that cool down come back in the order of the list. The node's address isn't given.
	c.patchClaim(t, "nat", `{"spec":{"count":null,"addresses":["198.51.100.3-198.51.100.4","2001:db8::2","198.51.100.0"]}}`)
	got = c.claimHas(t, "nat", "3/4")
	want = []string{"198.51.100.3,2001:db8::3", "198.51.100.4,2001:db8::4", "198.51.100.2,2001:db8::2"}
	r := meta.FindStatusCondition(got.Status.Conditions, v2.ClaimReady)
	if !slices.Equal(claimed(got), want) || r.Reason != v2.ReasonAddressInUse || !strings.Contains(r.Message, "Node n1, where Pod default/shop has it") {
		t.Errorf("the claim has %v, %+v", claimed(got), r)
	}
	testkit.Eventually(t, 20*time.Second, "an Event", func() error {
		of := "regarding.kind=AddressClaim,regarding.name=nat,reason=" + v2.ReasonAddressInUse
		es, err := c.core.EventsV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: of})
		if err == nil && (len(es.Items) == 0 || es.Items[0].Note != r.Message) {
			err = fmt.Errorf("there are %+v", es.Items)
		}
		return err
	})

	// A pool for floating addresses gives none to nodes.
	testkit.Must(c.coil.CoilV2().AddressPools().Patch(t.Context(), "partners", types.MergePatchType, []byte(`{"spec":{"purpose":"Floating"}}`), metav1.PatchOptions{}))(t)
	c.ask(t, "r2", n, "partners")
	if f := failed(c.answer(t, "r2")); f == nil || f.Reason != v2.ReasonPoolPurpose {
		t.Errorf("the node's request is answered with %+v", f)
	}

	// The pool goes when its addresses are free.
	testkit.Check(t, c.coil.CoilV2().AddressPools().Delete(t.Context(), p.Name, metav1.DeleteOptions{}))
	testkit.Check(t, c.drop(t.Context(), c.block(t, "partners-0"))) // from a pool that goes the claim doesn't get it
	testkit.Eventually(t, 20*time.Second, "the pool names the owner", func() error {
		got, err := c.condition(t, "partners", v2.PoolTerminating)
		if err == nil && !strings.Contains(got.Message, "4 floating addresses belong to AddressClaim default/nat, AddressClaim default/nat (cools down)") {
			err = errors.New(got.Message)
		}
		return err
	})
	c.patchClaim(t, "nat", `{"spec":{"coolDownSeconds":0}}`)
	c.claimHas(t, "nat", "3/4")
	testkit.Check(t, c.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).Delete(t.Context(), "nat", metav1.DeleteOptions{}))
	testkit.Eventually(t, 20*time.Second, "only the one that cools down is left", func() error {
		bs := c.blocksOf(t, "partners")
		if len(bs) != 1 || bs[0].Floating.CoolDownSeconds != 3600 {
			return fmt.Errorf("%d blocks", len(bs))
		}
		return nil
	})
	testkit.Check(t, c.coil.CoilV2().AddressBlocks().Delete(t.Context(), "partners-1", metav1.DeleteOptions{}))
	if b := c.block(t, "partners-1"); b.DeletionTimestamp == nil {
		t.Errorf("an address that cools down is gone once it is deleted: %+v", b)
	}
	b = testkit.Must(c.coil.CoilV2().AddressBlocks().Patch(t.Context(), "partners-1", types.MergePatchType, []byte(`{"floating":{"coolDownSeconds":0}}`), metav1.PatchOptions{}))(t)
	testkit.Eventually(t, 20*time.Second, "the pool is gone", func() error {
		_, err := c.coil.CoilV2().AddressPools().Get(t.Context(), "partners", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("%w; block %+v", err, b)
	})
}

// Two controllers at once, both of which believe to lead, give no address twice, and each claim has as many as it asks for.
func TestFloatingTwoLeaders(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "partners", 0, v4("198.51.100.0/25"))
	c.run(t, c.serviceAccount(t), options())
	o := options()
	o.Election.Namespace = metav1.NamespaceDefault
	c.allowLeases(t, o.Election.Namespace)
	c.run(t, c.serviceAccount(t), o)
	const claims = 12
	for i := range claims {
		c.addressClaim(t, fmt.Sprintf("c%d", i), "partners", v2.AddressClaimSpec{Count: new(int32(5))})
	}
	for i := range claims {
		c.claimHas(t, fmt.Sprintf("c%d", i), "5/5")
	}
	testkit.Eventually(t, 30*time.Second, "each address has one claim, and none is left over", func() error {
		owners := map[netip.Prefix]string{}
		of := map[string]int{}
		for _, b := range c.blocksOf(t, "partners") {
			p := netip.MustParsePrefix(*b.IPv4)
			if owners[p] != "" {
				t.Fatalf("%s is of %s and of %s", p, owners[p], b.Floating.Claim)
			}
			owners[p] = b.Floating.Claim
			of[b.Floating.Claim]++
		}
		for claim, n := range of {
			if n != 5 {
				return fmt.Errorf("%s has %d blocks", claim, n)
			}
		}
		return nil
	})
}
