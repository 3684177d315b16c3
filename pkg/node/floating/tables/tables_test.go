package tables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
)

// fake is a table whose flows are read once somebody lets that go on.
type fake struct {
	Table
	reading chan []netip.Addr
	closed  int
}

func (f *fake) Translated(_ context.Context, addrs []netip.Addr, each func(conntrack.Flow)) error {
	f.reading <- addrs
	for _, a := range addrs {
		each(conntrack.Flow{Translated: netip.AddrPortFrom(a, 1)})
	}
	return nil
}

func (f *fake) Close() { f.closed++ }

// While a table is read, those who want more of it wait together: it is read once for all of them, and closed.
func TestReadsAreShared(t *testing.T) {
	f := &fake{reading: make(chan []netip.Addr)}
	tables := New(t.Context(), func(_ context.Context, pod types.UID) (Table, error) {
		if pod != "p" {
			return nil, errors.New("no such pod")
		}
		return f, nil
	})
	if _, err := tables.Read(t.Context(), "q", nil); err == nil {
		t.Error("the table of no pod was read")
	}
	var readers sync.WaitGroup
	read := func(a netip.Addr) {
		got, err := tables.Read(t.Context(), "p", []netip.Addr{a})
		if err != nil || len(got[a]) != 1 {
			t.Errorf("%v, %v of %s", got, err, a)
		}
	}
	addr := func(i byte) netip.Addr { return netip.AddrFrom4([4]byte{198, 51, 100, i}) }
	readers.Go(func() { read(addr(0)) })
	until := func(what string, done func() bool) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, what, func() error {
			tables.dumps.mu.Lock()
			defer tables.dumps.mu.Unlock()
			if !done() {
				return fmt.Errorf("%+v", tables.dumps.next)
			}
			return nil
		})
	}
	until("the first one reads", func() bool {
		next, working := tables.dumps.next["p"]
		return working && next == nil
	})
	for i := range byte(10) {
		readers.Go(func() { read(addr(i + 1)) })
	}
	until("ten wait", func() bool { return tables.dumps.next["p"] != nil && len(tables.dumps.next["p"].addrs) == 10 })
	if first := <-f.reading; len(first) != 1 {
		t.Errorf("%v are read first", first)
	}
	if second := <-f.reading; len(second) != 10 {
		t.Errorf("%v are read then, not 10", second)
	}
	readers.Wait()
	if f.closed != 2 {
		t.Errorf("the table was closed %d times, want 2", f.closed)
	}
}
