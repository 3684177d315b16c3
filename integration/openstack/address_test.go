package openstack

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/testkit"
)

// public compares addresses by what others see of them.
var public = []cmp.Option{cmpopts.IgnoreUnexported(openstack.Address{}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })}

// Test1Create makes an address, with as few calls as needed, and none when it is there.
func Test1Create(t *testing.T) {
	sc := newScene(t)
	a := sc.ensure("web", all)
	budget := []string{"GET ports", "GET ports", "GET floatingips", "GET floatingips",
		"POST ports", "PUT ports/" + a.PortID + "/tags", "POST floatingips", "PUT floatingips/" + a.FloatingID + "/tags"}
	if diff := cmp.Diff(budget, sc.calls()); diff != "" {
		t.Errorf("calls of a new address (-want +got):\n%s", diff)
	}
	sc.wants("made", "one/web port floating")
	if len(a.Fixed) != 2 || !a.Fixed[0].Is4() || !a.Fixed[1].Is6() || !netip.MustParsePrefix("203.0.113.0/24").Contains(a.Floating) || len(a.Incomplete) != 0 {
		t.Errorf("the address is %+v", a)
	}
	if p := sc.raw("ports", "id="+a.PortID)[0]; p.Name != "coil-one-web" || p.Description != "Coil: cluster one, address web" {
		t.Errorf("the port is %+v", p)
	}

	listed := testkit.Must(sc.List(t.Context()))(t)
	if diff := cmp.Diff([]openstack.Address{a}, listed, public...); diff != "" {
		t.Errorf("what List returns (-Ensure +List):\n%s", diff)
	}
	sc.calls()
	for name, seen := range map[string]openstack.Address{"List": listed[0], "Ensure": a} {
		if diff := cmp.Diff(a, testkit.Must(sc.Ensure(t.Context(), seen, all))(t), public...); diff != "" {
			t.Errorf("nothing has changed (-want +got):\n%s", diff)
		}
		if calls := sc.calls(); len(calls) != 0 {
			t.Errorf("Ensure with what %s has returned makes the calls %q, want none", name, calls)
		}
	}
	if diff := cmp.Diff(a, sc.ensure("web", all), public...); diff != "" {
		t.Errorf("a second Ensure after a restart (-want +got):\n%s", diff)
	}
	if n := len(sc.calls()); n != 4 {
		t.Errorf("it makes %d calls, want 4", n)
	}

	testkit.Check(t, sc.Delete(t.Context(), "web"))
	sc.wants("deleted")
	testkit.Check(t, sc.Delete(t.Context(), "web"))
}

// TestFamilies makes addresses of one family, and adds the other one.
func TestFamilies(t *testing.T) {
	sc := newScene(t)
	a := sc.ensure("six", openstack.Want{IPv6: true})
	if len(a.Fixed) != 1 || !a.Fixed[0].Is6() || len(a.Incomplete) != 0 {
		t.Errorf("the address is %+v, want one of IPv6", a)
	}
	b := testkit.Must(sc.Ensure(t.Context(), a, all))(t)
	if b.PortID != a.PortID || len(b.Fixed) != 2 || b.Fixed[1] != a.Fixed[0] || !b.Floating.IsValid() {
		t.Errorf("the address is %+v, want one of both families with the former one of IPv6", b)
	}
	sc.wants("both", "one/six port floating")
	// What isn't wanted any more stays.
	testkit.Must(sc.Ensure(t.Context(), b, openstack.Want{IPv4: true}))(t)
	sc.wants("one", "one/six port floating")

	cfg := sc.cfg
	cfg.SubnetIDs, cfg.FloatingNetworkID = []string{sc.Subnet4}, ""
	c := sc.cluster(cfg)
	for _, tt := range []struct {
		want openstack.Want
		says string
	}{
		{openstack.Want{}, "no family"},
		{openstack.Want{IPv6: true}, "no subnet"},
		{openstack.Want{IPv6: true, Floating: true}, "leads to an IPv4 address"},
		{openstack.Want{IPv4: true, Floating: true}, "no network for them"},
	} {
		_, err := c.Ensure(t.Context(), openstack.Address{Key: "six"}, tt.want)
		refused(t, err, openstack.Misconfigured, tt.says)
	}
	_, err := c.Ensure(t.Context(), openstack.Address{Key: "a/b"}, both)
	refused(t, err, openstack.Misconfigured, `"a/b"`)
}

