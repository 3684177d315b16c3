// Package uninstall proves that "coild cleanup" leaves a node as it was before Coil came, and
// refuses while somebody needs what it removes.
//
// It compares the kernel's own words before and after. It must not know how the removal is
// done.
package uninstall

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// foreign is what others have beside Coil's objects, with names and numbers close to its.
const foreign = `
	ip route add 198.51.100.1 dev lo table 116 proto 99
	ip -6 route add 2001:db8:f::1 dev lo table 116 proto 99
	ip route add 198.51.100.0/24 dev lo table 119 proto 99
	ip -6 route add 2001:db8:f::/64 dev lo table 119 proto 99
	ip route add unreachable 198.51.100.0/24 table 120 proto 99
	ip route add 198.51.100.0/25 dev lo proto 99
	ip rule add priority 2000 to 198.51.100.0/24 lookup 99 protocol 99
	ip rule add priority 2001 lookup 120 protocol 99
	ip -6 rule add priority 2001 to 2001:db8:f::/48 lookup 99 protocol 99
	ip link add veth0123456789a type veth peer vethforeign2
	ip link set veth0123456789a group 77 alias not-coils
	ip link property add dev vethforeign2 altname coil-foreign-eth0
	ip link add name vethforeign3 type veth peer vethforeign4
	ip link set vethforeign3 group 1668245868 alias COILED:of:somebody
	ip neigh add proxy 10.255.64.200 dev eth0
	ip neigh add proxy fd00:255::1:c8 dev eth0 protocol 99
	nft add table inet others
	nft add chain inet others c
	nft add rule inet others c counter`

// hardened are parameters that an admin has set, and that the kernel changes along with
// forwarding.
const hardened = `
	cd /proc/sys/net
	echo 0 > ipv4/ip_forward
	echo 0 > ipv6/conf/all/forwarding
	echo 0 > ipv4/conf/all/accept_redirects
	echo 1 > ipv4/conf/vethforeign2/forwarding
	echo 1 > ipv6/conf/vethforeign2/forwarding`

// changing are parameters that tell or change a state rather than to set one.
var changing = regexp.MustCompile(`^\S*/(nf_conntrack_count|flush|random_table_perturb|hostname):`)

// expiring is what is left of the time of an element of nftables.
var expiring = regexp.MustCompile(` expires \S+`)

// node is one whose kernel is compared.
type node struct {
	*rig.Rig
	*rig.Node
	t *testing.T
	// router is the protocol number of coil-router's routes.
	router string
}

// cleanup runs "coild cleanup".
func (n *node) cleanup(more ...string) (string, error) {
	n.t.Helper()
	if n.router != "31" {
		more = append(more, "--router-protocol-id="+n.router)
	}
	return n.Cleanup(n.t.Context(), more...)
}

func newRig(t *testing.T) *rig.Rig {
	t.Helper()
	r := rigtest.New(t)
	testkit.Check(t, r.AddPool(t.Context(), "default", 2, rig.Dual("10.1.0.0/20", "fd00:1::/116")),
		r.AddPool(t.Context(), "lan", 2, rig.Dual("10.255.64.0/24", "fd00:255::1:0/120")), r.Announce(t.Context(), "lan", v2.AnnounceNeighbor),
		r.AddNamespace(t.Context(), "lan", "lan"))
	return r
}

// newNode returns a node on which coild doesn't run yet, with what others have there.
func newNode(t *testing.T, r *rig.Rig, flags ...string) *node {
	t.Helper()
	n := &node{Rig: r, t: t, router: "31"}
	var err error
	n.Node, err = r.AddNode(t.Context(), rig.NodeOptions{Down: true, CoildFlags: append([]string{"--cool-down=1s"}, flags...)})
	n.check(err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of coild:\n%s", n.Coild.Logs(40))
		}
	})
	n.sh(foreign)
	n.sh(hardened)
	n.check(os.MkdirAll(n.CNIBinDir(), 0o755))
	plugin, err := os.ReadFile(n.Plugin())
	n.check(err, os.WriteFile(filepath.Join(n.CNIBinDir(), "coil"), plugin, 0o755),
		os.WriteFile(filepath.Join(n.CNIBinDir(), "bridge"), nil, 0o755), os.WriteFile(filepath.Join(n.CNIConfDir(), "99-other.conflist"), nil, 0o644))
	return n
}

