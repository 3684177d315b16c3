package keepalived

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

// alone is a gateway that is the master of an instance of IPv4.
func alone(t *testing.T) (*lab, *gateway, Instance) {
	t.Helper()
	l := newLab(t, 1)
	g := l.gateways[0]
	i := l.instance(g, "four", ip4, 4, 100, some4(3))
	i.AdvertInterval = 50 * time.Millisecond
	g.apply(t, i)
	l.masters(t, "four", g)
	return l, g, i
}

// files are those of the folder of Coil's file, with their texts.
func (g *gateway) files(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, e := range testkit.Must(os.ReadDir(g.file("coil")))(t) {
		all[e.Name()] = string(testkit.Must(os.ReadFile(g.file(filepath.Join("coil", e.Name()))))(t))
	}
	return all
}

// unchanged fails the test when a function changes files or instances of the gateway, or has it read its files.
func (g *gateway) unchanged(t *testing.T, f func()) {
	t.Helper()
	reloads := func() int {
		return strings.Count(string(testkit.Must(os.ReadFile(g.file("log")))(t)), "Reloading ...")
	}
	files, states, n := g.files(t), testkit.Must(g.States(t.Context()))(t), reloads()
	f()
	if d := cmp.Diff(files, g.files(t)); d != "" {
		t.Errorf("files changed (-was +is):\n%s", d)
	}
	if d := cmp.Diff(states, testkit.Must(g.States(t.Context()))(t), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("instances changed (-was +is):\n%s", d)
	}
	if got := reloads(); got != n {
		t.Errorf("it was told to read its files %d times", got-n)
	}
}

// wantError fails the test unless an error has a text.
func wantError(t *testing.T, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error is %v, want one with %q", err, text)
		}
	}
}

// What keepalived has already isn't given to it again.
func TestApplyAgain(t *testing.T) {
	t.Parallel()
	l, g, i := alone(t)
	reloads := g.Counts.Reloads.Load()
	g.unchanged(t, func() { g.apply(t, i) })
	if n := g.Counts.Unchanged.Load(); n != 1 || g.Counts.Reloads.Load() != reloads {
		t.Errorf("%d changes were none", n)
	}
	// What somebody has done to the daemon is mended.
	testkit.Check(t, os.Rename(g.file("coil/coil.conf"), g.file("aside")))
	g.tell(t, syscall.SIGHUP)
	testkit.Eventually(t, patience, "keepalived forgets", func() error {
		if n := g.count(t, i.Addresses); n > 0 {
			return fmt.Errorf("it has %d addresses", n)
		}
		return nil
	})
	testkit.Check(t, os.Rename(g.file("aside"), g.file("coil/coil.conf")))
	g.apply(t, i)
	l.masters(t, "four", g)
	// Without instances it has none.
	g.apply(t)
	if n := g.count(t, i.Addresses); n > 0 {
		t.Errorf("there are %d addresses left", n)
	}
	g.unchanged(t, func() { g.apply(t) })
	if got := slices.Sorted(maps.Keys(g.files(t))); !slices.Equal(got, []string{"coil.conf"}) {
		t.Errorf("files are %q", got)
	}
}

// tell signals the gateway's keepalived.
func (g *gateway) tell(t *testing.T, s syscall.Signal) {
	t.Helper()
	testkit.Check(t, g.cmd.Process.Signal(s))
}

// What keepalived refuses is never in place, nor does the daemon read anything.
func TestScenario20Refused(t *testing.T) {
	t.Parallel()
	_, g, i := alone(t)
	missing := i
	missing.Interface = "eth7"
	g.unchanged(t, func() {
		err := g.Apply(t.Context(), Config{[]Instance{missing}})
		wantError(t, err, "keepalived refuses the configuration: ", "eth7", "doesn't exist")
		if refused := (*RefusedError)(nil); !errors.As(err, &refused) || strings.Contains(err.Error(), "without") {
			t.Errorf("error is %#v, want that it refuses this one only", err)
		}
		invalid := i
		invalid.Priority = 0
		wantError(t, g.Apply(t.Context(), Config{[]Instance{invalid}}), `VRRP instance "four": priority 0`)
	})
	// The operator's part is looked at, too.
	main := g.file("keepalived.conf")
	text := testkit.Must(os.ReadFile(main))(t)
	other := i
	other.Addresses = some4(7)
	for _, tt := range []struct{ name, main, want string }{
		{"no include", "! nothing\n", "doesn't include " + g.file("coil/coil.conf") + ": add the line: include " + g.file("coil/*.conf")},
		{"broken", string(text) + "nonsense\n", "(without Coil's part, too: mend " + main + ", or"},
		{"same name", string(text) + "vrrp_instance four {\n interface eth0\n virtual_router_id 9\n virtual_ipaddress {\n 10.9.9.9\n }\n}\n", "vrrp instance four already defined"},
		{"same ID", string(text) + "vrrp_instance op {\n interface eth0\n virtual_router_id 4\n virtual_ipaddress {\n 10.9.9.9\n }\n}\n", "four and op both use VRID 4"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			testkit.Check(t, os.WriteFile(main, []byte(tt.main), 0o644))
			g.unchanged(t, func() { wantError(t, g.Apply(t.Context(), Config{[]Instance{other}}), tt.want) })
		})
	}
	testkit.Check(t, os.WriteFile(main, text, 0o644))
	testkit.Check(t, os.WriteFile(g.file("keepalived"), []byte("#!/bin/sh\nexec nothing-such\n"), 0o755))
	g.unchanged(t, func() { wantError(t, g.Apply(t.Context(), Config{[]Instance{other}}), "not found") })
	testkit.Check(t, os.Remove(g.file("keepalived")))
	g.unchanged(t, func() {
		wantError(t, g.Apply(t.Context(), Config{[]Instance{other}}), "check the configuration: ", "no such file")
	})
}

