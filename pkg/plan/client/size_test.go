package client

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/cluster"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/testkit"
)

// scattered are n destinations far apart, of a family, every third of IPv4 private.
func scattered(rng *rand.Rand, n int, f dataplane.Family) []netip.Prefix {
	var all []netip.Prefix
	for i := range n {
		if f == dataplane.IPv6 {
			a := netip.MustParseAddr("2001:db8::").As16()
			for j := 4; j < 16; j++ {
				a[j] = byte(rng.Uint32())
			}
			all = append(all, netip.PrefixFrom(netip.AddrFrom16(a), 128))
			continue
		}
		a := netip.AddrFrom4([4]byte{byte(10 + 30*(i%3)), byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())})
		all = append(all, netip.PrefixFrom(a, 16+rng.IntN(17)).Masked())
	}
	return all
}

func ofDestinations(all []netip.Prefix) *v2.Egress {
	e := &v2.Egress{}
	for _, d := range all {
		e.Spec.Destinations = append(e.Spec.Destinations, d.String())
	}
	return e
}

// A destination costs a range or two, however scattered they are, also with originatingOnly.
func TestRangesAreFew(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var egresses []Egress
	for i := range MostDestinations / 256 {
		egresses = append(egresses, Egress{Name: fmt.Sprint("net/", i), OriginatingOnly: true, Destinations: scattered(rng, 256, dataplane.IPv6)})
	}
	egresses = append(egresses, Egress{Name: "net/all", OriginatingOnly: true, Destinations: plantest.Prefixes("::/0")})
	s := StateOf(clientOfFamilies("6", egresses...))
	g := s.Guard()
	if most := MostDestinations + 10; len(g.Destinations) > most || len(g.Replies) > most || len(g.Replies) == 0 {
		t.Errorf("%d ranges are captured, to %d answers pass, want at most %d", len(g.Destinations), len(g.Replies), most)
	}
	egresses[len(egresses)-1].OriginatingOnly = false
	g = StateOf(clientOfFamilies("6", egresses...)).Guard()
	if most := MostDestinations + 10; len(g.Replies) > most || len(g.Replies) < MostDestinations/2 {
		t.Errorf("answers pass to %d ranges, want about %d", len(g.Replies), MostDestinations)
	}
}

// Egresses that are more than a pod may have are closed: what they capture stays captured, by few routes.
func TestFit(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	modes := map[bool]int{}
	for round := range 12 {
		facts := clusterOf(1+rng.IntN(600), 1+rng.IntN(40))
		ranges := cluster.RangesOf(facts)
		whole := allOf(ranges)
		var all []Egress
		for i := range 8 + round%6 {
			e := Egress{
				Name: fmt.Sprint("net/", i), OriginatingOnly: rng.IntN(2) == 0, Peers: clientAddrs("46", fmt.Sprintf("10.96.0.%d", i), fmt.Sprintf("fd96::%d", i)),
				Destinations: append(scattered(rng, 200, dataplane.IPv4), scattered(rng, 56, dataplane.IPv6)...),
			}
			// Destinations inside of the cluster may be asked for by a longer prefix, and ranges around it, too.
			for range 5 {
				p := whole[rng.IntN(len(whole))]
				bits := p.Bits() - 3 + rng.IntN(7)
				e.Destinations = append(e.Destinations, netip.PrefixFrom(p.Addr(), min(max(bits, 0), p.Addr().BitLen())).Masked())
			}
			// Ranges around all others, and private ones, too.
			for _, wide := range plantest.Prefixes("0.0.0.0/0 ::/0 8.0.0.0/6 10.0.0.0/8") {
				if rng.IntN(4) == 0 {
					e.Destinations = append(e.Destinations, wide)
				}
			}
			e.InCluster = ranges.For(ofDestinations(e.Destinations))
			all = append(all, e)
		}
		fit, excess := Fit(all)
		if len(excess) == 0 || len(excess) == len(all) {
			t.Fatalf("%d of %d don't fit", len(excess), len(all))
		}
		for _, e := range all[:len(all)-len(excess)] {
			if !slices.ContainsFunc(fit, func(f Egress) bool { return f.Name == e.Name }) {
				t.Errorf("%s isn't used", e.Name)
			}
		}
		n := 0
		for _, e := range fit {
			n += len(e.Destinations)
		}
		var more prefixSet
		for _, e := range all {
			if slices.Contains(excess, e.Name) {
				more.add(e.Destinations...)
			}
		}
		modes[more.Size() <= mostClosed]++
		if most := MostDestinations + max(mostClosed, 4*mostClosing+2*2*len(whole)); n > most {
			t.Errorf("%d destinations, want at most %d", n, most)
		}
		before, err := setOf(StateOf(clientOfFamilies("46", all...)).Filter.Destinations)
		if err != nil {
			t.Fatal(err)
		}
		state := StateOf(clientOfFamilies("46", fit...))
		after, err := setOf(state.Filter.Destinations)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range before.Ranges() {
			if !after.ContainsRange(r) {
				t.Errorf("round %d: something of %s is open", round, r)
			}
		}
		for _, e := range all {
			for _, d := range e.Destinations {
				shared := slices.ContainsFunc(fit, func(f Egress) bool { return f.Name != "" && slices.Contains(f.Destinations, d) })
				if slices.Contains(excess, e.Name) && !shared && owner(all, d.Addr()) == e.Name && before.Contains(d.Addr()) && owner(fit, d.Addr()) != "" {
					t.Errorf("round %d: %s of %s goes by %s", round, d, e.Name, owner(fit, d.Addr()))
				}
			}
		}
		if len(state.Conflicts) > 0 && state.Conflicts[0].Winner == "" {
			t.Errorf("a conflict with an Egress without a name: %v", state.Conflicts[0])
		}
		for _, r := range state.Guard().Replies {
			for _, a := range []netip.Addr{r.From(), r.To()} {
				if before.Contains(a) && !answered(all, a) {
					t.Errorf("round %d: answers pass to %s", round, a)
				}
			}
		}
	}
	if modes[true] == 0 || modes[false] == 0 {
		t.Errorf("closed one by one were %d, by ranges %d", modes[true], modes[false])
	}
}

