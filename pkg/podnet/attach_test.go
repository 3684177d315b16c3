package podnet_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// lines returns the trimmed lines of an output, sorted.
func lines(out string) []string {
	var ls []string
	for l := range strings.Lines(out) {
		if l = strings.Join(strings.Fields(l), " "); l != "" {
			ls = append(ls, l)
		}
	}
	slices.Sort(ls)
	return ls
}

func TestAttachMakesWhatIsPromised(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, func(o *podnet.Options) { o.MTU = 1400 })
			p, pod := newPod(t, 1, f.ipv4, f.ipv6)
			a, err := n.Attach(t.Context(), p, nil)
			if err != nil {
				t.Fatal(err)
			}
			// At once: no address may need time to settle.
			if err := n.Check(t.Context(), p, a); err != nil {
				t.Error(err)
			}
			for where, ns := range map[string]*netnstest.NS{"pod": pod, "host": n.host} {
				if out := ns.IP(t, "-6", "-o", "address", "show", "tentative"); out != "" {
					t.Errorf("tentative addresses of the %s: %s", where, out)
				}
			}
			var podAddrs, podRoutes, hostAddrs, hostRoutes []string
			if f.ipv4 {
				podAddrs = append(podAddrs, "inet 10.64.0.1/32 scope global noprefixroute eth0")
				podRoutes = append(podRoutes, "default via 169.254.1.1 dev eth0", "169.254.1.1 dev eth0 scope link")
				hostAddrs = append(hostAddrs, "inet 169.254.1.1/32 scope link noprefixroute "+a.HostIfName)
				hostRoutes = append(hostRoutes, "10.64.0.1 dev "+a.HostIfName+" proto 30 scope link src 192.0.2.1")
			}
			if f.ipv6 {
				podAddrs = append(podAddrs, "inet6 fd64::1/128 scope global nodad noprefixroute",
					"inet6 "+eui64(t, a.PodMAC)+"/64 scope link nodad")
				podRoutes = append(podRoutes, "default via fe80::1 dev eth0 metric 1024 pref medium",
					"fe80::/64 dev eth0 proto kernel metric 256 pref medium")
				hostAddrs = append(hostAddrs, "inet6 fe80::1/64 scope link nodad")
				hostRoutes = append(hostRoutes, "fd64::1 dev "+a.HostIfName+" proto 30 src 2001:db8::1 metric 1024 pref medium")
			}
			slices.Sort(podAddrs)
			slices.Sort(hostAddrs)
			slices.Sort(podRoutes)
			slices.Sort(hostRoutes)
			addrs := func(ns *netnstest.NS, link string) []string {
				return slices.DeleteFunc(lines(ns.IP(t, "address", "show", link)), func(l string) bool { return !strings.HasPrefix(l, "inet") })
			}
			for _, c := range []struct {
				what      string
				got, want []string
			}{
				{"addresses of the pod", addrs(pod, "eth0"), podAddrs},
				{"addresses of the host's end", addrs(n.host, a.HostIfName), hostAddrs},
				{"routes of the pod", routesOf(t, pod, "main"), podRoutes},
				{"pod table", routesOf(t, n.host, "116"), hostRoutes},
			} {
				if diff := cmp.Diff(c.want, c.got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", c.what, diff)
				}
			}
			for ns, link := range map[*netnstest.NS]string{pod: "eth0", n.host: a.HostIfName} {
				out := ns.IP(t, "link", "show", link)
				for _, want := range []string{"mtu 1400", "state UP"} {
					if !strings.Contains(out, want) {
						t.Errorf("%s of %s is missing: %s", want, link, out)
					}
				}
			}
			host := n.host.IP(t, "-d", "link", "show", "dev", "coil-"+p.ContainerID+"-eth0")
			for _, want := range []string{a.HostIfName + "@", "group 1668245868", "alias COIL:default:" + p.ContainerID + ":eth0", a.HostMAC} {
				if !strings.Contains(host, want) {
					t.Errorf("%q is missing: %s", want, host)
				}
			}
			if got := pod.IP(t, "link", "show", "eth0"); !strings.Contains(got, a.PodMAC) {
				t.Errorf("MAC address %s is missing: %s", a.PodMAC, got)
			}
		})
	}
}

// routesOf returns the routes of a table, both families, without the table.
func routesOf(t *testing.T, ns *netnstest.NS, table string) []string {
	t.Helper()
	var routes []string
	for _, family := range []string{"-4", "-6"} {
		for _, l := range lines(ns.IP(t, family, "route", "show", "table", "all")) {
			// iproute2 doesn't say "table main".
			in, said := "main", ""
			if before, after, ok := strings.Cut(l, " table "); ok {
				in, said, _ = strings.Cut(after, " ")
				l = strings.TrimSpace(before + " " + said)
			}
			if in == table {
				routes = append(routes, l)
			}
		}
	}
	slices.Sort(routes)
	return routes
}

