package floating

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/testkit"
)

// A node that ends leaves no goroutine behind. It isn't parallel to others, which have goroutines of their own.
func TestNothingIsLeftBehind(t *testing.T) {
	before := runtime.NumGoroutine()
	w := newWorld(t, 2, 3)
	for _, n := range w.nodes {
		n.stop()
	}
	testkit.Eventually(t, 5*time.Second, "no goroutine is left", func() error {
		if after := runtime.NumGoroutine(); after > before {
			stacks := make([]byte, 1<<16)
			return fmt.Errorf("%d goroutines, before %d:\n%s", after, before, stacks[:runtime.Stack(stacks, true)])
		}
		return nil
	})
}

// What happens in clusters takes seconds of waiting each, and hardly a processor.
func TestClusters(t *testing.T) {
	together(t, map[string]func(*testing.T){
		"takes over": testTakesOver, "the API server is away": testAPIOutageMovesNothing, "the holder is cut off": testHolderIsCutOff,
		"hands over": testHandsOver, "a move is called off": testMoveIsCalledOff, "gives up": testGivesUp,
		"the record is written after the end": testRecordIsWrittenAfterTheEnd, "the pod is replaced": testPodIsReplaced,
		"released": testReleased, "gone": testGone, "gone without the watch": testGoneIsFoundByAWrite, "restart": testRestart,
		"forged datagrams": testForgedDatagrams, "the label is lost": testLostLabel, "leaves": testLeaves,
	})
}

// together runs tests at the same time, however few processors there are.
func together(t *testing.T, tests map[string]func(*testing.T)) {
	var group sync.WaitGroup
	for name, test := range tests {
		group.Go(func() { t.Run(name, test) })
	}
	group.Wait()
}

func testTakesOver(t *testing.T) {
	const addresses = 12
	w := newWorld(t, 4, addresses)
	cut := time.Now()
	w.nodes[0].cutPower()
	var took []time.Duration
	w.settled("the addresses of the dead node are at others", func(i int, b *v2.AddressBlock) error {
		if i%4 == 0 {
			return w.answeredByAnother(b, "n0")
		}
		return w.answeredBy(b, w.nodes[i%4])
	})
	for i := range addresses {
		if i%4 == 0 {
			holder := w.node(w.block(i).Floating.Holding.Holder)
			took = append(took, holder.spans(w.blocks[i])[0].from.Sub(cut))
		} else if n := len(w.nodes[i%4].spans(w.blocks[i])); n != 1 {
			t.Errorf("address %d, which had nothing to do with it, was answered for %d times", i, n)
		}
	}
	slices.Sort(took)
	t.Logf("taken over after %v", took)
	if len(took) != addresses/4 || took[len(took)/2] > testkit.Limit(4*time.Second) {
		t.Errorf("taken over after %v", took)
	}
}

// While nobody reaches the API server, nothing moves and nobody falls silent.
func testAPIOutageMovesNothing(t *testing.T) {
	w := newWorld(t, 3, 6)
	w.claimed()
	epochs := map[int]int64{}
	for i := range w.blocks {
		epochs[i] = w.block(i).Floating.Holding.Epoch
	}
	began := time.Now()
	for _, n := range w.nodes {
		n.noAPI.Store(true)
	}
	<-time.After(4 * time.Second) // longer than any lease, silence and answer of the API server
	for i, id := range w.blocks {
		if gap := w.silence(id, began); gap > 0 {
			t.Errorf("nobody answered for address %d for %s", i, gap)
		}
	}
	for _, n := range w.nodes {
		n.noAPI.Store(false)
	}
	w.settled("all is as it was", func(i int, b *v2.AddressBlock) error {
		if h := b.Floating.Holding; h.Epoch != epochs[i] {
			return fmt.Errorf("address %d has epoch %d, before %d", i, h.Epoch, epochs[i])
		}
		return w.answeredBy(b, w.nodes[i%3])
	})
}

