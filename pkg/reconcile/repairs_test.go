package reconcile

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports []string
		reg := prometheus.NewRegistry()
		r := NewRepairs(reg, func(_ context.Context, kind, message string) { reports = append(reports, kind+": "+message) }, "rule", "link")
		if w := r.Wait("rule", "link"); w != 0 {
			t.Errorf("wait %s before anything", w)
		}
		r.Done(t.Context(), "rule", 0)
		if w := r.Wait("rule"); w != 0 {
			t.Errorf("wait %s after nothing", w)
		}
		r.Saw("rule", "rule lost: 2000")
		// Another program undoes each repair at once.
		var waits []time.Duration
		for range 6 {
			r.Done(t.Context(), "rule", 2)
			waits = append(waits, r.Wait("link", "rule"))
			time.Sleep(r.Wait("rule"))
		}
		if want := []time.Duration{100e6, 200e6, 400e6, 800e6, 1e9, 1e9}; !slices.Equal(waits, want) {
			t.Errorf("waited %s, not %s", waits, want)
		}
		if w := r.Wait("link"); w != 0 {
			t.Errorf("another kind waits %s", w)
		}
		if want := []string{"rule: restored 3 times within 1s; seen last: rule lost: 2000"}; !slices.Equal(reports, want) {
			t.Errorf("reported %q, not %q", reports, want)
		}
		// It goes on for long.
		for range 900 {
			time.Sleep(time.Second)
			r.Done(t.Context(), "rule", 1)
		}
		if len(reports) != 2 {
			t.Errorf("reported %q in a quarter of an hour", reports)
		}
		// Then it ends, and one comes now and then.
		for range 5 {
			time.Sleep(6 * time.Minute)
			r.Done(t.Context(), "rule", 1)
			if w := r.Wait("rule"); w != minPause {
				t.Errorf("wait %s after a calm", w)
			}
		}
		if len(reports) != 3 { // the first of them is still within ten minutes of the others
			t.Errorf("reported %q", reports)
		}
		if got := testutil.ToFloat64(r.total.WithLabelValues("rule")); got != 12+900+5 {
			t.Errorf("counted %v", got)
		}
		if n, err := testutil.GatherAndCount(reg, "coil_repairs_total"); n != 2 || err != nil {
			t.Errorf("%d kinds, %v: one that has nothing yet is there, too", n, err)
		}
	})
}
