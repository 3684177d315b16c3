package floating

import (
	"fmt"
	"strings"
	"testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// A long list of addresses that pods have costs few calls.
func TestManyInUse(t *testing.T) {
	sc := newScene(t)
	sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/23"))
	for i := range int32(512) {
		sc.s.Put(blockResource, plantest.Block("p", i, fmt.Sprintf("10.0.%d.%d/32", i/256, i%256), fmt.Sprintf("n%d", i%3)))
	}
	sc.s.Put(claimResource, newClaim("c", v2.AddressClaimSpec{Addresses: []string{"10.0.0.0/23"}}))
	sc.r.DeliverAll()
	if err := sc.r.sync(t.Context(), "ns/c"); err == nil || !strings.Contains(err.Error(), "again after") {
		t.Fatal(err)
	}
	c := fakeapi.Find[*v2.AddressClaim](sc.s, claimResource, "ns/c")
	if !strings.Contains(ready(c).Message, "and 502 more") {
		t.Errorf("the condition is %+v", ready(c))
	}
	lists := 0
	for _, a := range sc.r.core.Actions() {
		if a.GetVerb() == "list" {
			lists++
		}
	}
	if n := sc.s.Calls()["get "+blockResource]; n > 10 || lists != 3 {
		t.Errorf("%d blocks were read, and Pods listed %d times", n, lists)
	}
}

// A creation without a clear answer is tried again with the same address, whether it was done or not.
func TestLostAnswers(t *testing.T) {
	for _, done := range []bool{true, false} {
		for name, spec := range map[string]v2.AddressClaimSpec{
			"any":    {Count: new(int32(1))},
			"listed": {Addresses: []string{"10.0.0.0"}},
		} {
			t.Run(fmt.Sprintf("%s, done %t", name, done), func(t *testing.T) {
				sc := newScene(t)
				sc.s.Put(poolResource, plantest.Pool("p", 0, "10.0.0.0/28"))
				sc.s.Put(claimResource, newClaim("c", spec))
				sc.r.DeliverAll()
				sc.s.Fault = func(verb, _ string) (before, after error) {
					switch {
					case verb != "create":
						return nil, nil
					case done:
						return nil, fakeapi.ErrLost
					}
					return fakeapi.ErrLost, nil
				}
				if err := sc.r.sync(t.Context(), "ns/c"); err == nil {
					t.Fatal("a lost answer is no error")
				}
				sc.s.Fault = nil
				if err := sc.r.sync(t.Context(), "ns/c"); err != nil {
					t.Fatal(err)
				}
				all := fakeapi.All[*v2.AddressBlock](sc.s, blockResource)
				if c := fakeapi.Find[*v2.AddressClaim](sc.s, claimResource, "ns/c"); blocksOf(c) != "p-0" || len(all) != 1 {
					t.Errorf("it has %q, and there are %d blocks", blocksOf(c), len(all))
				}
			})
		}
	}
}

// A claim that has what it asks for costs no call of the API server.
func TestNothingToDo(t *testing.T) {
	sc, _ := newClaimed(t, v2.AddressClaimSpec{Count: new(int32(3))})
	sc.s.Fault = func(verb, resource string) (before, after error) {
		t.Errorf("%s %s", verb, resource)
		return nil, nil
	}
	if _, err := sc.sync("c"); err != nil {
		t.Fatal(err)
	}
}