// Test12Repair changes and deletes objects behind the package's back.
func Test12Repair(t *testing.T) {
	sc := newScene(t)
	a := sc.ensure("web", all)
	for _, tt := range []struct {
		name    string
		disturb func(a openstack.Address)
		// What stays the same.
		port, fixed, floating bool
	}{
		{"port deleted", func(a openstack.Address) { sc.drop("ports/" + a.PortID) }, false, false, true},
		{"floating IP deleted", func(a openstack.Address) { sc.drop("floatingips/" + a.FloatingID) }, true, true, false},
		{"both deleted", func(a openstack.Address) { sc.drop("floatingips/" + a.FloatingID); sc.drop("ports/" + a.PortID) }, false, false, false},
		{"floating IP leads nowhere", func(a openstack.Address) {
			sc.update("floatingips/"+a.FloatingID, "floatingip", map[string]any{"port_id": nil})
		}, true, true, true},
		{"fixed address taken", func(a openstack.Address) {
			sc.update("ports/"+a.PortID, "port", map[string]any{"fixed_ips": []map[string]any{{"subnet_id": sc.Subnet6, "ip_address": a.Fixed[1].String()}}})
		}, true, false, true},
		{"tags taken", func(a openstack.Address) {
			sc.tag("ports/"+a.PortID, "theirs")
			sc.tag("floatingips/"+a.FloatingID, "theirs")
		}, true, true, true},
		{"descriptions changed", func(a openstack.Address) {
			sc.update("floatingips/"+a.FloatingID, "floatingip", map[string]any{"description": "theirs"})
			sc.update("ports/"+a.PortID, "port", map[string]any{"description": "theirs", "name": "theirs"})
		}, true, true, true},
	} {
		tt.disturb(a)
		b := sc.ensure("web", all)
		if (a.PortID == b.PortID) != tt.port || (a.FloatingID == b.FloatingID) != tt.floating || len(b.Incomplete) != 0 ||
			tt.fixed && !slices.Equal(a.Fixed, b.Fixed) || tt.floating && a.Floating != b.Floating {
			t.Errorf("%s: %+v became %+v", tt.name, a, b)
		}
		sc.wants(tt.name, "one/web port floating")
		if diff := cmp.Diff(b, sc.seen("web"), public...); diff != "" {
			t.Errorf("%s: what List returns (-Ensure +List):\n%s", tt.name, diff)
		}
		a = b
	}
	// A floating IP that has no port any more is swept although no port is.
	sc.drop("ports/" + a.PortID)
	for range 2 {
		testkit.Must(sc.Sweep(t.Context(), nil))(t)
	}
	sc.wants("swept")
}

// TestSecondPort has two ports of one key, as two leaders may make them: the older one is the address, and Sweep deletes the other.
func TestSecondPort(t *testing.T) {
	sc := newScene(t)
	a := sc.ensure("web", all)
	mark := map[string]any{"network_id": sc.NetworkID, "description": "Coil: cluster one, address web"}
	second := testkit.Must(sc.Create(t.Context(), "port", mark))(t)
	float := testkit.Must(sc.Create(t.Context(), "floatingip", map[string]any{
		"floating_network_id": sc.cloud.ExternalID(), "description": "Coil: cluster one, address web"}))(t)
	// The second one may have got the floating IP.
	sc.update("floatingips/"+a.FloatingID, "floatingip", map[string]any{"port_id": second, "fixed_ip_address": sc.raw("ports", "id="+second)[0].FixedIPs[0].IP})

	older, younger := a.PortID, second
	if x, y := sc.raw("ports", "id="+a.PortID)[0], sc.raw("ports", "id="+second)[0]; x.CreatedAt == y.CreatedAt && y.ID < x.ID {
		older, younger = second, a.PortID // made in the same second
	}
	b := testkit.Must(sc.Ensure(t.Context(), sc.seen("web"), all))(t)
	if b.PortID != older {
		t.Errorf("the port is %s, want the older one, %s", b.PortID, older)
	}
	keep := map[string]bool{"web": true}
	if gone := testkit.Must(sc.Sweep(t.Context(), keep))(t); len(gone) != 0 {
		t.Errorf("the first Sweep deletes %v", gone)
	}
	gone := testkit.Must(sc.Sweep(t.Context(), keep))(t)
	var ids []string
	for _, o := range gone {
		ids = append(ids, o.ID)
	}
	slices.Sort(ids)
	spare := float
	if b.FloatingID == float {
		spare = a.FloatingID
	}
	if want := []string{younger, spare}; !slices.Equal(ids, slices.Sorted(slices.Values(want))) {
		t.Errorf("the second Sweep deletes %q, want %q", ids, want)
	}
	sc.wants("swept", "one/web port floating")
}

