package repair

import (
	"fmt"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// Pods have the MTU of the node's uplink, and follow it while coild runs and when it starts.
func TestPodsFollowTheUplinksMTU(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2, rig.NodeOptions{})
	out := testkit.Must(f.Run(t.Context(), "ip", "-o", "address", "show", "to", f.Addr4.String()))(t)
	fields := strings.Fields(out)
	if len(fields) < 2 {
		t.Fatalf("no link has %s: %s", f.Addr4, out)
	}
	uplink := fields[1]
	resize := func(mtu int) {
		t.Helper()
		testkit.Must(f.Run(t.Context(), "ip", "link", "set", uplink, "mtu", fmt.Sprint(mtu)))(t)
	}
	follow := func(mtu int) {
		t.Helper()
		testkit.Eventually(t, within, fmt.Sprintf("an MTU of %d", mtu), func() error {
			for _, p := range f.pods {
				pod, err := p.Run(t.Context(), "ip", "-o", "link", "show", p.IfName)
				if err != nil {
					return err
				}
				if !strings.Contains(pod, fmt.Sprintf(" mtu %d ", mtu)) {
					return fmt.Errorf("in %s: %s", p, pod)
				}
				if err := p.Check(t.Context()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for _, mtu := range []int{1400, 1500} {
		resize(mtu)
		follow(mtu)
	}
	f.Coild.Kill()
	resize(1450)
	f.check(f.Start(t.Context()))
	follow(1450)
}
