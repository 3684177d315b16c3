package floating

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// scene is one controller whose caches show everything.
type scene struct {
	t  *testing.T
	s  *fakeapi.Server
	r  *replica
	at time.Time
}

func newScene(t *testing.T) *scene {
	sc := &scene{t: t, s: newServer(t), at: time.Unix(1e6, 0)}
	sc.r = newReplica(t, sc.s, func() time.Time { return sc.at })
	return sc
}

// newClaimed is a scene with a pool of 16 addresses and a claim that has what it asks for.
func newClaimed(t *testing.T, spec v2.AddressClaimSpec) (*scene, *v2.AddressClaim) {
	t.Helper()
	sc := newScene(t)
	sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/28"))
	sc.s.Put(claimResource, newClaim("c", spec))
	c, err := sc.sync("c")
	if err != nil || ready(c).Status != metav1.ConditionTrue {
		t.Fatalf("%+v, %v", c.Status, err)
	}
	return sc, c
}

// sync lets the controller work on the claim until it waits for something.
func (sc *scene) sync(name string) (*v2.AddressClaim, error) {
	sc.t.Helper()
	var err error
	for range 5 {
		sc.r.DeliverAll()
		err = sc.r.sync(sc.t.Context(), "ns/"+name)
	}
	sc.r.DeliverAll()
	if err != nil && strings.Contains(err.Error(), "to be done again") {
		err = nil
	}
	return fakeapi.Find[*v2.AddressClaim](sc.s, claimResource, "ns/"+name), err
}

func blocksOf(c *v2.AddressClaim) string {
	var names []string
	for _, a := range c.Status.Addresses {
		names = append(names, a.Block)
	}
	return strings.Join(names, " ")
}

func ready(c *v2.AddressClaim) metav1.Condition {
	if r := meta.FindStatusCondition(c.Status.Conditions, v2.ClaimReady); r != nil {
		return *r
	}
	return metav1.Condition{}
}

// A listed address that can't be had is told with who has it; the others are given.
func TestWhoHasAnAddress(t *testing.T) {
	for name, c := range map[string]struct {
		make    func(sc *scene)
		reason  string
		message []string
	}{
		"a pod": {func(sc *scene) {
			sc.s.Put(blockResource, plantest.Block("p", 1, "10.0.0.1/32", "n1"))
			for ip, pod := range map[string]string{"10.0.0.1": "shop", "10.0.0.2": "other"} {
				p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "web", Name: pod}, Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: ip}}}}
				if err := sc.r.core.Tracker().Add(p); err != nil {
					sc.t.Fatal(err)
				}
			}
		}, v2.ReasonAddressInUse, []string{"10.0.0.1 is in AddressBlock p-1 of Node n1, where Pod web/shop has it"}},
		"a node, for its pods": {func(sc *scene) {
			sc.s.Put(blockResource, plantest.Block("p", 1, "10.0.0.1/32", "n1"))
		}, v2.ReasonAddressInUse, []string{"p-1 of Node n1, for its pods"}},
		"a block of another pool": {func(sc *scene) {
			sc.s.Put(blockResource, plantest.Block("wide", 7, "10.0.0.0/30", "n1"))
		}, v2.ReasonAddressInUse, []string{"wide-7 of Node n1"}},
		"a block that an admin reserved": {func(sc *scene) {
			sc.s.Put(blockResource, plantest.Block("p", 1, "10.0.0.1/32", ""))
		}, v2.ReasonAddressInUse, []string{"of no node"}},
		"a Node itself": {func(sc *scene) {
			sc.r.ledger.SeeNode("n1", []netip.Addr{netip.MustParseAddr("10.0.0.1")})
		}, v2.ReasonAddressInUse, []string{"10.0.0.1 is an address of Node n1"}},
		"a node that lost the block": {func(sc *scene) {
			sc.r.ledger.Contest("p-1", "n1")
		}, v2.ReasonAddressInUse, []string{"a node claims AddressBlock p-1"}},
		"another claim": {func(sc *scene) {
			sc.s.Put(claimResource, newClaim("other", v2.AddressClaimSpec{Addresses: []string{"10.0.0.1"}}))
			_, _ = sc.sync("other")
		}, v2.ReasonAddressTaken, []string{"10.0.0.1 belongs to AddressClaim ns/other"}},
		"another claim had it": {func(sc *scene) {
			sc.s.Put(claimResource, newClaim("other", v2.AddressClaimSpec{Addresses: []string{"10.0.0.1"}, CoolDownSeconds: 600}))
			_, _ = sc.sync("other")
			sc.s.Drop(claimResource, "ns/other")
			_, _ = sc.sync("other")
		}, v2.ReasonAddressTaken, []string{"10.0.0.1 cools down until 1970-01-12T13:56:40Z: AddressClaim ns/other had it"}},
		"nobody: it is outside": {func(sc *scene) {}, v2.ReasonAddressOutsidePool, []string{"10.0.0.99 isn't an address of the pool"}},
	} {
		t.Run(name, func(t *testing.T) {
			sc := newScene(t)
			sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/28"))
			c.make(sc)
			list := []string{"10.0.0.1", "10.0.0.4"}
			if c.reason == v2.ReasonAddressOutsidePool {
				list[0] = "10.0.0.99"
			}
			sc.s.Put(claimResource, newClaim("c", v2.AddressClaimSpec{Addresses: list}))
			got, err := sc.sync("c")
			if err != nil {
				t.Fatal(err)
			}
			if blocksOf(got) != "p-4" || got.Status.Summary != "1/2" {
				t.Errorf("it has %q, %s", blocksOf(got), got.Status.Summary)
			}
			r := ready(got)
			if r.Status != metav1.ConditionFalse || r.Reason != c.reason {
				t.Errorf("the condition is %+v, want reason %s", r, c.reason)
			}
			for _, m := range c.message {
				if !strings.Contains(r.Message, m) {
					t.Errorf("the message is %q, want %q in it", r.Message, m)
				}
			}
			if e := <-sc.r.events.Events; !strings.Contains(e, c.reason) {
				t.Errorf("the Event is %q", e)
			}
		})
	}
}

