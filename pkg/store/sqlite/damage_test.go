package sqlite_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

// copyRecord copies the files of a record, as they are on the disk right now: what
// a machine that loses its process finds.
func copyRecord(tb testing.TB, from, to string) {
	tb.Helper()
	for _, suffix := range []string{"", "-wal", "-shm"} {
		data, err := os.ReadFile(from + suffix)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			tb.Fatal(err)
		}
		if err := os.WriteFile(to+suffix, data, 0o600); err != nil {
			tb.Fatal(err)
		}
	}
}

// crashImage makes a record with a log that isn't empty, and returns where the
// copy of its files is and what it records.
func crashImage(tb testing.TB) (sqlite.Options, string, []store.Allocation) {
	tb.Helper()
	o := options(tb)
	s, _ := mustOpen(tb, o)
	b := mustBlock(tb, "default-0", "10.0.0.0/26", "fd00::/122")
	fill(tb, s, b, 20)
	if err := s.Checkpoint(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	for i := range 10 {
		if _, err := s.Release(tb.Context(), id(fmt.Sprintf("c%d", i))); err != nil {
			tb.Fatal(err)
		}
		if i%2 == 0 {
			if err := s.Cool(tb.Context(), id(fmt.Sprintf("c%d", i))); err != nil {
				tb.Fatal(err)
			}
		}
		if _, err := s.Reserve(tb.Context(), request(fmt.Sprintf("d%d", i), b)); err != nil {
			tb.Fatal(err)
		}
	}
	image := filepath.Join(tb.TempDir(), "image.db")
	copyRecord(tb, o.Path, image)
	as := mustList(tb, s)
	mustClose(tb, s)
	return o, image, as
}

// wantServing wants that a record, whatever was done to it, opens and gives each
// address once, beside those that the caller finds in the kernel.
func wantServing(t *testing.T, o sqlite.Options, kernel []store.Allocation) (sqlite.OpenResult, []store.Allocation) {
	t.Helper()
	s, res := mustOpen(t, o)
	defer mustClose(t, s)
	as := mustList(t, s)
	b := mustBlock(t, "default-0", "10.0.0.0/26", "fd00::/122")
	set := s.SetBlocks
	if res.Fresh {
		set = s.AdoptBlocks
	}
	if err := set(t.Context(), []store.Block{b}); err != nil {
		t.Fatal(err)
	}
	for _, a := range kernel {
		if err := s.Adopt(t.Context(), a); err != nil && !errors.Is(err, store.ErrState) {
			t.Fatalf("adopt what the kernel has: %v", err)
		}
	}
	if err := s.Rebuilt(t.Context()); err != nil {
		t.Fatal(err)
	}
	given := map[netip.Addr]bool{}
	for _, a := range mustList(t, s) {
		for _, x := range a.Address.Addrs() {
			if given[x] {
				t.Fatalf("%s is recorded twice", x)
			}
			given[x] = true
		}
	}
	for i := 0; ; i++ {
		r := request(fmt.Sprintf("new%d", i), b)
		r.Yield = true
		a, err := s.Reserve(t.Context(), r)
		if errors.Is(err, store.ErrNoAddress) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range a.Address.Addrs() {
			if given[x] {
				t.Fatalf("%s is given twice", x)
			}
			given[x] = true
		}
	}
	if len(given) != 2*b.Size() {
		t.Fatalf("%d addresses are in use, want %d: some are lost", len(given), 2*b.Size())
	}
	return res, as
}

// kernelOf are the attached ones: what a scan of the kernel finds.
func kernelOf(as []store.Allocation) []store.Allocation {
	var attached []store.Allocation
	for _, a := range as {
		if a.State == store.Attached {
			attached = append(attached, a)
		}
	}
	return attached
}

func TestCrashImage(t *testing.T) {
	o, image, want := crashImage(t)
	o.Path = image
	res, got := wantServing(t, o, kernelOf(want))
	if res.Fresh {
		t.Errorf("a record of a process that was killed: %+v", res)
	}
	if len(got) != len(want) {
		t.Fatalf("%d allocations, want %d", len(got), len(want))
	}
}

func TestTruncated(t *testing.T) {
	o, image, want := crashImage(t)
	for _, tc := range []struct{ file string }{{""}, {"-wal"}, {"-shm"}} {
		st, err := os.Stat(image + tc.file)
		if err != nil {
			t.Fatal(err)
		}
		for _, left := range []int64{0, 1, 16, 100, 4096, st.Size() / 3, st.Size() / 2, st.Size() - 4096, st.Size() - 1} {
			if left < 0 {
				continue
			}
			t.Run(fmt.Sprintf("%s at %d of %d", "db"+tc.file, left, st.Size()), func(t *testing.T) {
				o := o
				o.Path = filepath.Join(t.TempDir(), "coild.db")
				copyRecord(t, image, o.Path)
				if err := os.Truncate(o.Path+tc.file, left); err != nil {
					t.Fatal(err)
				}
				res, _ := wantServing(t, o, kernelOf(want))
				if tc.file == "-shm" && res.Fresh {
					t.Errorf("the index of the log can be made anew, but: %+v", res)
				}
			})
		}
	}
}

// TestFlippedBytes damages a few bytes at random places. A record that is taken
// all the same says of each address what it said before; of a damaged log, what
// was committed last may be missing, as after a loss of power.
func TestFlippedBytes(t *testing.T) {
	o, image, want := crashImage(t)
	recorded := map[attachment.ID]store.Allocation{}
	for _, a := range want {
		recorded[a.ID] = a
	}
	taken, aside := 0, 0
	seeds := uint64(testkit.CrashForm.Times(16, 300))
	for _, file := range []string{"", "-wal", "-shm"} {
		for seed := range seeds {
			t.Run(fmt.Sprintf("db%s %d", file, seed), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, 9))
				o := o
				o.Path = filepath.Join(t.TempDir(), "coild.db")
				copyRecord(t, image, o.Path)
				data, err := os.ReadFile(o.Path + file)
				if err != nil {
					t.Fatal(err)
				}
				for range 1 + r.IntN(8) {
					data[r.IntN(len(data))] ^= byte(1 + r.IntN(255))
				}
				if err := os.WriteFile(o.Path+file, data, 0o600); err != nil {
					t.Fatal(err)
				}
				res, got := wantServing(t, o, kernelOf(want))
				if res.Fresh {
					aside++
					if res.SetAside == "" {
						t.Errorf("%+v", res)
					}
					return
				}
				taken++
				for _, a := range got {
					w, is := recorded[a.ID]
					switch {
					case file == "" && (!is || w.Address != a.Address || w.State != a.State):
						t.Errorf("%v has %s, %s; it had %s, %s", a.ID, a.Address, a.State, w.Address, w.State)
					case is && w.Address != a.Address:
						t.Errorf("%v has %s, it had %s", a.ID, a.Address, w.Address)
					}
				}
				if file != "-wal" && len(got) != len(want) {
					t.Errorf("%d allocations, want %d", len(got), len(want))
				}
			})
		}
	}
	t.Logf("%d records were taken, %d set aside", taken, aside)
	if taken == 0 || aside == 0 {
		t.Error("the damage is always or never found: it isn't random")
	}
}

