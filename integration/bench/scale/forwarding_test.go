package main

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

// Packets reach the endpoints, and their answers the client, more of them than there are ports.
func TestForwarding(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	var targets []netip.AddrPort
	for i := range 200 {
		targets = append(targets, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), endpointPort))
	}
	f := testkit.Must(newBareForwarding(t.Context(), targets))(t)
	t.Cleanup(func() { testkit.Check(t, f.close()) })
	random := rand.New(rand.NewPCG(1, 2))
	for range (lastPort-firstPort)/block + 2 {
		if took := testkit.Must(f.firsts(t.Context(), random))(t); took <= 0 {
			t.Fatalf("a packet took %v s", took)
		}
	}
	for range 3 {
		if took := testkit.Must(f.others(t.Context(), random))(t); took <= 0 {
			t.Fatalf("a packet took %v s", took)
		}
	}
}
