package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
)

// load is a container runtime that adds and deletes pods at 16-way concurrency,
// until it is stopped.
type load struct {
	c     *cluster
	node  *rig.Node
	pause sync.RWMutex // held for writing while nothing may happen

	stop   chan struct{}
	ending sync.Once
	wg     sync.WaitGroup
	held   atomic.Int64 // how many sandboxes a worker keeps at most
	failed atomic.Int64 // ADDs
	mu     sync.Mutex
	errs   []error
}

const (
	workers = 16
	many    = 4 // sandboxes that a worker keeps at most
	// patience is for how long a node may be busy: many blocks may have to go back, of
	// which each takes a second.
	patience = 2 * time.Minute
)

func startLoad(c *cluster, n *rig.Node) *load {
	l := &load{c: c, node: n, stop: make(chan struct{})}
	l.held.Store(many)
	c.t.Cleanup(func() { _ = l.finish() }) // of a test that has failed
	for i := range workers {
		l.wg.Go(func() {
			if err := l.work(i); err != nil {
				l.mu.Lock()
				l.errs = append(l.errs, err)
				l.mu.Unlock()
			}
		})
	}
	return l
}

// work is one worker. Its sandboxes live between pauses, so that there is something
// to be compared.
func (l *load) work(i int) error {
	ctx := l.c.t.Context()
	var live []*rig.Sandbox
	for round := 0; ; round++ {
		select {
		case <-l.stop:
			for _, s := range live {
				if err := end(ctx, s); err != nil {
					return err
				}
			}
			return nil
		default:
		}
		var err error
		live, err = l.step(ctx, i, round, live)
		if err != nil {
			return err
		}
	}
}

// step ends one sandbox and starts another, undisturbed by a pause.
func (l *load) step(ctx context.Context, worker, round int, live []*rig.Sandbox) ([]*rig.Sandbox, error) {
	l.pause.RLock()
	defer l.pause.RUnlock()
	for len(live) > 0 && len(live) > rand.IntN(int(l.held.Load())) {
		victim := rand.IntN(len(live))
		s := live[victim]
		live = slices.Delete(live, victim, victim+1)
		if err := end(ctx, s); err != nil {
			return nil, err
		}
		if rand.IntN(8) == 0 { // a kubelet that was restarted repeats itself
			if err := s.Del(ctx); err != nil {
				l.failed.Add(1)
			}
		}
	}
	s, err := l.node.NewSandbox(ctx, rig.SandboxOptions{
		Namespace: l.c.pools[round%len(l.c.pools)], Name: fmt.Sprintf("worker-%d", worker),
	})
	if err != nil {
		return nil, err
	}
	_, err = s.Add(ctx)
	if err != nil && rand.IntN(2) == 0 {
		_, err = s.Add(ctx) // a runtime that tries again with the same sandbox
	}
	if err != nil {
		l.failed.Add(1)
		return live, end(ctx, s)
	}
	return append(live, s), nil
}

// compare stops the load for a moment, and compares everything.
func (l *load) compare() error {
	l.pause.Lock()
	defer l.pause.Unlock()
	if err := l.node.AwaitReady(l.c.t.Context(), 30*time.Second); err != nil {
		return err
	}
	return l.c.awaitClean(patience)
}

// finish ends all pods.
func (l *load) finish() error {
	l.ending.Do(func() { close(l.stop) })
	l.wg.Wait()
	return errors.Join(l.errs...)
}

// points are all fault points of coild.
func points() []faultpoint.Point {
	return slices.Concat(faultpoint.Add, faultpoint.Del, faultpoint.Block, faultpoint.Restore)
}

// killer starts coild again and again, and says how each of its lives ends.
type killer struct {
	load  *load
	node  *rig.Node
	kills int
	at    map[faultpoint.Point]int // kills by point
	// resume ends the pause of hold, if it isn't nil.
	resume func()
}

// prepare makes it likely that a point is passed, and returns at which passage to
// kill.
func (k *killer) prepare(ctx context.Context, p faultpoint.Point) (passage int, err error) {
	k.load.held.Store(many)
	switch p {
	case faultpoint.BlockForgotten, faultpoint.BlockWithdrawn, faultpoint.BlockDeleted, faultpoint.BlockReleased:
		k.load.held.Store(1) // blocks get empty
	case faultpoint.RestoreAdopted:
		return 1, k.loseRecordOfPods(ctx)
	case faultpoint.RestoreDropped:
		return 1, k.leaveRecord(ctx)
	case faultpoint.RestoreReplayed:
		return 1, testkit.Within(ctx, 10*time.Second, func() error {
			if queued, err := os.ReadDir(k.node.DelQueueDir()); err != nil || len(queued) == 0 {
				return fmt.Errorf("no DEL is queued: %v", err)
			}
			return nil
		})
	}
	if slices.Contains(faultpoint.Add, p) || slices.Contains(faultpoint.Del, p) {
		return 1 + rand.IntN(5), nil
	}
	return 1, nil
}

