package main

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// Packets pass by all paths that are compared, and leave by the floating address where clients have it.
func TestPaths(t *testing.T) {
	if !vmtest.Reexec(t, vm.Options{Kernel: "6.12"}, modules...) {
		return
	}
	testkit.Check(t, prepare(t.Context()))
	c := testkit.Must(newCoil(t.Context()))(t)
	testkit.Must(c.resize(t.Context(), 2))(t)
	floating := testkit.Must(newFloating(t.Context()))(t)
	testkit.Must(floating.resize(t.Context(), 2))(t)
	for _, f := range families {
		wrong := fmt.Sprintf("add table inet wrong; add chain inet wrong input { type filter hook input priority 0; }; add rule inet wrong input %[1]s daddr %[2]s %[1]s saddr != %[3]s drop",
			map[dataplane.Family]string{dataplane.IPv4: "ip", dataplane.IPv6: "ip6"}[f], targets[f][viaFloating], map[dataplane.Family]netip.Addr{dataplane.IPv4: held.IPv4, dataplane.IPv6: held.IPv6}[f])
		testkit.Must(in(t.Context(), "server", "nft", wrong))(t)
		for via := range paths {
			if _, err := in(t.Context(), senders[via], "busybox", "ping", "-c", "1", "-W", "5", targets[f][via].String()); err != nil {
				t.Errorf("from %s: %v", senders[via], err)
			}
		}
	}
}
