package sqlite_test

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

// step is one kind of change, done for the attachment of a number.
type step struct {
	name string
	do   func(testing.TB, *sqlite.Store, store.Block, int)
}

var steps = []step{
	{"Reserve", func(tb testing.TB, s *sqlite.Store, b store.Block, i int) {
		r := request(fmt.Sprintf("%064d", i), b)
		r.Yield = true
		if _, err := s.Reserve(tb.Context(), r); err != nil {
			tb.Fatal(err)
		}
	}},
	{"Attach", func(tb testing.TB, s *sqlite.Store, b store.Block, i int) {
		w := store.Wiring{HostIfName: "veth0123456789a", HostIfIndex: i, Result: make([]byte, 0, 700)}
		w.Result = fmt.Appendf(w.Result, `{"cniVersion":"1.1.0","pad":"%0600d"}`, i)
		if err := s.Attach(tb.Context(), id(fmt.Sprintf("%064d", i)), w); err != nil {
			tb.Fatal(err)
		}
	}},
	{"Release", func(tb testing.TB, s *sqlite.Store, b store.Block, i int) {
		if _, err := s.Release(tb.Context(), id(fmt.Sprintf("%064d", i))); err != nil {
			tb.Fatal(err)
		}
	}},
	{"Cool", func(tb testing.TB, s *sqlite.Store, b store.Block, i int) {
		if err := s.Cool(tb.Context(), id(fmt.Sprintf("%064d", i))); err != nil {
			tb.Fatal(err)
		}
	}},
}

// BenchmarkSteps measures each step of an address's life on a node with 250 pods,
// by itself, in blocks of which all addresses were used.
func BenchmarkSteps(b *testing.B) {
	for _, size := range []int{10, 16} {
		s, block := churned(b, size)
		for n, st := range steps {
			b.Run(fmt.Sprintf("%s/%d", st.name, 1<<size), func(b *testing.B) {
				i := 0
				for b.Loop() {
					b.StopTimer()
					for _, before := range steps[:n] {
						before.do(b, s, block, i)
					}
					b.StartTimer()
					st.do(b, s, block, i)
					b.StopTimer()
					for _, after := range steps[n+1:] {
						after.do(b, s, block, i)
					}
					i++
					b.StartTimer()
				}
			})
		}
		mustClose(b, s)
	}
}

// BenchmarkBesideCopies measures the whole life of an address while copies of the record are made one after the other, and without them.
func BenchmarkBesideCopies(b *testing.B) {
	for _, size := range []int{10, 16} {
		for _, copies := range []bool{false, true} {
			b.Run(fmt.Sprintf("%d/copies=%t", 1<<size, copies), func(b *testing.B) {
				s, block := churned(b, size)
				defer mustClose(b, s)
				ctx, stop := context.WithCancel(b.Context())
				var copier sync.WaitGroup
				made := 0
				if copies {
					copier.Go(func() {
						for ctx.Err() == nil {
							c, err := s.Copy(ctx, math.MaxInt64)
							if ctx.Err() != nil {
								return
							}
							if err == nil {
								made++
								err = c.Close()
							}
							if err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				var took []time.Duration
				for i := 0; b.Loop(); i++ {
					began := time.Now()
					for _, st := range steps {
						st.do(b, s, block, i)
					}
					took = append(took, time.Since(began))
				}
				stop()
				copier.Wait()
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), "median-us")
				b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-us")
				b.ReportMetric(float64(took[len(took)-1].Microseconds()), "most-us")
				b.ReportMetric(float64(made)/b.Elapsed().Seconds(), "copies/s")
			})
		}
	}
}

// BenchmarkRead measures what is asked while pods come and go.
func BenchmarkRead(b *testing.B) {
	s, _ := churned(b, 16)
	defer mustClose(b, s)
	for name, read := range map[string]func() error{
		"Get":   func() error { _, err := s.Get(b.Context(), id("c7")); return err },
		"List":  func() error { _, err := s.List(b.Context()); return err },
		"Usage": func() error { _, err := s.Usage(b.Context()); return err },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := read(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// churned is a Store on a node with 250 pods, with a block of 2^bits addresses
// that were all used.
func churned(tb testing.TB, bits int) (*sqlite.Store, store.Block) {
	tb.Helper()
	o := options(tb)
	s, _ := mustOpen(tb, o)
	block := mustBlock(tb, "default-0", fmt.Sprintf("10.16.0.0/%d", 32-bits), fmt.Sprintf("fd16::/%d", 128-bits))
	fill(tb, s, block, min(250, 1<<(bits-1)))
	mustClose(tb, s)
	// The rows that years would have made, but not years of them.
	db := rawDB(tb, o.Path)
	mustExec(tb, db, `WITH RECURSIVE n (i) AS (SELECT 250 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < (1 << ?1))
		INSERT INTO addresses (ipv4, ipv6, state, since, boot_id, pool, block, block_id, block_offset, container_id, ifname,
			pod_namespace, pod_name, pod_uid, netns_path, netns_inode, host_ifname, host_ifindex, freed_seq, freed_boottime_ms)
		SELECT '10.16.' || (i >> 8) || '.' || (i & 255), 'fd16::' || printf('%x', i), 'cooling', '2026-01-01T00:00:00.000Z', 'boot-0',
			'default', 'default-0', (SELECT block_id FROM blocks), i, printf('%064d', -i), 'eth0', 'ns', 'pod-' || i, '', '', 0, '', 0,
			(i * 7919) % 65536 + 1, 1000 FROM n WHERE i < (1 << ?1)`, bits)
	if err := db.Close(); err != nil {
		tb.Fatal(err)
	}
	s, res := mustOpen(tb, o)
	if res != (sqlite.OpenResult{}) {
		tb.Fatalf("%s: %+v", filepath.Base(o.Path), res)
	}
	return s, block
}

// TestBigBlockIsFast compares a block of 4,096 addresses, all with a record, with
// one of 128. A step that reads the whole block would take thirty times longer;
// to compare is right on a busy machine too.
func TestBigBlockIsFast(t *testing.T) {
	medians := func(bits int) map[string]time.Duration {
		s, block := churned(t, bits)
		defer mustClose(t, s)
		took := map[string][]time.Duration{}
		measure := func(name string, do func()) {
			begin := time.Now()
			do()
			took[name] = append(took[name], time.Since(begin))
		}
		for i := range 60 {
			for _, st := range steps {
				measure(st.name, func() { st.do(t, s, block, i) })
			}
			measure("Usage", func() {
				if _, err := s.Usage(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		m := map[string]time.Duration{}
		for name, ds := range took {
			slices.Sort(ds)
			m[name] = ds[len(ds)/2]
		}
		return m
	}
	small, big := medians(7), medians(12)
	for name, d := range big {
		t.Logf("%s: median %s, of the small block %s", name, d, small[name])
		if limit := 10*small[name] + time.Millisecond; d > limit {
			t.Errorf("%s takes %s, more than %s", name, d, limit)
		}
	}
}
