package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
)

// event is what happens to a node that runs pods, and may be hit by kill -9 in the
// middle.
type event struct {
	*cluster
	row    row
	n      *rig.Node
	pods   []*rig.Sandbox
	killed bool // coild is to be killed
	kills  int
}

// row is one kind of event.
type row struct {
	name string
	do   func(e *event)
	// at is where coild is killed in the middle of what do asks for; without it do calls
	// middle.
	at faultpoint.Point
	// starts says that do starts coild, which is to be killed in its start.
	starts bool
	// flags are further ones of coild.
	flags []string
}

// Events in the life of a node and its pods. After each of them record, kernel and API
// server agree, pods that weren't deleted have kept their network, and no address was
// given again too early.
func TestLifeCycle(t *testing.T) {
	t.Parallel()
	for _, r := range rows() {
		for _, killed := range []bool{false, true} {
			name := r.name
			if killed {
				name += ", kill -9 in the middle"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := &event{cluster: newCluster(t, 3), row: r, killed: killed}
				e.run()
			})
		}
	}
}

func (e *event) run() {
	e.t.Helper()
	e.n = e.node(rig.NodeOptions{CoildFlags: e.row.flags})
	e.pods = e.podsOf(e.n, 5)
	e.clean()
	if e.row.at != "" && e.killed && !e.row.starts {
		e.n.Coild.Stop()
		e.arm()
		e.check(e.n.Start(e.t.Context()))
	}
	e.row.do(e)
	if e.row.at != "" && e.killed && e.kills == 0 {
		select { // what is done in the background
		case <-e.n.Coild.Ended():
		case <-time.After(testkit.Timeout(5 * time.Second)):
			e.t.Errorf("coild wasn't killed at %s", e.row.at)
		}
	}
	e.serve()
	e.works(e.n, e.live(e.n)...)
	e.rested()
	for _, s := range e.live(e.n) {
		e.check(end(e.t.Context(), s))
	}
	e.blocksGoBack()
}

// arm makes the next start of coild end at the row's point.
func (e *event) arm() { e.n.Coild.Faults = string(e.row.at) + "=1" }

// middle kills coild and starts it again, if this is asked for.
func (e *event) middle() {
	e.t.Helper()
	if !e.killed {
		return
	}
	e.n.Coild.Kill()
	e.kills++
	e.check(e.n.Coild.Start())
}

// start starts coild, which ends in its start if this is asked for.
func (e *event) start() {
	e.t.Helper()
	if e.killed && e.row.at != "" {
		e.arm()
	}
	e.check(e.n.Coild.Start())
	e.serve()
}

// revive does what the kubelet does for coild.
func (e *event) revive() {
	e.t.Helper()
	if e.n.Coild.Running() {
		return
	}
	e.kills++
	e.n.Coild.Faults = ""
	e.check(e.n.Coild.Start())
}

// until tries again until there is no error, as runtime and kubelet do.
func (e *event) until(do func() error) {
	e.t.Helper()
	e.check(testkit.Within(e.t.Context(), 40*time.Second, func() error {
		err := do()
		if err != nil {
			e.revive()
		}
		return err
	}))
}

// serve waits until coild serves ADD.
func (e *event) serve() {
	e.t.Helper()
	e.until(func() error {
		if !e.n.Coild.Running() {
			return errors.New("coild has ended")
		}
		return e.n.AwaitReady(e.t.Context(), 30*time.Second)
	})
}

func (e *event) add(s *rig.Sandbox) {
	e.t.Helper()
	e.until(func() error { _, err := s.Add(e.t.Context()); return err })
}

func (e *event) del(s *rig.Sandbox) {
	e.t.Helper()
	e.until(func() error { return s.Del(e.t.Context()) })
}

// settled waits until the node agrees with what was answered.
func (e *event) settled() {
	e.t.Helper()
	e.until(func() error {
		if err := e.n.AwaitReady(e.t.Context(), 10*time.Second); err != nil {
			return err
		}
		wrongs, err := e.n.Differences(e.t.Context())
		for _, w := range wrongs {
			err = errors.Join(err, errors.New(w))
		}
		return err
	})
}