// eui64 is the link-local address of a MAC address.
func eui64(t *testing.T, mac string) string {
	t.Helper()
	var b [6]byte
	if _, err := fmt.Sscanf(mac, "%02x:%02x:%02x:%02x:%02x:%02x", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5]); err != nil {
		t.Fatal(err)
	}
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: b[0] ^ 2, 9: b[1], 10: b[2], 11: 0xff, 12: 0xfe, 13: b[3], 14: b[4], 15: b[5]}).String()
}

// A MAC address that was set keeps udev and others from setting another one.
func TestMACAddressesAreSet(t *testing.T) {
	n := newNode(t)
	p, pod := newPod(t, 1, true, false)
	a := n.mustAttach(t, p)
	for ns, link := range map[*netnstest.NS]string{pod: "eth0", n.host: a.HostIfName} {
		// A new mount shows the namespace in which it is made.
		out, err := ns.Run("unshare", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && cat /sys/class/net/"+link+"/addr_assign_type")
		if err != nil {
			t.Fatal(err)
		}
		if out != "3" { // NET_ADDR_SET
			t.Errorf("addr_assign_type of %s is %s", link, out)
		}
	}
}

func TestPing(t *testing.T) {
	for _, f := range families {
		for _, rpFilter := range []string{"0", "1", "2"} {
			t.Run(f.name+" rp_filter "+rpFilter, func(t *testing.T) {
				n := newNode(t)
				for _, key := range []string{"all", "default"} {
					if _, err := n.host.Run("sysctl", "-qw", "net.ipv4.conf."+key+".rp_filter="+rpFilter); err != nil {
						t.Fatal(err)
					}
				}
				p1, pod1 := newPod(t, 1, f.ipv4, f.ipv6)
				p2, pod2 := newPod(t, 2, f.ipv4, f.ipv6)
				n.mustAttach(t, p1)
				n.mustAttach(t, p2)
				for i, to := range p2.Address.Addrs() {
					mustPing(t, pod1, to)
					mustPing(t, pod2, p1.Address.Addrs()[i])
					mustPing(t, n.host, to)
					node := nodeAddrs.IPv4
					if to.Is6() {
						node = nodeAddrs.IPv6
					}
					mustPing(t, pod1, node)
					source, err := n.host.SourceOf(pod2, to, testkit.Timeout(pingTimeout))
					if err != nil {
						t.Error(err)
					} else if source != node {
						t.Errorf("the node reaches %s as %s, not as %s", to, source, node)
					}
				}
				if f.ipv4 {
					mustPing(t, pod1, podnet.Gateways.IPv4)
				}
				if f.ipv6 {
					mustPing(t, pod1, podnet.Gateways.IPv6.WithZone("2"))
				}
			})
		}
	}
}

func TestNodeAddressThatIsNotLocal(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	p.NodeAddrs.IPv4, p.NodeAddrs.IPv6 = netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("2001:db8::99")
	a := n.mustAttach(t, p)
	want := []string{
		"10.64.0.1 dev " + a.HostIfName + " proto 30 scope link",
		"fd64::1 dev " + a.HostIfName + " proto 30 metric 1024 pref medium",
	}
	if diff := cmp.Diff(want, routesOf(t, n.host, "116")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A namespace in which IPv6 is switched off by default, as some runtimes make it.
func TestIPv6SwitchedOffByDefault(t *testing.T) {
	n := newNode(t)
	p, pod := newPod(t, 1, false, true)
	for _, ns := range []*netnstest.NS{n.host, pod} {
		if _, err := ns.Run("sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"); err != nil {
			t.Fatal(err)
		}
	}
	n.mustAttach(t, p)
	mustPing(t, n.host, p.Address.IPv6)
}

func TestRouterAdvertisementsAreIgnored(t *testing.T) {
	n := newNode(t)
	p, pod := newPod(t, 1, false, true)
	n.mustAttach(t, p)
	if out, err := pod.Run("sysctl", "-n", "net.ipv6.conf.eth0.accept_ra"); err != nil || out != "0" {
		t.Errorf("accept_ra is %q, %v", out, err)
	}
}

func TestCompatCalico(t *testing.T) {
	n := newNode(t, compatCalico)
	p, _ := newPod(t, 1, true, true)
	p.Namespace, p.Name = "default", "nginx"
	a := n.mustAttach(t, p)
	// printf default.nginx | sha1sum
	if want := "vethc440f455693"; a.HostIfName != want {
		t.Errorf("host's end is named %s, not %s", a.HostIfName, want)
	}
	if err := n.Check(t.Context(), p, a); err != nil {
		t.Error(err)
	}

	// The next sandbox of the same pod comes before the DEL of this one.
	next, _ := newPod(t, 2, true, true)
	next.Namespace, next.Name = p.Namespace, p.Name
	b := n.mustAttach(t, next)
	if b.HostIfName != a.HostIfName {
		t.Errorf("host's end is named %s, not %s", b.HostIfName, a.HostIfName)
	}
	mustPing(t, n.host, p.Address.IPv4)
	mustPing(t, n.host, next.Address.IPv4)
	if err := n.Remove(t.Context(), p.ID, a.HostIfIndex); err != nil {
		t.Fatal(err)
	}
	if err := n.Check(t.Context(), next, b); err != nil {
		t.Error(err)
	}
}

// Each request waits for the lock of all network configuration, so that their
// number bounds how many pods a node can start.
func TestAttachSendsFewMessages(t *testing.T) {
	for _, c := range []struct {
		name       string
		ipv4, ipv6 bool
		compat     bool
		most       int
	}{
		{"IPv4", true, false, false, 10},
		{"IPv4 compat", true, false, true, 10},
		{"dual", true, true, false, 14},
		{"dual compat", true, true, true, 14},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, func(o *podnet.Options) { o.CompatCalico = c.compat })
			p, _ := newPod(t, 1, c.ipv4, c.ipv6)
			var r recorder
			a, err := n.Attach(r.context(t.Context()), p, nil)
			if err != nil {
				t.Fatal(err)
			}
			if r.count() > c.most {
				t.Errorf("%d messages, more than %d: %q", r.count(), c.most, r.requests)
			}
			attached := r.count()
			if err := n.Check(r.context(t.Context()), p, a); err != nil {
				t.Fatal(err)
			}
			checked := r.count()
			if err := n.Withdraw(r.context(t.Context()), p.Address); err != nil {
				t.Fatal(err)
			}
			if err := n.Remove(r.context(t.Context()), p.ID, a.HostIfIndex); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d messages to attach, %d to check, %d to detach", attached, checked-attached, r.count()-checked)
			for _, q := range r.requests {
				if strings.Contains(q, "show type") || strings.Contains(q, "show table") || strings.Contains(q, "rule show") {
					t.Errorf("a dump: %s", q)
				}
			}
		})
	}
}