// Test14TwoClusters has two clusters in one project, and objects of nobody.
func Test14TwoClusters(t *testing.T) {
	sc := newScene(t)
	cfg := sc.cfg
	cfg.ClusterID = "one-more" // begins with the other's
	other := sc.cluster(cfg)
	sc.ensure("web", all)
	testkit.Must(other.Ensure(t.Context(), openstack.Address{Key: "web"}, all))(t)
	foreign := func(kind, description string, tags ...string) {
		t.Helper()
		id := testkit.Must(sc.Create(t.Context(), kind, map[string]map[string]any{
			"port": {"network_id": sc.NetworkID, "description": description}, "floatingip": {"floating_network_id": sc.cloud.ExternalID(), "description": description},
		}[kind]))(t)
		sc.tag(kind+"s/"+id, append([]string{"foreign"}, tags...)...)
	}
	foreign("port", "a database")
	foreign("port", "Coil: cluster one, address web!")                                        // not exactly
	foreign("port", "Coil: cluster one, address web", "coil-cluster=two")                     // of two
	foreign("port", "Coil: cluster two, address web", "coil-cluster=one", "coil-address=web") // of two
	foreign("port", "", "coil-cluster=one")                                                   // of no address
	foreign("floatingip", "a database")
	foreign("floatingip", "Coil: cluster two, address web", "coil-cluster=one")
	theirs := slices.DeleteFunc(sc.inventory(), func(l string) bool { return l == "one/web port floating" || l == "one-more/web port floating" })

	for range 3 {
		if gone := testkit.Must(sc.Sweep(t.Context(), map[string]bool{"web": true}))(t); len(gone) != 0 {
			t.Errorf("Sweep deletes %v", gone)
		}
	}
	for name, c := range map[string]*openstack.Client{"one": sc.Client, "one-more": other} {
		if l := testkit.Must(c.List(t.Context()))(t); len(l) != 1 || l[0].Key != "web" || len(l[0].Incomplete) != 0 {
			t.Errorf("cluster %s lists %+v, want its own address", name, l)
		}
	}
	for range 2 {
		testkit.Must(sc.Sweep(t.Context(), nil))(t)
	}
	sc.wants("one is swept", slices.Concat(theirs, []string{"one-more/web port floating"})...)
	testkit.Check(t, sc.Delete(t.Context(), "web"))
	sc.wants("one is deleted", slices.Concat(theirs, []string{"one-more/web port floating"})...)
}

// TestPages lists more ports than an answer has: some with tags, and some that a program made before it was killed.
func TestPages(t *testing.T) {
	sc := newScene(t)
	var ports []map[string]any
	var keys []string
	for i := range 16 {
		keys = append(keys, fmt.Sprintf("key-%02d", i))
		ports = append(ports, map[string]any{"network_id": sc.NetworkID, "description": "Coil: cluster one, address " + keys[i]})
	}
	var made struct{ Ports []object }
	testkit.Check(t, sc.Network(t.Context(), http.MethodPost, "ports", map[string]any{"ports": ports}, &made))
	for _, p := range made.Ports[:8] {
		sc.tag("ports/"+p.ID, "coil-cluster=one", "coil-address="+p.Description[len("Coil: cluster one, address "):])
	}
	// A port of a machine is in no list.
	sc.update("ports/"+testkit.Must(sc.Create(t.Context(), "port", map[string]any{"network_id": sc.NetworkID}))(t), "port", map[string]any{"device_owner": "compute:nova"})
	sc.calls()
	var got []string
	for i, a := range testkit.Must(sc.List(t.Context()))(t) {
		if got = append(got, a.Key); (len(a.Incomplete) == 0) != (i < 8) {
			t.Errorf("%s lacks %q", a.Key, a.Incomplete)
		}
	}
	if calls := sc.calls(); !slices.Equal(got, keys) || len(calls) != 6 {
		t.Errorf("List returns %q in the calls %q, want two pages of ports twice", got, calls)
	}
}