// answered says whether one of the Egresses that have the longest prefix around an address leaves answers alone.
func answered(egresses []Egress, a netip.Addr) bool {
	leaves, bits := false, -1
	for _, e := range egresses {
		for _, d := range e.Destinations {
			if d.Contains(a) && d.Bits() >= bits {
				leaves = e.OriginatingOnly || d.Bits() == bits && leaves
				bits = d.Bits()
			}
		}
	}
	return leaves
}

// A few destinations too many close nothing but themselves, and open nothing to answers.
func TestFitClosesOneByOne(t *testing.T) {
	all := []Egress{{Name: "a/all", Destinations: plantest.Prefixes("0.0.0.0/0 ::/0")}}
	for i := range MostDestinations/256 - 1 {
		e := Egress{Name: fmt.Sprint("b/", i)}
		for j := range 256 {
			e.Destinations = append(e.Destinations, netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i), byte(j), 7}), 32))
		}
		all = append(all, e)
	}
	for i := range 254 {
		all[0].Destinations = append(all[0].Destinations, netip.PrefixFrom(netip.AddrFrom4([4]byte{101, byte(i / 256), byte(i), 7}), 32))
	}
	answered := Egress{Name: "x/answered", OriginatingOnly: true, Destinations: plantest.Prefixes("50.1.2.3/32 10.1.3.0/24")}
	more := Egress{Name: "x/x", Destinations: plantest.Prefixes("10.1.2.0/24 fd12::/16 50.1.2.4/32")}
	fit, excess := Fit(append(all, answered, more))
	if len(excess) != 2 {
		t.Fatalf("%v don't fit", excess)
	}
	for _, a := range []string{"10.1.2.3", "10.1.3.3", "fd12::1", "50.1.2.3", "50.1.2.4"} {
		if got := owner(fit, netip.MustParseAddr(a)); got != "" {
			t.Errorf("%s goes by %s", a, got)
		}
	}
	for _, a := range []string{"9.9.9.9", "50.1.2.5", "2001:db8::1"} {
		if got := owner(fit, netip.MustParseAddr(a)); got != "a/all" {
			t.Errorf("%s goes by %q", a, got)
		}
	}
	g := StateOf(clientOfFamilies("46", fit...)).Guard()
	for a, want := range map[string]bool{"10.1.2.3": true, "10.1.3.3": true, "fd12::1": true, "50.1.2.3": true, "10.2.0.1": false} {
		if passes(g, netip.MustParseAddr(a), false) == want {
			t.Errorf("the node keeps packets to %s: %t", a, !want)
		}
	}
	for a, want := range map[string]bool{"10.1.3.3": true, "50.1.2.3": true, "50.1.2.4": false, "9.9.9.9": false} {
		if got := passes(g, netip.MustParseAddr(a), true); got != want {
			t.Errorf("the node lets answers to %s through: %t", a, got)
		}
	}
}