// A pool that can't give anything takes nothing away either.
func TestPoolsThatGiveNothing(t *testing.T) {
	for name, c := range map[string]struct {
		spoil  func(sc *scene, p *v2.AddressPool)
		reason string
		part   string
	}{
		"none": {func(sc *scene, p *v2.AddressPool) { sc.s.Drop(poolResource, "p") }, v2.ReasonPoolNotFound, "no AddressPool p"},
		"of larger blocks": {func(sc *scene, p *v2.AddressPool) {
			p.Spec.BlockSizeBits = 2
			sc.s.Put(poolResource, p)
		}, v2.ReasonBlockSize, "blockSizeBits: 0"},
		"that can't be understood": {func(sc *scene, p *v2.AddressPool) {
			p.Spec.Subnets = nil
			sc.s.Put(poolResource, p)
		}, v2.ReasonPoolInvalid, "no subnet"},
		"that is being deleted": {func(sc *scene, p *v2.AddressPool) {
			p.DeletionTimestamp = new(metav1.Now())
			sc.s.Put(poolResource, p)
		}, v2.ReasonPoolTerminating, "being deleted"},
		"that is for other namespaces": {func(sc *scene, p *v2.AddressPool) {
			p.Spec.FloatingNamespaces = []string{"other"}
			sc.s.Put(poolResource, p)
		}, v2.ReasonClaimNamespace, "AddressPool p gives floating addresses to other namespaces (spec.floatingNamespaces)"},
		"that drains": {func(sc *scene, p *v2.AddressPool) {
			p.Spec.Drain = true
			sc.s.Put(poolResource, p)
		}, v2.ReasonPoolDraining, "AddressPool p drains and gives nothing new (spec.drain)"},
		"that excludes all others": {func(sc *scene, p *v2.AddressPool) {
			p.Spec.Exclude = []string{"10.0.0.2-10.0.0.15", "10.0.0.1"}
			sc.s.Put(poolResource, p)
		}, v2.ReasonPoolExhausted, "for 2 more: all of its 1 blocks that spec.exclude leaves, without 15, are taken"},
		"that is suspended": {func(sc *scene, p *v2.AddressPool) { sc.r.lost = pools.Claims{Node: "n1", Last: sc.at} }, v2.ReasonPoolSuspended, "Node n1"},
		"that is full": {func(sc *scene, p *v2.AddressPool) {
			for i := range int32(16) {
				if fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, pools.BlockName("p", i)) == nil {
					sc.s.Put(blockResource, plantest.Block("p", i, fmt.Sprintf("10.0.0.%d/32", i), "n1"))
				}
			}
		}, v2.ReasonPoolExhausted, "for 2 more: all of its 16 blocks are taken"},
	} {
		t.Run(name, func(t *testing.T) {
			sc, before := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(2))})
			c.spoil(sc, fakeapi.Find[*v2.AddressPool](sc.s, poolResource, "p"))
			before.Spec.Count = new(int32(4))
			sc.s.Put(claimResource, before)
			got, err := sc.sync("c")
			if err != nil {
				t.Fatal(err)
			}
			if r := ready(got); r.Status != metav1.ConditionFalse || r.Reason != c.reason || !strings.Contains(r.Message, c.part) {
				t.Errorf("the condition is %+v", r)
			}
			if blocksOf(got) != "p-0 p-1" {
				t.Errorf("it has %q", blocksOf(got))
			}
		})
	}
}