// TestNamed makes addresses that are chosen by name, also anew after somebody has deleted their port.
func TestNamed(t *testing.T) {
	sc := newScene(t)
	addr4, addr6 := netip.MustParseAddr("10.1.0.77"), netip.MustParseAddr("fd00:1::4d")
	want := openstack.Want{IPv4: true, Addresses: []netip.Addr{addr4}, Floating: true}
	a := sc.ensure("web", want)
	if !slices.Equal(a.Fixed, []netip.Addr{addr4}) || !a.Floating.IsValid() {
		t.Errorf("the address is %+v, want %s", a, addr4)
	}
	want.IPv6, want.Addresses = true, append(want.Addresses, addr6)
	a = testkit.Must(sc.Ensure(t.Context(), a, want))(t)
	if !slices.Equal(a.Fixed, []netip.Addr{addr4, addr6}) {
		t.Errorf("the address is %+v, want its pair, too", a)
	}
	sc.calls()
	if testkit.Must(sc.Ensure(t.Context(), a, want))(t); len(sc.calls()) != 0 {
		t.Error("it has all that is wanted, and calls are made")
	}

	sc.drop("ports/" + a.PortID)
	if b := testkit.Must(sc.Ensure(t.Context(), sc.seen("web"), want))(t); !slices.Equal(b.Fixed, a.Fixed) || b.Floating != a.Floating || b.PortID == a.PortID {
		t.Errorf("after its port was deleted it is %+v, want another port with the same", b)
	}

	// One that Neutron has chosen isn't the one that is wanted.
	b := sc.ensure("shop", openstack.Want{IPv4: true})
	addr := netip.MustParseAddr("10.1.0.78")
	b = testkit.Must(sc.Ensure(t.Context(), b, openstack.Want{IPv4: true, Addresses: []netip.Addr{addr}, Floating: true}))(t)
	if f := sc.raw("floatingips", "port_id="+b.PortID); !slices.Contains(b.Fixed, addr) || len(f) != 1 || f[0].FixedIP != addr.String() {
		t.Errorf("the address is %+v, want %s with the floating IP", b, addr)
	}

	_, err := sc.Ensure(t.Context(), openstack.Address{Key: "other"}, openstack.Want{IPv4: true, Addresses: []netip.Addr{addr4}})
	refused(t, err, openstack.Conflict, "IpAddressAlreadyAllocated")
	_, err = sc.Ensure(t.Context(), openstack.Address{Key: "other"}, openstack.Want{IPv4: true, Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.1")}})
	refused(t, err, openstack.Misconfigured, "10.9.0.1")
	_, err = sc.Ensure(t.Context(), openstack.Address{Key: "other"}, openstack.Want{IPv4: true, Addresses: []netip.Addr{addr4, addr}})
	refused(t, err, openstack.Misconfigured, "two addresses")
	sc.wants("in the end", "one/web port floating", "one/shop port floating")
}

// TestRoom reads what is free, and has a port's addresses replaced.
func TestRoom(t *testing.T) {
	sc := newScene(t)
	sc.update("subnets/"+sc.Subnet4, "subnet", map[string]any{"allocation_pools": []map[string]any{{"start": "10.1.0.70", "end": "10.1.0.79"}}})
	// Who owns the network sees ports of others on it.
	testkit.Must(sc.cloud.Admin().Create(t.Context(), "port", map[string]any{"network_id": sc.NetworkID, "fixed_ips": []map[string]any{{"subnet_id": sc.Subnet6, "ip_address": "fd00:1::47"}}}))(t)
	a := sc.ensure("web", openstack.Want{IPv4: true})
	room := testkit.Must(sc.Room(t.Context()))(t)
	addr := netip.MustParseAddr
	for ip, want := range map[netip.Addr]struct{ given, taken bool }{
		a.Fixed[0]: {true, true}, addr("10.1.0.1"): {false, true}, addr("10.1.0.80"): {false, false}, addr("fd00:1::47"): {true, true}, addr("fd00:1::48"): {true, false},
	} {
		if room.Given.Contains(ip) != want.given || room.Taken.Contains(ip) != want.taken {
			t.Errorf("%s: given %t, taken %t; want %+v", ip, room.Given.Contains(ip), room.Taken.Contains(ip), want)
		}
	}

	_, err := sc.Ensure(t.Context(), a, openstack.Want{IPv4: true, IPv6: true, Addresses: []netip.Addr{a.Fixed[0], addr("fd00:1::47")}})
	refused(t, err, openstack.Conflict, "fd00:1::47")
	if !openstack.IsTaken(err) {
		t.Errorf("%v doesn't say that an address is taken", err)
	}
	other := openstack.Want{IPv4: true, IPv6: true, Addresses: []netip.Addr{addr("10.1.0.99"), addr("fd00:1::63")}, Replace: true, Floating: true}
	sc.calls()
	b := testkit.Must(sc.Ensure(t.Context(), a, other))(t)
	if calls := sc.calls(); len(calls) != 7 || calls[4] != "PUT ports/"+a.PortID {
		t.Errorf("the calls are %q, want one that changes the port", calls)
	}
	if b.PortID != a.PortID || !slices.Equal(b.Fixed, other.Addresses) || !b.Floating.IsValid() {
		t.Errorf("the address is %+v, want the port of %+v with others alone", b, a)
	}
	// A port loses nothing when what is to take the place is somebody's.
	other.Addresses = []netip.Addr{addr("10.1.0.98"), addr("fd00:1::47")}
	_, err = sc.Ensure(t.Context(), b, other)
	refused(t, err, openstack.Conflict, "fd00:1::47")
	if seen := sc.seen("web"); !slices.Equal(seen.Fixed, b.Fixed) || seen.Floating != b.Floating {
		t.Errorf("the address is %+v, want %+v", seen, b)
	}
	sc.wants("in the end", "one/web port floating")
}
