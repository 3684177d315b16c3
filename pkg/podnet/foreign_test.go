package podnet_test

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// The host's way to a pod is found however another plugin has attached it, and nothing that the pod does leads it elsewhere.
func TestWayOf(t *testing.T) {
	addr := ipam.Address{IPv4: netip.MustParseAddr("10.32.0.2"), IPv6: netip.MustParseAddr("fd32::2")}
	for name, c := range map[string]struct {
		// links gives the host and the pod links, of which the pod's is eth0, and route is how the host reaches the pod.
		host, pod []string
		want      string // the link of the host
	}{
		"by a veth": {
			host: []string{"link set way up", "route add 10.32.0.2 dev way scope link"},
			want: "way",
		},
		"by IPv6 alone": {
			host: []string{"link set way up", "-6 route add fd32::2 dev way"},
			want: "way",
		},
		"by a bridge": {
			host: []string{"link add cni0 type bridge", "link set way master cni0", "link set cni0 up", "link set way up", "address add 10.32.0.1/24 dev cni0"},
			want: "cni0",
		},
		"by a switch of which the veth is a port": {
			host: []string{"link add sw type bridge", "link set way master sw", "link set way up", "link add inner type bridge", "link set inner up", "route add 10.32.0.0/24 dev inner"},
			want: "inner",
		},
		"by a veth past a router of the host": {
			host: []string{"link set way up", "link add cilium type bridge", "link set cilium up", "address add 10.33.0.1/24 dev cilium", "route add 10.32.0.0/24 via 10.33.0.9"},
			want: "way",
		},
		"without a route": {host: []string{"link set way up"}, want: "way"},
		"with links that the pod has made": {
			host: []string{"link set way up", "route add 10.32.0.2 dev way scope link"},
			pod:  []string{"link add lie type bridge", "address add 10.32.0.2/32 dev lie", "link add v1 type veth peer name v2"},
			want: "way",
		},
		"by no veth": {host: []string{"link del way", "link add inner type bridge", "link set inner up", "route add 10.32.0.2 dev inner"}},
	} {
		t.Run(name, func(t *testing.T) {
			n, pod := newNode(t), netnstest.New(t)
			n.host.IP(t, "link", "add", "way", "type", "veth", "peer", "name", "eth0", "netns", pod.Path)
			n.host.Configure(t, c.host...)
			pod.Configure(t, c.pod...)
			got, err := n.WayOf(t.Context(), pod.NS, addr)
			if c.want == "" {
				if !errors.Is(err, podnet.ErrNoHostLink) {
					t.Errorf("%+v, %v; want ErrNoHostLink", got, err)
				}
				return
			}
			testkit.Check(t, err)
			inside := testkit.Must(rtnl.New(pod.NS))(t)
			defer inside.Close()
			want := podnet.Way{Link: testkit.Must(n.Handle().IndexByName(c.want))(t), Inside: testkit.Must(inside.IndexByName("eth0"))(t)}
			if got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		})
	}
}
