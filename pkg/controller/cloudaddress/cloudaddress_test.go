package cloudaddress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// Two pools of one project, even of one subnet, leave each other's address pairs alone.
func TestTwoPoolsOfOneProject(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pool("a", 1)
		sc.pool("b", 1)
		sc.gateway("gw", "port", "a", "b")
		sc.ask("one", "a")
		sc.run(time.Second)
		sc.ask("two", "b")
		sc.run(time.Second)
		sc.wantsPairs("of both", "port", "10.1.0.1/32", "10.1.0.2/32")
		sc.ask("three", "a")
		sc.run(2 * resync)
		sc.wantsPairs("with a third one", "port", "10.1.0.1/32", "10.1.0.2/32", "10.1.0.3/32")
		sc.give("one")
		sc.run(time.Second)
		sc.wantsPairs("without the first one", "port", "10.1.0.2/32", "10.1.0.3/32")
		if sc.claim("one") != nil && len(sc.claim("one").Finalizers) > 0 || len(sc.cloud.has()) != 2 {
			t.Errorf("the claim is left as %+v, the cloud has %+v", sc.claim("one"), sc.cloud.has())
		}
	})
}

// A gateway that gets another port, or leaves the pool, loses the address pairs of the former one; a port that is gone keeps nobody waiting.
func TestGatewayChanges(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pool("a", 1)
		sc.gateway("gw1", "first", "a")
		sc.gateway("gw2", "second", "a")
		sc.ask("one", "a")
		sc.run(time.Second)
		sc.wantsPairs("at first", "first", "10.1.0.1/32")
		sc.gateway("gw1", "third", "a")
		sc.gateway("gw2", "second", "other")
		sc.run(time.Second)
		sc.wantsPairs("with another port", "first")
		sc.wantsPairs("with another port", "third", "10.1.0.1/32")
		sc.wantsPairs("after it left", "second")
		sc.cloud.refuse(func(call string) error {
			if call == "pairs third" {
				return &openstack.Error{Reason: openstack.NotFound, Message: "Port third could not be found."}
			}
			return nil
		})
		sc.run(resync)
		sc.give("one")
		sc.run(time.Minute)
		if len(sc.cloud.has()) != 0 {
			t.Errorf("the cloud has %+v", sc.cloud.has())
		}
	})
}

// As long as OpenStack doesn't take an address from a gateway, its port stays, and OpenStack is asked ever more rarely.
func TestPairsStay(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pool("a", 1)
		sc.gateway("gw", "port", "a")
		sc.ask("one", "a")
		sc.run(time.Second)
		sc.cloud.refuse(func(call string) error {
			if call == "pairs port" {
				return &openstack.Error{Reason: openstack.Forbidden, Message: "it is forbidden"}
			}
			return nil
		})
		sc.cloud.made()
		sc.give("one")
		sc.run(4 * time.Minute)
		if n := len(sc.cloud.made()); n > 20 || len(sc.cloud.has()) != 1 {
			t.Errorf("there were %d calls, and there is %+v", n, sc.cloud.has())
		}
		sc.cloud.refuse(nil)
		sc.run(resync)
		if len(sc.cloud.has()) != 0 {
			t.Errorf("in the end there is %+v", sc.cloud.has())
		}
	})
}

// A gateway whose port is refused is told, and others serve; if all are, nobody does.
func TestPairsRefused(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pool("a", 1)
		sc.gateway("gw1", "first", "a")
		sc.gateway("gw2", "second", "a")
		refuse := func(ports ...string) {
			sc.cloud.refuse(func(call string) error {
				if port, ok := strings.CutPrefix(call, "pairs "); ok && slices.Contains(ports, port) {
					return &openstack.Error{Reason: openstack.Forbidden, Message: "it is forbidden"}
				}
				return nil
			})
		}
		refuse("second")
		sc.ask("one", "a")
		sc.run(time.Second)
		c := sc.claim("one").Status.Conditions
		i := slices.IndexFunc(c, func(c metav1.Condition) bool { return c.Type == v2.ClaimAllowed })
		if i < 0 || c[i].Status != metav1.ConditionTrue || !strings.Contains(c[i].Message, "gw2") || !strings.Contains(c[i].Message, "it is forbidden") {
			t.Errorf("with one gateway: %+v", c)
		}
		refuse("first", "second")
		sc.ask("two", "a")
		sc.run(time.Second)
		if got := sc.is("two", v2.ClaimAllowed); got != v2.ReasonPairsRefused {
			t.Errorf("with none: %q", got)
		}
		refuse()
		sc.run(2 * time.Minute)
		if got := sc.is("two", v2.ClaimAllowed); got != v2.ReasonPairsWritten {
			t.Errorf("in the end: %q", got)
		}
	})
}

