package proc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// parentEnv makes this test binary a parent that starts a child and then waits to be killed.
const parentEnv = "PROC_TEST_PARENT"

func TestMain(m *testing.M) {
	if log := os.Getenv(parentEnv); log != "" {
		os.Exit(parent(log))
	}
	os.Exit(m.Run())
}

func parent(log string) int {
	p, err := Start(Command{Path: "sleep", Args: []string{"1000"}, Log: log})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(p.PID())
	<-p.Done()
	return 1
}

func TestChildDiesWithItsParent(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), parentEnv+"="+t.TempDir()+"/log")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(line, &pid); err != nil {
		t.Fatalf("the parent said %q", line)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	testkit.Eventually(t, 5*time.Second, "the child is gone", func() error {
		// The reaper of this machine may be slow: a zombie is dead enough.
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if errors.Is(err, os.ErrNotExist) || strings.Contains(string(b), ") Z ") {
			return nil
		}
		return fmt.Errorf("process %d still runs: %s", pid, b)
	})
}

func TestWaitForReportsAnEarlyEnd(t *testing.T) {
	p, err := Start(Command{Path: "sh", Args: []string{"-c", "echo why; exit 3"}, Log: t.TempDir() + "/log"})
	if err != nil {
		t.Fatal(err)
	}
	err = p.WaitFor(t.Context(), func(context.Context) error { return errors.New("not yet") })
	if !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "why") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("error is %v, want ErrEnded with the status and the log", err)
	}
}

func TestWaitForEndsWithItsContext(t *testing.T) {
	p, err := Start(Command{Path: "sleep", Args: []string{"1000"}, Log: t.TempDir() + "/log"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = p.WaitFor(ctx, func(context.Context) error { return errors.New("not yet") })
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "not yet") {
		t.Errorf("error is %v, want canceled with the last reason", err)
	}
}

func TestKill(t *testing.T) {
	p, err := Start(Command{Path: "sleep", Args: []string{"1000"}, Log: t.TempDir() + "/log"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		p.Kill()
		if err := syscall.Kill(p.PID(), 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("the child still exists: %v", err)
		}
	}
}

func TestTail(t *testing.T) {
	file := t.TempDir() + "/log"
	long := strings.Repeat(strings.Repeat("x", 999)+"\n", 100)
	if err := os.WriteFile(file, []byte(long+"a\nb\nc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := Tail(file, 2); got != "b\nc" {
		t.Errorf("got %q, want the last two lines", got)
	}
	if got := Tail(file+"x", 2); !strings.Contains(got, "no such file") {
		t.Errorf("got %q, want why it can't be read", got)
	}
}