// An operator's instance stays as it is.
func TestOperatorsInstance(t *testing.T) {
	t.Parallel()
	l, g, i := alone(t)
	f := testkit.Must(os.OpenFile(g.file("keepalived.conf"), os.O_APPEND|os.O_WRONLY, 0))(t)
	_, err := f.WriteString("global_defs {\n  vrrp_strict\n}\nvrrp_instance op {\n  interface eth0\n  virtual_router_id 44\n  advert_int 0.05\n  version 3\n  virtual_ipaddress {\n    10.0.0.77/24 dev eth0\n  }\n}\n")
	testkit.Check(t, err, f.Close())
	i.Addresses = some4(4)
	g.apply(t, i)
	l.masters(t, "op", g)
	testkit.Check(t, l.host.Ping(some4(4)[3], testkit.Timeout(time.Second)))
	g.apply(t)
	l.masters(t, "op", g)
}

// An instance whose adverts can't be sent takes no part in elections, until it is applied when they can.
func TestSourceMissing(t *testing.T) {
	t.Parallel()
	l, g, i := alone(t)
	i.Source, i.Peers = netip.MustParseAddr("10.0.0.77"), addrs("10.0.0.78")
	g.apply(t, i)
	testkit.Eventually(t, patience, "the instance has a fault", func() error {
		if s := g.state(t, "four"); s.State != Fault || s.Assigned() > 0 || g.count(t, i.Addresses) > 0 {
			return fmt.Errorf("it is %s and has %d addresses", s.State, s.Assigned())
		}
		return nil
	})
	g.Configure(t, "addr add 10.0.0.77/24 dev eth0")
	g.apply(t, i)
	l.masters(t, "four", g)
}

// What keepalived takes, and doesn't do, is taken back.
func TestScenario20RolledBack(t *testing.T) {
	t.Parallel()
	l, g, i := alone(t)
	g.Configure(t, "link add d0 type veth peer name d1", "link set d0 up", "link set d1 up")
	testkit.Check(t, g.Lab().Sysctl("ipv6/conf/d0/disable_ipv6=1"))
	six := l.instance(g, "six", ip6, 6, 100, nil)
	six.AddressInterface, six.AdvertInterval = "d0", 50*time.Millisecond
	g.apply(t, i, six)
	l.masters(t, "six", g)
	states, files := testkit.Must(g.States(t.Context()))(t), g.files(t)
	check := func() {
		t.Helper()
		if d := cmp.Diff(files, g.files(t)); d != "" {
			t.Errorf("files changed (-was +is):\n%s", d)
		}
		if d := cmp.Diff(states, testkit.Must(g.States(t.Context()))(t), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
			t.Errorf("instances changed (-was +is):\n%s", d)
		}
	}
	more, refused := i, six
	more.Addresses, refused.Addresses = some4(9), some6(2)
	g.o.Patience = testkit.Timeout(time.Second)
	err := g.Apply(t.Context(), Config{[]Instance{more, refused}})
	wantError(t, err, "instance six is the master, but link d0 doesn't get fd01::1, fd01::2")
	check()
	if n := g.Counts.Rollbacks.Load(); n != 1 {
		t.Errorf("%d changes were taken back, want 1", n)
	}
	// Whoever applies it along with something else takes it back himself.
	change := testkit.Must(g.Prepare(t.Context(), Config{[]Instance{more}}))(t)
	check()
	testkit.Check(t, change.Commit(t.Context()))
	if got := g.count(t, some4(9)); got != 9 {
		t.Errorf("there are %d addresses of 9", got)
	}
	testkit.Check(t, change.Rollback(t.Context()))
	l.masters(t, "six", g)
	check()
	testkit.Check(t, change.Rollback(t.Context()))
	check()
}
