package uninstall

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// A node by whose address clients leave when its coild is killed has nothing of that after the cleanup.
func TestNodeAddress(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	n := newNode(t, r)
	n.check(r.AddNamespace(ctx, "out", "default"))
	before := n.settled()
	n.check(n.Start(ctx), r.NewNodeAddressEgress(ctx, "out", "out"))
	router := testkit.Must(n.NewEgressRouter(ctx, "out", "out"))(t)
	testkit.Eventually(t, 20*time.Second, "the node translates", func() error {
		out, err := n.NodeAddress(ctx, router)
		if err == nil && strings.Count(out, "lo ") != 2 {
			err = errors.New(out)
		}
		return err
	})
	n.Coild.Kill()
	n.refused("1 pods", router.Name)
	out, err := n.cleanup("--force")
	n.check(err)
	t.Logf("it printed:\n%s", out)
	// The routes to the router go with its link.
	if strings.Count(out, "table inet coil_masquerade of nftables") != 1 {
		t.Error("the table isn't printed, or not once")
	}
	n.same(before)
	if out, err := n.NodeAddress(ctx); err != nil || out != "" {
		t.Errorf("there is still\n%s%v", out, err)
	}
	if out, err = n.cleanup(); err != nil || out != "" {
		t.Errorf("again it printed %q, %v", out, err)
	}
	n.check(router.Close())
}
