package floating

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	corefake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

const (
	claimResource = "addressclaims"
	blockResource = "addressblocks"
	poolResource  = "addresspools"
)

func newServer(t *testing.T) *fakeapi.Server {
	return fakeapi.New(t, map[string]runtime.Object{blockResource: &v2.AddressBlockList{}})
}

// replica is a controller whose caches show what View gave them.
type replica struct {
	*Controller
	*fakeapi.View
	ledger *ledger.Ledger
	events *events.FakeRecorder
	core   *corefake.Clientset
	lost   pools.Claims
}

func newReplica(t *testing.T, s *fakeapi.Server, now func() time.Time) *replica {
	t.Helper()
	client := fake.NewSimpleClientset()
	client.PrependReactor("*", "*", s.React)
	inf := externalversions.NewSharedInformerFactory(client, 0).Coil().V2()
	r := &replica{ledger: ledger.New(now), events: events.NewFakeRecorder(10000), core: corefake.NewSimpleClientset()}
	var err error
	r.Controller, err = New(Config{
		Coil: client, Core: r.core, Claims: inf.AddressClaims(), Blocks: inf.AddressBlocks(), Pools: inf.AddressPools(),
		Ledger: r.ledger, LostBlocks: func(string) pools.Claims { return r.lost }, Recorder: r.events,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.now = now
	r.View = s.View(map[string]cache.Indexer{
		claimResource: inf.AddressClaims().Informer().GetIndexer(),
		blockResource: inf.AddressBlocks().Informer().GetIndexer(),
		poolResource:  inf.AddressPools().Informer().GetIndexer(),
	}, func(resource string, before, after fakeapi.Object) {
		if resource != blockResource {
			return
		}
		old, _ := before.(*v2.AddressBlock)
		b, _ := after.(*v2.AddressBlock)
		if b == nil {
			if old != nil {
				r.ledger.Miss(old.Name)
			}
		} else {
			r.ledger.See(b)
		}
		if old != nil || b != nil {
			r.blockChanged(old, b)
		}
	})
	return r
}

func newClaim(name string, spec v2.AddressClaimSpec) *v2.AddressClaim {
	spec.Pool = "p"
	return &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: spec}
}

// history lets two controllers that both believe to lead work on the same claims.
type history struct {
	t        *testing.T
	r        *rand.Rand
	s        *fakeapi.Server
	at       time.Time
	replicas []*replica
}

func (h *history) now() time.Time { return h.at }

// TestRandomHistories has two controllers, both of which believe to lead, caches that lag, lost answers, kills, claims that come, change and go,
// pods that take addresses, and blocks that are lost or deleted. At no time two blocks have an address, and no address changes its
// owner before its cool-down is over. In the end each claim has what it asks for, as far as there is.
func TestRandomHistories(t *testing.T) {
	for seed := range uint64(150) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			h := &history{t: t, r: rand.New(rand.NewPCG(seed, 9)), s: newServer(t), at: time.Unix(1e6, 0)}
			h.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/28"))
			h.s.Fault = func(verb, _ string) (before, after error) {
				if verb == "get" || verb == "list" {
					return nil, nil
				}
				switch h.r.IntN(12) {
				case 0:
					return fakeapi.ErrLost, nil
				case 1:
					return nil, fakeapi.ErrLost
				}
				return nil, nil
			}
			h.replicas = []*replica{newReplica(t, h.s, h.now), newReplica(t, h.s, h.now)}
			free := map[string]time.Time{} // when an address may get another owner
			owner := map[string]string{}
			for step := range 200 {
				h.step()
				h.check(owner, free)
				if t.Failed() {
					t.Fatalf("at step %d", step)
				}
			}
			h.s.Fault = nil
			h.settle()
			h.check(owner, free)
			h.checkEnd()
		})
	}
}

var keys = []string{"ns/a", "ns/b", "ns/c"}

func (h *history) step() {
	r := h.replicas[h.r.IntN(2)]
	switch h.r.IntN(12) {
	case 0, 1:
		h.changeClaim()
	case 2, 3, 4:
		r.Deliver(h.r.IntN(6))
	case 5, 6, 7, 8:
		// Errors are tried again by the next step that picks the claim.
		_ = r.sync(h.t.Context(), keys[h.r.IntN(len(keys))])
	case 9:
		h.at = h.at.Add(time.Duration(h.r.IntN(40)) * time.Second)
	case 10:
		h.others()
	case 11:
		if h.r.IntN(4) == 0 { // killed; the next one's caches show less
			i := slices.Index(h.replicas, r)
			h.replicas[i] = newReplica(h.t, h.s, h.now)
			h.replicas[i].Deliver(h.r.IntN(h.replicas[i].Behind() + 1))
		}
	}
}

func (h *history) changeClaim() {
	key := keys[h.r.IntN(len(keys))]
	c := fakeapi.Find[*v2.AddressClaim](h.s, claimResource, key)
	spec := v2.AddressClaimSpec{CoolDownSeconds: 60, Count: new(int32(h.r.IntN(8)))}
	if h.r.IntN(3) == 0 {
		spec.Count, spec.Addresses = nil, []string{fmt.Sprintf("10.0.0.%d/31", 2*h.r.IntN(8)), fmt.Sprintf("10.0.0.%d", h.r.IntN(16))}
	}
	switch {
	case c == nil:
		h.s.Put(claimResource, newClaim(key[3:], spec))
	case h.r.IntN(4) == 0:
		h.s.Drop(claimResource, key)
	default:
		spec.Pool = "p"
		c.Spec = spec
		h.s.Put(claimResource, c)
	}
}