func (n *node) check(errs ...error) {
	n.t.Helper()
	testkit.Check(n.t, errs...)
}

func (n *node) sh(script string) string {
	n.t.Helper()
	return rigtest.Sh(n.t, n.Node, script)
}

// kernel is all that Coil may change, in the words of iproute2, nft and /proc/sys.
func (n *node) kernel() string {
	n.t.Helper()
	var b strings.Builder
	b.WriteString(expiring.ReplaceAllString(n.sh(`
		ip -d link; ip -d -4 rule; ip -d -6 rule
		ip -d -4 route show table all; ip -d -6 route show table all
		ip -d address; ip maddress; nft list ruleset; ip -d nexthop; ip -4 neigh show proxy; ip -6 neigh show proxy`), ""))
	for line := range strings.Lines(n.sh(`cd /proc/sys; grep -rs . net | sort || true`)) {
		if !changing.MatchString(line) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// checked waits until the kernel has checked all addresses for duplicates.
func (n *node) checked() {
	n.t.Helper()
	testkit.Eventually(n.t, 20*time.Second, "addresses are usable", func() error {
		if out := n.sh("ip address"); strings.Contains(out, "tentative") {
			return errors.New(out)
		}
		return nil
	})
}

// settled is the kernel when it has done what it does in the background: new links have
// addresses that were checked for duplicates.
func (n *node) settled() string {
	n.t.Helper()
	testkit.Eventually(n.t, 20*time.Second, "addresses are usable", func() error {
		if out := n.sh("ip address"); strings.Contains(out, "tentative") || strings.Count(out, "inet6 fe80::") != 1 {
			return errors.New(out)
		}
		return nil
	})
	return n.kernel()
}

// same ends the test unless the kernel is as it was; parts of it follow in the background.
func (n *node) same(before string) {
	n.t.Helper()
	testkit.Eventually(n.t, 5*time.Second, "the kernel is as before", func() error {
		if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(n.kernel(), "\n")); diff != "" {
			return errors.New("(-before +after):\n" + diff)
		}
		return nil
	})
}

// files are those of the node that Coil may have made, by their paths.
func (n *node) files() []string {
	n.t.Helper()
	var all []string
	for _, dir := range []string{filepath.Dir(n.Socket()), n.StateDir(), n.CNIConfDir(), n.CNIBinDir()} {
		n.check(filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			// SQLite folds its log into the file whenever the last reader ends.
			if err == nil && path != dir && !strings.HasSuffix(path, "-wal") && !strings.HasSuffix(path, "-shm") {
				all = append(all, strings.TrimPrefix(path, filepath.Dir(n.StateDir())+"/"))
			}
			return err
		}))
	}
	slices.Sort(all)
	return all
}

// pod makes a pod with a network.
func (n *node) pod() *rig.Sandbox {
	n.t.Helper()
	return n.podIn("")
}

// podIn is pod in a namespace; empty is the default one.
func (n *node) podIn(namespace string) *rig.Sandbox {
	n.t.Helper()
	s, err := n.NewSandbox(n.t.Context(), rig.SandboxOptions{Namespace: namespace})
	n.check(err)
	_, err = s.Add(n.t.Context())
	n.check(err)
	return s
}

// end is what the runtime does when a pod has ended.
func (n *node) end(s *rig.Sandbox) {
	n.t.Helper()
	n.check(s.Del(n.t.Context()), s.Close())
	testkit.Eventually(n.t, 10*time.Second, "the link is gone", func() error {
		if out := n.sh("ip link"); strings.Contains(out, s.ContainerID) {
			return errors.New(out)
		}
		return nil
	})
}

