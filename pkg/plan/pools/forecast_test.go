package pools

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestExpect(t *testing.T) {
	now := time.Date(2026, 1, 10, 0, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }
	const day, week = 24 * time.Hour, 7 * 24 * time.Hour
	for _, tc := range []struct {
		name   string
		change func(p *v2.AddressPool)
		ages   []time.Duration // of blocks 0, 1, ...
		want   string
	}{
		{"no blocks", nil, nil, "8 free, 0 in 24h0m0s, never"},
		{"none is new", nil, []time.Duration{week, week, 25 * time.Hour}, "5 free, 0 in 24h0m0s, never"},
		{"some are new", nil, []time.Duration{week, time.Hour, 2 * time.Hour}, "5 free, 2 in 24h0m0s, 60h0m0s"},
		{"full", nil, []time.Duration{week, week, week, week, week, week, week, time.Minute}, "0 free, 1 in 24h0m0s, 0s"},
		{"a young pool", func(p *v2.AddressPool) { p.CreationTimestamp = ago(6 * time.Hour) }, []time.Duration{time.Hour, 5 * time.Hour}, "6 free, 2 in 6h0m0s, 18h0m0s"},
		{"too young", func(p *v2.AddressPool) { p.CreationTimestamp = ago(59 * time.Minute) }, []time.Duration{time.Minute}, "7 free, 1 in 59m0s, never"},
		{"of tomorrow, by another clock", func(p *v2.AddressPool) { p.CreationTimestamp = ago(-day) }, []time.Duration{-day}, "7 free, 1 in 0s, never"},
		{"excluded blocks aren't free", func(p *v2.AddressPool) { p.Spec.Exclude = []string{"10.0.0.0/26"} }, []time.Duration{time.Hour, week, time.Hour, time.Hour}, "4 free, 3 in 24h0m0s, 32h0m0s"},
		{"a pool that drains", func(p *v2.AddressPool) { p.Spec.Drain = true }, []time.Duration{time.Hour}, "7 free, 1 in 24h0m0s, never"},
		{"a deleted pool", func(p *v2.AddressPool) { p.DeletionTimestamp = new(ago(0)) }, []time.Duration{time.Hour}, "7 free, 1 in 24h0m0s, never"},
		{"nonsense", func(p *v2.AddressPool) { p.Spec.Subnets = nil }, []time.Duration{time.Hour}, "0 free, 0 in 24h0m0s, never"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pool := statusPool("p", subnet("10.0.0.0/24", ""))
			pool.CreationTimestamp = ago(week)
			blocks := []*v2.AddressBlock{block(t, statusPool("q", subnet("10.1.0.0/24", "")), 0, "n", 0, 0)}
			blocks[0].CreationTimestamp = ago(time.Hour)
			for i, age := range tc.ages {
				b := block(t, pool, int32(i), "n", 0, 0)
				b.CreationTimestamp = ago(age)
				blocks = append(blocks, b)
			}
			if tc.change != nil {
				tc.change(pool)
			}
			f := Expect(pool, blocks, now)
			full := "never"
			if f.FullInSeconds != nil {
				full = (time.Duration(*f.FullInSeconds) * time.Second).String()
			}
			if diff := cmp.Diff(tc.want, fmt.Sprintf("%d free, %d in %s, %s", f.Free, f.Taken, time.Duration(f.Seconds)*time.Second, full)); diff != "" {
				t.Error(diff)
			}
		})
	}
}