// An address that is excluded since stays its claim's until that releases it, and comes to nobody again.
func TestExcludedAddresses(t *testing.T) {
	sc, claim := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(2)), CoolDownSeconds: 60})
	pool := fakeapi.Find[*v2.AddressPool](sc.s, poolResource, "p")
	pool.Spec.Exclude = []string{"10.0.0.1-10.0.0.3"}
	sc.s.Put(poolResource, pool)
	resize := func(n int32) *v2.AddressClaim {
		t.Helper()
		claim.Spec.Count = &n
		sc.s.Put(claimResource, claim)
		got, err := sc.sync("c")
		if err != nil {
			t.Fatal(err)
		}
		claim = got.DeepCopy()
		return got
	}
	if got := blocksOf(resize(3)); got != "p-0 p-1 p-4" {
		t.Errorf("with one more it has %q, want the excluded one that it had, and the first that isn't", got)
	}
	if got := blocksOf(resize(1)); got != "p-0" {
		t.Errorf("with one it has %q", got)
	}
	if got := blocksOf(resize(2)); got != "p-0 p-4" {
		t.Errorf("with two again it has %q, want the one that isn't excluded back", got)
	}
	sc.s.Put(claimResource, newClaim("listed", v2.AddressClaimSpec{Addresses: []string{"10.0.0.2", "10.0.0.7"}}))
	got, err := sc.sync("listed")
	if err != nil {
		t.Fatal(err)
	}
	if r := ready(got); blocksOf(got) != "p-7" || r.Reason != v2.ReasonAddressExcluded || r.Message != "10.0.0.2 is excluded by AddressPool p (spec.exclude)" {
		t.Errorf("a list with an excluded address has %q: %+v", blocksOf(got), r)
	}
}

