package lbgateway

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/keepalived"
	"github.com/coil-net/coil/pkg/testkit"
)

// daemon is a keepalived that has addresses, and takes its time to do what it is told.
type daemon struct {
	// hangs is closed when a call that hangs is to go on; nil while none is to hang.
	hangs atomic.Pointer[chan struct{}]
	// waiting counts calls that hang.
	waiting atomic.Int32
	// guarded says whether the machine guards addresses.
	guarded func([]netip.Addr) error
	// takes is how long a change takes; nil for no time. fails says whether it is refused.
	takes atomic.Pointer[func() (d time.Duration, fails error)]
	// asked counts changes, and states questions for states. mark is the mark.
	asked, states, mark atomic.Int32

	mu sync.Mutex // guards all below
	// is is the configuration that keepalived was given. wrong is another one, after somebody else has changed keepalived; nil if nobody has.
	// unguarded names an address that was at the machine and that nothing guarded.
	is        keepalived.Config
	wrong     *keepalived.Config
	unguarded error
}

func addressesOf(c keepalived.Config) (all []netip.Addr) {
	for _, i := range c.Instances {
		all = append(all, i.Addresses...)
	}
	return all
}

func (d *daemon) Used() bool { return true }

// Apply implements VRRP. While it runs, both what it did and what it is to do may be at the machine.
func (d *daemon) Apply(ctx context.Context, c keepalived.Config) error {
	d.asked.Add(1)
	d.mu.Lock()
	was := d.is
	d.mu.Unlock()
	has := append(addressesOf(was), addressesOf(c)...)
	d.look(has)
	if hangs := d.hangs.Load(); hangs != nil {
		d.waiting.Add(1)
		defer d.waiting.Add(-1)
		select {
		case <-*hangs:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if takes := d.takes.Load(); takes != nil {
		took, err := (*takes)()
		time.Sleep(took)
		d.look(has)
		if err != nil {
			return err
		}
	}
	d.look(has)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.is, d.wrong = c, nil
	return nil
}

// Addresses implements VRRP.
func (d *daemon) Addresses() ([]netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return addressesOf(d.is), nil
}

// look notes whether an address isn't guarded.
func (d *daemon) look(has []netip.Addr) {
	if err := d.guarded(has); err != nil {
		d.mu.Lock()
		d.unguarded = err
		d.mu.Unlock()
	}
}

// Mark implements VRRP.
func (d *daemon) Mark() (string, error) { return fmt.Sprint(d.mark.Load()), nil }

// States implements VRRP: it is the master of each instance.
func (d *daemon) States(context.Context) (all []keepalived.InstanceState, err error) {
	d.states.Add(1)
	d.mu.Lock()
	defer d.mu.Unlock()
	is := d.is
	if d.wrong != nil {
		is = *d.wrong
	}
	for _, i := range is.Instances {
		s := keepalived.InstanceState{
			Name: i.Name, Interface: i.Interface, RouterID: i.RouterID, Priority: i.Priority, AdvertInterval: keepalived.DefaultAdvertInterval, Source: i.Source, Peers: i.Peers, State: keepalived.Master,
		}
		for _, a := range i.Addresses {
			s.Addresses = append(s.Addresses, keepalived.AddressState{Address: a, Interface: i.Interface, Assigned: true})
		}
		all = append(all, s)
	}
	return all, nil
}

// hang has calls hang until the function is called that it returns.
func (d *daemon) hang() (end func()) {
	hangs := make(chan struct{})
	d.hangs.Store(&hangs)
	return sync.OnceFunc(func() {
		d.hangs.Store(nil)
		close(hangs)
	})
}

// newElectedScene has a gateway that takes part in elections.
func newElectedScene(t *testing.T) (*scene, *daemon) {
	t.Helper()
	sc, d := newScene(t), &daemon{}
	sc.end()
	d.guarded = sc.guards
	sc.vrrp = d
	sc.s.Put(poolResource, poolOf("dmz", 10, 1))
	sc.spec(func(s *v2.LoadBalancerGatewaySpec) {
		s.Endpoints = v2.EndpointsPod
		s.VRRP = &v2.GatewayVRRP{Interface: "eth0", Sources: []string{"192.0.2.1", "2001:db8:2::1"}}
	})
	sc.start()
	return sc, d
}

// guards says whether the kernel guards addresses.
func (sc *scene) guards(all []netip.Addr) error {
	guarded := sc.guarded()
	for _, a := range all {
		if !slices.Contains(guarded, a) {
			return fmt.Errorf("%s is at the machine, which guards %v", a, guarded)
		}
	}
	return nil
}

// guarded are the addresses that the kernel guards.
func (sc *scene) guarded() (all []netip.Addr) {
	table := testkit.Must(sc.machine.Run("sh", "-c", "nft list table inet coil_lb 2>&1 || true"))(sc.t)
	for _, set := range strings.Split(table, "\n\tset ")[1:] {
		if !strings.HasPrefix(set, "addresses_") {
			continue
		}
		body, _, _ := strings.Cut(set, "\n\t}")
		for _, word := range strings.FieldsFunc(body, func(r rune) bool { return strings.ContainsRune(" \t\n{},", r) }) {
			if a, err := netip.ParseAddr(word); err == nil {
				all = append(all, a)
			}
		}
	}
	return all
}

// has waits until keepalived has the addresses of some blocks alone, and the machine guards the same ones.
func (sc *scene) has(d *daemon, when string, blocks ...int) {
	sc.t.Helper()
	var want []netip.Addr
	for _, i := range blocks {
		want = append(want, netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i)))
	}
	slices.SortFunc(want, netip.Addr.Compare)
	sc.await(when, func() error {
		d.mu.Lock()
		has := addressesOf(d.is)
		d.mu.Unlock()
		slices.SortFunc(has, netip.Addr.Compare)
		guarded := sc.guarded()
		slices.SortFunc(guarded, netip.Addr.Compare)
		if !slices.Equal(has, want) || !slices.Equal(guarded, want) {
			return fmt.Errorf("keepalived has %v, and the machine guards %v, want %v", has, guarded, want)
		}
		return nil
	})
}

