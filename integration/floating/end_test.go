package floating

import (
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// A coild that ends in an orderly way, as in an update, hands its addresses over, with their connections: it isn't known when the next one begins.
func TestOrderlyEnd(t *testing.T) {
	// Not beside the others: it measures.
	f := newFixture(t, "ended", 3)
	f.held(0)
	epoch := f.holding().Epoch
	before, after := f.flows(0), f.flows(1)
	want := f.connections(before, 50)
	pings := f.pings()
	began := time.Now()
	f.Candidates[0].Coild.Stop()
	took := time.Since(began)
	t.Logf("coild ended within %s", took)
	if took > testkit.Timeout(time.Second) {
		t.Errorf("coild ended within %s", took)
	}
	f.held(1)
	gone := outage(t, pings)
	t.Logf("the address was silent for %s", gone)
	if gone > testkit.Limit(time.Second) {
		t.Errorf("the address was silent for %s", gone)
	}
	if got := testkit.Must(f.known(after))(t); !slices.Equal(got, want) {
		t.Errorf("the next router has %d flows, want %d: %v", len(got), len(want), got)
	}
	if h := f.holding(); h.Epoch != epoch+2 && h.Epoch != epoch+1 || !h.HandedOver {
		t.Errorf("after epoch %d there is %+v", epoch, h)
	}
	began = time.Now()
	testkit.Check(t, f.Candidates[0].Start(t.Context()))
	t.Logf("coild was ready after %s", time.Since(began))
	f.held(1)
}
