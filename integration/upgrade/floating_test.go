package upgrade

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// floats are pools of floating addresses. The second one is deleted while the version before runs.
var floats = []string{"floats", "leaving"}

// claim makes claims of the pools' addresses, and returns the blocks.
func (e *env) claim(t *testing.T) map[string]v2.AddressBlock {
	t.Helper()
	blocks := map[string]v2.AddressBlock{}
	for i, pool := range floats {
		testkit.Must(e.coil.CoilV2().AddressPools().Create(t.Context(), &v2.AddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: pool},
			Spec:       v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new(fmt.Sprintf("198.51.100.%d/29", 8*i))}}},
		}, metav1.CreateOptions{}))(t)
		testkit.Must(e.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).Create(t.Context(), &v2.AddressClaim{
			ObjectMeta: metav1.ObjectMeta{Name: pool}, Spec: v2.AddressClaimSpec{Pool: pool, Count: new(int32(3))},
		}, metav1.CreateOptions{}))(t)
		testkit.Eventually(t, time.Minute, "the claim of "+pool, func() error {
			c, err := e.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).Get(t.Context(), pool, metav1.GetOptions{})
			if err == nil && !meta.IsStatusConditionTrue(c.Status.Conditions, v2.ClaimReady) {
				err = fmt.Errorf("%+v", c.Status)
			}
			return err
		})
		for _, b := range e.floating(t, pool) {
			blocks[b.Name] = b
		}
	}
	if len(blocks) != 6 {
		t.Fatalf("there are %d floating addresses, want 6", len(blocks))
	}
	return blocks
}

func (e *env) floating(t *testing.T, pool string) []v2.AddressBlock {
	t.Helper()
	of := v2.LabelPool + "=" + pool + "," + v2.LabelFloating + "=" + v2.FloatingValue
	return testkit.Must(e.coil.CoilV2().AddressBlocks().List(t.Context(), metav1.ListOptions{LabelSelector: of}))(t).Items
}

// leave deletes a pool of floating addresses, and a Node, while the version before runs.
func (e *env) leave(t *testing.T) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "ghost"}}
	testkit.Must(e.core.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}))(t)
	testkit.Check(t, e.core.CoreV1().Nodes().Delete(t.Context(), n.Name, metav1.DeleteOptions{}),
		e.coil.CoilV2().AddressPools().Delete(t.Context(), floats[1], metav1.DeleteOptions{}))
	testkit.Eventually(t, time.Minute, "the controller knows that the pool is deleted", func() error {
		p, err := e.coil.CoilV2().AddressPools().Get(t.Context(), floats[1], metav1.GetOptions{})
		if err == nil && !meta.IsStatusConditionTrue(p.Status.Conditions, v2.PoolTerminating) {
			err = fmt.Errorf("%+v", p.Status)
		}
		return err
	})
}

// unchanged checks that nothing of the floating addresses has changed.
func (e *env) unchanged(t *testing.T, s step, blocks map[string]v2.AddressBlock) {
	t.Helper()
	n := 0
	for _, pool := range floats {
		for _, b := range e.floating(t, pool) {
			n++
			was := blocks[b.Name]
			if b.UID != was.UID || b.DeletionTimestamp != nil || !equality.Semantic.DeepEqual(b.Floating, was.Floating) || !equality.Semantic.DeepEqual(b.Labels, was.Labels) {
				t.Errorf("%s: the floating address was %+v, and is %+v", s.name, was, b)
			}
		}
	}
	if n != len(blocks) {
		t.Errorf("%s: there are %d floating addresses, want %d", s.name, n, len(blocks))
	}
}

// give takes the claims away, with the version that knows them: the deleted pool goes.
func (e *env) give(t *testing.T) {
	t.Helper()
	testkit.Check(t, e.coil.CoilV2().AddressClaims(metav1.NamespaceDefault).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
	testkit.Eventually(t, time.Minute, "the deleted pool is gone", func() error {
		_, err := e.coil.CoilV2().AddressPools().Get(t.Context(), floats[1], metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("it is there"), err)
	})
}
