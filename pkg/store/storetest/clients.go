package storetest

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// ClientsOpener opens the record under test, and returns a function that closes it.
type ClientsOpener func(t testing.TB, c Config) (store.Clients, func())

// RunClients runs the suite that every store.Clients must pass.
func RunClients(t *testing.T, open ClientsOpener) {
	cfg := Config{Dir: t.TempDir(), BootID: "boot-1", CoolDown: coolDown, Clock: NewClock()}
	ctx := t.Context()
	r, closeRecord := open(t, cfg)
	want := func(what string, clients ...store.Client) {
		t.Helper()
		got, err := r.ListClients(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(clients, got, cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}, ipam.Address{})); d != "" {
			t.Fatalf("%s (-want +got):\n%s", what, d)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	want("at first")
	a := store.Client{
		Sandbox: store.Sandbox{
			ID: id("a"), Pod: store.Pod{Namespace: "ns", Name: "a", UID: "uid-a"}, Netns: store.Netns{Path: "/run/netns/a", Inode: 4026532},
			Address: ipam.Address{IPv4: netip.MustParseAddr("10.0.0.1"), IPv6: netip.MustParseAddr("fd00::1")},
		},
		Egresses: []store.KnownEgress{
			{Name: "net/gone"},
			{Name: "net/former", Destinations: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}, Former: true, OriginatingOnly: true},
			{Name: "net/gw", Policy: "EgressPolicy ns/p", Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Open: true},
			{Name: "net/gw", Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("2001:db8::/32")},
				InCluster: []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}},
		},
	}
	// Another plugin may give an address again before it has told that it was given back.
	b := store.Client{Sandbox: store.Sandbox{
		ID: attachment.ID{ContainerID: a.ContainerID, IfName: "net1"}, Pod: a.Pod, Address: ipam.Address{IPv4: a.Address.IPv4},
	}}
	must(r.SetClient(ctx, b))
	must(r.SetClient(ctx, a))
	must(r.SetClient(ctx, a))
	want("two, ordered", a, b)
	a.Egresses = a.Egresses[1:]
	a.Inode++
	must(r.SetClient(ctx, a))
	want("the newer record", a, b)

	closeRecord()
	cfg.BootID += "+"
	r, closeRecord = open(t, cfg)
	defer func() { closeRecord() }()
	want("after a restart", a, b)
	must(r.ForgetClients(ctx))
	must(r.ForgetClients(ctx, b.ID, id("never")))
	must(r.ForgetClients(ctx, b.ID))
	want("after one was forgotten", a)

	for _, wrong := range []store.Sandbox{{Address: a.Address}, {ID: a.ID}} {
		if err := r.SetClient(ctx, store.Client{Sandbox: wrong}); err == nil {
			t.Errorf("%+v was recorded", wrong)
		}
	}
	want("after what can't be recorded", a)
}
