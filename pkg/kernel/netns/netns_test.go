package netns_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// here is the inode of the thread's namespace.
func here(t *testing.T) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestOpenRefuses(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(folder, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		"":                            netns.ErrNotExist,
		filepath.Join(folder, "none"): netns.ErrNotExist,
		filepath.Join(file, "below"):  netns.ErrNotExist,
		file:                          netns.ErrNotNetns,
		fifo:                          netns.ErrNotNetns,
		folder:                        netns.ErrNotNetns,
		"/proc/self/ns/uts":           netns.ErrNotNetns,
		"/proc/self/status":           netns.ErrNotNetns,
		"/proc/999999999/ns/net":      netns.ErrNotExist,
	} {
		ns, err := netns.Open(path)
		if ns != nil || !errors.Is(err, want) {
			t.Errorf("Open(%q): %v, %v", path, ns, err)
		}
	}
}

func TestCurrent(t *testing.T) {
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	if ns.Inode() != here(t) {
		t.Errorf("inode %d is not %d", ns.Inode(), here(t))
	}
	if err := ns.Close(); err != nil {
		t.Error(err)
	}
}

func TestDo(t *testing.T) {
	ns := netnstest.New(t)
	outside := here(t)
	if ns.Inode() == outside {
		t.Fatal("the test's namespace is the process's")
	}
	want := errors.New("from inside")
	err := ns.Do(func() error {
		var st unix.Stat_t
		if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
			return err
		}
		if st.Ino != ns.Inode() {
			t.Errorf("inside, the inode is %d, not %d", st.Ino, ns.Inode())
		}
		return want
	})
	if err != want {
		t.Errorf("got %v", err)
	}
	if here(t) != outside {
		t.Error("the caller was moved")
	}
	if err := ns.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("a function that doesn't return succeeded")
	}
	var p *netns.Panic
	if err := ns.Do(func() error { panic("at fault") }); !errors.As(err, &p) || p.Value != "at fault" || !strings.Contains(string(p.Stack), "TestDo") {
		t.Errorf("a panic is %v", err)
	}
	if here(t) != outside {
		t.Error("the caller was moved")
	}
}

// No thread keeps the namespace, however many calls there are at once.
func TestDoLeavesNoThreadBehind(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	outside := here(t)
	spaces := []*netnstest.NS{netnstest.New(t), netnstest.New(t)}
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			ns := spaces[i%2]
			err := ns.Do(func() error {
				var st unix.Stat_t
				if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
					return err
				}
				if st.Ino != ns.Inode() {
					return errors.New("in another namespace")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		var st unix.Stat_t
		err := unix.Stat(filepath.Join("/proc/self/task", task.Name(), "ns/net"), &st)
		if err == nil && st.Ino != outside {
			t.Errorf("thread %s stayed in namespace %d", task.Name(), st.Ino)
		}
	}
}

// A later namespace at the same path is told apart by its inode.
func TestInodeOfAPathThatIsUsedAgain(t *testing.T) {
	ns := netnstest.New(t)
	netnstest.Remove(t, ns.Path)
	if _, err := netns.Open(ns.Path); !errors.Is(err, netns.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	netnstest.Make(t, ns.Path)
	again, err := netns.Open(ns.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if again.Inode() == ns.Inode() {
		t.Error("the same inode while the first is still open")
	}
}