// gc repeats a GC that lists some pods until the node agrees with what was answered.
func (e *event) gc(valid []*rig.Sandbox) {
	e.t.Helper()
	e.until(func() error {
		if err := e.n.GC(e.t.Context(), valid, rig.ValidAttachments, rig.Attachments); err != nil {
			return err
		}
		wrongs, err := e.n.Differences(e.t.Context())
		if len(wrongs) > 0 {
			err = errors.Join(err, fmt.Errorf("%q", wrongs))
		}
		return err
	})
}

// again makes another sandbox of a pod.
func (e *event) again(s *rig.Sandbox) *rig.Sandbox {
	e.t.Helper()
	o, err := e.n.NewSandbox(e.t.Context(), rig.SandboxOptions{Namespace: s.Namespace, Name: s.Name})
	e.check(err)
	return o
}

// code ends the test unless an error has a code of CNI.
func (e *event) code(err error, want uint) {
	e.t.Helper()
	if got := (&cnitypes.Error{}); !errors.As(err, &got) || got.Code != want {
		e.t.Fatalf("%v, want code %d of CNI", err, want)
	}
}

func rows() []row {
	calico := []string{"--compat-calico"}
	return []row{
		{name: "node reboot", at: faultpoint.RestoreDropped, starts: true, do: reboot},
		{name: "runtime restart", do: runtimeRestart},
		{name: "kubelet restart", at: faultpoint.DelReleased, do: kubeletRestart},
		{name: "coild restart", at: faultpoint.RestoreReplayed, starts: true, do: coildRestart},
		{name: "lost DEL", at: faultpoint.DelWithdrawn, do: lostDel},
		{name: "second ADD of a sandbox", at: faultpoint.AddHostWired, do: secondAdd},
		{name: "ADD of a sandbox in a new namespace", at: faultpoint.AddReserved, do: newNamespace},
		{name: "new sandbox of a pod, ADD first", at: faultpoint.AddRecorded, do: addFirst},
		{name: "new sandbox of a pod, DEL first", at: faultpoint.DelWithdrawn, do: delFirst},
		{name: "new sandbox of a pod, ADD first, links named as by Calico", at: faultpoint.AddVeth, do: addFirst, flags: calico},
		{name: "new sandbox of a pod, DEL first, links named as by Calico", at: faultpoint.DelUnlinked, do: delFirst, flags: calico},
		{name: "ADD, then nothing but the end of its namespace", at: faultpoint.AddHostWired, do: forgottenAdd(false)},
		{name: "ADD, then a GC that doesn't list it", at: faultpoint.AddHostWired, do: forgottenAdd(true)},
		{name: "DEL while ADD waits for a block", do: delWhileWaiting},
		{name: "DEL while ADD wires", at: faultpoint.AddPodWired, do: delWhileWiring},
		{name: "network namespace gone before ADD", at: faultpoint.DelBegun, do: namespaceGone},
		{name: "Node deleted and made again", do: nodeMadeAgain},
		{name: "record lost", at: faultpoint.RestoreAdopted, starts: true, do: func(e *event) {
			e.n.Coild.Kill()
			e.check(loseRecord(e.n))
			e.start()
		}},
		{name: "clock jumps back", at: faultpoint.RestoreLinks, starts: true, do: clockWas("2099-12-31T00:00:00.000Z")},
		{name: "clock jumps ahead", at: faultpoint.RestoreLinks, starts: true, do: clockWas("1999-12-31T00:00:00.000Z")},
	}
}

// All pods are gone with the kernel's state; of some the runtime sends the DEL.
func reboot(e *event) {
	ctx := e.t.Context()
	e.check(e.n.PowerCut(ctx), e.n.PowerOn(ctx))
	e.start()
	e.settled()
	for _, s := range e.pods[:2] {
		e.del(s)
	}
}

