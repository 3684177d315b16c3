package standby

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/testkit"
)

// The time for which a node has lacked connections goes on while it refuses them, again and again.
func TestBehindGoesOn(t *testing.T) {
	for name, refuses := range map[string]answer{"one": {Refused: map[string]string{"p-0": "it is full"}}, "many": {Others: true}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			st := &stream{s: w.a.Standby, wake: make(chan struct{}, 1), all: map[string]*copied{}}
			st.add(lead{Address: w.Address("p-0", "a"), node: "b"}, true)
			now := time.Now()
			began := now.Add(-time.Hour)
			st.all["p-0"].since = began
			for range 5 {
				now = now.Add(time.Hour) // all are due
				whole := st.starting(now)
				if _, news := st.settled(whole, refuses); len(whole) != 1 || news {
					t.Errorf("of %d addresses there are news: %t", len(whole), news)
				}
				if since, why := st.state("p-0"); !since.Equal(began) || !strings.Contains(why, "doesn't take") {
					t.Errorf("they lack since %s, want %s: %q", since, began, why)
				}
			}
			if _, news := st.settled(st.starting(now.Add(time.Hour)), answer{}); !news {
				t.Error("that all are taken is no news")
			}
			if since, _ := st.state("p-0"); !since.IsZero() {
				t.Errorf("they lack since %s", since)
			}
		})
	}
}

// A node that doesn't know of followers is asked more and more seldom, and connections aren't read for it.
func TestFollowerOfFormerVersion(t *testing.T) {
	var asked atomic.Int64
	w := newStandbyWorld(t, func(w *world) {
		w.a.limits.retry, w.a.limits.mostRetry, w.a.limits.whole = 10*time.Millisecond, 20*time.Millisecond, time.Hour
		w.b.AcceptBy(func(floatingtest.Accept) floatingtest.Accept {
			return func(_ context.Context, _ string, conn net.Conn) {
				var buffer []byte
				if _, _, err := frames.Read(conn, &buffer); err == nil {
					asked.Add(1)
					_ = frames.Write(conn, frames.Refused, []byte("it is no offer"))
				}
			}
		})
	})
	w.a.Add(w.Address("p-0", "a"), 0, 10)
	testkit.Eventually(t, 10*time.Second, "it is asked again", func() error {
		if n := asked.Load(); n < 4 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	w.inStep("it is no offer")
	if n := w.a.Reads(); n > 0 {
		t.Errorf("connections were read %d times", n)
	}
}

// An address that no other node may have is counted as one whose connections nobody keeps.
func TestAloneIsCounted(t *testing.T) {
	w := newStandbyWorld(t)
	w.inStep("")
	counts := func(state string) {
		t.Helper()
		var want strings.Builder
		fmt.Fprintln(&want, "# HELP coil_floating_standby_addresses Floating addresses of this node whose connections are to be copied all the time, by whether the other node has all of them: in_step or behind; alone without another node that may have the address.")
		fmt.Fprintln(&want, "# TYPE coil_floating_standby_addresses gauge")
		for _, s := range []string{"alone", "behind", "in_step"} {
			fmt.Fprintf(&want, "coil_floating_standby_addresses{state=%q} %d\n", s, map[bool]int{true: 1}[s == state])
		}
		if err := testutil.CollectAndCompare(w.a.metrics, strings.NewReader(want.String()), "coil_floating_standby_addresses"); err != nil {
			t.Error(err)
		}
	}
	counts("in_step")
	w.change(func(f *v2.Floating) { f.Successors = f.Successors[1:] })
	counts("alone")
	w.change(func(f *v2.Floating) { f.Holding.Holder = "" })
	counts("")
}
