package spread

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/testkit"
)

// kernel answers for addresses until some time.
type kernel struct {
	mu    sync.Mutex
	until map[string]time.Time
	epoch map[string]int64
	// adopted are the IDs of orders of an earlier life.
	adopted []string
	busy    map[string]bool
	twice   bool // two calls for an address were under way at once
	fails   func() bool
}

func (k *kernel) do(id string, change func()) error {
	k.mu.Lock()
	k.twice = k.twice || k.busy[id]
	k.busy[id] = true
	k.mu.Unlock()
	runtime.Gosched()
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.busy, id)
	if k.fails() {
		return errors.New("the kernel is busy")
	}
	change()
	return nil
}

func (k *kernel) Answer(_ context.Context, o floating.Order) error {
	return k.do(o.ID, func() { k.until[o.ID], k.epoch[o.ID] = o.Until, o.Epoch })
}

func (k *kernel) Adopt(orders []floating.Order) {
	for _, o := range orders {
		k.adopted = append(k.adopted, o.ID)
	}
}

func (k *kernel) Stop(_ context.Context, a floating.Address) error {
	return k.do(a.ID, func() { delete(k.until, a.ID) })
}

func (k *kernel) setFails(fails func() bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fails = fails
}

// lasts says for how long the kernel answers for an address.
func (k *kernel) lasts(id string) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return max(0, time.Until(k.until[id]))
}

// scene is a node with a Spread, and the blocks that it knows.
type scene struct {
	*Spread
	t      *testing.T
	kernel *kernel
	mu     sync.Mutex
	blocks map[string]*v2.AddressBlock
	serves bool
	uid    int
	silent bool // the Spread isn't told of blocks
	begun  int  // how often the node began to answer
}

func inScene(t *testing.T, do func(t *testing.T, sc *scene)) {
	synctest.Test(t, func(t *testing.T) {
		sc := &scene{t: t, serves: true, blocks: map[string]*v2.AddressBlock{}, kernel: &kernel{until: map[string]time.Time{}, epoch: map[string]int64{}, busy: map[string]bool{}, fails: func() bool { return false }}}
		sc.Spread = New(Config{
			Node: "n1", Place: sc.kernel,
			Block: func(name string) *v2.AddressBlock {
				sc.mu.Lock()
				defer sc.mu.Unlock()
				return sc.blocks[name]
			},
			Serves: func() bool {
				sc.mu.Lock()
				defer sc.mu.Unlock()
				return sc.serves
			},
			Begun: func() {
				sc.mu.Lock()
				defer sc.mu.Unlock()
				sc.begun++
			},
		}, nil, prometheus.NewRegistry())
		stop := testkit.Background(t.Context(), t, sc.Run)
		do(t, sc)
		stop()
		if sc.kernel.twice {
			t.Error("two calls for one address were under way at once")
		}
	})
}

// put makes a block of an address, or changes it; nil deletes it. The result is the ID of its address.
func (sc *scene) put(name string, change func(*v2.AddressBlock)) string {
	sc.mu.Lock()
	before := sc.blocks[name]
	var after *v2.AddressBlock
	if change != nil {
		if after = before.DeepCopy(); after == nil {
			sc.uid++
			after = &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{
				Name: name, UID: types.UID(fmt.Sprint(name, "-", sc.uid)), ResourceVersion: "1", Labels: map[string]string{v2.LabelFloating: v2.FloatingValue},
			}}
			after.IPv4 = new("192.0.2.1/32")
			after.Floating = &v2.Floating{Ports: []v2.FloatingPort{{Protocol: "TCP", Port: 80}}}
		}
		change(after)
	}
	if sc.blocks[name] = after; after == nil {
		delete(sc.blocks, name)
	}
	sc.mu.Unlock()
	if !sc.silent {
		sc.Changed(before, after)
	}
	if after == nil {
		return ""
	}
	return string(after.UID)
}

