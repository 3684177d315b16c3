package sqlite_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

// faults makes the writes of this process to files fail, as those of a disk do
// that breaks or that the kernel has made read-only, and lets them work again. It
// asks the kernel for each such system call to be decided here (seccomp_unotify(2)),
// which can't be undone: only a child process may have it.
type faults struct {
	errno   atomic.Int32 // what they fail with; 0: they work
	percent atomic.Int32 // how many of them fail
	failed  atomic.Int64
}

// seccompNotif and seccompResp are struct seccomp_notif and seccomp_notif_resp.
type seccompNotif struct {
	id         uint64
	pid, flags uint32
	nr         int32
	arch       uint32
	ip         uint64
	args       [6]uint64
}

type seccompResp struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

func newFaults() (*faults, error) {
	const offsetOfNr = 0
	calls := []uint32{unix.SYS_PWRITE64, unix.SYS_FTRUNCATE, unix.SYS_TRUNCATE, unix.SYS_FALLOCATE}
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offsetOfNr}}
	for i, nr := range calls {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: nr, Jt: uint8(len(calls) - i)})
	}
	filter = append(filter,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF})
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread() // the right to install it is the thread's
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("set no_new_privs: %w", err)
	}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_TSYNC|unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH,
		uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return nil, fmt.Errorf("install a seccomp filter: %w", errno)
	}
	f := &faults{}
	go f.serve(fd)
	return f, nil
}

func (f *faults) serve(fd uintptr) {
	for {
		var n seccompNotif
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&n))); errno != 0 {
			continue // interrupted, or the caller is gone
		}
		r := seccompResp{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
		if errno := f.errno.Load(); errno != 0 && rand.Int32N(100) < f.percent.Load() {
			r.err, r.flags = -errno, 0
			f.failed.Add(1)
		}
		// An error means that the caller is gone.
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&r)))
	}
}

func (f *faults) fail(errno unix.Errno, percent int) {
	f.percent.Store(int32(percent))
	f.errno.Store(int32(errno))
}

func (f *faults) heal() { f.errno.Store(0) }

// TestFailingDisk runs the child failingDisk.
func TestFailingDisk(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	o := options(t)
	cmd := childCommand(t, "failing disk", o.Path)
	cmd.Stderr = nil
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "writes failed") {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// failingDisk lets each kind of failure happen at rest and under load.
func failingDisk(path string) error {
	ctx := context.Background()
	f, err := newFaults()
	if err != nil {
		return err
	}
	o := sqlite.Options{Path: path, Identity: testNode, BootID: "boot-1", CoolDown: 1}
	s, _, err := sqlite.Open(ctx, o)
	if err != nil {
		return err
	}
	b, err := livesBlock()
	if err != nil {
		return err
	}
	if err := errors.Join(s.SetBlocks(ctx, []store.Block{b}), s.Rebuilt(ctx)); err != nil {
		return err
	}
	for _, errno := range []unix.Errno{unix.EROFS, unix.EIO, unix.ENOSPC, unix.EDQUOT} {
		if err := failAtRest(ctx, s, b, f, errno); err != nil {
			return fmt.Errorf("%w, all writes: %w", errno, err)
		}
	}
	for round := range 40 {
		errno := []unix.Errno{unix.EROFS, unix.EIO, unix.ENOSPC, unix.EDQUOT}[round%4]
		if err := failUnderLoad(ctx, s, b, f, errno, round); err != nil {
			return fmt.Errorf("%w under load, round %d: %w", errno, round, err)
		}
	}
	fmt.Fprintln(os.Stdout, f.failed.Load(), "writes failed")
	if err := s.Close(); err != nil {
		return err
	}
	s, res, err := sqlite.Open(ctx, o)
	if err != nil || res != (sqlite.OpenResult{}) {
		return fmt.Errorf("afterwards: %+v, %w", res, err)
	}
	return s.Close()
}

// failAtRest fails all writes: nothing changes, all can be read, and when they
// work again, so does the Store.
func failAtRest(ctx context.Context, s *sqlite.Store, b store.Block, f *faults, errno unix.Errno) error {
	r, next := request("rest", b), request("next", b)
	if _, err := s.Reserve(ctx, r); err != nil {
		return err
	}
	// A block that no address was taken of; then one can't be.
	small := b
	small.Name = fmt.Sprintf("small-%d", errno)
	small.IPv4 = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(errno), 0}), 30)
	small.IPv6 = netip.Prefix{}
	if err := s.SetBlocks(ctx, []store.Block{small}); err != nil {
		return err
	}
	f.fail(errno, 100)
	for range 2 {
		if _, err := s.Reserve(ctx, request("small", small)); !errors.Is(err, store.ErrReadOnly) {
			return fmt.Errorf("reserve of a new block: %w", err)
		}
	}
	f.heal()
	for i := range 4 {
		a, err := s.Reserve(ctx, request(fmt.Sprintf("small%d", i), small))
		if err != nil || a.Address != small.At(i) {
			return fmt.Errorf("address %d of a new block when writes work: %s, %w", i, a.Address, err)
		}
		if _, err := s.Release(ctx, a.ID); err != nil {
			return err
		}
		if err := s.Cool(ctx, a.ID); err != nil {
			return err
		}
	}
	f.fail(errno, 100)
	// The log may have room in the page cache for none of these.
	if _, err := s.Reserve(ctx, next); !errors.Is(err, store.ErrReadOnly) {
		return fmt.Errorf("reserve: %w", err)
	}
	if _, err := s.Release(ctx, r.ID); !errors.Is(err, store.ErrReadOnly) {
		return fmt.Errorf("release: %w", err)
	}
	if err := s.Writable(ctx); !errors.Is(err, store.ErrReadOnly) {
		return fmt.Errorf("writable: %w", err)
	}
	if a, err := s.Get(ctx, r.ID); err != nil || a.State != store.Pending {
		return fmt.Errorf("get: %s, %w", a.State, err)
	}
	if a, err := s.Reserve(ctx, r); err != nil || a.State != store.Pending {
		return fmt.Errorf("reserve of what is recorded: %s, %w", a.State, err)
	}
	if us, err := s.Usage(ctx); err != nil || us[0].Name != b.Name || us[0].Allocated != 1 {
		return fmt.Errorf("usage: %v, %w", us, err)
	}
	f.heal()
	if err := s.Writable(ctx); err != nil {
		return fmt.Errorf("writable when writes work: %w", err)
	}
	if _, err := s.Reserve(ctx, next); err != nil {
		return fmt.Errorf("reserve when writes work: %w", err)
	}
	for _, id := range []attachment.ID{r.ID, next.ID} {
		if _, err := s.Release(ctx, id); err != nil {
			return err
		}
	}
	return s.Cool(ctx, r.ID, next.ID)
}