// A keepalived that hangs is no reason to send connections to endpoints that are gone. An address that it may have is guarded until it hasn't.
func TestKeepalivedHangs(t *testing.T) {
	sc, d := newElectedScene(t)
	sc.service("a", nil)
	sc.service("b", nil)
	sc.endpoints("a", 0, "10.1.0.1")
	sc.block(1, "a", "")
	sc.has(d, "at first", 1)
	end := d.hang()
	defer end()
	sc.block(2, "b", "")
	hanging := func() error {
		if d.waiting.Load() == 0 {
			return errors.New("keepalived isn't asked")
		}
		return nil
	}
	sc.await("keepalived hangs", hanging)
	var took []time.Duration
	for i := range 20 {
		endpoint := fmt.Sprint("10.1.0.", 2+i)
		began := time.Now()
		sc.endpoints("a", 0, endpoint)
		sc.await("the kernel has another endpoint", func() error {
			out, err := sc.machine.Run("nft", "list", "map", "inet", "coil_lb", "endpoints_ipv4")
			if err == nil && !strings.Contains(out, endpoint+" ") {
				err = fmt.Errorf("%s", out)
			}
			return err
		})
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	t.Logf("the kernel has another endpoint after %s, %s at worst", took[len(took)/2], took[len(took)-1])
	if limit := testkit.Limit(100 * time.Millisecond); took[len(took)/2] > limit {
		t.Errorf("while keepalived hangs the kernel has another endpoint after %s, want %s at most", took, limit)
	}
	// Addresses that go meanwhile, one that keepalived has and one that it is about to have, are guarded.
	sc.block(1, "", "")
	sc.block(2, "", "")
	sc.block(3, "a", "")
	sc.await("the addresses that are gone are served no more", func() error {
		if out := testkit.Must(sc.machine.Run("nft", "list", "map", "inet", "coil_lb", "endpoints_ipv4"))(t); strings.Contains(out, "198.51.100.1 ") || !strings.Contains(out, "198.51.100.3 ") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	testkit.Check(t, sc.guards([]netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("198.51.100.3")}), hanging())
	end()
	sc.has(d, "when keepalived goes on", 3)
}

// Whatever comes, changes and goes, and however long keepalived takes, no address is at the machine that nothing guards. In the end both have the same addresses.
func TestElectionsInAnyOrder(t *testing.T) {
	for seed := range uint64(testkit.LBForm.Times(2, 40)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			sc, d := newElectedScene(t)
			r, slow := rand.New(rand.NewPCG(seed, 5)), rand.New(rand.NewPCG(seed, 6))
			takes := func() (time.Duration, error) {
				if slow.IntN(8) == 0 {
					return 0, errors.New("it doesn't do what its file says")
				}
				return time.Duration(slow.IntN(40)) * time.Millisecond, nil
			}
			d.takes.Store(&takes)
			sc.service("a", nil)
			for range 80 {
				switch r.IntN(8) {
				case 0:
					sc.s.Put(poolResource, poolOf("dmz", 10, int32(r.IntN(3))))
				case 1:
					sc.spec(func(s *v2.LoadBalancerGatewaySpec) { s.Pools = [][]string{{"dmz"}, {"other"}}[r.IntN(2)] })
				case 2:
					sc.s.Drop(gatewayResource, "gw1")
				case 3:
					sc.spec(func(s *v2.LoadBalancerGatewaySpec) {
						s.Pools, s.VRRP = []string{"dmz"}, &v2.GatewayVRRP{Interface: "eth0", Sources: []string{"192.0.2.1", "2001:db8:2::1"}}
					})
				default:
					sc.block(r.IntN(4), []string{"", "a"}[r.IntN(2)], "")
				}
				sc.Deliver(r.IntN(4))
				time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
			}
			sc.s.Put(poolResource, poolOf("dmz", 10, 2))
			sc.spec(func(s *v2.LoadBalancerGatewaySpec) {
				s.Pools, s.VRRP = []string{"dmz"}, &v2.GatewayVRRP{Interface: "eth0", Sources: []string{"192.0.2.1", "2001:db8:2::1"}}
			})
			sc.block(0, "", "")
			for i := 1; i < 4; i++ {
				sc.block(i, "a", "")
			}
			sc.has(d, "in the end", 1, 2, 3)
			sc.s.Drop(gatewayResource, "gw1")
			sc.settled("without the object")
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.unguarded != nil {
				t.Error(d.unguarded)
			}
		})
	}
}

