package sqlite_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/store/storetest"
)

// An address that had cooled down before a reboot is free after it; one that hadn't rests until
// the machine is up for long enough.
func TestCooledBeforeReboot(t *testing.T) {
	o := options(t)
	clock := storetest.NewClock()
	o.Clock = clock
	b := mustBlock(t, "default-0", "10.0.0.0/29", "")
	adopted := mustBlock(t, "default-1", "10.0.0.8/31", "")
	s, _ := mustOpen(t, o)
	fill(t, s, b, 8)
	checkpoint := func() {
		t.Helper()
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	free := func(name string) {
		t.Helper()
		if _, err := s.Release(t.Context(), id(name)); err != nil {
			t.Fatal(err)
		}
		if err := s.Cool(t.Context(), id(name)); err != nil {
			t.Fatal(err)
		}
	}
	boots := 0
	reboot := func() {
		t.Helper()
		mustClose(t, s)
		clock.Reboot(time.Second)
		boots++
		o.BootID = fmt.Sprintf("reboot-%d", boots)
		var res sqlite.OpenResult
		if s, res = mustOpen(t, o); res != (sqlite.OpenResult{}) {
			t.Fatalf("%+v", res)
		}
	}
	wantUsage := func(want ...int) {
		t.Helper()
		us, err := s.Usage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, u := range us {
			got = append(got, u.Allocated, u.Cooling)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("allocated and cooling: %v, want %v", got, want)
		}
	}
	reserve := func(name string, b store.Block, want error) {
		t.Helper()
		if _, err := s.Reserve(t.Context(), request(name, b)); !errors.Is(err, want) {
			t.Fatalf("Reserve: %v, want %v", err, want)
		}
	}

	free("c5")
	free("c3")
	clock.Advance(o.CoolDown / 2)
	checkpoint()
	free("c4")
	clock.Advance(o.CoolDown / 2)
	checkpoint()
	wantUsage(5, 1)
	reboot()
	wantUsage(5, 1)
	reserve("a", b, nil)
	reserve("b", b, nil)
	reserve("c", b, store.ErrNoAddress)
	wantUsage(7, 1)

	// The order goes on where it was, although nothing that is recorded as freed
	// has a number as high as what has cooled down.
	clock.Advance(o.CoolDown)
	checkpoint()
	reserve("c", b, nil)
	mustClose(t, s)
	s, _ = mustOpen(t, o)
	free("a")
	wantUsage(7, 1)
	reserve("d", b, store.ErrNoAddress)
	clock.Advance(o.CoolDown)
	reserve("d", b, nil)

	// Addresses of unknown use count as freed when their block was adopted.
	if err := s.AdoptBlocks(t.Context(), []store.Block{adopted}); err != nil {
		t.Fatal(err)
	}
	clock.Advance(o.CoolDown - time.Millisecond)
	checkpoint()
	reboot()
	wantUsage(8, 0, 0, 2)
	clock.Advance(o.CoolDown)
	checkpoint()
	reboot()
	wantUsage(8, 0, 0, 0)
	reserve("e", adopted, nil)

	// So do those whose block isn't recorded.
	lone := store.Allocation{ID: id("lone"), Address: mustBlock(t, "x-0", "10.0.0.16/32", "").At(0)}
	if err := s.Adopt(t.Context(), lone); err != nil {
		t.Fatal(err)
	}
	free("lone")
	free("e")
	checkpoint()
	clock.Advance(o.CoolDown - time.Millisecond)
	checkpoint()
	reboot()
	third := mustBlock(t, "default-2", "10.0.0.16/32", "")
	if err := s.SetBlocks(t.Context(), []store.Block{third}); err != nil {
		t.Fatal(err)
	}
	wantUsage(8, 0, 0, 1, 0, 1)
	reserve("f", third, store.ErrNoAddress)
}