// TestTornLog is a loss of power: of the log, which wasn't synced, some pages
// are missing. The rest is a state that was once committed.
func TestTornLog(t *testing.T) {
	o, image, _ := crashImage(t)
	wal, err := os.ReadFile(image + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 4))
		o := o
		o.BootID = "boot-2"
		o.Path = filepath.Join(t.TempDir(), "coild.db")
		copyRecord(t, image, o.Path)
		torn := append([]byte(nil), wal...)
		for p := 0; p < len(torn); p += 4096 {
			if r.IntN(10) == 0 {
				clear(torn[p:min(p+4096, len(torn))])
			}
		}
		if err := os.WriteFile(o.Path+"-wal", torn, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(o.Path + "-shm"); err != nil {
			t.Fatal(err)
		}
		if res, _ := wantServing(t, o, nil); res.Fresh {
			t.Errorf("seed %d: %+v", seed, res)
		}
	}
}

// A restart mends what is damaged while it is open, so that somebody has to be told.
func TestDamagedWhileOpen(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/26", "fd00::/122")
	fill(t, s, b, 1)
	if err := s.Writable(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustExec(t, rawDB(t, o.Path), "UPDATE addresses SET ipv4 = 'x'")
	if _, err := s.List(t.Context()); !errors.Is(err, sqlite.ErrDamaged) {
		t.Errorf("List: %v, want ErrDamaged", err)
	}
	if err := s.Writable(t.Context()); !errors.Is(err, sqlite.ErrDamaged) {
		t.Errorf("Writable: %v, want ErrDamaged", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, res := mustOpen(t, o); !res.Fresh || s.Writable(t.Context()) != nil {
		t.Errorf("opened again: %+v", res)
	}
}
