package apiserver

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// The blocks of a pool, floating ones among them, say how they are announced: from their creation, after the pool has changed, and
// after somebody else has changed them. A pool of a version without the field is announced by routes.
func TestBlocksAreLabelledAsThePoolIsAnnounced(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "lan", 0, v4("198.51.100.0/28"))
	n := c.node(t, "n1")
	c.run(t, c.serviceAccount(t), options())
	patch := func(announce string) {
		t.Helper()
		p := fmt.Appendf(nil, `{"spec":{"announce":%s}}`, announce)
		testkit.Must(c.coil.CoilV2().AddressPools().Patch(t.Context(), "lan", types.MergePatchType, p, metav1.PatchOptions{}))(t)
	}
	labels := func(want string, blocks ...string) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%s say %q", blocks, want), func() error {
			for _, name := range blocks {
				got, ok := c.block(t, name).Labels[v2.LabelAnnounce]
				if got != want || ok != (want != "") {
					return fmt.Errorf("%s says %q", name, got)
				}
			}
			return nil
		})
	}
	c.ask(t, "r0", n, "lan")
	if b := c.answer(t, "r0").Status.AddressBlockName; b != "lan-0" {
		t.Fatalf("the node has block %q", b)
	}
	c.addressClaim(t, "nat", "lan", v2.AddressClaimSpec{Count: new(int32(1))})
	c.claimHas(t, "nat", "1/1")
	labels("", "lan-0", "lan-1")

	patch(`"Neighbor"`)
	labels("Neighbor", "lan-0", "lan-1")
	c.ask(t, "r2", n, "lan")
	if b := c.block(t, c.answer(t, "r2").Status.AddressBlockName); b.Labels[v2.LabelAnnounce] != "Neighbor" {
		t.Errorf("a new block has labels %v", b.Labels)
	}
	c.addressClaim(t, "nat2", "lan", v2.AddressClaimSpec{Count: new(int32(1))})
	if got := c.claimHas(t, "nat2", "1/1"); c.block(t, got.Status.Addresses[0].Block).Labels[v2.LabelAnnounce] != "Neighbor" {
		t.Errorf("the block of a new floating address has no label")
	}
	foreign := func(value string) {
		t.Helper()
		p := fmt.Appendf(nil, `{"metadata":{"labels":{"coil.cybozu.com/announce":%s}}}`, value)
		testkit.Must(c.coil.CoilV2().AddressBlocks().Patch(t.Context(), "lan-0", types.MergePatchType, p, metav1.PatchOptions{}))(t)
	}
	foreign(`"elsewhere"`)
	labels("Neighbor", "lan-0")

	patch(`null`)
	labels("", "lan-0", "lan-1", "lan-2", "lan-3")
	foreign(`"Neighbor"`)
	labels("", "lan-0")
}
