package repair

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// forge lets a pod send datagrams to its node from an address that isn't the pod's.
func (f *fixture) forge(p *rig.Sandbox, source netip.Addr, n int) {
	f.t.Helper()
	gateway := strings.TrimSpace(f.sh("ip -o link show dev " + f.hostEnd(p) + ` | sed 's/.* link.ether \([^ ]*\) .*/\1/'`))
	// The host answers no question in the name of another (arp_filter), which a forger needn't ask.
	_, err := p.Run(f.t.Context(), "sh", "-ec", fmt.Sprintf(`
		ip neighbour replace 169.254.1.1 lladdr %[3]s dev eth0
		ip address replace %[1]s/32 dev eth0
		ip route replace %[2]s via 169.254.1.1 dev eth0 src %[1]s`, source, f.Addr4, gateway))
	f.check(err)
	conn, err := p.Dial(f.t.Context(), "udp", netip.AddrPortFrom(f.Addr4, 4711).String())
	f.check(err)
	defer conn.Close()
	for range n {
		_, err := conn.Write([]byte("coil")) // nobody listens: an error tells of the one before
		if err != nil {
			f.t.Logf("send: %v", err)
		}
	}
}

// annotate changes whether the pods of the namespace may send from any address, and waits until the
// pod's link says so by its group.
func (f *fixture) annotate(value string, group uint32) {
	f.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, v2.AnnotationSourceGuard, value)
	_, err := f.Core.CoreV1().Namespaces().Patch(f.t.Context(), f.pool, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	f.check(err)
	testkit.Eventually(f.t, 5*time.Second, "the link follows the namespace", func() error {
		if out := f.sh("ip -o link show dev " + f.hostEnd(f.pods[0])); !strings.Contains(out, fmt.Sprintf("group %d ", group)) {
			return errors.New(out)
		}
		return nil
	})
}

// The source guard counts what it drops, spares the namespaces that an admin names, and is removed where
// an admin doesn't want it at all.
func TestSourceGuard(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1, rig.NodeOptions{})
	dropped := func() map[string]float64 { return f.metric("coil_source_guard_dropped_packets_total", "family") }
	if got := dropped(); got["IPv4"] != 0 || len(got) != 2 {
		t.Errorf("dropped %v before anything was sent", got)
	}
	forged := netip.MustParseAddr("203.0.113.1")
	f.forge(f.pods[0], forged, 3)
	testkit.Eventually(t, 5*time.Second, "what was dropped is counted", func() error {
		if got := dropped(); got["IPv4"] != 3 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	f.annotate(v2.SourceGuardOff, dataplane.LinkGroupUnguarded)
	f.forge(f.pods[0], forged, 3)
	f.annotate("on", dataplane.LinkGroup)
	f.forge(f.pods[0], forged, 3)
	testkit.Eventually(t, 5*time.Second, "what was dropped is counted", func() error {
		if got := dropped(); got["IPv4"] != 6 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})

	f.sh("nft add table inet other")

	f.Coild.Args = append(f.Coild.Args, "--source-guard=false")
	f.check(f.Restart(t.Context()))
	if out := f.sh("nft list tables"); strings.TrimSpace(out) != "table inet other" {
		t.Errorf("tables without the guard: %s", out)
	}
	if out := f.sh("cat /proc/sys/net/ipv4/conf/" + f.hostEnd(f.pods[0]) + "/arp_filter"); strings.TrimSpace(out) != "0" {
		t.Errorf("arp_filter is %s without the guard", out)
	}
	if got := dropped(); len(got) > 0 {
		t.Errorf("%v are counted without the guard", got)
	}
}