// failUnderLoad fails some of the writes of a busy Store. An answer is
// recorded; no address has two holders.
func failUnderLoad(ctx context.Context, s *sqlite.Store, b store.Block, f *faults, errno unix.Errno, round int) error {
	var (
		mu      sync.Mutex
		errs    []error
		pending = map[attachment.ID]ipam.Address{}
		wg      sync.WaitGroup
	)
	problem := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, fmt.Errorf(format, args...))
	}
	f.fail(errno, 1+rand.IntN(30))
	for worker := range 4 {
		wg.Go(func() {
			for i := range 12 {
				r := request(fmt.Sprintf("%d-%d-%d", round, worker, i), b)
				r.Yield = true
				a, err := s.Reserve(ctx, r)
				if err != nil {
					if !errors.Is(err, store.ErrReadOnly) {
						problem("reserve: %w", err)
					}
					continue
				}
				if i%2 == 0 {
					_, err := s.Release(ctx, r.ID)
					if err == nil {
						err = s.Cool(ctx, r.ID)
					}
					if err != nil && !errors.Is(err, store.ErrReadOnly) {
						problem("release: %w", err)
					}
					continue
				}
				mu.Lock()
				pending[r.ID] = a.Address
				mu.Unlock()
				if i%5 == 0 {
					if err := s.Checkpoint(ctx); err != nil && !errors.Is(err, store.ErrReadOnly) {
						problem("checkpoint: %w", err)
					}
				}
			}
		})
	}
	wg.Wait()
	f.heal()
	if err := s.Writable(ctx); err != nil {
		problem("writable when writes work: %w", err)
	}
	as, err := s.List(ctx)
	if err != nil {
		problem("list: %w", err)
	}
	holders := map[ipam.Address]attachment.ID{}
	var ids []attachment.ID
	for _, a := range as {
		if other, is := holders[a.Address]; is {
			problem("%s is of %v and %v", a.Address, other, a.ID)
		}
		holders[a.Address] = a.ID
		ids = append(ids, a.ID)
		if _, err := s.Release(ctx, a.ID); err != nil {
			problem("release when writes work: %w", err)
		}
	}
	for id, address := range pending {
		if holders[address] != id {
			problem("%v was answered %s, which is recorded for %v", id, address, holders[address])
		}
	}
	if err := s.Cool(ctx, ids...); err != nil {
		problem("cool when writes work: %w", err)
	}
	return errors.Join(errs...)
}