// loseRecordOfPods removes the record while pods have a network, which they would
// lose one by one if the load went on without coild.
func (k *killer) loseRecordOfPods(ctx context.Context) error {
	k.node.Coild.Faults = ""
	if err := k.node.Start(ctx); err != nil {
		return err
	}
	err := testkit.Within(ctx, 30*time.Second, func() error {
		if live := len(k.load.c.live(k.node)); live < many {
			return fmt.Errorf("only %d pods have a network", live)
		}
		return nil
	})
	if err != nil {
		return err
	}
	k.hold()
	k.node.Coild.Kill()
	k.kills++
	return loseRecord(k.node)
}

// leaveRecord leaves the record of an ADD that came to no end. Its DEL waits in the queue, and doesn't
// reach coild before that looks at the record.
func (k *killer) leaveRecord(ctx context.Context) error {
	if err := k.life(ctx, faultpoint.AddReserved); err != nil {
		return err
	}
	k.hold()
	return nil
}

// hold pauses the load until the life that is prepared has ended.
func (k *killer) hold() {
	k.load.pause.Lock()
	k.resume = k.load.pause.Unlock
}

// loseRecord removes the record.
func loseRecord(n *rig.Node) error {
	files, err := filepath.Glob(n.Database() + "*")
	for _, f := range files {
		err = errors.Join(err, os.Remove(f))
	}
	return err
}

// life starts coild and kills it at a point, or at a random time if the point is
// empty or isn't passed in time.
func (k *killer) life(ctx context.Context, p faultpoint.Point) error {
	passage, err := k.prepare(ctx, p)
	if k.resume != nil {
		defer k.resume()
		defer func() { k.resume = nil }()
	}
	if err != nil {
		return err
	}
	k.node.Coild.Faults = ""
	within := rand.N(300 * time.Millisecond)
	if p != "" {
		k.node.Coild.Faults = fmt.Sprintf("%s=%d", p, passage)
		within = testkit.Timeout(20 * time.Second) // blocks go back only after a while
	}
	if err := k.node.Coild.Start(); err != nil {
		return err
	}
	if p == "" && rand.IntN(4) > 0 { // else somewhere in its start
		if err := k.node.AwaitReady(ctx, 30*time.Second); err != nil {
			return err
		}
	}
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-k.node.Coild.Ended():
		k.at[p]++
	case <-timer.C:
		k.node.Coild.Kill()
	}
	k.kills++
	return ctx.Err()
}

// Pods come and go while coild is killed at every point and at random times.
func TestKilledUnderLoad(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2, 5)
	n := c.node(rig.NodeOptions{})
	l := startLoad(c, n)
	k := &killer{load: l, node: n, at: map[faultpoint.Point]int{}}
	random, rounds, least := 12, 1, 40
	if testkit.CrashForm.Long() {
		random, rounds, least = 120, 13, 500
	}
	started := time.Now()
	n.Coild.Kill()
	compare := func() {
		t.Helper()
		n.Coild.Faults = ""
		c.check(n.Start(t.Context()))
		if err := l.compare(); err != nil {
			t.Fatalf("after %d kills: %v", k.kills, err)
		}
		n.Coild.Kill()
		k.kills++
	}
	for range rounds {
		for i, p := range points() {
			c.check(k.life(t.Context(), p))
			if i%9 == 8 {
				compare()
			}
		}
	}
	for _, p := range points() {
		if k.at[p] == 0 { // nothing passed there in time
			c.check(k.life(t.Context(), p))
		}
	}
	for i := range random {
		c.check(k.life(t.Context(), ""))
		if i%20 == 10 {
			compare()
		}
	}
	n.Coild.Faults = ""
	c.check(n.Start(t.Context()), l.finish())
	c.check(c.awaitClean(patience))
	k.report(c, time.Since(started), least)
	c.rested()
	c.blocksGoBack()
}

// report tells how often coild was killed, and ends in an error if that is less than
// it should be or if a point was left out.
func (k *killer) report(c *cluster, took time.Duration, least int) {
	c.t.Helper()
	adds, dels := c.Ledger.Counts(k.node)
	atPoints := 0
	for p, n := range k.at {
		if p != "" {
			atPoints += n
		}
	}
	c.t.Attr("kills", fmt.Sprintf("%d, %d of them at fault points", k.kills, atPoints))
	c.t.Logf("%d kills in %s, %d of them at fault points; %d ADDs answered, %d failed, %d DELs",
		k.kills, took.Round(time.Second), atPoints, adds, k.load.failed.Load(), dels)
	if k.kills < least {
		c.t.Errorf("coild was killed %d times, at least %d were asked for", k.kills, least)
	}
	for _, p := range points() {
		if k.at[p] == 0 {
			c.t.Errorf("coild was never killed at %s", p)
		}
	}
}

// blocksGoBack ends the test unless the nodes whose coild runs give all blocks back
// once no pod is left.
func (c *cluster) blocksGoBack() {
	c.t.Helper()
	testkit.Eventually(c.t, patience, "all blocks go back", func() error {
		for _, n := range c.nodes {
			if !n.Coild.Running() {
				continue
			}
			held, err := n.Blocks(c.t.Context())
			if err != nil {
				return err
			}
			if len(held) > 0 {
				return fmt.Errorf("%s holds %d blocks", n.Name, len(held))
			}
		}
		return nil
	})
	c.clean()
}