// keepalived is asked for its states when they may have changed, and otherwise every minute: it logs each question.
func TestStatesAreAskedSeldom(t *testing.T) {
	sc, d := newElectedScene(t)
	sc.service("a", nil)
	sc.endpoints("a", 0, "10.1.0.1")
	sc.block(1, "a", "")
	sc.has(d, "at first", 1)
	sc.end()
	looks := func(when string, want int32) {
		t.Helper()
		before := d.states.Load()
		for range 3 {
			_ = sc.watchVRRP(t.Context(), struct{}{}) // it says when to look again
		}
		if got := d.states.Load() - before; got != want {
			t.Errorf("%s: three looks ask %d times, want %d", when, got, want)
		}
	}
	sc.asked = asked{}
	looks("at first", 1)
	looks("nothing has changed", 0)
	testkit.Check(t, sc.elect(t.Context(), struct{}{}))
	looks("it was told the same again", 0)
	d.mark.Add(1)
	looks("addresses came", 1)
	sc.block(2, "a", "")
	sc.DeliverAll()
	_ = sc.apply(t.Context(), struct{}{}) // likewise
	testkit.Check(t, sc.elect(t.Context(), struct{}{}))
	looks("another address", 1)
	sc.asked.at = sc.asked.at.Add(-statesEvery)
	looks("after a minute", 1)
}

// An address that keepalived may have is guarded from the start on, whatever the machine's file says: one that keepalived keeps since it refuses to be told anything, though no
// Service has it any more, and one that came after the file was written.
func TestGuardsAfterStart(t *testing.T) {
	for name, spoil := range map[string]func(sc *scene) error{
		"an old file":   func(*scene) error { return nil },
		"a broken file": func(sc *scene) error { return os.WriteFile(sc.file, []byte("{"), 0o600) },
		"no file":       func(sc *scene) error { return os.Remove(sc.file) },
	} {
		t.Run(name, func(t *testing.T) {
			sc, d := newElectedScene(t)
			sc.service("a", nil)
			sc.endpoints("a", 0, "10.1.0.1")
			sc.block(1, "a", "")
			sc.has(d, "at first", 1)
			refuses := func() (time.Duration, error) { return 0, errors.New("it doesn't do what its file says") }
			d.takes.Store(&refuses)
			sc.block(1, "", "")
			sc.says("while keepalived refuses", v2.ReasonVRRPFailed, "it doesn't do what its file says")
			sc.end()
			testkit.Check(t, spoil(sc), sc.guards(addressesOf(d.is)))
			testkit.Must(sc.machine.Run("nft", "flush", "ruleset"))(t)
			sc.boot() // nothing is known of the cluster yet
			testkit.Check(t, sc.guards(addressesOf(d.is)))
			sc.start()
			sc.says("while keepalived refuses, after the start", v2.ReasonVRRPFailed, "it doesn't do what its file says")
			testkit.Check(t, sc.guards(addressesOf(d.is)))
			d.takes.Store(nil)
			sc.settled("when keepalived has nothing any more")
		})
	}
}