// The holder is cut off from the API server, from its peers, or from both.
func testHolderIsCutOff(t *testing.T) {
	tests := map[string]func(*testing.T){}
	for name, tt := range map[string]struct {
		api, peers bool
		moves      bool
	}{
		"from the API server": {api: true},
		"from its peers":      {peers: true, moves: true},
		"from both":           {api: true, peers: true, moves: true},
	} {
		tests[name] = func(t *testing.T) {
			w := newWorld(t, 3, 1)
			w.claimed()
			began := time.Now()
			n := w.nodes[0]
			n.noAPI.Store(tt.api)
			n.noPeers.Store(tt.peers)
			if tt.moves {
				w.settled("another node has it", func(_ int, b *v2.AddressBlock) error { return w.answeredByAnother(b, n.name) })
			} else {
				<-time.After(4 * time.Second) // longer than any lease, silence and answer of the API server
				if gap := w.silence(w.blocks[0], began); gap > 0 {
					t.Errorf("nobody answered for %s", gap)
				}
			}
			n.noAPI.Store(false)
			n.noPeers.Store(false)
			holder := w.block(0).Floating.Holding
			w.settled("it stays where it is", func(_ int, b *v2.AddressBlock) error {
				if h := b.Floating.Holding; h.Holder != holder.Holder || h.Epoch != holder.Epoch {
					return fmt.Errorf("%+v, before %+v", h, holder)
				}
				return w.answeredBy(b, w.node(holder.Holder))
			})
			if !tt.moves && holder.Holder != n.name {
				t.Errorf("it has moved to %s", holder.Holder)
			}
		}
	}
	together(t, tests)
}

// moving is a Mover that waits for the test.
type moving chan string

func (m moving) Move(ctx context.Context, a Address, to string) {
	select {
	case m <- a.Block + " to " + to:
	case <-ctx.Done():
	}
}

func testHandsOver(t *testing.T) {
	asked := make(moving)
	w := newWorld(t, 3, 1, func(w *world) { w.nodes[0].mover = asked })
	began := time.Now()
	w.change(0, func(b *v2.AddressBlock) { b.Floating.MovingTo = "n2" })
	select {
	case what := <-asked:
		if what != "p-0 to n2" {
			t.Errorf("asked for %q", what)
		}
	case <-time.After(testkit.Timeout(10 * time.Second)):
		t.Fatal("nobody prepares the other node")
	}
	w.settled("it has moved", func(_ int, b *v2.AddressBlock) error {
		if !b.Floating.Holding.HandedOver {
			return fmt.Errorf("%+v", b.Floating.Holding)
		}
		return w.answeredBy(b, w.nodes[2])
	})
	gap := w.silence(w.blocks[0], began)
	t.Logf("nobody answered for %s", gap)
	if gap > testkit.Limit(500*time.Millisecond) {
		t.Errorf("nobody answered for %s", gap)
	}
	if b := w.block(0); b.Floating.MovingTo != "" || len(b.Floating.Successors) != 3 {
		t.Errorf("the move isn't over, or a node has changed what is the controller's: %+v", b.Floating)
	}
	// The new holder can't keep it: it doesn't come back by the same move.
	epoch := w.block(0).Floating.Holding.Epoch
	w.nodes[2].set(func(k *kernel) { k.unready = true })
	w.nodes[2].driver.TargetsChanged()
	w.settled("the next one has it, and keeps it", func(_ int, b *v2.AddressBlock) error {
		if h := b.Floating.Holding; h.Epoch != epoch+2 || h.Claims == 0 {
			return fmt.Errorf("%+v", h)
		}
		return w.answeredBy(b, w.nodes[0])
	})
}

// What moves no more is forgotten.
func testMoveIsCalledOff(t *testing.T) {
	asked := make(moving) // nobody is there
	w := newWorld(t, 2, 1, func(w *world) { w.nodes[0].mover = asked })
	w.change(0, func(b *v2.AddressBlock) { b.Floating.MovingTo = "n1" })
	w.change(0, func(b *v2.AddressBlock) { b.Floating.MovingTo = "" })
	w.change(0, func(b *v2.AddressBlock) { b.Floating.Successors = b.Floating.Successors[:1] })
	w.settled("the voters are those of the last change", func(_ int, b *v2.AddressBlock) error {
		if len(b.Floating.Holding.Voters) != 1 {
			return fmt.Errorf("%+v", b.Floating.Holding)
		}
		return w.answeredBy(b, w.nodes[0])
	})
	w.nodes[0].stop() // which waits for the Mover
}

// A node whose target can't take packets gives the address up at once, and one that is no successor any more, too.
func testGivesUp(t *testing.T) {
	tests := map[string]func(*testing.T){}
	for name, lose := range map[string]func(w *world){
		"target": func(w *world) {
			w.nodes[0].set(func(k *kernel) { k.unready = true })
			w.nodes[0].driver.TargetsChanged()
		},
		"successors": func(w *world) {
			w.change(0, func(b *v2.AddressBlock) { b.Floating.Successors = b.Floating.Successors[1:] })
		},
	} {
		tests[name] = func(t *testing.T) {
			w := newWorld(t, 3, 1)
			began := time.Now()
			lose(w)
			w.settled("the next one has it", func(_ int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[1]) })
			if gap := w.silence(w.blocks[0], began); gap > testkit.Limit(500*time.Millisecond) {
				t.Errorf("nobody answered for %s", gap)
			}
		}
	}
	together(t, tests)
}

