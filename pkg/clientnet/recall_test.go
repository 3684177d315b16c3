package clientnet

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// A process that starts sees in the kernel which routers the last one gave no flows to; of new ones, and
// without a group, it sees nothing.
func TestSilentRouters(t *testing.T) {
	p := newDirectPod(t, 4)
	silent := func(routers string) []netip.Addr {
		t.Helper()
		c := p.Client
		c.Egresses = append(c.Egresses, directly(routers, "192.0.2.0/24", "2001:db8::/32"))
		found := testkit.Must(New(dataplane.ProtocolNode, p.network.tunnels, nil).Silent(t.Context(), p.At(), c))(t)
		return slices.SortedFunc(slices.Values(found), netip.Addr.Compare)
	}
	const all = "1 live, 2 live, 3 live, 4 live"
	if got := silent(all); len(got) > 0 {
		t.Errorf("before anything was made: %v", got)
	}
	p.mustUse(directly("1 live, 2 dead, 3 live", "192.0.2.0/24", "2001:db8::/32"))
	if got := silent(all); !slices.Equal(got, routerAddrs(2)) {
		t.Errorf("2 is dead, 4 is new: %v", got)
	}
	p.mustUse(directly("1 dead, 2 dead, 3 dead", "192.0.2.0/24", "2001:db8::/32"))
	if got := silent(all); len(got) > 0 {
		t.Errorf("all are dead: %v", got)
	}
}
