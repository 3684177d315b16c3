package vm

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestNewestPackage(t *testing.T) {
	names := []string{
		"linux-image-6.1.0-9-amd64",
		"linux-image-6.1.0-56-amd64",
		"linux-image-6.1.0-57-cloud-amd64",
		"linux-image-6.1.0-57-rt-amd64",
		"linux-image-6.1.0-57-amd64-unsigned",
		"linux-image-6.1.0-57-amd64-dbg",
		"linux-image-6.12.99+deb12-amd64",
		"linux-image-6.12.117+deb12-amd64",
		"linux-image-6.12-amd64",
	}
	for series, want := range map[string]string{
		"6.1":  "linux-image-6.1.0-56-amd64",
		"6.12": "linux-image-6.12.117+deb12-amd64",
		"6.2":  "",
	} {
		if got := newestPackage(series, names); got != want {
			t.Errorf("newest of %s is %q, want %q", series, got, want)
		}
	}
}

// Waits in an emulated machine are ten times those of the host, whose scale is multiplied.
func TestEmulatedScales(t *testing.T) {
	for _, tt := range []struct{ env, want []string }{
		{nil, []string{waitEnv + "=10", limitEnv + "=10"}},
		{[]string{"A=7", waitEnv + "=2.5"}, []string{"A=7", waitEnv + "=2.5", waitEnv + "=25", limitEnv + "=10"}},
		{[]string{waitEnv + "=2", waitEnv + "=4"}, []string{waitEnv + "=2", waitEnv + "=4", waitEnv + "=40", limitEnv + "=10"}},
		{[]string{waitEnv + "="}, []string{waitEnv + "=", waitEnv + "=10", limitEnv + "=10"}},
	} {
		if d := cmp.Diff(tt.want, emulated(tt.env)); d != "" {
			t.Errorf("of %q (-want +got):\n%s", tt.env, d)
		}
	}
}