// A cloud that fails as a whole is asked ever more rarely, however many claims wait; it provides all of them when it works again.
func TestPause(t *testing.T) {
	for _, reason := range []openstack.Reason{openstack.Temporary, openstack.AuthFailed} {
		for _, from := range []string{"list", "ensure"} {
			t.Run(fmt.Sprint(reason, " from ", from), func(t *testing.T) {
				inScene(t, func(t *testing.T, sc *scene) {
					sc.cloud.refuse(func(call string) error {
						if strings.HasPrefix(call, from) {
							return &openstack.Error{Reason: reason, Message: "it is closed"}
						}
						return nil
					})
					sc.pool("a", 1)
					for i := range 100 {
						sc.ask(fmt.Sprint("c", i), "a")
					}
					sc.run(30 * time.Minute)
					// Each pause is a minute in the end, and as many try after it as there are workers.
					if n := len(sc.cloud.made()); n > 40*workers {
						t.Errorf("there were %d calls in 30 minutes", n)
					}
					if got := sc.is("c99", v2.ClaimProvided); got != string(reason) {
						t.Errorf("a claim says %q", got)
					}
					sc.cloud.refuse(nil)
					sc.run(15 * time.Minute)
					for i := range 100 {
						if got := sc.is(fmt.Sprint("c", i), v2.ClaimProvided); got != v2.ReasonAddressProvided {
							t.Fatalf("in the end claim %d says %q", i, got)
						}
					}
				})
			})
		}
	}
}

// The cloud's own time to wait is kept.
func TestRetryAfter(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.cloud.refuse(func(string) error {
			return &openstack.Error{Reason: openstack.Temporary, Message: "too many", RetryAfter: 10 * time.Minute}
		})
		sc.pool("a", 1)
		sc.run(9 * time.Minute)
		if calls := sc.cloud.made(); len(calls) != 1 {
			t.Errorf("there were the calls %q", calls)
		}
		sc.cloud.refuse(nil)
		sc.run(2 * time.Minute)
		if calls := sc.cloud.made(); !slices.Contains(calls, "sweep") {
			t.Errorf("there were the calls %q", calls)
		}
	})
}

// An error of one address holds up no other one.
func TestOneFails(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.cloud.refuse(func(call string) error {
			if call == "ensure bad" {
				return &openstack.Error{Reason: openstack.Conflict, Message: "somebody has it"}
			}
			return nil
		})
		sc.pool("a", 1)
		sc.ask("bad", "a")
		sc.run(time.Second)
		sc.ask("good", "a")
		sc.run(time.Second)
		if got := sc.is("bad", v2.ClaimProvided); got != string(openstack.Conflict) {
			t.Errorf("one says %q", got)
		}
		if got := sc.is("good", v2.ClaimProvided); got != v2.ReasonAddressProvided {
			t.Errorf("another says %q", got)
		}
	})
}

// An address that the cloud chooses, and that the pool excludes, is told. One that is excluded later stays its claim's.
func TestExcludedAddress(t *testing.T) {
	exclude := func(sc *scene) {
		p := fakeapi.Find[*v2.AddressPool](sc.s, poolResource, "a").DeepCopy()
		p.Spec.Exclude = []string{*p.Spec.Subnets[0].IPv4}
		sc.s.Put(poolResource, p)
	}
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pool("a", 1)
		sc.ask("before", "a")
		sc.run(time.Second)
		exclude(sc)
		sc.ask("after", "a")
		sc.run(time.Minute)
		if before, after := sc.is("before", v2.ClaimProvided), sc.is("after", v2.ClaimProvided); before != v2.ReasonAddressProvided || after != v2.ReasonAddressExcluded {
			t.Errorf("they say %q and %q", before, after)
		}
	})
}

