package floating

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	typed "github.com/coil-net/coil/generated/clientset/versioned/typed/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/testkit"
)

// A node tells what it knows, takes back what it has told when that has ended, and leaves alone what another node has told.
func TestConditions(t *testing.T) {
	other := metav1.Condition{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Reason: v2.ReasonPacketsDropped, Message: "node n2: dropped"}
	mine := other
	mine.Message = "node n1: dropped"
	both := mine
	both.Message += "\n" + other.Message
	over := mine
	over.Status = metav1.ConditionFalse
	rival := mine
	rival.Type, rival.Message = v2.BlockConflicting, "node n1: a rival"
	const dropped, passed, released, ofServices = "dropped", "passed", "released", "of Services"
	for _, c := range []struct {
		name   string
		has    []metav1.Condition
		known  string
		want   string
		warned bool
	}{
		{"nothing", nil, "", "", false},
		{"new", nil, dropped, "True node n1: dropped", true},
		{"told", []metav1.Condition{mine}, dropped, "True node n1: dropped", false},
		{"another one", []metav1.Condition{mine}, "all dropped", "True node n1: all dropped", true},
		{"told by an earlier life", []metav1.Condition{mine}, "", "True node n1: dropped", false},
		{"over", []metav1.Condition{mine}, passed, "False node n1: it isn't so any more", false},
		{"over, since the address is released", []metav1.Condition{mine}, released, "False node n1: it isn't so any more", false},
		{"over before", []metav1.Condition{over}, passed, "False node n1: dropped", false},
		{"again", []metav1.Condition{over}, dropped, "True node n1: dropped", true},
		{"another node's", []metav1.Condition{other}, "", "True node n2: dropped", false},
		{"another node's, passed here", []metav1.Condition{other}, passed, "True node n2: dropped", false},
		{"both", []metav1.Condition{other}, dropped, "True node n2: dropped\nnode n1: dropped", true},
		{"over here, and not there", []metav1.Condition{both}, passed, "True node n2: dropped", false},
		{"of Services, told by an earlier life", []metav1.Condition{mine}, ofServices, "False node n1: it isn't so any more", false},
		{"a rival that an earlier life told", []metav1.Condition{rival}, "", "False node n1: it isn't so any more", false},
	} {
		tr := NewTroubles(TroublesConfig{Node: "n1"}, nil)
		b := heldBlock(func(b *v2.AddressBlock) { b.Status.Conditions = c.has })
		switch c.known {
		case "":
		case passed:
			tr.Passed(Address{Block: b.Name})
		case released:
			b.Floating.ReleasedAt = &metav1.Time{}
		case ofServices:
			b.Floating.Ports = []v2.FloatingPort{{Protocol: "TCP", Port: 80}}
		default:
			tr.Dropped(Address{Block: b.Name}, c.known)
		}
		wrong, _ := tr.of(b.Name, time.Now())
		after, news := tr.conditions(b, wrong, metav1.Now())
		var got []string
		for _, a := range after {
			got = append(got, fmt.Sprint(a.Status, " ", a.Message))
		}
		if strings.Join(got, ", ") != c.want || (len(news) > 0) != c.warned {
			t.Errorf("%s: %q and Events of %v, want %q", c.name, got, news, c.want)
		}
	}
}

// A node goes on looking at addresses that it was found to drop, though it doesn't have them: those that it has seen, and those of which an
// earlier life has told so. It ends with a probe that passes, or with the address.
func TestBlockedAddresses(t *testing.T) {
	blocked := func(b *v2.AddressBlock) {
		b.Status.Conditions = []metav1.Condition{{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Message: "node n1: dropped"}}
	}
	for _, c := range []struct {
		name   string
		change func(*v2.AddressBlock)
		known  func(*Troubles, Address)
		want   bool
	}{
		{"nothing is known", func(*v2.AddressBlock) {}, func(*Troubles, Address) {}, false},
		{"told by an earlier life", blocked, func(*Troubles, Address) {}, true},
		{"told by another node", func(b *v2.AddressBlock) {
			blocked(b)
			b.Status.Conditions[0].Message = "node n2: dropped"
		}, func(*Troubles, Address) {}, false},
		{"seen here, told by nobody", func(*v2.AddressBlock) {}, func(tr *Troubles, a Address) { tr.Dropped(a, "dropped") }, true},
		{"passed", func(*v2.AddressBlock) {}, func(tr *Troubles, a Address) {
			tr.Dropped(a, "dropped")
			tr.Passed(a)
		}, false},
		{"the condition was taken away", blocked, func(tr *Troubles, a Address) {
			tr.Dropped(a, "dropped")
			b := tr.cfg.All()[0]
			tr.look(b)
			b.Status.Conditions = nil
			tr.look(b)
		}, false},
		{"released", func(b *v2.AddressBlock) {
			blocked(b)
			b.Floating.ReleasedAt = &metav1.Time{}
		}, func(tr *Troubles, a Address) { tr.Dropped(a, "dropped") }, false},
	} {
		b := heldBlock(c.change)
		tr := NewTroubles(TroublesConfig{Node: "n1", All: func() []*v2.AddressBlock { return []*v2.AddressBlock{b} }}, nil)
		c.known(tr, Address{ID: string(b.UID), Block: b.Name})
		if got := tr.Blocked(); (len(got) > 0) != c.want {
			t.Errorf("%s: blocked are %+v, want %t", c.name, got, c.want)
		}
	}
}