func (sc *scene) setServes(is bool) {
	sc.mu.Lock()
	sc.serves = is
	var all []*v2.AddressBlock
	for _, b := range sc.blocks {
		all = append(all, b)
	}
	sc.mu.Unlock()
	sc.Look(all)
}

func order(id string, lasts time.Duration) floating.Order {
	return floating.Order{Address: floating.Address{ID: id, Address: ipam.Address{}, OfServices: true}, Epoch: 7, Until: time.Now().Add(lasts)}
}

// The node answers when its holder says so, and when the block has the node among those that announce the address; not for addresses that hosts of a link find at one
// node alone, nor for those that are no Services'.
func TestAnswers(t *testing.T) {
	all := func(b *v2.AddressBlock) { b.Floating.Announcers.All = true }
	for _, c := range []struct {
		name   string
		change func(*v2.AddressBlock)
		serves bool
		want   bool
	}{
		{"by its holder alone", func(*v2.AddressBlock) {}, true, false},
		{"by all", all, true, true},
		{"by all, but this node", all, false, false},
		{"by this node", func(b *v2.AddressBlock) { b.Floating.Announcers.Nodes = []string{"n0", "n1"} }, false, true},
		{"by others", func(b *v2.AddressBlock) { b.Floating.Announcers.Nodes = []string{"n0", "n2"} }, true, false},
		{"to neighbours", func(b *v2.AddressBlock) {
			all(b)
			b.Labels[v2.LabelAnnounce] = string(v2.AnnounceNeighbor)
		}, true, false},
		{"of no Service", func(b *v2.AddressBlock) {
			all(b)
			b.Floating.Ports = nil
		}, true, false},
		{"released", func(b *v2.AddressBlock) {
			all(b)
			b.Floating.ReleasedAt = &metav1.Time{}
		}, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				sc.setServes(c.serves)
				id := sc.put("b", c.change)
				time.Sleep(time.Second)
				want := map[bool]time.Duration{true: lasting - time.Second}[c.want]
				if got := sc.kernel.lasts(id); got < want || !c.want && got > 0 {
					t.Errorf("the node answers for %s, want %s", got, want)
				}
				testkit.Check(t, sc.Answer(t.Context(), order(id, time.Minute)))
				if got := sc.kernel.epoch[id]; (got == 0) != c.want {
					t.Errorf("as its holder it answers in the epoch %d", got)
				}
				if got := sc.kernel.lasts(id); (got > time.Minute) != c.want || got == 0 {
					t.Errorf("as its holder it answers for %s", got)
				}
				testkit.Check(t, sc.Stop(t.Context(), order(id, 0).Address))
				if got := sc.kernel.lasts(id); (got > time.Minute) != c.want || (got > 0) != c.want {
					t.Errorf("when it isn't the holder any more it answers for %s", got)
				}
				want = map[bool]time.Duration{true: 1}[c.want]
				has := sc.Addresses()
				if (len(has) == 1 && has[0].ID == id && has[0].OfServices) != c.want || (len(has) > 0) != c.want || (sc.begun == 1) != c.want || (sc.begun > 0) != c.want {
					t.Errorf("it answers beside the holder for %+v, and began %d times", has, sc.begun)
				}
				testkit.Check(t, testutil.CollectAndCompare(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "n"}, sc.count), strings.NewReader(fmt.Sprintf("# TYPE n gauge\nn %d\n", want))))
				time.Sleep(10 * lasting)
				if got := sc.kernel.lasts(id); (got > 0) != c.want {
					t.Errorf("later it answers for %s", got)
				}
				sc.put("b", nil)
				time.Sleep(time.Second)
				if got := sc.kernel.lasts(id); got > 0 || sc.known(id) {
					t.Errorf("when the block is gone it answers for %s, and knows the address: %t", got, sc.known(id))
				}
			})
		})
	}
}

