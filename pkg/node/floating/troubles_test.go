package floating

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	"github.com/coil-net/coil/pkg/testkit"
)

// A node tells what it knows, takes back what it has told, and leaves alone what another node has told.
func TestConditions(t *testing.T) {
	other := metav1.Condition{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Reason: v2.ReasonPacketsDropped, Message: "node n2: dropped"}
	mine := other
	mine.Message = "node n1: dropped"
	over := mine
	over.Status = metav1.ConditionFalse
	for _, c := range []struct {
		name   string
		has    []metav1.Condition
		wrong  string
		want   string
		warned bool
	}{
		{"nothing", nil, "", "", false},
		{"new", nil, "dropped", "True node n1: dropped", true},
		{"told", []metav1.Condition{mine}, "dropped", "True node n1: dropped", false},
		{"another one", []metav1.Condition{mine}, "all dropped", "True node n1: all dropped", true},
		{"over", []metav1.Condition{mine}, "", "False node n1: it isn't so any more", false},
		{"over before", []metav1.Condition{over}, "", "False node n1: dropped", false},
		{"again", []metav1.Condition{over}, "dropped", "True node n1: dropped", true},
		{"another node's", []metav1.Condition{other}, "", "True node n2: dropped", false},
		{"both", []metav1.Condition{other}, "dropped", "True node n2: dropped", false},
	} {
		wrong := map[string]seen{}
		if c.wrong != "" {
			wrong[v2.BlockForwardingBlocked] = seen{message: c.wrong}
		}
		tr := NewTroubles(TroublesConfig{Node: "n1"}, nil)
		after, news := tr.conditions(&v2.AddressBlock{Status: v2.AddressBlockStatus{Conditions: c.has}}, wrong, metav1.Now())
		var got []string
		for _, a := range after {
			got = append(got, fmt.Sprint(a.Status, " ", a.Message))
		}
		if strings.Join(got, ", ") != c.want || (len(news) > 0) != c.warned {
			t.Errorf("%s: %q and Events of %v, want %q", c.name, got, news, c.want)
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

// A trouble that isn't seen any more is over after some time. One that changes all the time is told once a minute.
func TestTroublesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &patched{fails: true}
		var over []string
		block := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: "p-1", UID: "u"}}
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
			Over:  func(id, condition string) { over = append(over, id+" "+condition) },
		}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- tr.Run(ctx) }()
		a := Address{ID: "u", Block: "p-1"}
		for i := range 100 {
			tr.Saw(a, v2.BlockConflicting, fmt.Sprintf("host %d", i))
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if len(api.patches) != 2 || warned != 2 || !strings.HasPrefix(api.patches[0], "[status] ") || !strings.Contains(api.patches[1], "node n1: host 60") {
			t.Errorf("%d Events, and %q", warned, api.patches)
		}
		testkit.Check(t, testutil.CollectAndCompare(tr, strings.NewReader(`
			# HELP coil_floating_troubled_addresses Floating addresses of which something was wrong at this node in the last minutes, by the condition of their AddressBlocks that says what.
			# TYPE coil_floating_troubled_addresses gauge
			coil_floating_troubled_addresses{condition="Conflicting"} 1
			coil_floating_troubled_addresses{condition="ForwardingBlocked"} 0
			# HELP coil_floating_unheld_addresses Floating addresses that this node may have and that no node has.
			# TYPE coil_floating_unheld_addresses gauge
			coil_floating_unheld_addresses 1
		`)))
		tr.Saw(a, v2.BlockForwardingBlocked, "dropped")
		tr.Ended(a, v2.BlockForwardingBlocked)
		time.Sleep(lasting + time.Second)
		synctest.Wait()
		if !slices.Equal(over, []string{"u Conflicting"}) {
			t.Errorf("over are %q", over)
		}
		cancel()
		testkit.Check(t, <-ended)
	})
}
