package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// testNodeAddresses has the client leave by the addresses of the routers' nodes, and by the routers' own again. Meanwhile somebody flushes all rulesets of a
// node: nothing comes from anywhere else, and the client comes again.
func testNodeAddresses(t *testing.T, s *site, out *outside, routers []corev1.Pod) {
	use := func(addresses string) {
		t.Helper()
		patch := fmt.Sprintf(`{"spec": {"addresses": %s}}`, addresses)
		testkit.Must(s.coil.CoilV2().Egresses(namespace).Patch(t.Context(), egress, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
	}
	use(`{"use": "Node"}`)
	var want []string
	testkit.Eventually(t, 60*time.Second, "the status has the nodes' addresses", func() error {
		e, err := s.coil.CoilV2().Egresses(namespace).Get(t.Context(), egress, metav1.GetOptions{})
		if err != nil {
			return err
		}
		want = nil
		for _, a := range e.Status.NodeAddresses {
			want = append(want, a.IPv4, a.IPv6)
		}
		if len(e.Status.NodeAddresses) != len(routers) || slices.Contains(want, "") {
			return fmt.Errorf("%+v", e.Status.NodeAddresses)
		}
		return nil
	})
	for _, r := range routers {
		for _, a := range testkit.Must(s.Addrs(r.Spec.NodeName))(t) {
			if !slices.Contains(want, a.String()) {
				t.Errorf("router %s is on %s, which has %s, and the status has %v", r.Name, r.Spec.NodeName, a, want)
			}
		}
	}
	out.changes(t, "chosen", want)
	out.forget()
	testkit.Must(s.Exec(t.Context(), routers[0].Spec.NodeName, "nft", "delete", "table", "inet", dataplane.NftTableMasquerade))(t)
	out.await(t, "chosen", want)
	s.healed(t, routers[0].Spec.NodeName)
	out.forget()
	out.await(t, "chosen", want)
	use("null")
	out.changes(t, "chosen", ips(routers...))
}

// healed waits until a node translates for its routers.
func (s *site) healed(t *testing.T, node string) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, node+" translates again", func() error {
		out, err := s.Exec(t.Context(), node, "nft", "list", "table", "inet", dataplane.NftTableMasquerade)
		if err == nil && !strings.Contains(string(out), "masquerade fully-random") {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
}

// changes waits until a visitor comes from other addresses than before, in each family, and no more from those.
func (o *outside) changes(t *testing.T, visitor string, addrs []string) {
	t.Helper()
	testkit.Eventually(t, 60*time.Second, visitor+" changes its addresses", func() error {
		from := o.from(visitor)
		families := map[bool]bool{}
		for _, a := range from {
			if !slices.Contains(addrs, a) {
				o.forget()
				return fmt.Errorf("it comes from %v, and not only from %v", from, addrs)
			}
			families[strings.Contains(a, ":")] = true
		}
		if len(families) != 2 {
			return fmt.Errorf("it comes from %v", from)
		}
		return nil
	})
}
