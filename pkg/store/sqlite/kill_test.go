package sqlite_test

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

// childEnv names what the test binary does when a test starts it again; its
// argument is in childArgEnv.
const (
	childEnv    = "COIL_TEST_SQLITE_CHILD"
	childArgEnv = "COIL_TEST_SQLITE_CHILD_ARG"
)

func TestMain(m *testing.M) {
	children := map[string]func(string) error{"lives": lives, "failing disk": failingDisk}
	child := children[os.Getenv(childEnv)]
	if child == nil {
		os.Exit(m.Run())
	}
	if err := child(os.Getenv(childArgEnv)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// childCommand is the test binary again, as the child of a name.
func childCommand(tb testing.TB, name, arg string) *exec.Cmd {
	tb.Helper()
	cmd := exec.CommandContext(tb.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+name, childArgEnv+"="+arg)
	cmd.Stderr = os.Stderr
	// Nor does it outlive a test that is killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

func livesBlock() (store.Block, error) {
	ipv4, ipv6 := "10.0.0.0/26", "fd00::/122"
	b, err := ipam.ParseBlock(&ipv4, &ipv6)
	return store.Block{Name: "default-0", Pool: "default", Block: b}, err
}

// lives is a process whose pods come and go. Each answer is told at once:
// "+ ID address" when an address was reserved, "- ID" before it is released.
func lives(path string) error {
	ctx := context.Background()
	s, res, err := sqlite.Open(ctx, sqlite.Options{Path: path, Identity: testNode, BootID: "boot-1", CoolDown: time.Millisecond})
	if err != nil {
		return err
	}
	if res.SetAside != "" {
		return fmt.Errorf("the record of a killed process is set aside: %+v", res)
	}
	b, err := livesBlock()
	if err != nil {
		return err
	}
	if err := s.SetBlocks(ctx, []store.Block{b}); err != nil {
		return err
	}
	if err := s.Rebuilt(ctx); err != nil {
		return err
	}
	failed := make(chan error)
	for worker := range 4 {
		go func() { failed <- live(ctx, s, b, worker) }()
	}
	for {
		select {
		case err := <-failed:
			return err
		default:
		}
		if err := s.Checkpoint(ctx); err != nil {
			return err
		}
	}
}

// live has three pods at a time, and replaces the oldest for ever.
func live(ctx context.Context, s *sqlite.Store, b store.Block, worker int) error {
	var alive []attachment.ID
	for i := 0; ; i++ {
		r := request(fmt.Sprintf("%d-%d-%d", os.Getpid(), worker, i), b)
		r.Yield = true
		a, err := s.Reserve(ctx, r)
		if err != nil {
			return err
		}
		fmt.Println("+", r.ContainerID, a.Address)
		if err := s.Attach(ctx, r.ID, store.Wiring{HostIfName: "veth", HostIfIndex: i, Result: []byte(`{}`)}); err != nil {
			return err
		}
		if alive = append(alive, r.ID); len(alive) < 3 {
			continue
		}
		fmt.Println("-", alive[0].ContainerID)
		if _, err := s.Release(ctx, alive[0]); err != nil {
			return err
		}
		if err := s.Cool(ctx, alive[0]); err != nil {
			return err
		}
		alive = alive[1:]
	}
}

// TestKill kills a process that writes, many times. Each time the record opens as
// it is, and has all that was answered.
func TestKill(t *testing.T) {
	o := options(t)
	o.Clock, o.CoolDown = nil, time.Millisecond
	answers := 0
	for round := range 25 {
		want := killed(t, o, round)
		answers += len(want)
		s, res := mustOpen(t, o)
		if res.SetAside != "" || res.Fresh && len(want) > 0 {
			t.Fatalf("round %d: %+v", round, res)
		}
		as := mustList(t, s)
		got := map[string]string{}
		addresses := map[string]string{}
		var ids []attachment.ID
		for _, a := range as {
			got[a.ContainerID] = a.Address.String()
			for _, x := range a.Address.Addrs() {
				if other, is := addresses[x.String()]; is {
					t.Fatalf("round %d: %s is of %s and %s", round, x, other, a.ContainerID)
				}
				addresses[x.String()] = a.ContainerID
			}
			ids = append(ids, a.ID)
		}
		for container, address := range want {
			if got[container] != address {
				t.Errorf("round %d: %s was answered %s, the record has %q", round, container, address, got[container])
			}
		}
		for _, i := range ids { // the pods are gone
			if _, err := s.Release(t.Context(), i); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Cool(t.Context(), ids...); err != nil {
			t.Fatal(err)
		}
		mustClose(t, s)
	}
	if answers == 0 {
		t.Error("each process was killed before it did anything")
	}
}

// killed runs the process lives and kills it after a while; it returns the
// addresses that it answered and didn't say to release.
func killed(t *testing.T, o sqlite.Options, round int) map[string]string {
	t.Helper()
	r := rand.New(rand.NewPCG(uint64(round), 5))
	cmd := childCommand(t, "lives", o.Path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() {
		if err := cmd.Process.Kill(); err != nil && round%5 != 0 {
			t.Error(err)
		}
	}
	lines := 1 + r.IntN(600)
	if round%5 == 0 { // while it starts
		lines = -1
		timer := time.AfterFunc(time.Duration(r.IntN(60))*time.Millisecond, kill)
		defer timer.Stop()
	}
	want := map[string]string{}
	scanner := bufio.NewScanner(out)
	for n := 1; scanner.Scan(); n++ {
		switch f := strings.Fields(scanner.Text()); {
		case len(f) == 3 && f[0] == "+":
			want[f[1]] = f[2]
		case len(f) == 2 && f[0] == "-":
			delete(want, f[1])
		default:
			t.Errorf("line %q", scanner.Text())
		}
		if n == lines {
			kill()
		}
	}
	if err := scanner.Err(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.Exited() {
		t.Errorf("the process wasn't killed: %v", cmd.ProcessState)
	}
	return want
}
