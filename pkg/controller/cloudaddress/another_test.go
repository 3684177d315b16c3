package cloudaddress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/openstack"
)

// six are the addresses of fd00:1::/124 from one to another.
func six(from, to int) (all []netip.Addr) {
	for i := from; i <= to; i++ {
		all = append(all, netip.MustParseAddr(fmt.Sprintf("fd00:1::%x", i)))
	}
	return all
}

// hasPair wants that a claim has a pair, and its port that one alone.
func (sc *scene) hasPair(name string, n int) {
	sc.t.Helper()
	want := []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.1.0.%d", n)), six(n, n)[0]}
	if p := sc.claim(name).Status.Provided; p == nil || p.IPv4 != want[0].String() || p.IPv6 != want[1].String() {
		sc.t.Errorf("the claim %s has %+v, want %s: %+v", name, p, want, sc.claim(name).Status.Conditions)
	}
	if got := sc.cloud.has()[name].Fixed; !slices.Equal(got, want) {
		sc.t.Errorf("the port of %s has %s, want %s", name, got, want)
	}
}

// A claim gets another pair when somebody has the IPv6 address of the one that OpenStack has begun, even where OpenStack would choose the same again.
func TestAnotherPair(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.cloud.take(true, six(1, 4)...)
		sc.cloud.take(true, netip.MustParseAddr("10.1.0.6"))
		sc.pairPool("a")
		sc.ask("one", "a")
		sc.run(time.Second)
		sc.hasPair("one", 5)
		if n := len(sc.cloud.has()); n != 1 {
			t.Errorf("there are %d ports", n)
		}
		calls := sc.cloud.made()
		if len(calls) > 10 {
			t.Errorf("there are the calls %q", calls)
		}
		// The IPv4 address of 6 is taken; the pairs of those after 11 aren't OpenStack's to give.
		for i := range 6 {
			sc.ask(fmt.Sprint("more-", i), "a")
			sc.run(10 * time.Second)
		}
		for i, n := range []int{7, 8, 9, 10, 11} {
			sc.hasPair(fmt.Sprint("more-", i), n)
		}
		if got := sc.is("more-5", v2.ClaimProvided); got != string(openstack.AddressesExhausted) {
			t.Errorf("a claim for which there is no pair says %q", got)
		}
	})
}

// Several claims at once get different pairs.
func TestAnotherPairAtOnce(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.cloud.take(true, six(1, 3)...)
		sc.pairPool("a")
		for i := range workers {
			sc.ask(fmt.Sprint("c", i), "a")
		}
		sc.run(2 * time.Minute)
		all := map[string]bool{}
		for i := range workers {
			p := sc.claim(fmt.Sprint("c", i)).Status.Provided
			if p == nil {
				t.Fatalf("claim %d has nothing: %+v", i, sc.claim(fmt.Sprint("c", i)).Status)
			}
			all[p.IPv4+p.IPv6] = true
		}
		if len(all) != workers {
			t.Errorf("the claims have %v", all)
		}
	})
}

// When no pair is free the claim says so in OpenStack's words, OpenStack is asked ever more rarely, and the claim gets the first pair that is.
func TestNoPair(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.cloud.take(true, six(0, 15)...)
		sc.pairPool("a")
		sc.ask("one", "a")
		sc.run(20 * time.Minute)
		is := meta.FindStatusCondition(sc.claim("one").Status.Conditions, v2.ClaimProvided)
		if is == nil || is.Reason != string(openstack.AddressesExhausted) || !strings.Contains(is.Message, "AddressPool a") || !strings.Contains(is.Message, "fd00:1::1 already allocated") {
			t.Errorf("it says %+v", is)
		}
		calls := sc.cloud.made()
		if n := len(calls); n > 120 || len(sc.cloud.has()) != 1 {
			t.Errorf("there were %d calls in 20 minutes, and there is %+v", n, sc.cloud.has())
		}
		if slices.ContainsFunc(calls, func(c string) bool { return strings.HasPrefix(c, "replace") }) {
			t.Errorf("pairs that are taken are asked for: %q", calls)
		}
		sc.cloud.free(six(9, 9)[0])
		sc.run(2 * time.Minute)
		sc.hasPair("one", 9)
	})
}

// Where OpenStack doesn't show who has an address, pairs are tried one after the other, a few in one pass, ever more rarely, and none again before all were.
func TestAnotherPairUnseen(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.cloud.take(false, six(1, 11)...)
		sc.pairPool("a")
		sc.ask("one", "a")
		sc.run(20 * time.Minute)
		calls := sc.cloud.made()
		inPass := 0
		for _, c := range calls {
			if inPass++; !strings.HasPrefix(c, "replace") {
				inPass = 0
			}
			if inPass > tries {
				t.Errorf("there are %d tries in one pass: %q", inPass, calls)
			}
		}
		least, most := len(calls), 0
		for _, n := range tried(calls) {
			least, most = min(least, n), max(most, n)
		}
		if n := len(tried(calls)); n != 10 || least < 1 || most > least+1 || len(calls) > 300 {
			t.Errorf("there are %d calls; %d pairs were tried %d to %d times", len(calls), n, least, most)
		}
		if got := sc.is("one", v2.ClaimProvided); got != string(openstack.Conflict) {
			t.Errorf("it says %q", got)
		}
		sc.cloud.free(six(11, 11)[0])
		sc.run(5 * time.Minute)
		sc.hasPair("one", 11)
	})
}

