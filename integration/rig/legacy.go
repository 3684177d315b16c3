package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// LegacyNode leaves on a node that never had a coild what the agent of Coil 2.x leaves:
// forwarding, rules without a protocol, and the routes to blocks.
func (n *Node) LegacyNode(ctx context.Context, blocks ...*v2.AddressBlock) error {
	h, err := rtnl.New(n.ns.NS)
	if err != nil {
		return err
	}
	defer h.Close()
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		// iproute2 can't: it sets a protocol always.
		if err := h.Do(ctx, rtnl.AddRule(dataplane.Rule{Family: f, Priority: 2000, Table: 116})); err != nil {
			return err
		}
	}
	if err := n.ns.Forward(); err != nil {
		return err
	}
	for _, b := range blocks {
		for _, p := range []*string{b.IPv4, b.IPv6} {
			if p == nil {
				continue
			}
			if _, err := n.Run(ctx, "ip", "route", "add", *p, "dev", "lo", "table", exportTable, "proto", protocol); err != nil {
				return err
			}
		}
	}
	return nil
}

// AddLegacyBlock makes an AddressBlock of a node as the controller of Coil 2.x did: it
// doesn't say the UID of the Node.
func (r *Rig) AddLegacyBlock(ctx context.Context, pool string, index int32, node, ipv4, ipv6 string) (*v2.AddressBlock, error) {
	p, err := r.Coil.CoilV2().AddressPools().Get(ctx, pool, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	kind := schema.GroupVersionKind{Group: v2.GroupVersion.Group, Version: v2.GroupVersion.Version, Kind: "AddressPool"}
	b := &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name:            fmt.Sprintf("%s-%d", pool, index),
			Labels:          map[string]string{v2.LabelPool: pool, v2.LabelNode: node},
			Finalizers:      []string{v2.Finalizer},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(p, kind)},
		},
		Index: index,
	}
	if ipv4 != "" {
		b.IPv4 = &ipv4
	}
	if ipv6 != "" {
		b.IPv6 = &ipv6
	}
	return r.Coil.CoilV2().AddressBlocks().Create(ctx, b, metav1.CreateOptions{})
}

// WireLegacy wires a sandbox as Coil 2.x did: the IPv4 gateway is the node's InternalIP,
// the IPv6 gateway the address that the kernel gave to the host's end; that has an
// alias, but neither group nor alternative name. It returns the name of the host's end.
func (s *Sandbox) WireLegacy(ctx context.Context, pool string, addrs ...netip.Addr) (string, error) {
	n, host := s.Node, "veth"+s.ContainerID[:8]
	if err := n.ns.IP(ctx, fmt.Sprintf(`
link add %[1]s type veth peer name %[2]s netns %[3]s
link set %[1]s alias COIL:%[4]s:%[5]s:%[2]s
addr add %[6]s/32 dev %[1]s scope link
link set %[1]s up
`, host, s.IfName, s.ns.Path(), pool, s.ContainerID, n.Addr4)); err != nil {
		return "", err
	}
	var links []struct {
		Addrs []struct {
			Local string `json:"local"`
		} `json:"addr_info"`
	}
	if _, err := s.Run(ctx, "ip", "link", "set", s.IfName, "up"); err != nil {
		return "", err
	}
	if err := n.ip(ctx, &links, "-6", "addr", "show", "dev", host); err != nil {
		return "", err
	}
	if len(links) == 0 || len(links[0].Addrs) == 0 {
		return "", fmt.Errorf("link %s has no link-local address", host)
	}
	result := map[string]any{"cniVersion": cniVersion}
	var ips []map[string]string
	for _, a := range addrs {
		p := netip.PrefixFrom(a, a.BitLen())
		inside := fmt.Sprintf("addr add %s dev %s nodad\n", p, s.IfName)
		if a.Is4() {
			inside = fmt.Sprintf("addr add %[1]s dev %[2]s\nroute add %[3]s dev %[2]s scope link\nroute add default via %[3]s dev %[2]s\n", p, s.IfName, n.Addr4)
		} else {
			inside += fmt.Sprintf("route add default via %s dev %s\n", links[0].Addrs[0].Local, s.IfName)
		}
		if err := s.ns.IP(ctx, inside); err != nil {
			return "", err
		}
		if _, err := n.Run(ctx, "ip", "route", "add", p.String(), "dev", host, "scope", "link", "table", podTable, "proto", protocol); err != nil {
			return "", err
		}
		ips = append(ips, map[string]string{"address": p.String()})
	}
	result["ips"] = ips
	raw, err := json.Marshal(result)
	if err != nil {
		return "", err
	}
	s.result = raw
	n.rig.Ledger.answered(s, addrs)
	return host, nil
}

// RouteOutside makes the router between the nodes send a prefix to a node.
func (r *Rig) RouteOutside(ctx context.Context, prefix string, n *Node) error {
	via := n.Addr4
	if netip.MustParsePrefix(prefix).Addr().Is6() {
		via = n.Addr6
	}
	_, err := r.fabric.Run(ctx, "ip", "route", "replace", prefix, "via", via.String())
	return err
}
