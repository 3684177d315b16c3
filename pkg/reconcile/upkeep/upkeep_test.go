package upkeep

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/testkit"
)

const kind, otherKind = "route", "rule"

// bench is a loop in a bubble of its own time, and when it synced, since the start.
type bench struct {
	*Loop
	repairs *reconcile.Repairs
	start   time.Time
	at      []time.Duration
	failing atomic.Bool
}

// run runs a loop while test does.
func run(t *testing.T, cfg Config, test func(*bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{start: time.Now(), repairs: reconcile.NewRepairs(nil, nil, kind, otherKind)}
		cfg.Name = "test"
		cfg.Sync = func(context.Context) error {
			b.at = append(b.at, time.Since(b.start))
			if b.failing.Load() {
				return errors.New("no memory")
			}
			return nil
		}
		b.Loop = New(cfg, b.repairs, reconcile.NewMetrics(nil))
		testkit.Background(t.Context(), t, func(ctx context.Context) error { return b.Run(ctx) })
		synctest.Wait()
		test(b)
	})
}

// after returns when there were syncs since the last call, when d has passed.
func (b *bench) after(d time.Duration) []time.Duration {
	time.Sleep(d)
	synctest.Wait()
	defer func() { b.at = nil }()
	return b.at
}

func TestLoop(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		do   func(*bench)
		want []time.Duration // within three minutes
	}{
		{"at the start and once in a while", Config{Every: time.Minute}, func(*bench) {}, []time.Duration{0, time.Minute, 2 * time.Minute}},
		{"nothing to do at the start", Config{Every: 2 * time.Minute, InLine: true}, func(*bench) {}, []time.Duration{2 * time.Minute}},
		{"inputs change", Config{Every: time.Hour, Settle: time.Second}, func(b *bench) {
			for range 10 {
				b.Changed()
			}
		}, []time.Duration{0, time.Second}},
		{"something is lost", Config{Every: time.Hour, Settle: time.Second, InLine: true}, func(b *bench) { b.Lost(kind) }, []time.Duration{0}},
		{"something is lost that was restored just now", Config{Every: time.Hour, InLine: true}, func(b *bench) {
			b.repairs.Done(context.Background(), kind, 1)
			b.Lost(kind)
		}, []time.Duration{100 * time.Millisecond}},
		{"something is lost of another kind than was restored just now", Config{Every: time.Hour, InLine: true}, func(b *bench) {
			b.repairs.Done(context.Background(), kind, 1)
			b.Lost(otherKind)
		}, []time.Duration{0}},
		{"a failure", Config{Every: time.Hour}, func(b *bench) {
			b.failing.Store(true)
			b.Lost(kind)
			synctest.Wait()
			b.failing.Store(false)
		}, []time.Duration{0, 0, 50 * time.Millisecond}},
	} {
		t.Run(c.name, func(t *testing.T) {
			run(t, c.cfg, func(b *bench) {
				c.do(b)
				if got := b.after(3*time.Minute - time.Second); !slices.Equal(got, c.want) {
					t.Errorf("synced at %s, want %s", got, c.want)
				}
			})
		})
	}
}

func TestSpread(t *testing.T) {
	run(t, Config{Every: time.Minute, Spread: 6 * time.Second}, func(b *bench) {
		at := b.after(time.Hour)
		if n := len(at); n < 3600/66 || n > 60 {
			t.Errorf("%d syncs in an hour", n)
		}
		for i := range at[1:] {
			if d := at[i+1] - at[i]; d < time.Minute || d > 66*time.Second {
				t.Errorf("%s between two syncs", d)
			}
		}
	})
}

// once is a source that tells one batch.
type once []rtnl.Change

func (o once) Run(_ context.Context, _ time.Duration, told func([]rtnl.Change)) error {
	told(o)
	return nil
}

// A loop syncs once for all changes that come together, if one of them concerns it.
func TestWatch(t *testing.T) {
	concerns := func(k rtnl.ChangeKind) func(context.Context, []rtnl.Change) []string {
		return func(_ context.Context, changes []rtnl.Change) []string {
			if slices.ContainsFunc(changes, func(c rtnl.Change) bool { return c.Kind == k }) {
				return []string{kind}
			}
			return nil
		}
	}
	run(t, Config{Every: time.Hour, InLine: true, Lost: concerns(rtnl.RuleLost)}, func(b *bench) {
		for _, c := range []struct {
			changes once
			syncs   int
		}{
			{once{{Kind: rtnl.LinkLost}}, 0},
			{once{{Kind: rtnl.LinkLost}, {Kind: rtnl.RuleLost}, {Kind: rtnl.RuleLost}}, 1},
		} {
			if err := Watch(t.Context(), c.changes, time.Second, b.Loop); err != nil {
				t.Fatal(err)
			}
			if got := b.after(time.Second); len(got) != c.syncs {
				t.Errorf("%v: %d syncs, want %d", c.changes, len(got), c.syncs)
			}
		}
	})
}

func TestSkipped(t *testing.T) {
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	var l Loop
	for i, step := range []struct {
		items []string
		said  bool
	}{{nil, false}, {[]string{"a"}, true}, {[]string{"a"}, false}, {[]string{"a", "b"}, true}, {nil, false}, {[]string{"a"}, true}} {
		log.Reset()
		l.Skipped(ctx, "Left out", step.items)
		if said := strings.Contains(log.String(), "Left out"); said != step.said {
			t.Errorf("step %d, %q: said %t", i, step.items, said)
		}
	}
}
