package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// churn makes and removes links in the host's namespace until the test is over,
// and returns how many it made so far.
func churn(tb testing.TB, host *netnstest.NS, workers int) (stop func() int) {
	tb.Helper()
	ctx, cancel := context.WithCancel(ctxOf(tb))
	var wg sync.WaitGroup
	made := make([]int, workers)
	h, err := rtnl.New(host.NS)
	if err != nil {
		tb.Fatal(err)
	}
	for w := range workers {
		wg.Go(func() {
			v := rtnl.Veth{
				Name: fmt.Sprintf("churn%d", w), MAC: net.HardwareAddr{2, 0, 0, 0, 0, byte(w)},
				PeerName: fmt.Sprintf("churn%dp", w), PeerMAC: net.HardwareAddr{2, 0, 0, 0, 1, byte(w)},
				PeerNetns: host.Fd(), MTU: 1500,
			}
			for ; ctx.Err() == nil; made[w]++ {
				err := h.Do(context.Background(), rtnl.AddVeth(v))
				index, indexErr := h.IndexByName(v.Name)
				if err := errors.Join(err, indexErr, h.Do(context.Background(), rtnl.DelLink(index))); err != nil {
					tb.Errorf("churn: %v", err)
					return
				}
			}
		})
	}
	return func() int {
		cancel()
		wg.Wait()
		h.Close()
		sum := 0
		for _, m := range made {
			sum += m
		}
		return sum
	}
}

// Attach and Remove never depend on a complete view of the host, so that other
// programs' changes can't make them fail; what they read in full, they read
// right or not at all.
func TestConcurrentAttachAndDetachUnderChurn(t *testing.T) {
	const pods, workers, rounds = 200, 16, 2
	n := newNode(t)
	type one struct {
		podnet.Pod
		ns *netnstest.NS
	}
	all := make([]one, pods)
	for i := range all {
		all[i].Pod, all[i].ns = newPod(t, i, true, i%2 == 0)
	}
	hostBefore := state(t, n.host)
	podBefore := lines(state(t, all[0].ns))
	stop := churn(t, n.host, 2)

	// record is as the node's record: every pod is there before it is attached.
	var mu sync.Mutex
	record := map[string]podnet.Wired{}
	want := func(context.Context) ([]podnet.Wired, error) {
		mu.Lock()
		defer mu.Unlock()
		var ws []podnet.Wired
		for _, w := range record {
			ws = append(ws, w)
		}
		return ws, nil
	}
	set := func(w podnet.Wired) {
		mu.Lock()
		defer mu.Unlock()
		record[w.ContainerID] = w
	}
	ctx := t.Context()
	each := func(do func(i int, p podnet.Pod) error) {
		t.Helper()
		work := make(chan int)
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for i := range work {
					if err := do(i, all[i].Pod); err != nil {
						t.Error(err)
					}
				}
			})
		}
		for i := range all {
			work <- i
		}
		close(work)
		wg.Wait()
	}
	syncing, syncs := make(chan struct{}), 0
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-syncing:
				return
			case <-tick.C:
			}
			result, err := n.Sync(ctx, want)
			if err != nil {
				t.Errorf("sync: %v", err)
			}
			if result.Deleted != 0 || result.Replaced != 0 {
				t.Errorf("sync: %+v", result)
			}
			syncs++
		}
	})
	attachments := make([]podnet.Attachment, pods)
	for round := range rounds {
		each(func(i int, p podnet.Pod) error {
			set(podnet.Wired{Pod: p})
			a, err := n.Attach(ctx, p, nil)
			if err != nil {
				return err
			}
			attachments[i] = a
			set(podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex})
			return n.Check(ctx, p, a)
		})
		each(func(i int, p podnet.Pod) error {
			set(podnet.Wired{Pod: p})
			if err := n.Withdraw(ctx, p.Address); err != nil {
				return err
			}
			if round == rounds-1 && i%3 == 0 {
				netnstest.Remove(t, all[i].ns.Path)
			}
			if err := n.Remove(ctx, p.ID, attachments[i].HostIfIndex); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			delete(record, p.ContainerID)
			return nil
		})
	}
	close(syncing)
	wg.Wait()
	t.Logf("%d links of others made, %d syncs", stop(), syncs)
	if syncs == 0 {
		t.Error("no sync")
	}
	if diff := cmp.Diff(hostBefore, state(t, n.host)); diff != "" {
		t.Errorf("on the host (-before +after):\n%s", diff)
	}
	for i, o := range all {
		if i%3 == 0 {
			continue
		}
		if diff := cmp.Diff(podBefore, lines(state(t, o.ns))); diff != "" {
			t.Fatalf("in %s (-before +after):\n%s", o.Name, diff)
		}
	}
}

// benchmark runs op for 200 pods, with workers at once, again and again, and
// reports the time that one takes at the median and how many are done per second.
func benchmark(b *testing.B, workers int, ipv6 bool, existing int, op func(n node, ps []podnet.Pod, each func(do func(i int)))) {
	const pods = 200
	n := newNode(b)
	for i := range existing {
		p, _ := newPod(b, pods+i, true, ipv6)
		if _, err := n.Attach(b.Context(), p, nil); err != nil {
			b.Fatal(err)
		}
	}
	ps := make([]podnet.Pod, pods)
	for i := range ps {
		ps[i], _ = newPod(b, i, true, ipv6)
	}
	var times []time.Duration
	var busy time.Duration
	each := func(do func(i int)) {
		took := make([]time.Duration, pods)
		work := make(chan int)
		var wg sync.WaitGroup
		start := time.Now()
		for range workers {
			wg.Go(func() {
				for i := range work {
					t := time.Now()
					do(i)
					took[i] = time.Since(t)
				}
			})
		}
		for i := range pods {
			work <- i
		}
		close(work)
		wg.Wait()
		busy += time.Since(start)
		times = append(times, took...)
	}
	rounds := 0
	for b.Loop() {
		op(n, ps, each)
		rounds++
	}
	slices.Sort(times)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(times[len(times)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(times[len(times)*99/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(float64(len(times))/busy.Seconds(), "pods/s")
}

func BenchmarkAttach(b *testing.B) {
	for _, existing := range []int{0, 500} {
		for _, workers := range []int{1, 8} {
			for _, ipv6 := range []bool{false, true} {
				b.Run(fmt.Sprintf("existing=%d/workers=%d/dual=%t", existing, workers, ipv6), func(b *testing.B) {
					benchmark(b, workers, ipv6, existing, func(n node, ps []podnet.Pod, each func(func(int))) {
						each(func(i int) {
							if _, err := n.Attach(b.Context(), ps[i], nil); err != nil {
								b.Error(err)
							}
						})
						b.StopTimer()
						for _, p := range ps {
							n.host.IP(b, "link", "set", "dev", "coil-"+p.ContainerID+"-"+p.IfName, "group", "77")
						}
						n.host.IP(b, "link", "del", "group", "77")
						b.StartTimer()
					})
				})
			}
		}
	}
}

func BenchmarkDetach(b *testing.B) {
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			benchmark(b, workers, true, 0, func(n node, ps []podnet.Pod, each func(func(int))) {
				b.StopTimer()
				as := make([]podnet.Attachment, len(ps))
				for i, p := range ps {
					as[i] = n.mustAttachOnly(b, p)
				}
				b.StartTimer()
				each(func(i int) {
					if err := n.Withdraw(b.Context(), ps[i].Address); err != nil {
						b.Error(err)
					}
					if err := n.Remove(b.Context(), ps[i].ID, as[i].HostIfIndex); err != nil {
						b.Error(err)
					}
				})
			})
		})
	}
}