// refused ends the test unless cleanup refuses, names all that it should, and changes nothing.
func (n *node) refused(names ...string) {
	n.t.Helper()
	n.checked()
	before, files := n.kernel(), n.files()
	out, err := n.cleanup()
	if err == nil || out != "" {
		n.t.Fatalf("cleanup printed %q, %v; it should refuse", out, err)
	}
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			n.t.Errorf("the error doesn't name %q: %v", name, err)
		}
	}
	n.same(before)
	if diff := cmp.Diff(files, n.files()); diff != "" {
		n.t.Errorf("files (-before +after):\n%s", diff)
	}
}

// After coild has run, with pods that came and went, cleanup leaves the node as it was.
func TestNothingStays(t *testing.T) {
	r := newRig(t)
	for name, flags := range map[string][]string{
		"default numbers": nil,
		"other numbers":   {"--pod-table-id=1116", "--pod-rule-prio=1500", "--export-table-id=1119", "--protocol-id=40"},
		"names of Calico": {"--compat-calico"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, r, flags...)
			if slices.Contains(flags, "--protocol-id=40") {
				n.router = "41"
			}
			testNothingStays(n)
		})
	}
}

func testNothingStays(n *node) {
	t, ctx := n.t, n.t.Context()
	before := n.settled()
	n.check(n.Start(ctx))
	// More than one block of four.
	var pods []*rig.Sandbox
	for range 5 {
		pods = append(pods, n.pod())
	}
	pods = append(pods, n.podIn("lan"))
	testkit.Eventually(t, 10*time.Second, "the node answers for its address", func() error {
		if out := n.sh("ip -4 neigh show proxy; ip -6 neigh show proxy"); strings.Count(out, "\n") != 4 {
			return errors.New(out)
		}
		return nil
	})
	for _, p := range pods[:2] {
		n.end(p)
	}
	n.Coild.Kill()
	n.check(n.Start(ctx))
	n.sh(strings.ReplaceAll("ip route add 203.0.113.0/24 via 10.255.0.1 proto N; ip -6 route add 2001:db8:3::/64 via fd00:255::1 proto N", "N", n.router)) // coil-router
	if n.kernel() == before {
		t.Fatal("coild changed nothing")
	}

	n.refused("a coild serves", "delete the DaemonSet coild")
	n.Coild.Stop()
	n.refused("4 pods", "default/"+pods[2].Name, "lan/"+pods[5].Name, "--force")
	n.check(n.Start(ctx))
	for _, p := range pods[2:5] {
		n.end(p)
	}
	n.Coild.Kill() // the socket stays
	n.refused("1 pods", pods[5].Name)
	// Now the plugin can only queue the deletion, and the namespace is held by somebody.
	n.check(pods[5].Del(ctx))
	// As coild in a pod does; this one has a kubeconfig.
	n.check(os.WriteFile(filepath.Join(n.StateDir(), "api-servers.json"), nil, 0o600))

	out, err := n.cleanup()
	n.check(err)
	t.Logf("it printed:\n%s", out)
	for _, want := range []string{"rule ", "route", "link veth", "net/ipv4/ip_forward = 0", "net/ipv6/conf/all/proxy_ndp = 0",
		"net/ipv4/neigh/eth0/proxy_delay = 80", "2 proxy neighbour entries of protocol", "coil.conflist", "coil.conflist.staged", "coild.sock", "del-queue", "api-servers.json", "bin/coil"} {
		if !strings.Contains(out, want) {
			t.Errorf("nothing was printed of %q", want)
		}
	}
	n.same(before)
	left := []string{"bin/bridge", "cni/99-other.conflist", "state/coild.db", "state/coild.db-ballast", "state/coild.db-lock"}
	if diff := cmp.Diff(left, n.files()); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}

	out, err = n.cleanup()
	if err != nil || out != "" {
		t.Errorf("again it printed %q, %v", out, err)
	}
	n.same(before)

	out, err = n.cleanup("--state")
	if err != nil || strings.Count(out, "removed ") != 3 {
		t.Errorf("with --state it printed %q, %v", out, err)
	}
	if diff := cmp.Diff(left[:2], n.files()); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if out, err = n.cleanup("--state"); err != nil || out != "" {
		t.Errorf("again it printed %q, %v", out, err)
	}
	n.check(pods[5].Close())
}