// patched is an API server that has one block.
type patched struct {
	typed.AddressBlockInterface
	mu      sync.Mutex
	patches []string
	fails   bool
}

func (p *patched) Patch(_ context.Context, _ string, _ types.PatchType, data []byte, _ metav1.PatchOptions, sub ...string) (*v2.AddressBlock, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fails {
		p.fails = false
		return nil, errors.New("away")
	}
	p.patches = append(p.patches, fmt.Sprint(sub, " ", string(data)))
	return &v2.AddressBlock{}, nil
}

// The API server takes messages of 32 KiB. More nodes than that holds see trouble of an address that many announce: those that don't fit say so when others don't any more.
func TestConditionsFit(t *testing.T) {
	text, others := strings.Repeat("x", 300), ""
	for i := range 200 {
		if longer := plan.Told(others, fmt.Sprint("other-", i), text); len(longer) <= 32768 {
			others = longer
		}
	}
	block := heldBlock(func(b *v2.AddressBlock) {
		b.Status.Conditions = []metav1.Condition{{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Reason: v2.ReasonPacketsDropped, Message: others}}
	})
	tr := NewTroubles(TroublesConfig{Node: "n1"}, nil)
	wrong := map[string]seen{v2.BlockForwardingBlocked: {message: text}}
	if after, news := tr.conditions(block, wrong, metav1.Now()); len(news) > 0 || after[0].Message != others {
		t.Errorf("news are %v, the message has %d bytes", news, len(after[0].Message))
	}
	block.Status.Conditions[0].Message = plan.Told(others, "other-7", "")
	after, news := tr.conditions(block, wrong, metav1.Now())
	if len(news) != 1 || plan.ToldBy(after[0].Message, "n1") != text {
		t.Errorf("when another one is well, news are %v", news)
	}
}

// A rival that isn't seen any more is told of for some time, as are dropped packets to Services; other dropped packets are until a probe passes. What changes all the time is told once a minute.
func TestTroublesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &patched{fails: true}
		block := heldBlock(func(b *v2.AddressBlock) { b.Name, b.UID = "p-1", "u" })
		warned := 0
		tr := NewTroubles(TroublesConfig{
			Node: "n1", Blocks: api, All: func() []*v2.AddressBlock {
				mine := heldBlock(func(b *v2.AddressBlock) {
					b.Floating.Holding = v2.FloatingHolding{}
					b.Floating.Successors = []v2.FloatingNode{{Node: "n1"}}
				})
				released, others := mine.DeepCopy(), mine.DeepCopy()
				released.Floating.ReleasedAt, others.Floating.Successors[0].Node = &metav1.Time{}, "n2"
				return []*v2.AddressBlock{block, mine, released, others, heldBlock(func(*v2.AddressBlock) {})}
			},
			Block: func(name string) *v2.AddressBlock { return map[string]*v2.AddressBlock{"p-1": block}[name] },
			Warn:  func(*v2.AddressBlock, string, string) { warned++ },
		}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- tr.Run(ctx) }()
		a := Address{ID: "u", Block: "p-1"}
		for i := range 100 {
			tr.Conflicting(a, fmt.Sprintf("host %d", i))
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if len(api.patches) != 2 || warned != 2 || !strings.HasPrefix(api.patches[0], "[status] ") || !strings.Contains(api.patches[1], "node n1: host 60") {
			t.Errorf("%d Events, and %q", warned, api.patches)
		}
		testkit.Check(t, testutil.CollectAndCompare(tr, strings.NewReader(`
			# HELP coil_floating_troubled_addresses Floating addresses of which something is wrong at this node, or was in the last minutes, by the condition of their AddressBlocks that says what.
			# TYPE coil_floating_troubled_addresses gauge
			coil_floating_troubled_addresses{condition="Conflicting"} 1
			coil_floating_troubled_addresses{condition="ForwardingBlocked"} 0
			# HELP coil_floating_unheld_addresses Floating addresses that this node may have and that no node has.
			# TYPE coil_floating_unheld_addresses gauge
			coil_floating_unheld_addresses 1
		`)))
		tr.Dropped(a, "dropped")
		time.Sleep(lasting + time.Second)
		synctest.Wait()
		if wrong, next := tr.of("p-1", time.Now()); len(wrong) != 1 || wrong[v2.BlockForwardingBlocked].message != "dropped" || next != 0 {
			t.Errorf("later %+v is wrong, and is looked at after %s", wrong, next)
		}
		tr.Passed(a)
		if wrong, _ := tr.of("p-1", time.Now()); len(wrong) > 0 {
			t.Errorf("at the end %+v is wrong", wrong)
		}
		a.OfServices = true
		for range 3 {
			tr.Dropped(a, "not translated")
			time.Sleep(lasting - time.Second)
			if wrong, _ := tr.of("p-1", time.Now()); wrong[v2.BlockForwardingBlocked].message != "not translated" {
				t.Errorf("of Services %+v is wrong", wrong)
			}
		}
		time.Sleep(2 * time.Second)
		if wrong, _ := tr.of("p-1", time.Now()); len(wrong) > 0 {
			t.Errorf("some time after packets to Services weren't translated %+v is wrong", wrong)
		}
		cancel()
		testkit.Check(t, <-ended)
	})
}
