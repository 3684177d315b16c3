package blockrequest

import (
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// The leader before made a block and died; the cache of the next one doesn't show it.
func TestSurveyFindsWhatTheCacheLacks(t *testing.T) {
	api := newFakeAPI(t)
	api.addPool(plantest.Pool("default", 1, "10.0.0.0/27"))
	req := api.addRequest("r", "node", "default")
	api.addRequest("other", "node", "default")
	shown := api.Events()
	api.addBlock(forRequest(plantest.Block("default", 7, "10.0.0.14/31", "node"), req))
	r := newReplica(t, api, shown, testNode("node"))
	fails := 2
	api.Fault = func(verb, _ string) (before, after error) {
		if verb == "list" && fails > 0 {
			fails--
			return fakeapi.ErrLost, nil
		}
		return nil, nil
	}
	synctest.Test(t, func(t *testing.T) {
		if err := r.survey(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	for _, name := range []string{"r", "other"} {
		if err := r.sync(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if got := api.requests()["r"].Status.AddressBlockName; got != "default-7" {
		t.Errorf("answer is %q, want the block made before", got)
	}
	if got := api.requests()["other"].Status.AddressBlockName; got != "default-8" {
		t.Errorf("answer is %q, want default-8: the pool goes on after its highest block", got)
	}
}

// A cache without any of many blocks must not cost one call for each.
func TestManyCollisionsReadAllBlocksOnce(t *testing.T) {
	api := newFakeAPI(t)
	api.addPool(plantest.Pool("default", 0, "10.0.0.0/22"))
	api.addRequest("r", "node", "default")
	shown := api.Events()
	for i := range int32(1000) {
		api.addBlock(plantest.Block("default", i, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String()+"/32", "other"))
	}
	r := newReplica(t, api, shown, testNode("node"))
	if err := r.sync(t.Context(), "r"); err != nil {
		t.Fatal(err)
	}
	if got := api.requests()["r"].Status.AddressBlockName; got != "default-1000" {
		t.Errorf("answer is %q", got)
	}
	if n := api.Calls()["create addressblocks"]; n > maxCollisions+2 {
		t.Errorf("%d attempts", n)
	}
	if n := api.Calls()["list addressblocks"]; n != 1 {
		t.Errorf("all blocks were read %d times", n)
	}
}