func TestAttachRefuses(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	folder := t.TempDir()
	file := filepath.Join(folder, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	before := state(t, n.host)
	for _, c := range []struct {
		name   string
		change func(*podnet.Pod)
		is     error
		says   string
	}{
		{"missing namespace", func(p *podnet.Pod) { p.Netns = filepath.Join(folder, "none") }, netns.ErrNotExist, "none"},
		{"path below a file", func(p *podnet.Pod) { p.Netns = filepath.Join(file, "none") }, netns.ErrNotExist, "none"},
		{"ordinary file", func(p *podnet.Pod) { p.Netns = file }, netns.ErrNotNetns, "file"},
		{"folder", func(p *podnet.Pod) { p.Netns = folder }, netns.ErrNotNetns, folder},
		{"namespace of another kind", func(p *podnet.Pod) { p.Netns = "/proc/self/ns/uts" }, netns.ErrNotNetns, "uts"},
		{"the host's namespace", func(p *podnet.Pod) { p.Netns = n.host.Path }, nil, "host's own"},
		{"no address", func(p *podnet.Pod) { p.Address.IPv4, p.Address.IPv6 = netip.Addr{}, netip.Addr{} }, nil, "no address"},
		{"wrong family", func(p *podnet.Pod) { p.Address.IPv4 = p.Address.IPv6 }, nil, "not an IPv4 address"},
		{"long interface name", func(p *podnet.Pod) { p.IfName = "sixteen-letters-" }, nil, "interface name"},
		{"no container ID", func(p *podnet.Pod) { p.ContainerID = "" }, nil, "container ID"},
		{"long alias", func(p *podnet.Pod) { p.ContainerID = strings.Repeat("x", 250) }, nil, "alias"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := p
			c.change(&p)
			_, err := n.Attach(t.Context(), p, nil)
			if err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v", err)
			}
		})
	}
	if diff := cmp.Diff(before, state(t, n.host)); diff != "" {
		t.Errorf("left on the host (-before +after):\n%s", diff)
	}
}

func TestMTUTooSmallForIPv6(t *testing.T) {
	n := newNode(t, func(o *podnet.Options) { o.MTU = 1279 })
	p, _ := newPod(t, 1, false, true)
	if _, err := n.Attach(t.Context(), p, nil); err == nil || !strings.Contains(err.Error(), "MTU 1279") {
		t.Errorf("got %v", err)
	}
}

func TestLongContainerID(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, false)
	p.ContainerID = strings.Repeat("c", 200)
	n.mustAttach(t, p)
	if err := n.Remove(t.Context(), p.ID, 0); err != nil {
		t.Fatal(err)
	}
	if found, err := n.List(t.Context()); err != nil || len(found) != 0 {
		t.Errorf("found %v, %v", found, err)
	}
}
