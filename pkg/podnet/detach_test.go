package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func TestDetach(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t)
			p, pod := newPod(t, 1, f.ipv4, f.ipv6)
			hostBefore, podBefore := state(t, n.host), state(t, pod)
			a := n.mustAttach(t, p)

			if err := n.Withdraw(t.Context(), p.Address); err != nil {
				t.Fatal(err)
			}
			if routes := routesOf(t, n.host, "116"); len(routes) != 0 {
				t.Errorf("routes after Withdraw: %q", routes)
			}
			if err := n.Withdraw(t.Context(), p.Address); err != nil {
				t.Errorf("second Withdraw: %v", err)
			}
			for _, hint := range []int{a.HostIfIndex, a.HostIfIndex, 0} {
				if err := n.Remove(t.Context(), p.ID, hint); err != nil {
					t.Error(err)
				}
			}
			if diff := cmp.Diff(hostBefore, state(t, n.host)); diff != "" {
				t.Errorf("on the host (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(podBefore, state(t, pod)); diff != "" {
				t.Errorf("in the pod (-before +after):\n%s", diff)
			}
		})
	}
}

func TestRemoveFindsTheLink(t *testing.T) {
	for _, c := range []struct {
		name string
		// hint returns the index to pass.
		hint func(t *testing.T, n node, a podnet.Attachment) int
	}{
		{"by index", func(t *testing.T, n node, a podnet.Attachment) int { return a.HostIfIndex }},
		{"without an index", func(t *testing.T, n node, a podnet.Attachment) int { return 0 }},
		{"by an index that is gone", func(t *testing.T, n node, a podnet.Attachment) int { return 99999 }},
		{"by an index that is somebody else's", func(t *testing.T, n node, a podnet.Attachment) int { return 1 }},
		{"by an index that is another pod's", func(t *testing.T, n node, a podnet.Attachment) int {
			other, _ := newPod(t, 2, true, true)
			return n.mustAttach(t, other).HostIfIndex
		}},
		{"without the alternative name", func(t *testing.T, n node, a podnet.Attachment) int {
			n.host.IP(t, "link", "property", "del", "dev", a.HostIfName, "altname", fmt.Sprintf("coil-%064x-eth0", 1))
			return 0
		}},
		{"after it was renamed", func(t *testing.T, n node, a podnet.Attachment) int {
			n.host.IP(t, "link", "set", a.HostIfName, "down")
			n.host.IP(t, "link", "set", a.HostIfName, "name", "renamed")
			return 0
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			p, _ := newPod(t, 1, true, true)
			a := n.mustAttach(t, p)
			hint := c.hint(t, n, a)
			others := strings.Count(n.host.IP(t, "-o", "link"), "\n") - 1
			if err := n.Remove(t.Context(), p.ID, hint); err != nil {
				t.Fatal(err)
			}
			left := n.host.IP(t, "-o", "link")
			if strings.Contains(left, p.ContainerID) || strings.Count(left, "\n") != others {
				t.Errorf("left: %s", left)
			}
		})
	}
}

// The runtime may have removed the namespace before DEL arrives, or may know of
// none at all.
func TestRemoveWithoutNetns(t *testing.T) {
	n := newNode(t)
	p, pod := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	netnstest.Remove(t, pod.Path)
	if err := n.Remove(t.Context(), p.ID, a.HostIfIndex); err != nil {
		t.Fatal(err)
	}
	if found, err := n.List(t.Context()); err != nil || len(found) != 0 {
		t.Errorf("found %v, %v", found, err)
	}
	if err := n.Remove(t.Context(), attachment.ID{ContainerID: "never-attached", IfName: "eth0"}, 0); err != nil {
		t.Error(err)
	}
}