// The sandboxes survive. GC lists them, under either key or both; what it doesn't list is
// released only when it is still missing later.
func runtimeRestart(e *event) {
	ctx := e.t.Context()
	for _, keys := range [][]string{{rig.ValidAttachments, rig.Attachments}, {rig.ValidAttachments}, {rig.Attachments}} {
		e.until(func() error { return e.n.GC(ctx, e.pods, keys...) })
		e.middle()
	}
	e.settled()
	e.check(e.n.GC(ctx, nil, rig.ValidAttachments)) // a runtime that has lost its state
	e.check(e.n.GC(ctx, e.pods, rig.ValidAttachments))
	e.settled()
	e.check(e.n.GC(ctx, e.pods[1:], rig.Attachments))
	e.settled()
	e.Ledger.Lose(e.pods[0])
	e.gc(e.pods[1:])
	e.check(e.pods[0].Close())
}

// DELs come twice, without a network namespace, and for what never was.
func kubeletRestart(e *event) {
	s := e.pods[0]
	for range 2 {
		e.del(s)
	}
	e.check(s.Close())
	e.del(s)
	s.Path = ""
	e.del(s)
	never := e.sandbox(e.n)
	e.del(never)
	e.check(never.Close())
	e.del(never)
}

// Calls that come while coild is away: DEL is done when it is back, ADD must be tried again.
func coildRestart(e *event) {
	ctx := e.t.Context()
	e.n.Coild.Stop()
	e.code(e.n.Status(ctx), cnitypes.ErrPluginNotAvailable)
	for _, s := range e.pods[:2] {
		e.check(s.Del(ctx))
	}
	fresh := e.sandbox(e.n)
	_, err := fresh.Add(ctx)
	e.code(err, cnitypes.ErrTryAgainLater)
	e.check(e.pods[0].Close()) // the other one's namespace is still there
	e.start()
	e.settled()
	e.add(fresh)
	e.check(e.pods[1].Close())
}

// A network namespace is gone and no DEL comes. One that is still there is kept, whatever
// became of its pod.
func lostDel(e *event) {
	e.Ledger.Lose(e.pods[0])
	e.check(e.pods[0].RemoveNetns())
	e.settled()
}

// A runtime repeats an ADD after a timeout: one that is complete, one whose link is
// gone, and one that still runs.
func secondAdd(e *event) {
	ctx := e.t.Context()
	s := e.pods[0]
	e.add(s)
	_, err := s.Run(ctx, "ip", "link", "del", s.IfName)
	e.check(err)
	e.add(s)
	e.reach(s, e.pods[1])
	fresh := e.sandbox(e.n)
	answers := make(chan error)
	for range 4 {
		go func() { _, err := fresh.Add(ctx); answers <- err }()
	}
	for range 4 {
		<-answers // of those that fail nothing may be left
	}
	e.revive()
	e.add(fresh)
	e.settled()
}

// No DEL comes for an ADD that has ended, or died with all in the kernel: its namespace goes, or GC doesn't list it.
func forgottenAdd(gc bool) func(e *event) {
	return func(e *event) {
		s := e.sandbox(e.n)
		_, _ = s.Add(e.t.Context())
		e.serve()
		e.Ledger.Lose(s)
		if gc {
			e.gc(e.pods)
		}
		e.check(s.RemoveNetns())
		e.settled()
		e.check(s.Close())
	}
}

// The sandbox is the same to the runtime, but its network namespace was made anew.
func newNamespace(e *event) {
	s := e.pods[0]
	e.Ledger.Lose(s)
	e.check(s.MakeNetns())
	e.add(s)
	e.reach(s, e.pods[1])
}

func addFirst(e *event) {
	e.replace(func(old, s *rig.Sandbox) {
		e.add(s)
		e.del(old)
	})
}

func delFirst(e *event) {
	e.replace(func(old, s *rig.Sandbox) {
		e.del(old)
		e.add(s)
	})
}

// replace gives a pod another sandbox; the old one is deleted again when it has gone.
func (e *event) replace(do func(old, s *rig.Sandbox)) {
	old := e.pods[0]
	s := e.again(old)
	do(old, s)
	e.check(old.Close())
	e.del(old)
	e.reach(s, e.pods[1])
}