// The next holder begins when it sees the record, so that one who can't stop doesn't write it before its time is over.
func testRecordIsWrittenAfterTheEnd(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.nodes[0].set(func(k *kernel) { k.deaf, k.unready = true, true })
	w.nodes[0].driver.TargetsChanged()
	w.settled("the next one has it", func(_ int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[1]) })
	before, after := w.nodes[0].spans(w.blocks[0]), w.nodes[1].spans(w.blocks[0])
	if both := before[len(before)-1].to.Sub(after[0].from); both > 0 {
		t.Errorf("both answered for %s", both)
	}
}

// The pod on the holder was replaced: the record names the new one.
func testPodIsReplaced(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.change(0, func(b *v2.AddressBlock) { b.Floating.Successors[0].PodUID = "next" })
	w.settled("the record names the new pod", func(_ int, b *v2.AddressBlock) error {
		if h := b.Floating.Holding; h.PodUID != "next" || h.Holder != "n0" || len(w.answering(w.blocks[0])) != 1 {
			return fmt.Errorf("%+v", h)
		}
		return nil
	})
}

func testReleased(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.change(0, func(b *v2.AddressBlock) { b.Floating.ReleasedAt = new(metav1.Now()) })
	w.settled("nobody has it", func(_ int, b *v2.AddressBlock) error {
		if _, labelled := b.Labels[v2.LabelFloatingHolder]; labelled || b.Floating.Holding.Holder != "" || len(w.answering(w.blocks[0])) > 0 {
			return fmt.Errorf("%v %+v, %q", b.Labels, b.Floating.Holding, w.answering(w.blocks[0]))
		}
		return nil
	})
}

// An address that isn't there any more isn't answered for, whatever the other nodes and the API server say of it.
func testGone(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.claimed()
	w.nodes[0].noAPI.Store(true)
	w.nodes[0].driver.Changed(w.block(0), nil)
	testkit.Eventually(t, time.Second, "nobody answers", func() error {
		if who := w.answering(w.blocks[0]); len(who) > 0 {
			return fmt.Errorf("%q", who)
		}
		return nil
	})
}

// A block that a write finds to be gone is forgotten, though the watch may still show it.
func testGoneIsFoundByAWrite(t *testing.T) {
	w := newWorld(t, 1, 1)
	n := w.nodes[0]
	n.blind.Store(true)
	b := w.block(0)
	w.api.Drop(blockResource, b.Name)
	n.set(func(k *kernel) { k.unready = true })
	n.driver.TargetsChanged()
	testkit.Eventually(t, 10*time.Second, "nobody answers", func() error {
		if who := w.answering(w.blocks[0]); len(who) > 0 {
			return fmt.Errorf("%q", who)
		}
		return nil
	})
	testkit.Eventually(t, 10*time.Second, "the write has found it", func() error {
		left := make(chan int, 1)
		n.driver.tell(t.Context(), func() { left <- len(n.driver.blocks) + len(n.driver.fed) })
		select {
		case some := <-left:
			if some > 0 {
				return fmt.Errorf("the node has %d objects", some)
			}
		case <-t.Context().Done():
		}
		return nil
	})
	n.set(func(k *kernel) { k.unready = false })
	n.driver.Changed(nil, b)
	n.stop()
	if len(n.driver.blocks)+len(n.driver.fed) > 0 {
		t.Errorf("the node has %v still", n.driver.blocks)
	}
}

// A program that starts again soon goes on. The kernel answers meanwhile.
func testRestart(t *testing.T) {
	w := newWorld(t, 3, 3)
	began := time.Now()
	w.nodes[0].stop()
	w.nodes[0].start()
	w.settled("it has answered for longer than the kernel does by itself", func(i int, b *v2.AddressBlock) error {
		if spans := w.nodes[i].spans(w.blocks[i]); spans[len(spans)-1].to.Before(began.Add(2 * holding.Lease)) {
			return fmt.Errorf("%+v", spans)
		}
		return w.answeredBy(b, w.nodes[i])
	})
	for i, id := range w.blocks {
		if h := w.block(i).Floating.Holding; h.Epoch != 1 {
			t.Errorf("it has moved: %+v", h)
		}
		if gap := w.silence(id, began); gap > testkit.Limit(500*time.Millisecond) {
			t.Errorf("nobody answered for %s", gap)
		}
	}
}