func TestWithdrawLeavesForeignRoutes(t *testing.T) {
	n := newNode(t)
	n.host.IP(t, "route", "add", "10.64.0.1", "dev", "uplink", "table", "116", "proto", "99")
	before := routesOf(t, n.host, "116")
	if err := n.Withdraw(t.Context(), addressOf(1, true, true)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, routesOf(t, n.host, "116")); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

func TestList(t *testing.T) {
	n := newNode(t)
	if found, err := n.List(t.Context()); err != nil || len(found) != 0 {
		t.Errorf("on an empty node: %v, %v", found, err)
	}
	p, _ := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	// As an earlier Coil wires pods: no group, no alternative name, without IPAM no
	// pool and no route.
	for i, alias := range []string{"COIL:old:cafe:eth0", "COIL::0c31-uid:eth0", "COIL:odd", "something else", ""} {
		name := fmt.Sprintf("old%d", i)
		n.host.IP(t, "link", "add", name, "type", "veth", "peer", name+"p")
		n.host.IP(t, "link", "set", name, "up")
		if alias != "" {
			n.host.IP(t, "link", "set", name, "alias", alias)
		}
	}
	n.host.IP(t, "route", "add", "10.64.9.9", "dev", "old0", "table", "116", "proto", "30", "scope", "link")
	n.host.IP(t, "route", "add", "10.64.9.10", "dev", "old1", "table", "116", "proto", "99", "scope", "link")
	got, err := n.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []podnet.Found{
		{ID: p.ID, Pool: "default", HostIfName: a.HostIfName, Addresses: p.Address.Addrs()},
		{ID: attachment.ID{ContainerID: "cafe", IfName: "eth0"}, Pool: "old", HostIfName: "old0", Unlabelled: true, Addresses: []netip.Addr{netip.MustParseAddr("10.64.9.9")}},
		{ID: attachment.ID{ContainerID: "0c31-uid", IfName: "eth0"}, HostIfName: "old1", Unlabelled: true},
	}
	for i := range got {
		if got[i].HostIfIndex == 0 || i == 0 && got[i].HostIfIndex != a.HostIfIndex {
			t.Errorf("index of %s is wrong", got[i])
		}
		got[i].HostIfIndex = 0
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	ids, err := n.Attached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range want {
		if !slices.Contains(ids, f.ID) {
			t.Errorf("%s isn't among the attached %v", f.Key(), ids)
		}
	}
	if len(ids) != len(want) {
		t.Errorf("attached %v, want %d", ids, len(want))
	}
	// One of an earlier Coil is only found by its index.
	old := attachment.ID{ContainerID: "cafe", IfName: "eth0"}
	index, err := n.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Remove(t.Context(), old, index[1].HostIfIndex); err != nil {
		t.Fatal(err)
	}
	after, err := n.List(t.Context())
	if err != nil || slices.ContainsFunc(after, func(f podnet.Found) bool { return f.ID == old }) {
		t.Errorf("found %v, %v", after, err)
	}
}

// interrupt makes the first dumps fail whose request contains a text.
func interrupt(times int, text string) *recorder {
	return &recorder{fail: func(_ int, request string) error {
		if times > 0 && strings.Contains(request, text) {
			times--
			return rtnl.ErrDumpInterrupted
		}
		return nil
	}}
}

func TestListInterrupted(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	n.mustAttach(t, p)
	for _, dump := range []string{"link show", "route show table 116 proto 30 (IPv4)", "route show table 116 proto 30 (IPv6)"} {
		found, err := n.List(interrupt(3, dump).context(t.Context()))
		if err != nil || len(found) != 1 {
			t.Errorf("%s interrupted three times: %v, %v", dump, found, err)
		}
		found, err = n.List(interrupt(1000, dump).context(t.Context()))
		if !errors.Is(err, rtnl.ErrDumpInterrupted) || found != nil {
			t.Errorf("%s interrupted for ever: %v, %v", dump, found, err)
		}
	}
}

func TestCheckNamesWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, n node, pod *netnstest.NS, link string)
		says  []string
	}{
		{"alias", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "link", "set", link, "alias", "mine")
		}, []string{`alias is "mine"`}},
		{"group", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "link", "set", link, "group", "3")
		}, []string{"group is 0x3"}},
		{"MTU", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "link", "set", link, "mtu", "1300")
		}, []string{"MTU of " + "veth", "is 1300, not 1500"}},
		{"MTU of the pod's end", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			pod.IP(t, "link", "set", "eth0", "mtu", "1600")
		}, []string{"MTU of eth0 is 1600, more than 1500"}},
		{"host's end down", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "link", "set", link, "down")
		}, []string{"on the host: link veth", "is down", "10.64.0.1: ", "fd64::1: "}},
		{"pod's end down", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			pod.IP(t, "link", "set", "eth0", "down")
		}, []string{"in the pod: link eth0 is down", "route to 0.0.0.0/0", "route to ::/0"}},
		{"MAC address", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "link", "set", link, "address", "02:00:00:00:00:01")
		}, []string{"on the host: MAC address of veth", " is 02:00:00:00:00:01"}},
		{"alternative name", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "link", "property", "del", "dev", link, "altname", fmt.Sprintf("coil-%064x-eth0", 1))
		}, []string{"alternative name coil-"}},
		{"gateway's addresses", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "address", "flush", "dev", link)
		}, []string{"address 169.254.1.1 is missing", "address fe80::1 is missing"}},
		{"pod's addresses", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			pod.IP(t, "address", "del", "10.64.0.1/32", "dev", "eth0")
			pod.IP(t, "address", "del", "fd64::1/128", "dev", "eth0")
		}, []string{"in the pod: address 10.64.0.1 is missing", "address fd64::1 is missing"}},
		{"pod routes", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "route", "flush", "table", "116")
			n.host.IP(t, "-6", "route", "flush", "table", "116")
		}, []string{"route to 10.64.0.1", "route to fd64::1"}},
		{"rule", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "rule", "del", "priority", "2000")
		}, []string{"route to 10.64.0.1"}},
		{"route somewhere else", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "route", "replace", "10.64.0.1", "dev", "uplink", "table", "116", "proto", "30")
		}, []string{"10.64.0.1 is reached by 10.64.0.1/32 dev"}},
		{"default routes", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			pod.IP(t, "route", "del", "default")
			pod.IP(t, "-6", "route", "del", "default")
		}, []string{"route to 0.0.0.0/0", "route to ::/0"}},
		{"other namespace", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			netnstest.Remove(t, pod.Path)
			netnstest.Make(t, pod.Path)
		}, []string{"is another network namespace"}},
		{"link", func(t *testing.T, n node, pod *netnstest.NS, link string) {
			n.host.IP(t, "link", "del", link)
		}, []string{"on the host: link veth", "in the pod: "}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			p, pod := newPod(t, 1, true, true)
			a := n.mustAttach(t, p)
			if err := n.Check(t.Context(), p, a); err != nil {
				t.Fatal(err)
			}
			unknown := a
			unknown.NetnsInode, unknown.HostMAC, unknown.PodMAC = 0, "", ""
			if err := n.Check(t.Context(), p, unknown); err != nil {
				t.Fatalf("as far as is known after the record was lost: %v", err)
			}
			c.spoil(t, n, pod, a.HostIfName)
			err := n.Check(t.Context(), p, a)
			if err == nil {
				t.Fatal("nothing was noticed")
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is missing: %v", want, err)
				}
			}
		})
	}
	t.Run("namespace gone", func(t *testing.T) {
		n := newNode(t)
		p, pod := newPod(t, 1, true, true)
		a := n.mustAttach(t, p)
		netnstest.Remove(t, pod.Path)
		if err := n.Check(t.Context(), p, a); !errors.Is(err, netns.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

// wired returns the pods as Sync wants them.
func wired(pods ...podnet.Wired) func(context.Context) ([]podnet.Wired, error) {
	return func(context.Context) ([]podnet.Wired, error) { return pods, nil }
}

func TestSync(t *testing.T) {
	n := newNode(t)
	var pods []podnet.Wired
	for i := range 3 {
		p, _ := newPod(t, i+1, true, true)
		pods = append(pods, podnet.Wired{Pod: p, HostIfIndex: n.mustAttach(t, p).HostIfIndex})
	}
	sync := func(want func(context.Context) ([]podnet.Wired, error), result string) {
		t.Helper()
		got, err := n.Sync(t.Context(), want)
		if err != nil {
			t.Fatal(err)
		}
		if s := fmt.Sprintf("%+v", got); s != result {
			t.Errorf("Sync: %s, not %s", s, result)
		}
	}
	before := state(t, n.host)
	sync(wired(pods...), "{Added:0 Replaced:0 Deleted:0}")
	if diff := cmp.Diff(before, state(t, n.host)); diff != "" {
		t.Errorf("changed without need (-before +after):\n%s", diff)
	}

	// Drift, next to what belongs to others.
	n.host.IP(t, "rule", "add", "priority", "2000", "to", "10.99.0.0/16", "lookup", "99")
	n.host.IP(t, "route", "add", "10.99.0.1", "dev", "uplink", "table", "116", "proto", "99")
	before = state(t, n.host)
	n.host.IP(t, "rule", "del", "priority", "2000", "lookup", "116")
	n.host.IP(t, "-6", "rule", "del", "priority", "2001")
	n.host.IP(t, "route", "del", "10.64.0.1", "table", "116")
	n.host.IP(t, "-6", "route", "del", "fd64::2", "table", "116")
	n.host.IP(t, "route", "replace", "10.64.0.3", "dev", "uplink", "table", "116", "proto", "30", "scope", "link")
	n.host.IP(t, "route", "add", "10.64.0.77", "dev", "uplink", "table", "116", "proto", "30")
	sync(wired(pods...), "{Added:2 Replaced:1 Deleted:1}")
	if got, err := n.Rules(t.Context()); err != nil || got != (dataplane.Result{Added: 2}) {
		t.Errorf("Rules: %+v, %v", got, err)
	}
	if diff := cmp.Diff(lines(before), lines(state(t, n.host))); diff != "" {
		t.Errorf("not restored (-before +after):\n%s", diff)
	}
	sync(wired(pods...), "{Added:0 Replaced:0 Deleted:0}")

	// A pod that is being attached keeps what it has; one that isn't wanted doesn't.
	attaching := pods[0]
	attaching.HostIfIndex = 0
	sync(wired(attaching, pods[1]), "{Added:0 Replaced:0 Deleted:2}")
	if got := len(routesOf(t, n.host, "116")); got != 5 {
		t.Errorf("%d routes, not 5", got)
	}

	// The node's address goes away, and comes back.
	n.host.IP(t, "address", "del", "192.0.2.1/24", "dev", "uplink")
	sync(wired(pods...), "{Added:2 Replaced:2 Deleted:0}")
	for _, r := range routesOf(t, n.host, "116") {
		if strings.Contains(r, "src 192.0.2.1") {
			t.Errorf("source that isn't the host's: %s", r)
		}
	}
	n.host.IP(t, "address", "add", "192.0.2.1/24", "dev", "uplink")
	sync(wired(pods...), "{Added:0 Replaced:3 Deleted:0}")
	for _, p := range pods {
		for _, to := range p.Address.Addrs() {
			mustPing(t, n.host, to)
		}
	}
}

func TestSyncFailures(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	before := state(t, n.host)
	for _, dump := range []string{"route show table 116 proto 30 (IPv4)", "route show table 116 proto 30 (IPv6)"} {
		result, err := n.Sync(interrupt(1000, dump).context(t.Context()), wired())
		if !errors.Is(err, rtnl.ErrDumpInterrupted) || result.Changed() {
			t.Errorf("%s interrupted: %+v, %v", dump, result, err)
		}
	}
	unknown := errors.New("record can't be read")
	if _, err := n.Sync(t.Context(), func(context.Context) ([]podnet.Wired, error) { return nil, unknown }); !errors.Is(err, unknown) {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff(before, state(t, n.host)); diff != "" {
		t.Errorf("changed (-before +after):\n%s", diff)
	}

	// One pod whose link is gone doesn't keep the others from being repaired.
	gone, _ := newPod(t, 2, true, true)
	if err := n.Withdraw(t.Context(), p.Address); err != nil {
		t.Fatal(err)
	}
	result, err := n.Sync(t.Context(), wired(podnet.Wired{Pod: gone, HostIfIndex: 99999}, podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex}))
	if !errors.Is(err, rtnl.ErrNotExist) || !strings.Contains(err.Error(), "10.64.0.2/32") || result.Added != 2 {
		t.Errorf("got %+v, %v", result, err)
	}
	mustPing(t, n.host, p.Address.IPv4)
}

func TestSetup(t *testing.T) {
	n := newNode(t)
	// An uplink that has its default route by router advertisement.
	n.host.IP(t, "link", "set", "uplink-peer", "up")
	n.host.IP(t, "-6", "route", "add", "default", "via", "2001:db8::ffff", "dev", "uplink", "proto", "ra")
	for key, value := range map[string]string{"ip_forward": "0", "conf.uplink.accept_ra": "1"} {
		family := "ipv4"
		if strings.Contains(key, "ra") {
			family = "ipv6"
		}
		if _, err := n.host.Run("sysctl", "-qw", "net."+family+"."+key+"="+value); err != nil {
			t.Fatal(err)
		}
	}
	n.host.IP(t, "rule", "del", "priority", "2001")
	for range 2 {
		setUp(t, n.Network)
	}
	out, err := n.host.Run("sysctl", "-n", "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv6.conf.uplink.accept_ra")
	if err != nil || out != "1\n1\n2" {
		t.Errorf("got %q, %v", out, err)
	}
	for _, family := range []string{"-4", "-6"} {
		want := []string{"2000: from all lookup 116 proto 30", "2001: from all lookup 120 proto 30"}
		got := slices.DeleteFunc(lines(n.host.IP(t, family, "rule")), func(l string) bool { return !strings.HasPrefix(l, "200") })
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("rules (-want +got):\n%s", diff)
		}
	}
}

func TestOptionsValidate(t *testing.T) {
	good := podnet.Options{PodTable: 116, RulePriority: 2000, Protocol: 30}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	bad := podnet.Options{PodTable: 120, RulePriority: 0, Protocol: 256, MTU: 20}
	err := bad.Validate()
	for _, want := range []string{"pod table", "rule priority", "protocol", "MTU"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing: %v", want, err)
		}
	}
	if _, err := podnet.New(bad); err == nil {
		t.Error("New accepts it")
	}
}