// The claim of an Egress that was deleted and made again has the addresses of before, and they are the new Egress's.
func TestAddressesOutliveTheirClaim(t *testing.T) {
	sc := newScene(t)
	sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/28"))
	made := func(uid string) *v2.AddressClaim {
		c := newClaim("c", v2.AddressClaimSpec{Count: new(int32(3)), CoolDownSeconds: 60})
		c.OwnerReferences = []metav1.OwnerReference{{Kind: "Egress", Name: "nat", UID: types.UID(uid), Controller: new(true)}}
		return c
	}
	sc.s.Put(claimResource, made("1"))
	if c, err := sc.sync("c"); err != nil || blocksOf(c) != "p-0 p-1 p-2" {
		t.Fatalf("%+v, %v", c.Status, err)
	}
	sc.s.Drop(claimResource, "ns/c")
	if _, err := sc.sync("c"); err != nil {
		t.Fatal(err)
	}
	for _, b := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
		if b.Floating.ReleasedAt == nil {
			t.Errorf("%s isn't released", b.Name)
		}
	}
	sc.at = sc.at.Add(59 * time.Second)
	sc.s.Put(claimResource, made("2"))
	c, err := sc.sync("c")
	if err != nil || blocksOf(c) != "p-0 p-1 p-2" {
		t.Fatalf("%+v, %v", c.Status, err)
	}
	sc.at = sc.at.Add(time.Hour)
	if c, err = sc.sync("c"); err != nil || blocksOf(c) != "p-0 p-1 p-2" {
		t.Fatalf("after a while: %+v, %v", c.Status, err)
	}
	for _, b := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
		if b.Floating.ReleasedAt != nil || b.Floating.Owner.UID != "2" {
			t.Errorf("%s is %+v", b.Name, b.Floating)
		}
	}
	// Without an owner they are free after the cool-down.
	sc.s.Drop(claimResource, "ns/c")
	if _, err := sc.sync("c"); err != nil {
		t.Fatal(err)
	}
	sc.at = sc.at.Add(61 * time.Second)
	if _, err := sc.sync("c"); err != nil {
		t.Fatal(err)
	}
	if left := fakeapi.All[*v2.AddressBlock](sc.s, blockResource); len(left) > 0 {
		t.Errorf("%d blocks are left, such as %+v", len(left), left[0])
	}
}

// Addresses that were lost with etcd's data come back, also while the pool gives no others.
func TestLostWithABackup(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(sc *scene, p *v2.AddressPool)
		then  func(sc *scene, p *v2.AddressPool)
	}{
		"suspended": {func(sc *scene, p *v2.AddressPool) { sc.r.lost = pools.Claims{Node: "n1", Last: sc.at} }, nil},
		"no pool for a while": {func(sc *scene, p *v2.AddressPool) { sc.s.Drop(poolResource, "p") },
			func(sc *scene, p *v2.AddressPool) { sc.s.Put(poolResource, p) }},
	} {
		t.Run(name, func(t *testing.T) {
			sc, _ := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(3))})
			sc.s.Drop(blockResource, "p-1")
			pool := fakeapi.Find[*v2.AddressPool](sc.s, poolResource, "p")
			c.spoil(sc, pool)
			got, err := sc.sync("c")
			if c.then != nil {
				if blocksOf(got) != "p-0 p-1 p-2" || ready(got).Status != metav1.ConditionFalse {
					t.Errorf("meanwhile it has %q, %+v", blocksOf(got), ready(got))
				}
				c.then(sc, pool)
				got, err = sc.sync("c")
			}
			b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "p-1")
			if err != nil || blocksOf(got) != "p-0 p-1 p-2" || ready(got).Status != metav1.ConditionTrue || b == nil || claims.Key(b) != "ns/c" {
				t.Errorf("it has %q, %+v, %v; the block is %+v", blocksOf(got), ready(got), err, b)
			}
		})
	}
}

// A claim that is being deleted keeps its addresses until it is gone: whoever keeps it may use them.
func TestDeletedClaim(t *testing.T) {
	sc, c := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(1))})
	c.DeletionTimestamp = new(metav1.Now())
	sc.s.Put(claimResource, c)
	if _, err := sc.sync("c"); err != nil {
		t.Fatal(err)
	}
	if b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "p-0"); b == nil || b.Floating.ReleasedAt != nil {
		t.Errorf("the block is %+v", b)
	}
	sc.s.Drop(claimResource, "ns/c")
	if _, err := sc.sync("c"); err != nil {
		t.Fatal(err)
	}
	if all := fakeapi.All[*v2.AddressBlock](sc.s, blockResource); len(all) != 0 { // there is no cool-down
		t.Errorf("%d blocks are left", len(all))
	}
}