// A program that will end prepares the next nodes and gives its addresses up, as far as others are there, and waits no longer than it is told to.
func testLeaves(t *testing.T) {
	asked := make(moving, 1)
	w := newWorld(t, 3, 3, func(w *world) { w.nodes[0].mover = asked })
	w.claimed()
	began := time.Now()
	w.nodes[0].driver.Leave(t.Context())
	if what := <-asked; what != "p-0 to n1" {
		t.Errorf("asked for %q", what)
	}
	if h := w.block(0).Floating.Holding; h.Holder == "n0" {
		t.Errorf("it has left, and %+v", h)
	}
	w.settled("another node answers", func(i int, b *v2.AddressBlock) error {
		if i == 0 {
			return w.answeredByAnother(b, "n0")
		}
		return w.answeredBy(b, w.nodes[i])
	})
	if gap := w.silence(w.blocks[0], began); gap > testkit.Limit(500*time.Millisecond) {
		t.Errorf("nobody answered for %s", gap)
	}
	w.nodes[1].noAPI.Store(true)
	within, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	w.nodes[1].driver.Leave(within)
	if err := w.answeredBy(w.block(1), w.nodes[1]); err != nil {
		t.Errorf("without the API server: %v", err)
	}
}

// Somebody deletes the label by which the holder reads what it has: the holder writes it again, and goes on.
func testLostLabel(t *testing.T) {
	w := newWorld(t, 3, 3)
	w.claimed()
	for _, value := range []string{"", "n2", "nobody"} {
		w.change(0, func(b *v2.AddressBlock) {
			delete(b.Labels, v2.LabelFloatingHolder)
			if value != "" {
				b.Labels[v2.LabelFloatingHolder] = value
			}
		})
		w.settled(fmt.Sprintf("the label %q is mended", value), func(i int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[i]) })
	}
	// Without the API server it can't be written, and is when that is back.
	w.nodes[0].noAPI.Store(true)
	w.change(0, func(b *v2.AddressBlock) { delete(b.Labels, v2.LabelFloatingHolder) })
	<-time.After(2 * time.Second)
	w.nodes[0].noAPI.Store(false)
	w.settled("the label is mended", func(i int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[i]) })
	if h := w.block(0).Floating.Holding; h.Epoch != 1 {
		t.Errorf("the address has moved: %+v", h)
	}
}

// Datagrams of others don't keep a dead node alive, nor take an address from one that lives: neither repeated ones of nodes, whole, cut or
// changed, nor those without the key.
func testForgedDatagrams(t *testing.T) {
	var mu sync.Mutex
	var recorded [][]byte
	w := newWorld(t, 3, 3, func(w *world) {
		for _, n := range w.nodes {
			n.heard = func(datagram []byte) {
				mu.Lock()
				defer mu.Unlock()
				recorded = append(recorded, datagram)
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	var attacker sync.WaitGroup
	defer attacker.Wait()
	defer cancel()
	attacker.Go(func() { w.attack(ctx, &mu, &recorded) })
	<-time.After(2 * time.Second)
	for i := range w.blocks {
		if err := w.answeredBy(w.block(i), w.nodes[i]); err != nil {
			t.Error(err)
		}
		if h := w.block(i).Floating.Holding; h.Epoch != 1 {
			t.Errorf("address %d has epoch %d", i, h.Epoch)
		}
	}
	cut := time.Now()
	w.nodes[0].cutPower()
	w.settled("a dead node is dead", func(i int, b *v2.AddressBlock) error {
		if i == 0 {
			return w.answeredByAnother(b, "n0")
		}
		return w.answeredBy(b, w.nodes[i])
	})
	// What was recorded last counts for the silence, since the nodes can't know that it is repeated.
	if took := time.Since(cut); took > testkit.Limit(6*time.Second) {
		t.Errorf("taken over after %s", took)
	}
}

// attack repeats recorded datagrams until ctx ends, from the address of the node that sent them.
func (w *world) attack(ctx context.Context, mu *sync.Mutex, recorded *[][]byte) {
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(w.nodes[0].addr, 0)))
	if err != nil {
		w.t.Error(err)
		return
	}
	defer conn.Close()
	for ctx.Err() == nil {
		mu.Lock()
		all := slices.Clone((*recorded)[max(0, len(*recorded)-50):])
		mu.Unlock()
		for _, d := range all {
			changed := slices.Clone(d)
			changed[len(changed)/2] ^= 1
			for _, forged := range [][]byte{d, changed, d[:len(d)-1], {}} {
				for _, n := range w.nodes {
					_, _ = conn.WriteToUDPAddrPort(forged, netip.AddrPortFrom(n.addr, uint16(w.port)))
				}
			}
		}
		<-time.After(20 * time.Millisecond)
	}
}
