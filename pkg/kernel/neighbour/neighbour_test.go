package neighbour_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/neighbour"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

const proto = 30

var (
	floats = []netip.Addr{netip.MustParseAddr("192.0.2.200"), netip.MustParseAddr("2001:db8::200")}
	other  = netip.MustParseAddr("192.0.2.201")
)

// site is a host on the link eth0 of a node, behind which a pod has addresses of the link's subnets.
type site struct {
	host, node *netnstest.NS
	handle     *rtnl.Handle
	*neighbour.Syncer
	link int // the node's eth0
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{host: netnstest.New(t), node: netnstest.New(t)}
	pod := netnstest.New(t)
	s.node.Configure(t,
		"link add eth0 type veth peer name eth0 netns "+s.host.Path,
		"link add veth0 type veth peer name eth0 netns "+pod.Path,
		"link set eth0 up", "link set veth0 up",
		"addr add 192.0.2.2/24 dev eth0", "addr add 2001:db8::2/64 dev eth0 nodad",
		"addr add 10.0.0.1/24 dev veth0", "addr add fd00::1/64 dev veth0 nodad",
		"route add 192.0.2.200 via 10.0.0.2 dev veth0", "route add 192.0.2.201 via 10.0.0.2 dev veth0",
		"-6 route add 2001:db8::200 via fd00::2 dev veth0")
	s.host.Configure(t, "link set eth0 up", "addr add 192.0.2.1/24 dev eth0", "addr add 2001:db8::1/64 dev eth0 nodad")
	pod.Configure(t, "link set eth0 up", "addr add 10.0.0.2/24 dev eth0", "addr add fd00::2/64 dev eth0 nodad",
		"addr add 192.0.2.200/32 dev lo", "addr add 192.0.2.201/32 dev lo", "addr add 2001:db8::200/128 dev lo nodad",
		"route add default via 10.0.0.1", "-6 route add default via fd00::1")
	testkit.Check(t, s.node.Lab().Forward(),
		s.node.Lab().Sysctl("ipv4/neigh/eth0/proxy_delay=0", "ipv6/neigh/eth0/proxy_delay=0", "ipv6/conf/all/proxy_ndp=1"),
		// A change within a second of another one counts, too.
		s.host.Lab().Sysctl("ipv4/neigh/eth0/locktime=0", "ipv6/neigh/eth0/locktime=0"))
	s.handle = testkit.Must(rtnl.New(s.node.NS))(t)
	t.Cleanup(s.handle.Close)
	s.link = testkit.Must(s.handle.IndexByName("eth0"))(t)
	s.Syncer = neighbour.New(s.handle, proto)
	return s
}

// want are the entries for addresses.
func (s *site) want(addrs ...netip.Addr) []dataplane.Proxy {
	var all []dataplane.Proxy
	for _, a := range addrs {
		all = append(all, dataplane.Proxy{Link: s.link, Addr: a, Protocol: proto})
	}
	return all
}

// sync makes the entries of addresses, and checks that the second time nothing is written.
func (s *site) sync(t *testing.T, want dataplane.Result, addrs ...netip.Addr) {
	t.Helper()
	if got, err := s.Sync(t.Context(), s.want(addrs...)); err != nil || got != want {
		t.Errorf("Sync(%v) = %+v, %v, want %+v", addrs, got, err, want)
	}
	if got, err := s.Sync(t.Context(), s.want(addrs...)); err != nil || got != (dataplane.Result{}) {
		t.Errorf("again: %+v, %v", got, err)
	}
	if missing, err := s.Missing(t.Context(), s.want(addrs...)); err != nil || len(missing) > 0 {
		t.Errorf("missing are %v, %v", missing, err)
	}
}

// show returns the entries as iproute2 shows them.
func (s *site) show(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, family := range []string{"-4", "-6"} {
		for l := range strings.Lines(s.node.IP(t, family, "neigh", "show", "proxy")) {
			all = append(all, strings.Join(strings.Fields(l), " "))
		}
	}
	slices.Sort(all)
	return all
}

// reaches waits until the host reaches an address, or doesn't.
func (s *site) reaches(t *testing.T, a netip.Addr, want bool) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%s is reached: %t", a, want), func() error {
		s.host.IP(t, "neigh", "flush", "dev", "eth0")
		err := s.host.Ping(a, testkit.Timeout(time.Second))
		if want {
			return err
		}
		if err == nil {
			return errors.New("it is")
		}
		return nil
	})
}

