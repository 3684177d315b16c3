package blockrequest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// TestRandomHistories lets two controllers, as many as believe to lead at once, work
// on the same requests with caches that lag, lost answers, kills and nodes that give
// blocks back. At no time may two blocks share an address; in the end each request
// has one block, or was refused by a pool that is full.
func TestRandomHistories(t *testing.T) {
	for seed := range 120 {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { newHistory(t, uint64(seed)).run() })
	}
}

type history struct {
	t        *testing.T
	rng      *rand.Rand
	api      fakeAPI
	replicas []*replica
	asked    []string
	uids     map[string]types.UID
}

func newHistory(t *testing.T, seed uint64) *history {
	h := &history{t: t, rng: rand.New(rand.NewPCG(seed, 7)), api: newFakeAPI(t), uids: map[string]types.UID{}}
	// The two pools overlap, and one of them is soon full.
	h.api.addPool(plantest.Pool("default", 1, "10.0.0.0/27"))
	h.api.addPool(plantest.Pool("small", 0, "10.0.0.16/30"))
	h.api.Fault = func(verb, _ string) (before, after error) {
		if verb != "create" && verb != "update" {
			return nil, nil
		}
		switch h.rng.IntN(12) {
		case 0:
			return fakeapi.ErrLost, nil
		case 1:
			return nil, fakeapi.ErrLost
		}
		return nil, nil
	}
	for range 2 {
		h.replicas = append(h.replicas, newReplica(t, h.api, 0, testNode("node")))
	}
	return h
}

func (h *history) run() {
	for range 150 {
		h.step()
		h.requireDisjoint()
	}
	h.api.Fault = nil
	h.settle()
	h.check()
}

func (h *history) step() {
	r := h.replicas[h.rng.IntN(len(h.replicas))]
	switch h.rng.IntN(10) {
	case 0, 1:
		name := fmt.Sprintf("r-%d", len(h.asked))
		h.uids[name] = h.api.addRequest(name, "node", []string{"default", "default", "small"}[h.rng.IntN(3)]).UID
		h.asked = append(h.asked, name)
	case 2, 3, 4:
		for range h.rng.IntN(5) {
			r.Deliver(1)
		}
	case 5, 6, 7:
		if len(h.asked) > 0 {
			// Errors are tried again by the next step that picks the request.
			_ = r.sync(h.t.Context(), h.asked[h.rng.IntN(len(h.asked))])
		}
	case 8:
		h.nodeActs()
	case 9:
		h.restart(r)
	}
}

// restart kills a replica; the one that follows has caches that lag as well, and has
// looked at the API server before it works.
func (h *history) restart(r *replica) {
	if h.rng.IntN(4) != 0 {
		return
	}
	next := newReplica(h.t, h.api, h.rng.IntN(h.api.Events()+1), testNode("node"))
	if err := next.survey(h.t.Context()); err != nil {
		h.t.Fatal(err)
	}
	for i := range h.replicas {
		if h.replicas[i] == r {
			h.replicas[i] = next
		}
	}
}

// nodeActs does one thing that coild does: it lets go of a block that is being deleted,
// gives back one that it got, or deletes a request that has its answer.
func (h *history) nodeActs() {
	for name, b := range h.api.blocks() {
		if b.DeletionTimestamp != nil || h.rng.IntN(4) == 0 {
			h.api.dropBlock(name)
			return
		}
	}
	for name, r := range h.api.requests() {
		if len(r.Status.Conditions) > 0 && h.rng.IntN(2) == 0 {
			h.api.dropRequest(name)
			return
		}
	}
}

// settle lets everything run until nothing changes any more.
func (h *history) settle() {
	for range 100 {
		before := h.api.Events()
		for _, r := range h.replicas {
			r.DeliverAll()
			for _, name := range h.asked {
				_ = r.sync(h.t.Context(), name)
			}
		}
		for name, b := range h.api.blocks() {
			if b.DeletionTimestamp != nil {
				h.api.dropBlock(name)
				before = -1
			}
		}
		if h.api.Events() == before {
			return
		}
	}
	h.t.Fatal("no end of changes")
}

func (h *history) requireDisjoint() {
	h.t.Helper()
	owner := map[netip.Addr]string{}
	for name, b := range h.api.blocks() {
		p := netip.MustParsePrefix(*b.IPv4)
		for a := p.Addr(); p.Contains(a); a = a.Next() {
			// Only one name can have an address of one pool. Pools that overlap are the
			// admin's mistake, and two caches that lag can't tell.
			key := b.Labels[v2.LabelPool]
			if other, ok := owner[a]; ok && h.api.blocks()[other].Labels[v2.LabelPool] == key {
				h.t.Fatalf("%s is in %s and %s", a, other, name)
			}
			owner[a] = name
		}
	}
}

func (h *history) check() {
	blocksOf := map[types.UID][]string{}
	for name, b := range h.api.blocks() {
		uid := types.UID(b.Labels[v2.LabelRequest])
		blocksOf[uid] = append(blocksOf[uid], name)
	}
	for name, r := range h.api.requests() {
		if len(r.Status.Conditions) != 1 {
			h.t.Errorf("request %s has no answer", name)
			continue
		}
		names := blocksOf[r.UID]
		switch c := r.Status.Conditions[0]; {
		case c.Type == v2.BlockRequestFailed:
			if c.Reason != v2.ReasonPoolExhausted {
				h.t.Errorf("request %s failed: %s", name, c.Message)
			}
		case len(names) > 1:
			h.t.Errorf("request %s has the blocks %q", name, names)
		case len(names) == 1 && names[0] != r.Status.AddressBlockName:
			h.t.Errorf("request %s was answered with %s, but has block %s", name, r.Status.AddressBlockName, names[0])
		}
	}
	for _, b := range h.api.blocks() {
		if owner := metav1.GetControllerOf(b); owner == nil || owner.UID != h.api.pools()[b.Labels[v2.LabelPool]].UID {
			h.t.Errorf("block %s is not owned by its pool", b.Name)
		}
	}
}