// The plan is made in a time that grows with its size, not with the square of that.
func TestFitOfManyIsQuick(t *testing.T) {
	var e Egress
	for i := range 1 << 14 {
		e.Destinations = append(e.Destinations, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 1}), 32))
		e.InCluster = append(e.InCluster, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 2}), 32))
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadTime(t)
	fit, _ := Fit([]Egress{e})
	if took := threadTime(t) - start; took > testkit.Timeout(3*time.Second) {
		t.Errorf("it took %v of a processor", took)
	}
	if len(fit) != 1 || len(fit[0].Destinations) > 2*mostClosing {
		t.Errorf("%d Egresses, of the first %d destinations", len(fit), len(fit[0].Destinations))
	}
}

// threadTime is the processor time of the thread: other programs don't add to it.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	testkit.Check(t, unix.Getrusage(unix.RUSAGE_THREAD, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// owner returns the Egress that has the longest prefix around an address, of two the first by name.
func owner(egresses []Egress, a netip.Addr) string {
	name, bits := "none", -1
	for _, e := range egresses {
		for _, d := range e.Destinations {
			if d.Contains(a) && (d.Bits() > bits || d.Bits() == bits && e.Name < name) {
				name, bits = e.Name, d.Bits()
			}
		}
	}
	return name
}

// A destination that is closed because there are too many doesn't go by an Egress with a longer prefix, of which no more
// than a part is closed. The cluster stays within reach.
func TestFitSparesOthers(t *testing.T) {
	var all []Egress
	for i := range MostDestinations / 256 {
		e := Egress{Name: fmt.Sprint("a/", i), Peers: clientAddrs("4", "10.96.0.9", ""), InCluster: plantest.Prefixes("10.96.0.0/12 10.4.0.0/16 10.5.0.0/24")}
		for j := range 256 {
			e.Destinations = append(e.Destinations, netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i), byte(j), 7}), 32))
		}
		all = append(all, e)
	}
	all[0].Destinations[0] = netip.MustParsePrefix("192.0.2.0/24")
	all[0].Destinations[1] = netip.MustParsePrefix("198.18.0.0/15")
	more := Egress{Name: "x/x", InCluster: all[0].InCluster}
	for i := range 250 {
		more.Destinations = append(more.Destinations, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, byte(i), 1}), 32))
		if i < 4 || i > 5 {
			more.Destinations = append(more.Destinations, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), byte(i), byte(i)}), 32))
		}
	}
	fit, excess := Fit(append(all, more))
	if len(excess) != 1 {
		t.Fatalf("%v don't fit", excess)
	}
	state := StateOf(clientOfFamilies("4", fit...))
	captured, err := setOf(state.Filter.Destinations)
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]string{"192.0.2.1": "", "192.0.2.200": "a/0", "198.18.0.1": "a/0", "10.7.7.7": "", "192.0.77.1": ""} {
		if got := owner(fit, netip.MustParseAddr(address)); got != want || !captured.Contains(netip.MustParseAddr(address)) {
			t.Errorf("%s goes by %q, want %q", address, got, want)
		}
	}
	// Some of the Services' range was asked for, in the other two nothing.
	for _, address := range []string{"10.4.1.1", "10.5.0.1"} {
		if captured.Contains(netip.MustParseAddr(address)) {
			t.Errorf("%s, a pod, can't be reached", address)
		}
	}
}

// Routers that are more than a pod may have take nothing.
func TestFitRouters(t *testing.T) {
	var all []Egress
	for i := range 12 {
		e := Egress{Name: fmt.Sprint("net/", i), Direct: true, Destinations: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 32)}}
		for j := range groupBuckets {
			e.Routers = append(e.Routers, Router{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i), byte(j)}), State: RouterLive})
		}
		all = append(all, e)
	}
	fit, excess := Fit(all)
	s := StateOf(clientOfFamilies("4", fit...))
	if len(s.Tunnels) != MostTunnels || len(excess) != 4 {
		t.Errorf("%d tunnels, and %v don't fit; want %d and 4", len(s.Tunnels), excess, MostTunnels)
	}
	for _, e := range all {
		d := e.Destinations[0]
		if !slices.ContainsFunc(s.Filter.Destinations, func(r netipx.IPRange) bool { return !d.Addr().Less(r.From()) && !r.To().Less(d.Addr()) }) {
			t.Errorf("%s of %s is open", d, e.Name)
		}
	}
}

func BenchmarkClientState(b *testing.B) {
	rng := rand.New(rand.NewPCG(5, 6))
	ranges := cluster.RangesOf(clusterOf(5000, 40))
	var all []Egress
	for i := range plan.MostEgresses {
		e := Egress{Name: fmt.Sprint("net/", i), OriginatingOnly: true, Destinations: scattered(rng, 256, dataplane.IPv6)}
		e.InCluster = ranges.For(ofDestinations(e.Destinations))
		all = append(all, e)
	}
	for b.Loop() {
		fit, _ := Fit(all)
		StateOf(clientOfFamilies("6", fit...))
	}
}
