package floating

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/testkit"
)

// scripted is a Place that notes what it is asked, and waits and fails as a test wants.
type scripted struct {
	mu    sync.Mutex
	calls []string
	// hang blocks calls of this kind until it is closed, or their context ends; fails is how many calls of a kind fail.
	hang  map[string]chan struct{}
	fails map[string]int
}

func (p *scripted) Answer(ctx context.Context, o Order) error {
	call := fmt.Sprintf("answer %d", o.Epoch)
	if o.Announce {
		call += " and tell"
	}
	return p.do(ctx, call)
}

func (p *scripted) Stop(ctx context.Context, _ Address) error { return p.do(ctx, "stop") }

func (p *scripted) do(ctx context.Context, call string) error {
	p.mu.Lock()
	p.calls = append(p.calls, call)
	kind, _, _ := strings.Cut(call, " ")
	hang := p.hang[kind]
	p.fails[kind]--
	fails := p.fails[kind] >= 0
	p.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if fails {
		return errors.New("netlink is busy")
	}
	return nil
}

func (p *scripted) saw(t *testing.T, want ...string) {
	t.Helper()
	testkit.Eventually(t, 5*time.Second, "calls of Place", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !slices.Equal(p.calls, want) {
			return fmt.Errorf("%q, want %q", p.calls, want)
		}
		return nil
	})
}

// newScripted returns orders, which end with the test.
func newScripted(t *testing.T) (context.Context, *orders, *scripted) {
	p := &scripted{hang: map[string]chan struct{}{}, fails: map[string]int{}}
	o := newOrders(p, newMetrics(prometheus.NewRegistry()))
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() {
		cancel()
		o.wait()
	})
	return ctx, o, p
}

var here = Address{ID: "u", Block: "p-7"}

func until(d time.Duration, epoch int64) Order {
	return Order{Address: here, Epoch: epoch, Until: time.Now().Add(testkit.Timeout(d))}
}

// An Answer that hangs is ended by a Stop, which comes last.
func TestStopOvertakesAnswer(t *testing.T) {
	ctx, o, p := newScripted(t)
	p.hang["answer"] = make(chan struct{})
	o.answer(ctx, until(time.Minute, 1))
	p.saw(t, "answer 1")
	o.answer(ctx, until(time.Minute, 2))
	o.stop(ctx, here)
	p.saw(t, "answer 1", "stop")
	if !o.stopped(here.ID)(ctx) {
		t.Error("it didn't stop")
	}
}

// A Stop that fails is tried again until it is done, and nobody is told sooner.
func TestStopIsRepeated(t *testing.T) {
	ctx, o, p := newScripted(t)
	p.fails["stop"] = 3
	o.answer(ctx, until(time.Minute, 1))
	p.saw(t, "answer 1")
	o.stop(ctx, here)
	o.stop(ctx, here)
	p.saw(t, "answer 1", "stop", "stop", "stop", "stop")
	if !o.stopped(here.ID)(ctx) {
		t.Error("it didn't stop")
	}
}

// Who waits for a Stop that can't be done waits for the end of the time for which the node was to answer, and no longer.
func TestStopThatFailsEndsByItself(t *testing.T) {
	ctx, o, p := newScripted(t)
	p.fails["stop"] = 1000
	last := until(300*time.Millisecond, 1)
	o.answer(ctx, last)
	o.stop(ctx, here)
	within, cancel := context.WithTimeout(ctx, testkit.Timeout(10*time.Second))
	defer cancel()
	if !o.stopped(here.ID)(within) {
		t.Error("the end isn't told")
	}
	if left := time.Until(last.Until); left > 0 {
		t.Errorf("it is said to have stopped %s too early", left)
	}
}

// A node that is told to answer again hasn't stopped.
func TestStopIsReplaced(t *testing.T) {
	ctx, o, p := newScripted(t)
	p.hang["stop"] = make(chan struct{})
	o.answer(ctx, until(time.Minute, 1))
	p.saw(t, "answer 1")
	o.stop(ctx, here)
	stopped := o.stopped(here.ID)
	p.saw(t, "answer 1", "stop")
	o.answer(ctx, until(time.Minute, 2))
	close(p.hang["stop"])
	if stopped(ctx) {
		t.Error("it is said to have stopped, though it goes on")
	}
	p.saw(t, "answer 1", "stop", "answer 2")
}

// An Answer that fails is tried again while there is something to answer for.
func TestAnswerIsRepeated(t *testing.T) {
	ctx, o, p := newScripted(t)
	p.fails["answer"] = 2
	o.answer(ctx, until(time.Minute, 1))
	p.saw(t, "answer 1", "answer 1", "answer 1")
}

// Hosts of the link are told with the first Answer that is done in time, and once.
func TestAnnouncementIsNotLost(t *testing.T) {
	ctx, o, p := newScripted(t)
	hang := make(chan struct{})
	p.hang["answer"] = hang
	first := until(300*time.Millisecond, 1)
	first.Announce = true
	o.answer(ctx, first)
	p.saw(t, "answer 1 and tell")
	o.answer(ctx, until(time.Minute, 2)) // as a holder goes on
	p.saw(t, "answer 1 and tell", "answer 2 and tell")
	close(hang)
	o.answer(ctx, until(time.Minute, 3))
	p.saw(t, "answer 1 and tell", "answer 2 and tell", "answer 3")
}

// An announcement that wasn't made before a Stop isn't made after it.
func TestStopForgetsAnnouncement(t *testing.T) {
	ctx, o, p := newScripted(t)
	p.hang["answer"] = make(chan struct{})
	first := until(time.Minute, 1)
	first.Announce = true
	o.answer(ctx, first)
	p.saw(t, "answer 1 and tell")
	o.stop(ctx, here)
	p.saw(t, "answer 1 and tell", "stop")
	o.answer(ctx, until(time.Minute, 2))
	p.saw(t, "answer 1 and tell", "stop", "answer 2")
}

// Nothing is kept of an address for which the node doesn't answer any more.
func TestOrdersAreForgotten(t *testing.T) {
	ctx, o, p := newScripted(t)
	o.answer(ctx, until(time.Minute, 1))
	p.saw(t, "answer 1")
	o.stop(ctx, here)
	testkit.Eventually(t, 5*time.Second, "nothing is kept", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.hands) > 0 {
			return fmt.Errorf("%d addresses", len(o.hands))
		}
		return nil
	})
}
