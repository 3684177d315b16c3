package rig

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/scratch"
	"github.com/coil-net/coil/pkg/testkit"
)

// A mended disk is a new one, also if others, who made a mount namespace, still have the broken one.
func TestBrokenDiskIsMended(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	for _, others := range []bool{false, true} {
		r := &Rig{scratch: testkit.Must(scratch.New(scratchPrefix))(t)}
		t.Cleanup(func() { testkit.Check(t, r.scratch.Remove()) })
		n := &Node{rig: r, Name: "node", opts: NodeOptions{DiskBytes: 16 << 20}}
		testkit.Check(t, n.makeDisk())
		t.Cleanup(func() { testkit.Check(t, n.disk.unmount()) })
		if others {
			cmd := exec.Command("cat")
			cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
			in := testkit.Must(cmd.StdinPipe())(t)
			testkit.Check(t, cmd.Start())
			t.Cleanup(func() {
				in.Close()
				testkit.Check(t, cmd.Wait())
			})
		}
		name := filepath.Join(n.StateDir(), "record")
		f := testkit.Must(os.Create(name))(t)
		_, err := f.WriteString("kept")
		testkit.Check(t, err, f.Sync(), f.Close())
		testkit.Check(t, n.BreakDisk(t.Context()))
		if err := os.WriteFile(name, nil, 0); !errors.Is(err, unix.EROFS) {
			t.Fatalf("writing on a broken disk: %v, want %v", err, unix.EROFS)
		}
		testkit.Check(t, n.MountDisk(t.Context(), false))
		if got := testkit.Must(os.ReadFile(name))(t); string(got) != "kept" {
			t.Errorf("others have it: %t: the file has %q", others, got)
		}
		testkit.Check(t, os.WriteFile(name, []byte("new"), 0))
	}
}
