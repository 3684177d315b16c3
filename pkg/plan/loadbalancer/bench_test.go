package loadbalancer_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// manyServices are Services of which share have an address together. Some have theirs, and the others come.
func manyServices(tb testing.TB, n, share int, has func(i int) bool) loadbalancer.Facts {
	cidr := "10.0.0.0/16"
	pool := testkit.Must(ipam.NewPool(0, []ipam.Subnet{testkit.Must(ipam.ParseSubnet(&cidr, nil))(tb)}))(tb)
	f := loadbalancer.Facts{Default: "pool", Pools: map[string]ipam.Pool{"pool": pool}}
	for i := range n {
		at := ipam.AddressOf(netip.AddrFrom4([4]byte{10, 0, byte(i / share >> 8), byte(i / share)}))
		s := loadbalancer.Service{
			Name: types.NamespacedName{Namespace: "shop", Name: fmt.Sprint("web-", i)}, UID: types.UID(fmt.Sprint("uid-", i)), Created: time.Unix(int64(i), 0),
			Ports: []loadbalancer.Port{{Protocol: corev1.ProtocolTCP, Number: uint16(80 + i%share)}}, Families: []dataplane.Family{dataplane.IPv4},
		}
		if has(i) {
			s.Has, s.Claim = at.Addrs(), fmt.Sprint("claim-", i/share)
			if last := len(f.Addresses) - 1; last < 0 || f.Addresses[last].Claim != s.Claim {
				f.Addresses = append(f.Addresses, loadbalancer.Address{Claim: s.Claim, Pool: "pool", Address: at})
			}
		}
		f.Services = append(f.Services, s)
	}
	return f
}

// BenchmarkAssign makes plans of many Services: each time that one changes the whole plan is made.
func BenchmarkAssign(b *testing.B) {
	for name, has := range map[string]func(int) bool{
		"all have one": func(int) bool { return true },
		"all come":     func(int) bool { return false },
		"half come":    func(i int) bool { return i/10%2 == 0 },
	} {
		for _, share := range []int{1, 10} {
			for _, n := range []int{500, 5000} {
				b.Run(fmt.Sprintf("%s/services=%d/share=%d", name, n, share), func(b *testing.B) {
					f := manyServices(b, n, share, has)
					for b.Loop() {
						loadbalancer.Assign(f)
					}
				})
			}
		}
	}
}

// BenchmarkSuccessors places an address of Services on one of 100 nodes.
func BenchmarkSuccessors(b *testing.B) {
	nodes, load := make(loadbalancer.Nodes, 100), map[string]int{}
	for i := range nodes {
		nodes[i] = v2.FloatingNode{Node: fmt.Sprintf("node-%02d", i), Addresses: []string{"192.0.2.1"}}
	}
	s := loadbalancer.Spot{Block: "services-1"}
	for b.Loop() {
		nodes.Successors(s, nodes.First(s, load))
	}
}