// stopped has a scene whose loops are called by hand, and a clock.
func stopped(t *testing.T) (sc *scene, d *daemon, pass func(time.Duration)) {
	t.Helper()
	sc, d = newElectedScene(t)
	sc.service("a", nil)
	sc.endpoints("a", 0, "10.1.0.1")
	sc.block(1, "a", "")
	sc.has(d, "at first", 1)
	sc.end()
	clock := time.Now()
	sc.now = func() time.Time { return clock }
	return sc, d, func(by time.Duration) { clock = clock.Add(by) }
}

// turns has the machine see everything, do it, and look at keepalived.
func (sc *scene) turns() {
	sc.t.Helper()
	sc.DeliverAll()
	_ = sc.apply(sc.t.Context(), struct{}{}) // it says when to look again
	testkit.Check(sc.t, sc.elect(sc.t.Context(), struct{}{}))
	_ = sc.watchVRRP(sc.t.Context(), struct{}{}) // likewise
}

// What keepalived doesn't follow it is told again after longer and longer pauses, however often endpoints change, and at once when something else is to be told.
func TestUnfollowedChangesAreNotRepeatedSoon(t *testing.T) {
	sc, d, pass := stopped(t)
	refuses := func() (time.Duration, error) {
		return 0, fmt.Errorf("%w coil.conf says: instance coil_10_ipv6 is missing", keepalived.ErrNotFollowed)
	}
	d.takes.Store(&refuses)
	sc.block(2, "a", "")
	before := d.asked.Load()
	for i := range 200 {
		sc.endpoints("a", 0, fmt.Sprint("10.1.1.", i))
		sc.turns()
		pass(3 * time.Second)
	}
	// After 0, 3, 9, 21, 45, 93 s, and then each minute.
	if n := d.asked.Load() - before; n < 12 || n > 16 {
		t.Errorf("within ten minutes it was told %d times", n)
	}
	before = d.asked.Load()
	sc.block(3, "a", "")
	sc.turns()
	if n := d.asked.Load() - before; n != 1 {
		t.Errorf("with another address it was told %d times at once", n)
	}
	d.takes.Store(nil)
	pass(lookEvery)
	sc.turns()
	if n := len(addressesOf(d.is)); n != 6 {
		t.Errorf("it has %d addresses when it takes them, want 6", n)
	}
	sc.block(4, "a", "")
	for what, err := range map[string]error{"doesn't run": keepalived.ErrNotRunning, "doesn't include the file": errors.New("keepalived.conf doesn't include coil.conf")} {
		fails := func() (time.Duration, error) { return 0, err }
		d.takes.Store(&fails)
		before = d.asked.Load()
		for range 10 {
			sc.turns()
		}
		if n := d.asked.Load() - before; n < 10 {
			t.Errorf("while it %s, it is told %d times in ten looks", what, n)
		}
	}
}

// While keepalived refuses a change, it goes on as before: its states are told.
func TestStatesAreToldWhileKeepalivedRefuses(t *testing.T) {
	sc, d, _ := stopped(t)
	refuses := func() (time.Duration, error) { return 0, errors.New("no") }
	d.takes.Store(&refuses)
	sc.block(2, "a", "")
	for range 3 {
		sc.turns()
		if st := sc.status(sc.own(), metav1.Now()); len(st.VRRP) != 2 || st.VRRP[0].State != "MASTER" || condition(st) != v2.ReasonVRRPFailed {
			t.Errorf("%+v", st)
		}
	}
}

// A keepalived that doesn't do any more what it did is told again: somebody else may have changed its file.
func TestKeepalivedIsChangedByOthers(t *testing.T) {
	for name, change := range map[string]func(*keepalived.Instance){
		"an address is missing": func(i *keepalived.Instance) { i.Addresses = i.Addresses[:0] },
		"another priority":      func(i *keepalived.Instance) { i.Priority = 7 },
		"another instance":      func(i *keepalived.Instance) { i.Name = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			sc, d, _ := stopped(t)
			sc.turns()
			before := d.asked.Load()
			sc.turns()
			if n := d.asked.Load() - before; n != 0 {
				t.Errorf("it was told %d times while nothing changed", n)
			}
			wrong := keepalived.Config{Instances: slices.Clone(d.is.Instances)}
			change(&wrong.Instances[0])
			d.wrong = &wrong
			d.mark.Add(1)
			sc.turns() // it is seen
			sc.turns() // it is told
			if n := d.asked.Load() - before; n != 1 || d.wrong != nil {
				t.Errorf("it was told %d times", n)
			}
			if st := sc.status(sc.own(), metav1.Now()); condition(st) != v2.ReasonAllServed {
				t.Errorf("%+v", st)
			}
		})
	}
}