// Addresses are answered for while they are wanted, and others' entries stay as they are.
func TestSync(t *testing.T) {
	s := newSite(t)
	for _, a := range floats {
		s.reaches(t, a, false)
	}
	s.node.IP(t, "neigh", "add", "proxy", other.String(), "dev", "eth0")
	s.sync(t, dataplane.Result{Added: 2}, floats...)
	for _, a := range floats {
		s.reaches(t, a, true)
	}
	want := []string{"192.0.2.200 dev eth0 proxy proto coil", "192.0.2.201 dev eth0 proxy", "2001:db8::200 dev eth0 proxy proto coil"}
	for i, w := range want {
		want[i] = strings.ReplaceAll(w, "proto coil", "proto 30")
	}
	if diff := cmp.Diff(want, s.show(t)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	// Somebody else's is as good, and isn't taken over.
	s.sync(t, dataplane.Result{}, append(slices.Clone(floats), other)...)
	s.sync(t, dataplane.Result{Deleted: 1}, floats[1])
	s.reaches(t, floats[0], false)
	s.reaches(t, floats[1], true)
	s.sync(t, dataplane.Result{Deleted: 1})
	s.reaches(t, floats[1], false)
	if diff := cmp.Diff([]string{"192.0.2.201 dev eth0 proxy"}, s.show(t)); diff != "" {
		t.Errorf("at the end (-want +got):\n%s", diff)
	}
}

// Single addresses are removed on all links, and others' entries stay.
func TestRemove(t *testing.T) {
	s := newSite(t)
	s.node.IP(t, "neigh", "add", "proxy", other.String(), "dev", "eth0")
	veth := testkit.Must(s.handle.IndexByName("veth0"))(t)
	want := append(s.want(floats...), dataplane.Proxy{Link: veth, Addr: floats[0], Protocol: proto})
	testkit.Must(s.Sync(t.Context(), want))(t)
	if got, err := s.Remove(t.Context(), floats[0], other); err != nil || got != (dataplane.Result{Deleted: 2}) {
		t.Errorf("Remove = %+v, %v", got, err)
	}
	if got, err := s.List(t.Context()); err != nil || !slices.Equal(got, s.want(floats[1])) {
		t.Errorf("left are %v, %v", got, err)
	}
	if got, err := s.Remove(t.Context(), floats[0]); err != nil || got != (dataplane.Result{}) {
		t.Errorf("again: %+v, %v", got, err)
	}
	if got := s.show(t); len(got) != 2 || got[0] != "192.0.2.201 dev eth0 proxy" {
		t.Errorf("entries are %q", got)
	}
}

// Entries stay while a link has no carrier, as when a switch starts anew.
func TestCarrier(t *testing.T) {
	s := newSite(t)
	s.sync(t, dataplane.Result{Added: 2}, floats...)
	before := s.show(t)
	s.host.IP(t, "link", "set", "eth0", "down")
	testkit.Eventually(t, 5*time.Second, "the node's link has no carrier", func() error {
		if text := s.node.IP(t, "-o", "link", "show", "eth0"); !strings.Contains(text, "NO-CARRIER") {
			return errors.New(text)
		}
		return nil
	})
	s.host.IP(t, "link", "set", "eth0", "up")
	if diff := cmp.Diff(before, s.show(t)); diff != "" {
		t.Errorf("entries (-before +after):\n%s", diff)
	}
}

// What is lost comes back; what can't be is told, and the rest is done.
func TestSyncFailures(t *testing.T) {
	s := newSite(t)
	s.sync(t, dataplane.Result{Added: 2}, floats...)
	s.node.IP(t, "neigh", "del", "proxy", floats[0].String(), "dev", "eth0")
	if missing, err := s.Missing(t.Context(), s.want(floats...)); err != nil || !slices.Equal(missing, s.want(floats[0])) {
		t.Errorf("missing are %v, %v", missing, err)
	}
	s.sync(t, dataplane.Result{Added: 1}, floats...)
	gone := dataplane.Proxy{Link: 1 << 30, Addr: other, Protocol: proto}
	if got, err := s.Sync(t.Context(), append(s.want(other), gone)); err == nil || !strings.Contains(err.Error(), fmt.Sprint(gone)) || got != (dataplane.Result{Added: 1, Deleted: 2}) {
		t.Errorf("with a link that isn't there: %+v, %v", got, err)
	}
	for _, p := range []dataplane.Proxy{
		{Link: s.link, Addr: other, Protocol: 31}, {Addr: other, Protocol: proto}, {Link: s.link, Protocol: proto},
		{Link: s.link, Addr: netip.MustParseAddr("::ffff:192.0.2.1"), Protocol: proto}, {Link: s.link, Addr: netip.MustParseAddr("fe80::1%eth0"), Protocol: proto},
	} {
		if got, err := s.Sync(t.Context(), []dataplane.Proxy{p}); err == nil || got != (dataplane.Result{}) {
			t.Errorf("%v is accepted: %+v", p, got)
		}
	}
}

// A host that has sent to an address elsewhere sends to this node as soon as that is announced.
func TestAnnounce(t *testing.T) {
	s := newSite(t)
	s.sync(t, dataplane.Result{Added: 2}, floats...)
	at := func(a netip.Addr) string {
		f := strings.Fields(s.host.IP(t, "neigh", "show", a.String()))
		if i := slices.Index(f, "lladdr"); i >= 0 {
			return f[i+1]
		}
		return ""
	}
	elsewhere, mac := "02:00:5e:00:53:99", testkit.Must(net.ParseMAC("02:00:5e:00:53:01"))(t)
	s.node.IP(t, "link", "set", "eth0", "address", mac.String())
	for _, a := range floats {
		s.reaches(t, a, true)
	}
	for _, state := range []string{"reachable", "stale"} {
		for _, a := range floats {
			s.host.IP(t, "neigh", "replace", a.String(), "lladdr", elsewhere, "dev", "eth0", "nud", state)
			if got := at(a); got != elsewhere {
				t.Fatalf("%s is at %q", a, got)
			}
			testkit.Check(t, announce.Send(s.node.NS, []announce.Announcement{{Link: s.link, MAC: mac, Addr: a}}))
			testkit.Eventually(t, 5*time.Second, fmt.Sprintf("%s, %s before, is here", a, state), func() error {
				if got := at(a); got != mac.String() {
					return fmt.Errorf("it is at %q", got)
				}
				return nil
			})
			testkit.Check(t, s.host.Ping(a, testkit.Timeout(time.Second)))
		}
	}
}
