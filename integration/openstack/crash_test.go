package openstack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	lab "github.com/coil-net/coil/integration/lab/openstack"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/testkit"
)

// killed has an operation end at a call, as by kill -9: the call is done, its answer is lost, and no other comes. It returns whether the operation made so
// many calls that count.
func (sc *scene) killed(at int, counts func(lab.Call) bool, operation func(*openstack.Client) error) bool {
	sc.t.Helper()
	n, cut := 0, false
	sc.front.SetFault(func(c lab.Call) lab.Fault {
		if cut {
			return lab.Fault{Down: true}
		}
		if counts(c) {
			n++
		}
		cut = n == at
		return lab.Fault{Lost: cut}
	})
	err := operation(sc.Client)
	sc.front.SetFault(nil)
	if (err != nil) != cut {
		sc.t.Errorf("killed at call %d: %t, error %v", at, cut, err)
	}
	sc.restart()
	return cut
}

// counted are the calls after which programs are killed: in the short form those that change something, since after the others
// the cloud is as it was before.
func counted(c lab.Call) bool { return c.Writes() || testkit.LBForm.Long() }

// Test10Killed kills each operation at each of its calls, and then repeats it.
func Test10Killed(t *testing.T) {
	t.Run("Ensure", func(t *testing.T) {
		sc := newScene(t)
		var want []string
		for at, cut := 1, true; cut; at++ {
			key := fmt.Sprint("key-", at)
			cut = sc.killed(at, counted, func(c *openstack.Client) error { return try(c, key) })
			if cut {
				testkit.Check(t, try(sc.Client, key))
			}
			want = append(want, "one/"+key+" port floating")
			sc.wants(fmt.Sprint("killed at call ", at), want...)
		}
	})
	t.Run("Delete", func(t *testing.T) {
		sc := newScene(t)
		for at, cut := 1, true; cut; at++ {
			testkit.Check(t, try(sc.Client, "web"))
			cut = sc.killed(at, counted, func(c *openstack.Client) error { return c.Delete(t.Context(), "web") })
			if cut {
				testkit.Check(t, sc.Delete(t.Context(), "web"))
			}
			sc.wants(fmt.Sprint("killed at call ", at))
		}
	})
	t.Run("Sweep", func(t *testing.T) {
		sc := newScene(t)
		sc.ensure("kept", both)
		sweep := func(c *openstack.Client) error {
			_, err1 := c.Sweep(t.Context(), map[string]bool{"kept": true})
			_, err2 := c.Sweep(t.Context(), map[string]bool{"kept": true})
			return errors.Join(err1, err2)
		}
		for at, cut := 1, true; cut; at++ {
			testkit.Check(t, try(sc.Client, "web"))
			cut = sc.killed(at, counted, sweep)
			if cut {
				testkit.Check(t, sweep(sc.Client))
			}
			sc.wants(fmt.Sprint("killed at call ", at), "one/kept port")
		}
	})
}

// try has an address made that has all.
func try(c *openstack.Client, key string) error {
	_, err := c.Ensure(context.Background(), openstack.Address{Key: key}, all)
	return err
}

// TestSweepSpares has Sweep spare what is young, what it hasn't seen before, and what changes meanwhile.
func TestSweepSpares(t *testing.T) {
	sc := newScene(t)
	a := sc.ensure("web", all)
	cfg := sc.cfg
	cfg.Grace = time.Hour
	young := sc.cluster(cfg)
	sweep := func(c *openstack.Client, keep ...string) []openstack.Object {
		t.Helper()
		kept := map[string]bool{}
		for _, k := range keep {
			kept[k] = true
		}
		return testkit.Must(c.Sweep(t.Context(), kept))(t)
	}
	for _, step := range []struct {
		name string
		gone []openstack.Object
	}{
		{"young", slices.Concat(sweep(young), sweep(young), sweep(young))},
		{"seen for the first time", sweep(sc.Client)},
		{"used again", sweep(sc.Client, "web")},
		{"seen for the first time since", sweep(sc.Client)},
	} {
		if len(step.gone) != 0 {
			t.Errorf("%s: %v is deleted", step.name, step.gone)
		}
	}
	// Somebody changes the port after it was listed.
	sc.front.SetFault(func(c lab.Call) lab.Fault {
		if c.String() == "DELETE floatingips/"+a.FloatingID {
			sc.update("ports/"+a.PortID, "port", map[string]any{"name": "taken"})
		}
		return lab.Fault{}
	})
	gone := sweep(sc.Client)
	sc.front.SetFault(nil)
	if len(gone) != 1 || gone[0].ID != a.FloatingID || gone[0].Addresses[0] != a.Floating {
		t.Errorf("%v is deleted, want the floating IP", gone)
	}
	sc.wants("changed", "one/web port")
	if gone := sweep(sc.Client); len(gone) != 1 || gone[0].ID != a.PortID {
		t.Errorf("%v is deleted at last, want the port", gone)
	}
}

// Test15Churn makes and deletes addresses at random, while answers are lost and programs start again; COIL_RANDOM_SEED repeats it.
func Test15Churn(t *testing.T) {
	sc := newScene(t)
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("COIL_RANDOM_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("COIL_RANDOM_SEED=%d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	wants := map[string]openstack.Want{}
	var faults, n atomic.Uint64
	for round := range testkit.LBForm.Times(1, 60) {
		sc.front.SetFault(func(c lab.Call) lab.Fault {
			switch h := (n.Add(1)*2654435761 + seed) % 16; {
			case h == 0:
				faults.Add(1)
				return lab.Fault{Lost: true}
			case h == 1:
				faults.Add(1)
				return lab.Fault{Code: 502, Body: "bad gateway"}
			}
			return lab.Fault{}
		})
		for range 8 {
			key := fmt.Sprint("key-", r.IntN(4))
			var err error
			if r.IntN(3) == 0 {
				delete(wants, key)
				err = sc.Delete(t.Context(), key)
			} else {
				// To make a floating IP takes Neutron longer than all else.
				wants[key] = openstack.Want{IPv4: true, Floating: key < "key-2"}
				_, err = sc.Ensure(t.Context(), openstack.Address{Key: key}, wants[key])
			}
			if r.IntN(4) == 0 {
				sc.restart()
			}
			if reason := openstack.ReasonOf(err); err != nil && reason != openstack.Temporary {
				t.Errorf("%s: %v", reason, err)
			}
		}
		sc.front.SetFault(nil)
		keep := map[string]bool{}
		var want []string
		for _, key := range slices.Sorted(maps.Keys(wants)) {
			sc.ensure(key, wants[key])
			keep[key] = true
			want = append(want, "one/"+key+" port")
			if wants[key].Floating {
				want[len(want)-1] += " floating"
			}
		}
		for range 2 {
			testkit.Must(sc.Sweep(t.Context(), keep))(t)
		}
		sc.wants(fmt.Sprint("round ", round, " of seed ", seed), want...)
	}
	t.Logf("%d faults in %d calls", faults.Load(), n.Load())
}
