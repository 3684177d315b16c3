package main

import (
	"net/netip"
	"testing"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// A played client has all objects of package clientnet, tunnels in both families included. A second look
// changes nothing: what is measured is the comparison.
func TestClientNode(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	c := clientNode{Pods: []clientPod{{Namespace: customers, Name: "a", UID: "uid", Addr4: netip.MustParseAddr("10.0.0.5"), Addr6: netip.MustParseAddr("fd00:10::6")}}}
	s := testkit.Must(c.sandboxes(t.Context()))(t)[0]
	n := &network{Network: clientnet.New(dataplane.ProtocolNode, veths{}, nil), want: 1, made: map[uint64]bool{}}
	used := client.Client{
		Address: s.Address, Link: s.IfName, Port: dataplane.FouPort, Protocol: dataplane.ProtocolNode,
		Egresses: []client.Egress{{
			Name: gateways + "/" + gateway, Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
			Peers: ipam.Address{IPv4: netip.MustParseAddr("10.96.0.100"), IPv6: netip.MustParseAddr("fd00:10:96::100")},
		}},
	}
	for i, want := range []bool{true, false} {
		out, err := n.Client(t.Context(), s.Netns, used)
		if err != nil {
			t.Fatal(err)
		}
		if changed := out.Rules.Changed() || out.Routes.Changed() || out.Tunnels.Changed(); changed != want {
			t.Errorf("look %d: something was changed: %t, want %t: %+v", i, changed, want, out)
		}
	}
	if len(n.made) != 1 {
		t.Errorf("%d clients are made, want 1", len(n.made))
	}
}