// tried counts the pairs that were tried.
func tried(calls []string) map[string]int {
	n := map[string]int{}
	for _, c := range calls {
		if strings.HasPrefix(c, "replace") {
			n[c]++
		}
	}
	return n
}

// An address that a claim tells stays, whoever has the other one of the pair.
func TestPairToldStays(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pairPool("a")
		sc.ask("one", "a")
		sc.run(time.Second)
		sc.hasPair("one", 1)
		sc.cloud.lose("one", six(1, 1)[0])
		sc.cloud.take(true, six(1, 1)...)
		sc.cloud.made()
		sc.run(2 * resync)
		if p := sc.claim("one").Status.Provided; p == nil || p.IPv4 != "10.1.0.1" || p.IPv6 != "fd00:1::1" {
			t.Errorf("it tells %+v", p)
		}
		if got := sc.is("one", v2.ClaimProvided); got != string(openstack.Conflict) {
			t.Errorf("it says %q", got)
		}
		if n := tried(sc.cloud.made()); len(n) > 0 || !slices.Contains(sc.cloud.has()["one"].Fixed, netip.MustParseAddr("10.1.0.1")) {
			t.Errorf("the port has %s after %v", sc.cloud.has()["one"].Fixed, n)
		}
	})
}

// A claim that tells an address stays with it, too, if the cache doesn't know that yet.
func TestPairToldUnseen(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.cloud.take(true, six(1, 1)...)
		told := false
		sc.cloud.refuse(func(call string) error {
			if call == "ensure one" && !told && len(sc.cloud.addresses) > 0 {
				told = true
				claim := sc.claim("one")
				claim.Status.Provided = &v2.ProvidedAddress{PortID: "port-of-one", IPv4: "10.1.0.1", IPv6: "fd00:1::1"}
				sc.s.Put(claimResource, claim)
			}
			return nil
		})
		sc.pairPool("a")
		sc.ask("one", "a")
		sc.run(time.Minute)
		if n := tried(sc.cloud.made()); !told || len(n) > 0 {
			t.Errorf("it was told: %t; there are the tries %v", told, n)
		}
		if got := sc.cloud.has()["one"].Fixed; !slices.Equal(got, []netip.Addr{netip.MustParseAddr("10.1.0.1")}) {
			t.Errorf("the port has %s", got)
		}
	})
}

// What another claim tells isn't given a second time, although its port is gone for the moment.
func TestAnotherPairOfClaims(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pairPool("a")
		sc.ask("one", "a")
		sc.run(time.Second)
		sc.ask("two", "a")
		sc.run(time.Second)
		sc.cloud.take(true, six(3, 11)...)
		sc.cloud.take(true, netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.3"))
		sc.cloud.lose("two", netip.MustParseAddr("10.1.0.2"), six(2, 2)[0])
		sc.cloud.take(true, netip.MustParseAddr("10.1.0.2"))
		sc.ask("three", "a")
		sc.run(time.Second)
		sc.cloud.free(netip.MustParseAddr("10.1.0.2"))
		sc.run(time.Minute)
		if got := sc.is("three", v2.ClaimProvided); got != string(openstack.AddressesExhausted) {
			t.Errorf("the third one says %q, and has %+v", got, sc.claim("three").Status.Provided)
		}
		sc.run(resync)
		sc.hasPair("two", 2)
	})
}

// A program that ends in the middle leaves one port, with the pair of before or with the other one. The next program goes on.
func TestAnotherPairKilled(t *testing.T) {
	for _, done := range []bool{false, true} {
		t.Run(fmt.Sprint("done ", done), func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				sc.cloud.take(true, six(1, 1)...)
				replaces := func(call string) bool { return strings.HasPrefix(call, "replace") }
				if done {
					sc.cloud.mislay(replaces)
				} else {
					sc.cloud.refuse(func(call string) error {
						if replaces(call) {
							return &openstack.Error{Reason: openstack.Temporary, Message: "no answer"}
						}
						return nil
					})
				}
				sc.pairPool("a")
				sc.ask("one", "a")
				sc.run(500 * time.Millisecond)
				if got := sc.is("one", v2.ClaimProvided); got != string(openstack.Temporary) {
					t.Errorf("it says %q", got)
				}
				sc.stop()
				sc.cloud.mislay(nil)
				sc.cloud.refuse(nil)
				sc.start()
				sc.run(time.Minute)
				sc.hasPair("one", 2)
				if all := sc.cloud.has(); len(all) != 1 {
					t.Errorf("there is %+v", all)
				}
			})
		})
	}
}