// What is given up in the same change as the cool-down is made longer cools down for that long.
func TestCoolDownOfTheClaim(t *testing.T) {
	sc, c := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(2))})
	c.Spec.Count, c.Spec.CoolDownSeconds = new(int32(1)), 3600
	sc.s.Put(claimResource, c)
	if _, err := sc.sync("c"); err != nil {
		t.Fatal(err)
	}
	if b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "p-1"); b == nil || b.Floating.CoolDownSeconds != 3600 {
		t.Errorf("the block is %+v", b)
	}
}

// The token of a node's coild doesn't make its block a claim's.
func TestNodesBlockIsNoClaims(t *testing.T) {
	sc := newScene(t)
	sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/28"))
	c := newClaim("c", v2.AddressClaimSpec{Addresses: []string{"10.0.0.1"}})
	sc.s.Put(claimResource, c)
	b := plantest.Block("p", 1, "10.0.0.1/32", "n1")
	b.Floating = new(claims.Floating(c))
	sc.s.Put(blockResource, b)
	got, err := sc.sync("c")
	if err != nil || blocksOf(got) != "" || ready(got).Reason != v2.ReasonAddressInUse {
		t.Errorf("it has %q, %+v, %v", blocksOf(got), ready(got), err)
	}
}

// What the API server refuses is told, and what is there stays.
func TestRefusedBlock(t *testing.T) {
	sc, c := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(1))})
	sc.s.Fault = func(verb, _ string) (before, after error) {
		if verb == "create" {
			return apierrors.NewForbidden(v2.Resource(blockResource), "p-1", errors.New("quota")), nil
		}
		return nil, nil
	}
	for _, spec := range []v2.AddressClaimSpec{{Pool: "p", Count: new(int32(3))}, {Pool: "p", Addresses: []string{"10.0.0.0", "10.0.0.5"}}} {
		c.Spec = spec
		sc.s.Put(claimResource, c)
		got, err := sc.sync("c")
		if err != nil || blocksOf(got) != "p-0" || ready(got).Reason != v2.ReasonPoolInvalid || !strings.Contains(ready(got).Message, "quota") {
			t.Errorf("it has %q, %+v, %v", blocksOf(got), ready(got), err)
		}
	}
}

// An older definition of AddressBlocks drops whose an address is: no block is left that belongs to nobody.
func TestOldDefinition(t *testing.T) {
	sc := newScene(t)
	sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/28"))
	sc.s.Put(claimResource, newClaim("c", v2.AddressClaimSpec{Count: new(int32(1))}))
	sc.s.Prune = func(o fakeapi.Object) {
		if b, ok := o.(*v2.AddressBlock); ok {
			b.Floating = nil
		}
	}
	if _, err := sc.sync("c"); !errors.Is(err, errOldDefinition) {
		t.Errorf("the error is %v", err)
	}
	if all := fakeapi.All[*v2.AddressBlock](sc.s, blockResource); len(all) != 0 {
		t.Errorf("%d blocks are left", len(all))
	}
	sc.s.Prune = nil
	if c, err := sc.sync("c"); err != nil || c.Status.Summary != "1/1" {
		t.Errorf("with the new definition: %+v, %v", c.Status, err)
	}
}

// What an admin takes off a block comes back.
func TestMarksComeBack(t *testing.T) {
	sc, _ := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(1))})
	for name, spoil := range map[string]func(*v2.AddressBlock){
		"both labels": func(b *v2.AddressBlock) { b.Labels = map[string]string{v2.LabelPool: "p"} },
		"the field":   func(b *v2.AddressBlock) { b.Floating = nil },
	} {
		b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "p-0")
		spoil(b)
		sc.s.Put(blockResource, b)
		c, err := sc.sync("c")
		b = fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "p-0")
		if err != nil || blocksOf(c) != "p-0" || claims.Outdated(b, c) {
			t.Errorf("%s: %v, the claim has %q, the block is %+v with %v", name, err, blocksOf(c), b.Floating, b.Labels)
		}
	}
	if all := fakeapi.All[*v2.AddressBlock](sc.s, blockResource); len(all) != 1 {
		t.Errorf("there are %d blocks", len(all))
	}
}