// What a claim, or its pool, gets wrong is told with what to do.
func TestProblems(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v2.AddressClaim)
		subnet int
		reason string
	}{
		"two addresses":    {func(a *v2.AddressClaim) { *a.Spec.Count = 2 }, 1, v2.ReasonAddressInvalid},
		"a list":           {func(a *v2.AddressClaim) { a.Spec.Count, a.Spec.Addresses = nil, []string{"10.1.0.7", "10.1.0.8"} }, 1, v2.ReasonAddressInvalid},
		"outside":          {func(a *v2.AddressClaim) { a.Spec.Count, a.Spec.Addresses = nil, []string{"10.9.0.7"} }, 1, v2.ReasonAddressOutsidePool},
		"chosen elsewhere": {func(*v2.AddressClaim) {}, 2, v2.ReasonAddressOutsidePool},
		"by name":          {func(a *v2.AddressClaim) { a.Spec.Count, a.Spec.Addresses = nil, []string{"10.1.0.7"} }, 1, v2.ReasonAddressProvided},
	} {
		t.Run(name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				sc.pool("a", c.subnet)
				sc.ask("one", "a")
				claim := sc.claim("one")
				c.change(claim)
				sc.s.Put(claimResource, claim)
				sc.run(time.Second)
				if got := sc.is("one", v2.ClaimProvided); got != c.reason {
					t.Errorf("it says %q, want %q", got, c.reason)
				}
			})
		})
	}
}

// A sweep keeps what claims have, also those that were lost and come back, and what other pools of the project have.
func TestKeep(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pool("a", 1)
		sc.pool("b", 1)
		sc.ask("one", "a")
		sc.ask("two", "b")
		sc.run(time.Second)
		sc.stop()
		addr := sc.cloud.has()["one"].Fixed[0]
		sc.s.Drop(claimResource, namespace+"/one")
		sc.ask("again", "a")
		claim := sc.claim("again")
		claim.Spec.Count, claim.Spec.Addresses = nil, []string{addr.String()}
		sc.s.Put(claimResource, claim)
		sc.start()
		sc.run(resync)
		if p := sc.claim("again").Status.Provided; p == nil || p.PortID != "port-of-one" || p.IPv4 != addr.String() {
			t.Errorf("the claim that came back has %+v", p)
		}
		for _, key := range []string{"one", "two", "again"} {
			if kept := sc.cloud.keeps(); !kept[key] {
				t.Errorf("%s isn't kept: %v", key, kept)
			}
		}
		sc.give("again")
		sc.run(time.Second)
		if _, left := sc.cloud.has()["one"]; left {
			t.Error("the port is left")
		}
	})
}

// A pool that is gone says what to do with what is left, and nothing is lost.
func TestPoolGone(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pool("a", 1)
		sc.ask("one", "a")
		sc.run(time.Second)
		sc.stop()
		sc.s.Drop(poolResource, "a")
		sc.give("one")
		sc.start()
		sc.run(time.Minute)
		if got := sc.is("one", v2.ClaimProvided); got != v2.ReasonPoolNotFound || !slices.Contains(sc.claim("one").Finalizers, Finalizer) {
			t.Errorf("it says %q", got)
		}
		sc.pool("a", 1)
		sc.run(time.Minute)
		if len(sc.cloud.has()) != 0 {
			t.Errorf("the cloud has %+v", sc.cloud.has())
		}
	})
}

// Ranges stand for the addresses in them.
func TestPrefixes(t *testing.T) {
	addrs := []netip.Addr{netip.MustParseAddr("10.1.0.9"), netip.MustParseAddr("10.1.0.200"), netip.MustParseAddr("fd00::1")}
	got := fmt.Sprint(prefixes(addrs, []string{"10.1.0.0/25"}))
	if want := "[10.1.0.0/25 10.1.0.200/32 fd00::1/128]"; got != want {
		t.Errorf("the pairs are %s, want %s", got, want)
	}
}
