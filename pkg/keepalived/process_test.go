package keepalived

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

// The daemon ends when it reads of a link that isn't there. Coil's file is then one that it starts with.
func TestDaemonEnds(t *testing.T) {
	t.Parallel()
	l, g, i := alone(t)
	more := i
	more.Addresses = some4(6)
	change := testkit.Must(g.Prepare(t.Context(), Config{[]Instance{more}}))(t)
	main := testkit.Must(os.ReadFile(g.file("keepalived.conf")))(t)
	operators := string(main) + "vrrp_instance op {\n  interface eth7\n  virtual_router_id 44\n  virtual_ipaddress {\n    10.0.0.77/24\n  }\n}\n"
	testkit.Check(t, os.WriteFile(g.file("keepalived.conf"), []byte(operators), 0o644))
	err := change.Commit(t.Context())
	wantError(t, err, "keepalived doesn't do what", "isn't running: start it (systemctl start keepalived)", "the former configuration is in place")
	if !errors.Is(err, ErrNotRunning) {
		t.Errorf("error is %v", err)
	}
	_ = g.cmd.Wait() // it says that it had to end
	testkit.Check(t, os.WriteFile(g.file("keepalived.conf"), main, 0o644))
	if _, err := g.States(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("states: %v", err)
	}
	g.start(t)
	l.masters(t, "four", g)
	g.apply(t, i)
}

// Without a daemon, the file is there for when it starts.
func TestNotRunning(t *testing.T) {
	t.Parallel()
	l, g, i := alone(t)
	g.stop(t)
	i.Addresses = some4(5)
	for range 2 {
		err := g.Apply(t.Context(), Config{[]Instance{i}})
		wantError(t, err, "the configuration is in place: keepalived isn't running: start it (systemctl start keepalived): there is no "+g.file("keepalived.pid"))
		if !errors.Is(err, ErrNotRunning) {
			t.Errorf("error is %v", err)
		}
	}
	g.start(t)
	l.masters(t, "four", g)
	if n := g.count(t, some4(5)); n != 5 {
		t.Errorf("there are %d addresses of 5", n)
	}
	g.apply(t, i)
	if got := slices.Sorted(maps.Keys(g.files(t))); g.Counts.Unchanged.Load() != 1 || !slices.Equal(got, []string{"coil.conf"}) {
		t.Errorf("files are %q", got)
	}
}

// Nothing is left of what is removed, whether there is a daemon or not.
func TestRemove(t *testing.T) {
	t.Parallel()
	for name, runs := range map[string]bool{"with a daemon": true, "without one": false} {
		_, g, i := alone(t)
		if !runs {
			g.stop(t)
			i.Addresses = some4(5)
			if err := g.Apply(t.Context(), Config{[]Instance{i}}); !errors.Is(err, ErrNotRunning) {
				t.Errorf("%s: error is %v", name, err)
			}
		}
		testkit.Check(t, g.Remove(t.Context()))
		if left := g.files(t); len(left) > 0 || g.Used() {
			t.Errorf("%s: files are %q", name, left)
		}
	}
}

// A process that has the pid of a keepalived that is dead gets no signal.
func TestStalePID(t *testing.T) {
	g := newGateway(t, 1)
	g.Configure(t, "link add eth0 type veth peer name d1", "link set eth0 up", "addr add 10.0.0.1/24 dev eth0")
	foreign := exec.Command("sleep", "60")
	foreign.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	testkit.Check(t, foreign.Start())
	t.Cleanup(func() { testkit.Check(t, foreign.Process.Kill()); _ = foreign.Wait() })
	c := Config{[]Instance{{Name: "a", Interface: "eth0", RouterID: 1, Priority: 1, Source: netip.MustParseAddr("10.0.0.1")}}}
	for _, tt := range []struct{ name, pid, want string }{
		{"another program", fmt.Sprintf("%d\n", foreign.Process.Pid), "which isn't keepalived"},
		{"nothing", "4194303\n", "which isn't keepalived"},
		{"this process group", "0\n", "has no process ID"},
		{"all processes", "-1\n", "has no process ID"},
		{"init", "1\n", "has no process ID"},
		{"no number", "keepalived\n", "has no process ID"},
		{"empty", "", "has no process ID"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			testkit.Check(t, os.WriteFile(g.file("keepalived.pid"), []byte(tt.pid), 0o644))
			err := g.Apply(t.Context(), c)
			wantError(t, err, tt.want)
			if !errors.Is(err, ErrNotRunning) {
				t.Errorf("error is %v", err)
			}
			if _, err := g.States(t.Context()); !errors.Is(err, ErrNotRunning) {
				t.Errorf("states: %v", err)
			}
		})
	}
	// Of SIGHUP and SIGUSR1 it would have died.
	if err := foreign.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the other program: %v", err)
	}
}

// Whatever a call that was killed has left, the next one does what is wanted, or goes back to what keepalived followed.
func TestLeftByACrash(t *testing.T) {
	t.Parallel()
	l, g, i := alone(t)
	old := g.files(t)["coil.conf"]
	more := i
	more.Addresses = some4(6)
	next := string(Config{[]Instance{more}}.Render())
	missing := i
	missing.Interface = "eth7"
	broken := string(Config{[]Instance{missing}}.Render())
	const former, temp = ".coil.conf.former", ".coil.conf.tmp-123"
	for _, tt := range []struct {
		name   string
		files  map[string]string
		reload bool
	}{
		{"while it was checked", map[string]string{"coil.conf": old, temp: next}, false},
		{"the former is noted", map[string]string{"coil.conf": old, former: old}, false},
		{"in place", map[string]string{"coil.conf": next, former: old}, false},
		{"read", map[string]string{"coil.conf": next, former: old}, true},
		{"something broken is in place", map[string]string{"coil.conf": broken, former: old}, false},
	} {
		setUp := func(t *testing.T) {
			t.Helper()
			g.apply(t, i)
			for name, text := range tt.files {
				testkit.Check(t, os.WriteFile(g.file("coil/"+name), []byte(text), 0o644))
			}
			if tt.reload {
				g.tell(t, syscall.SIGHUP)
			}
		}
		check := func(t *testing.T, text string, addresses int) {
			t.Helper()
			if d := cmp.Diff(map[string]string{"coil.conf": text}, g.files(t)); d != "" {
				t.Errorf("files (-want +got):\n%s", d)
			}
			testkit.Eventually(t, patience, "the link has the addresses", func() error {
				if n := g.count(t, some4(6)); n != addresses {
					return fmt.Errorf("there are %d, want %d", n, addresses)
				}
				return nil
			})
		}
		t.Run(tt.name+", and it goes on", func(t *testing.T) {
			setUp(t)
			g.apply(t, more)
			check(t, next, 6)
		})
		if tt.reload {
			continue // keepalived follows it, so that there is nothing to go back from
		}
		t.Run(tt.name+", and it goes back", func(t *testing.T) {
			setUp(t)
			change := testkit.Must(g.Prepare(t.Context(), Config{[]Instance{more}}))(t)
			change.want[0].Priority++ // what keepalived won't do
			g.o.Patience = 300 * time.Millisecond
			defer func(d time.Duration) { g.o.Patience = d }(g.options().Patience)
			wantError(t, change.Commit(t.Context()), "instance four has priority 100, not 101")
			check(t, old, 3)
		})
	}
	l.masters(t, "four", g)
}