// Blocks, the node and the holder change at random, and the kernel fails. In the end the node answers for those for which it is to.
func TestAnyChanges(t *testing.T) {
	for seed := range uint64(200) {
		inScene(t, func(t *testing.T, sc *scene) {
			r := rand.New(rand.NewPCG(seed, 5))
			faults := rand.New(rand.NewPCG(seed, 6))
			sc.kernel.setFails(func() bool { return faults.IntN(5) == 0 })
			held := map[string]bool{} // by ID
			ids := map[string]string{}
			for range 60 {
				name := fmt.Sprint("b-", r.IntN(3))
				switch r.IntN(6) {
				case 0:
					sc.setServes(r.IntN(2) == 0)
				case 1:
					sc.put(name, nil)
				case 2:
					ids[name] = sc.put(name, func(b *v2.AddressBlock) { b.Floating.Announcers.All = !b.Floating.Announcers.All })
				case 3:
					ids[name] = sc.put(name, func(b *v2.AddressBlock) {
						b.Floating.Announcers.Nodes = [][]string{nil, {"n1"}, {"n2"}}[r.IntN(3)]
					})
				default:
					id := ids[name]
					if id == "" {
						continue
					}
					if b := sc.cfg.Block(name); b != nil && string(b.UID) == id && r.IntN(2) == 0 {
						held[id] = true
						_ = sc.Answer(t.Context(), order(id, 2*time.Second))
						continue
					}
					held[id] = false
					for sc.Stop(t.Context(), order(id, 0).Address) != nil { // until it is done
					}
				}
				if r.IntN(2) == 0 {
					time.Sleep(time.Duration(r.IntN(50)) * time.Millisecond)
				}
			}
			sc.kernel.setFails(func() bool { return false })
			for id := range held {
				testkit.Check(t, sc.Stop(t.Context(), order(id, 0).Address))
			}
			time.Sleep(3 * time.Minute)
			for name, id := range ids {
				b := sc.blocks[name]
				want := b != nil && string(b.UID) == id && (b.Floating.Announcers.All && sc.serves || len(b.Floating.Announcers.Nodes) > 0 && b.Floating.Announcers.Nodes[0] == "n1")
				if got := sc.kernel.lasts(id); (got > 0) != want {
					t.Errorf("seed %d: for %s the node answers for %s, want an answer: %t", seed, id, got, want)
				}
			}
			n := 0
			for id := range held {
				if sc.kernel.lasts(id) > 0 {
					n++
				}
			}
			for _, id := range ids {
				if _, ok := held[id]; !ok && sc.kernel.lasts(id) > 0 {
					n++
				}
			}
			if float64(n) != sc.count() {
				t.Errorf("seed %d: the node answers for %d addresses, and counts %v", seed, n, sc.count())
			}
		})
		if t.Failed() {
			return
		}
	}
}

// What an earlier life has left goes on if it is still wanted; it is given anew, or ends when it isn't wanted any more.
func TestStart(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.silent = true
		wanted := sc.put("b", func(b *v2.AddressBlock) { b.Floating.Announcers.All = true })
		other := sc.put("c", func(b *v2.AddressBlock) { b.Floating.Announcers.Nodes = []string{"n2"} })
		testkit.Check(t, sc.kernel.Answer(t.Context(), order(wanted, time.Minute))) // by an earlier life
		next := New(sc.cfg, nil, prometheus.NewRegistry())
		next.Start([]*v2.AddressBlock{sc.cfg.Block("b"), sc.cfg.Block("c")})
		if got := sc.kernel.adopted; len(got) != 1 || got[0] != wanted {
			t.Errorf("%v are adopted, want %s and not %s", got, wanted, other)
		}
		if sc.begun != 1 {
			t.Errorf("the node began to answer %d times, want 1", sc.begun)
		}
		sc.setServes(false)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- next.Run(ctx) }()
		time.Sleep(time.Second)
		if got := sc.kernel.lasts(wanted); got > 0 {
			t.Errorf("the node answers for %s when it doesn't serve any more", got)
		}
		cancel()
		testkit.Check(t, <-done)
	})
}
