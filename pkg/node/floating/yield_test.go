package floating

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// A pod isn't ready any more, and lives, or is dead and its network is still there: another node is prepared before that takes the address.
func TestYields(t *testing.T) {
	together(t, map[string]func(*testing.T){
		"the pod": testUnreadyPod, "the successors": testUnreadyToController, "another pod of the node": testOtherPodOfNode, "gone": testGonePod,
		"a copy that hangs": testCopyHangs, "ready again": testReadyAgain, "while it moves": testUnreadyWhileItMoves,
	})
}

// yielding is a world whose first node prepares others by m, and has time for that.
func yielding(t *testing.T, m Mover) *world {
	w := newWorld(t, 3, 1, func(w *world) { w.nodes[0].mover, w.nodes[0].copyTime = m, time.Minute })
	w.claimed()
	return w
}

// target changes what the first node's target is.
func (w *world) target(change func(*kernel)) {
	w.nodes[0].set(change)
	w.nodes[0].driver.TargetsChanged()
}

func unready(k *kernel) { k.unready = true }

// handsOver lets the first node have prepared another one, which gets the address then.
func (w *world) handsOver(asked moving, to int) {
	w.t.Helper()
	says(w.t, asked, fmt.Sprintf("p-0 to n%d", to))
	w.settled("the next one has it", func(_ int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[to]) })
	if h := w.block(0).Floating.Holding; h.Epoch != 2 || !h.HandedOver {
		w.t.Errorf("it wasn't handed over: %+v", h)
	}
}

// says waits for what a Mover says.
func says(t *testing.T, mover <-chan string, want string) {
	t.Helper()
	select {
	case what := <-mover:
		if what != want {
			t.Errorf("it says %q, want %q", what, want)
		}
	case <-time.After(testkit.Timeout(10 * time.Second)):
		t.Fatalf("it doesn't say %q", want)
	}
}

// answers waits until the first node prepares another one, and answers still.
func (w *world) answers() {
	w.t.Helper()
	n := w.nodes[0]
	testkit.Eventually(w.t, 10*time.Second, "it prepares another node, and answers", func() error {
		is := make(chan bool, 1)
		n.driver.tell(w.t.Context(), func() {
			f := n.driver.fed[w.blocks[0]]
			is <- f != nil && f.yields != nil && f.moving != ""
		})
		if !<-is {
			return errors.New("it prepares no other node")
		}
		return w.answeredBy(w.block(0), n)
	})
}

func testUnreadyPod(t *testing.T) {
	asked := make(moving)
	w := yielding(t, asked)
	w.target(unready)
	w.answers()
	w.handsOver(asked, 1)
}

// The controller sees first that the pod isn't ready: the node is no successor any more, and answers until the next one is prepared. An order that
// changes meanwhile changes nothing.
func testUnreadyToController(t *testing.T) {
	asked := make(moving)
	w := yielding(t, asked)
	w.change(0, func(b *v2.AddressBlock) { b.Floating.Successors = b.Floating.Successors[1:] })
	w.answers()
	w.target(unready)
	s := w.block(0).Floating.Successors
	w.change(0, func(b *v2.AddressBlock) { b.Floating.Successors = []v2.FloatingNode{s[1], s[0]} })
	w.handsOver(asked, 1)
}

// Another pod of the node is to have the address: connections are in the one that has it.
func testOtherPodOfNode(t *testing.T) {
	asked := make(moving)
	w := yielding(t, asked)
	w.change(0, func(b *v2.AddressBlock) { b.Floating.Successors[0].PodUID = "next" })
	w.answers()
	w.handsOver(asked, 1)
}

// Nobody waits for connections that are gone with the pod.
func testGonePod(t *testing.T) {
	asked := make(moving)
	w := yielding(t, asked)
	w.target(func(k *kernel) { k.gone = true })
	w.settled("the next one has it", func(_ int, b *v2.AddressBlock) error { return w.answeredBy(b, w.nodes[1]) })
	select {
	case what := <-asked:
		t.Errorf("asked for %q", what)
	default:
	}
}

// Another node that can't be prepared gets the address nevertheless.
func testCopyHangs(t *testing.T) {
	w := newWorld(t, 3, 1, func(w *world) { w.nodes[0].mover = make(moving) }) // nobody is there
	w.claimed()
	w.target(unready)
	w.settled("another one has it", func(_ int, b *v2.AddressBlock) error { return w.answeredByAnother(b, "n0") })
}

func testReadyAgain(t *testing.T) {
	w, asked, n := noted(t)
	w.target(unready)
	w.answers()
	w.target(func(k *kernel) { k.unready = false })
	says(t, n.ended, "n1")
	if h := w.block(0).Floating.Holding; h.Epoch != 1 {
		t.Errorf("it has moved: %+v", h)
	}
	w.target(unready)
	w.answers()
	w.handsOver(asked, 1)
}

// A copy that is under way goes on.
func testUnreadyWhileItMoves(t *testing.T) {
	w, asked, n := noted(t)
	w.change(0, func(b *v2.AddressBlock) { b.Floating.MovingTo = "n2" })
	says(t, n.began, "n2")
	w.target(unready)
	w.answers()
	w.handsOver(asked, 2)
	if len(n.began) > 0 {
		t.Errorf("it prepares %s as well", <-n.began)
	}
}

// noting is a Mover that says when it begins and ends.
type noting struct {
	Mover
	began, ended chan string
}

// noted is a yielding world whose first node notes that, too.
func noted(t *testing.T) (*world, moving, noting) {
	asked := make(moving)
	n := noting{asked, make(chan string, 9), make(chan string, 9)}
	w := yielding(t, n)
	return w, asked, n
}

func (n noting) Move(ctx context.Context, a Address, to string) {
	n.began <- to
	n.Mover.Move(ctx, a, to)
	n.ended <- to
}