// DEL ends an ADD that waits for a block, at once.
func delWhileWaiting(e *event) {
	ctx := e.t.Context()
	other := e.pool(3, 0)
	e.pools = append(e.pools, other)
	for range 2 { // the second time its pod and namespace are known for sure
		s, err := e.n.NewSandbox(ctx, rig.SandboxOptions{Namespace: other})
		e.check(err)
		e.add(s)
		e.del(s)
		e.check(s.Close())
	}
	e.check(testkit.Within(ctx, 30*time.Second, func() error { return e.holdsNone(other) }))
	s, err := e.n.NewSandbox(ctx, rig.SandboxOptions{Namespace: other})
	e.check(err)
	e.n.CutAPI(true)
	answer := make(chan error, 1)
	go func() { _, err := s.Add(ctx); answer <- err }()
	select {
	case err := <-answer:
		e.t.Fatalf("ADD didn't wait for a block: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	e.middle()
	asked := time.Now()
	e.del(s)
	if took := time.Since(asked); !e.killed && took > 3*time.Second {
		e.t.Errorf("DEL took %s", took)
	}
	if err := <-answer; err == nil {
		e.t.Error("ADD was answered after DEL")
	}
	e.n.CutAPI(false)
	e.check(s.Close())
}

// holdsNone says whether the node has a block of a pool.
func (e *event) holdsNone(pool string) error {
	held, err := e.n.Blocks(e.t.Context())
	for _, b := range held {
		if b.Labels[v2.LabelPool] == pool {
			return fmt.Errorf("it holds %s", b.Name)
		}
	}
	return err
}

func delWhileWiring(e *event) {
	ctx := e.t.Context()
	for range 12 {
		s := e.sandbox(e.n)
		answer := make(chan error, 1)
		go func() { _, err := s.Add(ctx); answer <- err }()
		time.Sleep(rand.N(12 * time.Millisecond))
		first := s.Del(ctx)
		if err := <-answer; err == nil || first != nil {
			e.revive()
		}
		e.del(s) // as the runtime does when one of them wasn't answered
		e.check(s.Close())
	}
	e.settled()
}

// ADD fails and leaves nothing, and DEL succeeds.
func namespaceGone(e *event) {
	s := e.sandbox(e.n)
	e.check(s.RemoveNetns())
	if _, err := s.Add(e.t.Context()); err == nil {
		e.t.Error("ADD was answered without a network namespace")
	}
	e.del(s)
	e.check(s.Close())
	e.settled()
}

// Without its Node the node exports nothing and gives no address, but its pods keep
// theirs, and the same blocks are its own when there is a Node again.
func nodeMadeAgain(e *event) {
	ctx := e.t.Context()
	e.check(e.n.DeleteObject(ctx))
	e.refuses(e.n, cnitypes.ErrLimitedConnectivity)
	e.check(testkit.Within(ctx, 10*time.Second, func() error { return exports(ctx, e.n, 0) }))
	e.keep(e.pods)
	e.middle()
	e.del(e.pods[0])
	e.check(e.pods[0].Close())
	e.keep(e.pods[1:])
	e.check(e.n.CreateObject(ctx))
	if !e.killed {
		<-e.n.Coild.Ended() // to start anew, as another node
	}
	e.serve()
	e.settled()
}

// exports says whether the node exports so many IPv4 blocks.
func exports(ctx context.Context, n *rig.Node, want int) error {
	out, err := n.Run(ctx, "ip", "-4", "route", "show", "table", "119")
	if err != nil {
		return err
	}
	if got := strings.Count(out, "\n"); got != want {
		return fmt.Errorf("%d blocks are exported, want %d:\n%s", got, want, out)
	}
	return nil
}

// clockWas makes the wall clock jump: what the record has is of another time.
func clockWas(at string) func(*event) {
	return func(e *event) {
		for _, s := range e.pods[:2] {
			e.del(s)
			e.check(s.Close())
		}
		e.settled()
		e.n.Coild.Kill()
		e.check(statement("UPDATE addresses SET since = '"+at+"'; UPDATE blocks SET since = '"+at+"'")(e.cluster, e.n))
		e.start()
	}
}
