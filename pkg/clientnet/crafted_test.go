package clientnet

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
)

// craft adds to Coil's table of the pod a set, or an element of a set that is there, with user data that
// ends before it says: no library of nftables lets a program do that.
func (g *guarded) craft(set string, exists bool) {
	g.T.Helper()
	h := testkit.Must(rtnl.NewProtocol(g.NS.NS, unix.NETLINK_NETFILTER))(g.T)
	defer h.Close()
	attr := func(kind uint16, parts ...[]byte) []byte {
		return rtnl.AppendAttribute(nil, kind, slices.Concat(parts...))
	}
	text := func(s string) []byte { return append([]byte(s), 0) }
	message := func(kind uint16, attrs ...[]byte) rtnl.Request {
		body := append([]byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}, slices.Concat(attrs...)...)
		return rtnl.NewRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, unix.NLM_F_CREATE|unix.NLM_F_ACK, body, "a crafted message")
	}
	batch := func(kind uint16) rtnl.Request {
		return rtnl.NewRequest(kind, 0, []byte{0, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}, "a batch")
	}
	data := []byte{7, 0xff}
	crafted := []rtnl.Request{message(unix.NFT_MSG_NEWSETELEM,
		attr(unix.NFTA_SET_ELEM_LIST_TABLE, text(dataplane.NftTable)), attr(unix.NFTA_SET_ELEM_LIST_SET, text(set)),
		attr(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED,
			attr(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, attr(unix.NFTA_DATA_VALUE, []byte{192, 0, 2, 1})), attr(unix.NFTA_SET_ELEM_USERDATA, data))))}
	if !exists {
		crafted = []rtnl.Request{
			message(unix.NFT_MSG_NEWTABLE, attr(unix.NFTA_TABLE_NAME, text(dataplane.NftTable))),
			message(unix.NFT_MSG_NEWSET,
				attr(unix.NFTA_SET_TABLE, text(dataplane.NftTable)), attr(unix.NFTA_SET_NAME, text(set)), attr(unix.NFTA_SET_ID, []byte{0, 0, 0, 9}),
				attr(unix.NFTA_SET_KEY_TYPE, []byte{0, 0, 0, 7}), attr(unix.NFTA_SET_KEY_LEN, []byte{0, 0, 0, 4}), attr(unix.NFTA_SET_USERDATA, data)),
		}
	}
	testkit.Check(g.T, h.Do(g.T.Context(), slices.Concat([]rtnl.Request{batch(unix.NFNL_MSG_BATCH_BEGIN)}, crafted, []rtnl.Request{batch(unix.NFNL_MSG_BATCH_END)})...))
	out := testkit.Must(g.NS.Run("nft", "list", "set", "inet", dataplane.NftTable, set))(g.T)
	if exists && !strings.Contains(out, "192.0.2.1") {
		g.T.Fatalf("the element isn't there:\n%s", out)
	}
}

// Whatever a program in a pod puts into the table that Coil has there, its Egresses change, and the node's
// guard with them.
func TestCraftedSets(t *testing.T) {
	for name, craft := range map[string]func(*guarded){
		"a set": func(g *guarded) {
			g.takeAway()
			g.craft("crafted", false)
		},
		"an element": func(g *guarded) { g.craft("peers_ipv4", true) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuarded(t)
			a, b := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/64"), clientnettest.Gateway("net/b", 2, "198.51.100.0/24", "2001:db8:1::/64")
			g.mustUse(a)
			craft(g)
			made := g.mustUse(b).State
			testkit.Check(t, g.check(made))
			g.takeAway()
			g.wantLeaving("with Egress b", guardedEnds[:2]...)
		})
	}
}

// panicking are Tunnels that panic, in the goroutine that is in the pod's network namespace if inside.
type panicking struct {
	Tunnels
	inside bool
}

func (p panicking) fail(ns *netns.NS) error {
	if p.inside {
		return ns.Do(func() error { panic("at fault") })
	}
	panic("at fault")
}

func (p panicking) Make(_ context.Context, ns *netns.NS, _ *rtnl.Handle, _ uint16, _ []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error) {
	return nil, dataplane.Result{}, p.fail(ns)
}

func (p panicking) Prune(_ context.Context, ns *netns.NS, _ *rtnl.Handle, _ uint16, _ []dataplane.Tunnel, _ ...dataplane.Family) (dataplane.Result, error) {
	return dataplane.Result{}, p.fail(ns)
}

func (p panicking) Check(_ context.Context, ns *netns.NS, _ *rtnl.Handle, _ uint16, _ []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error) {
	return nil, p.fail(ns)
}

// A fault of coild that a program in the pod has found is an error, and leaves nothing open.
func TestPanicInAPod(t *testing.T) {
	for name, inside := range map[string]bool{"in a call": false, "in the namespace": true} {
		t.Run(name, func(t *testing.T) {
			g := newGuarded(t)
			a, b := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/64"), clientnettest.Gateway("net/b", 2, "198.51.100.0/24", "2001:db8:1::/64")
			made := g.mustUse(a).State
			g.network.tunnels = panicking{g.Links, inside}
			for range 2 {
				if _, err := g.use(t.Context(), b); !errors.Is(err, errPanic) {
					t.Errorf("a panic is %v", err)
				}
			}
			if err := g.check(made); !errors.Is(err, errPanic) {
				t.Errorf("a panic of CHECK is %v", err)
			}
			g.takeAway()
			g.wantLeaving("with Egress b", guardedEnds[:2]...)
			if _, err := g.use(t.Context()); !errors.Is(err, errPanic) {
				t.Errorf("a panic without an Egress is %v", err)
			}
			g.wantLeaving("without an Egress", guardedEnds...)
		})
	}
}
