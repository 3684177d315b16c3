package assign

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/coil-net/coil/pkg/podnet"
)

// result returns the CNI result of an attachment, of the newest version.
func result(p podnet.Pod, a podnet.Attachment) ([]byte, error) {
	r := types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{
			{Name: a.HostIfName, Mac: a.HostMAC},
			{Name: p.IfName, Mac: a.PodMAC, Sandbox: p.Netns},
		},
	}
	gateways := map[bool]netip.Addr{true: podnet.Gateways.IPv4, false: podnet.Gateways.IPv6}
	for _, addr := range p.Address.Addrs() {
		gw := net.IP(gateways[addr.Is4()].AsSlice())
		r.IPs = append(r.IPs, &types100.IPConfig{
			Interface: types100.Int(1),
			Address:   net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
			Gateway:   gw,
		})
		all := net.IPNet{IP: make(net.IP, addr.BitLen()/8), Mask: net.CIDRMask(0, addr.BitLen())}
		r.Routes = append(r.Routes, &types.Route{Dst: all, GW: gw})
	}
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode the CNI result: %w", err)
	}
	return b, nil
}

// macsOf returns the MAC addresses in a text of result. One is empty if a link can't have it or Coil doesn't write it so,
// as in a record of which a few bits flipped: then the kernel's is right. Nothing else is read, since all pods are asked
// for theirs again and again.
func macsOf(result []byte) (host, pod string) {
	var r struct{ Interfaces []struct{ Mac string } }
	if len(result) == 0 || json.Unmarshal(result, &r) != nil || len(r.Interfaces) != 2 {
		return "", ""
	}
	return macOrNone(r.Interfaces[0].Mac), macOrNone(r.Interfaces[1].Mac)
}

func macOrNone(s string) string {
	mac, err := net.ParseMAC(s)
	if err != nil || len(mac) != 6 || mac.String() != s || !unicast(mac) {
		return ""
	}
	return s
}

// unicast says that a link can have an address: see is_valid_ether_addr of the kernel.
func unicast(mac net.HardwareAddr) bool {
	return mac[0]&1 == 0 && !bytes.Equal(mac, make(net.HardwareAddr, len(mac)))
}