// others: a node gets a block or gives one back, an admin deletes a block, a block's mark is taken away, or one is lost with a backup.
func (h *history) others() {
	name := fmt.Sprintf("p-%d", h.r.IntN(16))
	b := fakeapi.Find[*v2.AddressBlock](h.s, blockResource, name)
	switch {
	case b == nil:
		_, index, _ := pools.SplitBlockName(name)
		h.s.Put(blockResource, plantest.Block("p", index, fmt.Sprintf("10.0.0.%d/32", index), "node"))
	case b.Labels[v2.LabelNode] != "":
		h.s.Drop(blockResource, name)
	case h.r.IntN(2) == 0 && b.DeletionTimestamp == nil:
		b.DeletionTimestamp = new(metav1.Now())
		h.s.Put(blockResource, b)
	case h.r.IntN(2) == 0:
		delete(b.Labels, []string{v2.LabelReserved, v2.LabelFloating}[h.r.IntN(2)])
		h.s.Put(blockResource, b)
	}
}

// check looks at the world as the API server has it.
func (h *history) check(owner map[string]string, free map[string]time.Time) {
	h.t.Helper()
	seen := map[netip.Prefix]string{}
	for _, b := range fakeapi.All[*v2.AddressBlock](h.s, blockResource) {
		p := netip.MustParsePrefix(*b.IPv4)
		if seen[p] != "" {
			h.t.Errorf("%s and %s have %s", seen[p], b.Name, p)
		}
		seen[p] = b.Name
		who := claims.Key(b)
		if who == "" {
			who = "pods"
		}
		if was := owner[*b.IPv4]; was != "" && was != who && was != "pods" && h.at.Before(free[*b.IPv4]) {
			h.t.Errorf("%s was of %s, and is of %s %s too early", *b.IPv4, was, who, free[*b.IPv4].Sub(h.at))
		}
		owner[*b.IPv4] = who
		if b.Floating != nil {
			free[*b.IPv4] = h.at.Add(time.Minute) // it may be released now at the earliest
			if b.Floating.ReleasedAt != nil {
				free[*b.IPv4] = b.Floating.ReleasedAt.Add(time.Minute)
			}
		}
	}
}

// settle lets all events arrive, and time pass, until nothing is left to do.
func (h *history) settle() {
	for range 8 {
		for range 4 {
			for _, r := range h.replicas {
				r.DeliverAll()
				for _, key := range keys {
					_ = r.sync(h.t.Context(), key)
				}
			}
		}
		h.at = h.at.Add(2 * time.Minute)
	}
	for _, r := range h.replicas {
		r.DeliverAll()
		for _, key := range keys {
			if err := r.sync(h.t.Context(), key); err != nil && !strings.Contains(err.Error(), "again after") {
				h.t.Errorf("%s: %v", key, err)
			}
		}
	}
}

func (h *history) checkEnd() {
	h.t.Helper()
	all := fakeapi.All[*v2.AddressBlock](h.s, blockResource)
	of := map[string][]string{}
	for _, b := range all {
		if b.Labels[v2.LabelNode] != "" {
			continue
		}
		if b.Labels[v2.LabelReserved] != v2.ReservedValue || b.Labels[v2.LabelFloating] != v2.FloatingValue || b.Floating.ReleasedAt != nil || b.DeletionTimestamp != nil {
			h.t.Errorf("%s is %+v with labels %v", b.Name, *b.Floating, b.Labels)
		}
		of[claims.Key(b)] = append(of[claims.Key(b)], b.Name)
	}
	for _, key := range keys {
		c := fakeapi.Find[*v2.AddressClaim](h.s, claimResource, key)
		if c == nil {
			if len(of[key]) > 0 {
				h.t.Errorf("%s is gone, and has %v", key, of[key])
			}
			continue
		}
		var told []string
		for _, a := range c.Status.Addresses {
			told = append(told, a.Block)
		}
		slices.Sort(told)
		slices.Sort(of[key])
		if !slices.Equal(told, of[key]) {
			h.t.Errorf("%s says that it has %v, and has %v", key, told, of[key])
		}
		ready := meta.IsStatusConditionTrue(c.Status.Conditions, v2.ClaimReady)
		if c.Spec.Count != nil {
			if want := int(*c.Spec.Count); len(told) > want || len(told) < want && len(all) < 16 || ready != (len(told) == want) {
				h.t.Errorf("%s has %d addresses of %d, %d are free: %+v", key, len(told), want, 16-len(all), c.Status)
			}
			continue
		}
		pool, err := pools.Parse(plantest.Pool("p", 0, "10.0.0.0/28").Spec)
		if err != nil {
			h.t.Fatal(err)
		}
		want, _ := claims.Indexes(c.Spec.Addresses, pool)
		for _, i := range want {
			name := pools.BlockName("p", i)
			if b := fakeapi.Find[*v2.AddressBlock](h.s, blockResource, name); b == nil || claims.Key(b) != key && ready {
				h.t.Errorf("%s lists %s, which is %+v: %+v", key, name, b, c.Status)
			}
		}
		if ready != (len(told) == len(want)) {
			h.t.Errorf("%s has %d of %d addresses, and says %+v", key, len(told), len(want), c.Status)
		}
	}
}