// With --force, pods are cut off, each is named, and nothing stays either.
func TestForce(t *testing.T) {
	n := newNode(t, newRig(t))
	before := n.settled()
	n.check(n.Start(t.Context()))
	pods := []*rig.Sandbox{n.pod(), n.pod()}
	n.Coild.Stop()
	// A link that is up is a pod's even if it doesn't tell whose.
	n.sh("ip link set coil-" + pods[1].ContainerID + `-eth0 alias ""`)
	n.refused("2 pods", pods[0].Name)
	out, err := n.cleanup("--force")
	n.check(err)
	if strings.Count(out, "cutting off ") != 2 || !strings.Contains(out, "cutting off pod default/"+pods[0].Name) {
		t.Errorf("it printed:\n%s", out)
	}
	n.same(before)
}

// A record that can't be read matters only if a pod is to be named, and goes with --state.
func TestDamagedRecord(t *testing.T) {
	n := newNode(t, newRig(t))
	before := n.settled()
	n.check(n.Start(t.Context()))
	p := n.pod()
	n.Coild.Stop()
	n.check(os.WriteFile(n.Database(), make([]byte, 4096), 0o600))
	n.refused("1 pods", p.ContainerID, n.Database())
	n.check(p.Close())
	testkit.Eventually(t, 10*time.Second, "the link went with its namespace", func() error {
		if out := n.sh("ip link"); strings.Contains(out, p.ContainerID) {
			return errors.New(out)
		}
		return nil
	})
	out, err := n.cleanup("--state")
	if err != nil || !strings.Contains(out, "removed "+n.Database()) {
		t.Errorf("it printed %q, %v", out, err)
	}
	n.same(before)
}

// An object that can't be removed costs only itself, and each of them is reported.
func TestGoesOn(t *testing.T) {
	n := newNode(t, newRig(t))
	before := n.settled()
	n.check(n.Start(t.Context()))
	n.end(n.pod())
	n.Coild.Stop()
	conf, plugin := filepath.Join(n.CNIConfDir(), "10-coil.conflist"), filepath.Join(n.CNIBinDir(), "coil")
	n.check(os.WriteFile(conf, []byte(`{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge"}]}`), 0o644),
		os.Remove(plugin), os.Mkdir(plugin, 0o755))
	out, err := n.cleanup()
	if err == nil {
		t.Fatal("it reported success")
	}
	for _, want := range []string{"10-coil.conflist", "isn't Coil's", plugin, "is a folder"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
	if !strings.Contains(out, "10-coil.conflist.staged") {
		t.Errorf("it printed:\n%s", out)
	}
	n.same(before)
	if _, err := os.Stat(conf); err != nil {
		t.Error(err)
	}
}

// Objects that Coil 2.x left go, too; links of other plugins only lose the alias that it gave them.
func TestEarlierCoil(t *testing.T) {
	r := newRig(t)
	n := newNode(t, r)
	ctx := t.Context()
	n.sh(`ip rule del priority 2001 protocol 99 lookup 120; ip link add vethchained type veth peer vethchained2`)
	before := n.settled()
	block, err := r.AddLegacyBlock(ctx, "default", 0, n.Name, "10.1.0.0/30", "fd00:1::/126")
	n.check(err, n.LegacyNode(ctx, block))
	s, err := n.NewSandbox(ctx, rig.SandboxOptions{})
	n.check(err)
	link, err := s.WireLegacy(ctx, "default", netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00:1::1"))
	n.check(err)
	n.sh("ip link set vethchained alias COIL::0f6a7d6c-0a3c-4a5e-9c55-6f2b0a2c9a01:eth0")
	n.refused("1 pods", link, s.ContainerID)
	out, err := n.cleanup("--force")
	n.check(err)
	t.Logf("it printed:\n%s", out)
	// Nobody recorded what 2.x did to the host's parameters.
	n.sh(hardened)
	n.same(before)
}
