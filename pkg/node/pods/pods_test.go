package pods

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/podnet"
)

// repairs notes what is counted.
type repairs struct {
	done map[string]int
	saw  []string // kinds
}

func (r *repairs) Done(_ context.Context, kind string, n int) {
	if n > 0 {
		r.done[kind] += n
	}
}

func (r *repairs) Saw(kind, _ string) { r.saw = append(r.saw, kind) }

// network lacks something of each kind, and fails as it is told.
type network struct {
	calls []string
	fail  map[string]error
}

func (n *network) call(what string) error {
	n.calls = append(n.calls, what)
	return n.fail[what]
}

func (n *network) Forward(context.Context) (bool, error) { return true, n.call("forward") }

func (n *network) DetectMTU(context.Context, ipam.Address) (int, bool, error) {
	return 1400, true, n.call("mtu")
}

func (n *network) Rules(context.Context) (dataplane.Result, error) {
	return dataplane.Result{Added: 2, Deleted: 7}, n.call("rules")
}

func (n *network) MendLinks(ctx context.Context, want Wired) (podnet.Mended, error) {
	_, err := want(ctx)
	return podnet.Mended{Links: 3, Addresses: 4, Parameters: 5, Learned: 6, Resized: 7}, errors.Join(err, n.call("links"))
}

func (n *network) Sync(ctx context.Context, want Wired) (dataplane.Result, error) {
	_, err := want(ctx)
	return dataplane.Result{Added: 8, Replaced: 9}, errors.Join(err, n.call("routes"))
}

func newKeeper() (*Keeper, *network, *repairs) {
	n, r := &network{fail: map[string]error{}}, &repairs{done: map[string]int{}}
	return &Keeper{
		Network: n, Wired: func(context.Context) ([]podnet.Wired, error) { return nil, n.call("pods") },
		NodeAddrs: func() ipam.Address { return ipam.Address{} }, Repairs: r,
	}, n, r
}

// A missing object was lost, unless coild hasn't served before.
func TestRepairs(t *testing.T) {
	k, _, r := newKeeper()
	if err := errors.Join(k.Mend(t.Context(), false, k.Wired), k.Routes(t.Context(), false)); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[string]int{}, r.done); d != "" {
		t.Errorf("repairs at the first start (-want +got):\n%s", d)
	}
	if err := k.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := map[string]int{Sysctl: 1 + 5 + 6, Rule: 2, Link: 3, LinkAddress: 4, Route: 8}
	if d := cmp.Diff(want, r.done); d != "" {
		t.Errorf("repairs (-want +got):\n%s", d)
	}
}

// One failure keeps nothing else from being repaired, and links come before the routes that need them.
func TestSyncGoesOn(t *testing.T) {
	for _, failing := range []string{"", "forward", "mtu", "rules", "links", "routes", "pods"} {
		k, n, _ := newKeeper()
		failure := errors.New("no memory")
		n.fail[failing] = failure
		if err := k.Sync(t.Context()); errors.Is(err, failure) != (failing != "") {
			t.Errorf("%s fails: %v", failing, err)
		}
		if d := cmp.Diff([]string{"forward", "mtu", "rules", "pods", "links", "pods", "routes"}, n.calls); d != "" {
			t.Errorf("%s fails: calls (-want +got):\n%s", failing, d)
		}
	}
}

// A Node may get its addresses after coild has started.
func TestMoved(t *testing.T) {
	one, none := ipam.Address{IPv4: netip.MustParseAddr("192.0.2.1")}, ipam.Address{}
	for _, c := range []struct {
		name  string
		addrs []ipam.Address
		want  []bool
	}{
		{"an address from the start", []ipam.Address{one, one}, []bool{false, false}},
		{"none at the start", []ipam.Address{none, one}, []bool{false, true}},
		{"none any more", []ipam.Address{one, none, one}, []bool{false, true, true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var now ipam.Address
			k := &Keeper{NodeAddrs: func() ipam.Address { return now }}
			for i, a := range c.addrs {
				now = a
				if got := k.Moved(); got != c.want[i] {
					t.Errorf("step %d: moved is %t", i, got)
				}
			}
		})
	}
}
