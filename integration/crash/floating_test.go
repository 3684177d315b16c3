package crash

import (
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
)

// The controller is killed at each point while a claim gets addresses, and while it gives some up. In the end the claim has as many as it asks
// for, its first address is the same, and no other block is left.
func TestFloatingControllerKilled(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, 0)
	pools, claims := c.Coil.CoilV2().AddressPools(), c.Coil.CoilV2().AddressClaims(metav1.NamespaceDefault)
	testkit.Must(pools.Create(ctx, &v2.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "partners"},
		Spec:       v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new("198.51.100.0/24")}}},
	}, metav1.CreateOptions{}))(t)
	testkit.Must(claims.Create(ctx, &v2.AddressClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "c"}, Spec: v2.AddressClaimSpec{Pool: "partners", Count: new(int32(1))},
	}, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the controller's log:\n%s", c.Controller.Logs(40))
		}
	})
	kills := 0
	restart := func(faults string) {
		c.check(c.KillController(ctx))
		c.Controller.Faults = faults
		c.check(c.Controller.Start())
	}
	has := func(n int) (first string) {
		testkit.Eventually(t, 30*time.Second, fmt.Sprintf("%d addresses, and no other block", n), func() error {
			select {
			case <-c.Controller.Ended():
				kills++
				restart("")
			default:
			}
			got, err := claims.Get(ctx, "c", metav1.GetOptions{})
			if err != nil {
				return err
			}
			l, err := c.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelPool + "=partners"})
			if err != nil {
				return err
			}
			if len(got.Status.Addresses) != n || len(l.Items) != n || !meta.IsStatusConditionTrue(got.Status.Conditions, v2.ClaimReady) {
				return fmt.Errorf("%d blocks, %+v", len(l.Items), got.Status)
			}
			first = got.Status.Addresses[0].Block
			return nil
		})
		return first
	}
	first := has(1)
	for range testkit.CrashForm.Times(1, 10) {
		for _, p := range faultpoint.Floating {
			restart(fmt.Sprintf("%s=2", p))
			for _, n := range []int{4, 1} {
				testkit.Must(claims.Patch(ctx, "c", types.MergePatchType, fmt.Appendf(nil, `{"spec":{"count":%d}}`, n), metav1.PatchOptions{}))(t)
				if now := has(n); now != first {
					t.Errorf("killed at %s: the first address was %s, and is %s", p, first, now)
				}
			}
		}
	}
	if want := testkit.CrashForm.Times(1, 10) * len(faultpoint.Floating); kills != want {
		t.Errorf("the controller was killed %d times, want %d", kills, want)
	}
	t.Attr("kills", fmt.Sprint(kills))
	testkit.Check(t, claims.Delete(ctx, "c", metav1.DeleteOptions{}), pools.Delete(ctx, "partners", metav1.DeleteOptions{}))
	testkit.Eventually(t, 30*time.Second, "nothing is left", func() error {
		_, err := pools.Get(ctx, "partners", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("the pool is there"), err)
	})
}