func TestLoadOrder(t *testing.T) {
	dep := "kernel/net/9p/9pnet.ko.xz:\n" +
		"kernel/fs/netfs/netfs.ko.xz:\n" +
		"kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/fscache/fscache.ko.xz kernel/fs/netfs/netfs.ko.xz\n" +
		"kernel/fs/fscache/fscache.ko.xz: kernel/fs/netfs/netfs.ko.xz\n" +
		"kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko.xz\n"
	got, err := loadOrder([]byte(dep), []string{"builtin", "9pnet_virtio", "9p"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"kernel/net/9p/9pnet.ko.xz", "kernel/net/9p/9pnet_virtio.ko.xz",
		"kernel/fs/netfs/netfs.ko.xz", "kernel/fs/fscache/fscache.ko.xz", "kernel/fs/9p/9p.ko.xz",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if _, err := loadOrder([]byte("garbage\n"), []string{"9p"}); err == nil {
		t.Error("garbage was accepted")
	}
}

func TestCpio(t *testing.T) {
	var b bytes.Buffer
	w := cpioWriter{w: &b}
	w.file("init", 0o755, []byte("hello"))
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	// Made by: printf hello > init; echo init | cpio -o -H newc, with fixed inode, owner and time.
	want := "070701" + "00000001" + "000081ED" + "00000000" + "00000000" + "00000001" + "00000000" + "00000005" +
		"00000000" + "00000000" + "00000000" + "00000000" + "00000005" + "00000000" + "init\x00" + "\x00" + "hello" + "\x00\x00\x00"
	got := b.String()
	if !strings.HasPrefix(got, want) {
		t.Errorf("got\n%s\nwant\n%s", hex.Dump([]byte(got)), hex.Dump([]byte(want)))
	}
	if len(got)%4 != 0 || !strings.Contains(got, "TRAILER!!!") {
		t.Errorf("%d bytes, want a multiple of 4 with a trailer", len(got))
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"no command":           {},
		"unknown acceleration": {Args: []string{"true"}, Accel: "xen"},
		"counted by 6.1":       {Args: []string{"true"}, Counted: true},
	} {
		if err := o.defaults(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := findKernel(t.Context(), "../etc", nil); err == nil {
		t.Error("a path was accepted as a kernel series")
	}
}

func TestRun(t *testing.T) {
	testkit.Need(t, testkit.VM)
	mark := t.TempDir() + "/mark"
	for _, series := range []string{"6.1", "6.12"} {
		t.Run(series, func(t *testing.T) {
			run := func(ctx context.Context, script string) (string, string, error) {
				var out, errOut bytes.Buffer
				err := Run(ctx, Options{
					Kernel: series, Args: []string{"sh", "-c", script},
					Stdin: strings.NewReader("from the host\n"), Stdout: &out, Stderr: &errOut, Log: t.Output(),
				})
				return out.String(), errOut.String(), err
			}
			out, errOut, err := run(t.Context(), `uname -r; cat; echo oops >&2
				modprobe fou && modprobe ip6_tunnel && ip fou add port 5555 ipproto 4 && ip fou show
				echo x > `+mark+` && cat `+mark+`; ip -br link show lo; seq 200000; exit 7`)
			exit := (*ExitError)(nil)
			if !errors.As(err, &exit) || exit.Status != 7 {
				t.Errorf("error is %v, want exit status 7", err)
			}
			if !strings.HasPrefix(out, series+".") {
				t.Errorf("it was not a kernel %s:\n%s", series, out)
			}
			for _, want := range []string{"from the host", "port 5555 ipproto 4", "x\n", "LOOPBACK,UP"} {
				if !strings.Contains(out, want) {
					t.Errorf("output has no %q:\n%s", want, out)
				}
			}
			next := 1
			for line := range strings.Lines(out[max(strings.Index(out, "\n1\n"), 0):]) {
				if n, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && n == next {
					next++
				} else if next > 1 {
					t.Errorf("%q arrived after line %d", line, next-1)
					break
				}
			}
			if next != 200001 {
				t.Errorf("%d of 200000 lines arrived in order; the end of the output is %q", next-1, out[max(0, len(out)-100):])
			}
			if !strings.Contains(errOut, "oops") {
				t.Errorf("standard error is %q", errOut)
			}
			if _, err := os.Stat(mark); err == nil {
				t.Error("a file written in the machine appeared on the host")
			}
		})
	}
	if testkit.EgressForm.Long() {
		t.Run("a disk keeps changes, and another program is PID 1", testDisk)
		t.Run("counted", testCounted)
		t.Run("code that changes", testCodeThatChanges)
	}
	t.Run("a fault of the kernel ends the machine", func(t *testing.T) {
		err := Run(t.Context(), Options{Log: t.Output(), Args: []string{"sh", "-c",
			"[ $(cat /proc/sys/kernel/panic_on_oops) = 1 ] || exit; echo c > /proc/sysrq-trigger; sleep 100000"}})
		if err == nil || !strings.Contains(err.Error(), "sysrq triggered crash") {
			t.Errorf("error is %v, want one with the kernel's last words", err)
		}
	})
	t.Run("output that the host takes slowly", func(t *testing.T) {
		var out slow
		testkit.Check(t, Run(t.Context(), Options{Args: []string{"seq", "200000"}, Stdout: &out, Log: t.Output()}))
		if got := out.taken.String(); !strings.HasSuffix(got, "\n199999\n200000\n") || strings.Count(got, "\n") != 200000 {
			t.Errorf("%d lines have come, the last of them %q", strings.Count(got, "\n"), got[max(0, len(got)-50):])
		}
	})
	t.Run("a command that doesn't exist", func(t *testing.T) {
		err := Run(t.Context(), Options{Args: []string{"no-such-command"}, Log: t.Output()})
		if err == nil || !strings.Contains(err.Error(), "no-such-command") {
			t.Errorf("error is %v, want one that names the command", err)
		}
	})
	t.Run("a cancelled context ends the machine", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(10*time.Second))
		defer cancel()
		err := Run(ctx, Options{Args: []string{"sleep", "100000"}, Log: t.Output()})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error is %v, want the context's", err)
		}
	})
}

// slow is a buffer that takes 0.2 s for each write: when the command ends, the machine's port is full.
type slow struct{ taken bytes.Buffer }

func (s *slow) Write(b []byte) (int, error) {
	time.Sleep(200 * time.Millisecond)
	return s.taken.Write(b)
}

// A machine whose clock counts instructions, as integration/bench/egress has it, waits for nothing.
func testCounted(t *testing.T) {
	start := time.Now()
	err := Run(t.Context(), Options{Kernel: "6.12", Accel: TCG, Counted: true, Args: []string{"sleep", "300"}, Log: t.Output()})
	if took := time.Since(start); err != nil || took > 200*time.Second {
		t.Errorf("300 s of the machine, in which nothing is done, took %s: %v", took, err)
	}
}

// Of two machines with one disk the second has what the first one has flushed before it lost its power.
func testDisk(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "disk")
	testkit.Must(exec.CommandContext(t.Context(), "mkfs.ext4", "-q", disk, "64M").CombinedOutput())(t)
	run := func(script string) string {
		t.Helper()
		var out bytes.Buffer
		testkit.Check(t, Run(t.Context(), Options{
			Disk: disk, Init: []string{"sleep", "100000"}, Args: []string{"sh", "-ec", script}, Stdin: strings.NewReader("from the host\n"), Stdout: &out, Stderr: &out, Log: t.Output(),
		}))
		return out.String()
	}
	if out := run("cat; cat /proc/1/comm; echo kept >/etc/kept; sync; echo lost >/etc/lost"); out != "from the host\nsleep\n" {
		t.Errorf("the first machine says %q", out)
	}
	if out := run("cat /etc/kept; ! cat /etc/lost 2>/dev/null"); out != "kept\n" {
		t.Errorf("the second machine says %q", out)
	}
}

// The scheduler's statistics are a jump label that each switch of tasks runs over.
func testCodeThatChanges(t *testing.T) {
	err := Run(t.Context(), Options{Kernel: "6.12", Log: t.Output(), Args: []string{"sh", "-c", `
		for i in 1 2 3 4; do while :; do /bin/true; done & done
		for i in $(seq 50); do for on in 1 0; do echo $on > /proc/sys/kernel/sched_schedstats || exit; done; done`}})
	if err != nil {
		t.Error(err)
	}
}
