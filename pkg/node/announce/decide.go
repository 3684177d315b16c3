package announce

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// link is one on which the node may answer for addresses of its subnets.
type link struct {
	index   int
	name    string
	mac     net.HardwareAddr
	carrier bool
	subnets []netip.Prefix
}

// state is that of a link in which hosts are told where addresses are: its MAC address, and whether anybody can hear.
func (l link) state() string {
	if l.carrier {
		return l.mac.String()
	}
	return l.mac.String() + " without carrier"
}

// decide returns, in a fixed order, where the node answers for addresses, and the addresses for which there is no link. A slave of a bond
// and a port of a bridge have no subnets. The uncertain ones are answered for where they are held.
func decide(links map[int]link, addrs []Address, held map[spot]string) (want []spot, homeless []Address) {
	for _, a := range addrs {
		found := a.Uncertain
		for _, l := range links {
			if !slices.ContainsFunc(l.subnets, func(p netip.Prefix) bool { return p.Contains(a.Addr) }) {
				continue
			}
			found = true
			s := spot{l.index, a.Addr}
			if _, ok := held[s]; ok || !a.Uncertain {
				want = append(want, s)
			}
		}
		if !found {
			homeless = append(homeless, a)
		}
	}
	slices.SortFunc(want, func(a, b spot) int { return cmp.Or(cmp.Compare(a.link, b.link), a.addr.Compare(b.addr)) })
	return slices.Compact(want), homeless
}

// suits says whether addresses may be announced on a link, whatever its subnets are. The host's ends of pods' links aren't for that.
func suits(l rtnl.Link) bool {
	return l.Up && l.Ethernet && !l.Loopback && len(l.MAC) == 6 && !bytes.Equal(l.MAC, make([]byte, 6)) &&
		!dataplane.OfPods(l.Group) && !strings.HasPrefix(l.Alias, dataplane.AliasPrefix)
}

// subnetOf says whether a prefix of an address of a link is a subnet, whose hosts look for each other on the link.
func subnetOf(p netip.Prefix) bool {
	return !p.IsSingleIP() && !p.Addr().IsLinkLocalUnicast() && !p.Addr().IsLoopback()
}

// readLinks returns the links in whose subnets one of the addresses is, by index.
func readLinks(ctx context.Context, h *rtnl.Handle, addrs []Address) (map[int]link, error) {
	if len(addrs) == 0 {
		return nil, nil
	}
	own, err := h.Addrs(ctx)
	if err != nil {
		return nil, err
	}
	links := map[int]link{}
	for _, o := range own {
		inside := func(a Address) bool { return o.Prefix.Contains(a.Addr) }
		if !subnetOf(o.Prefix) || !slices.ContainsFunc(addrs, inside) {
			continue
		}
		l, known := links[o.Link]
		if !known {
			found, err := h.LinkByIndex(ctx, o.Link)
			if errors.Is(err, rtnl.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			if !suits(found) {
				continue
			}
			l = link{index: found.Index, name: found.Name, mac: found.MAC, carrier: found.Carrier}
		}
		l.subnets = append(l.subnets, o.Prefix.Masked())
		links[o.Link] = l
	}
	return links, nil
}

// proxies are the entries of spots.
func (k *Keeper) proxies(spots []spot) []dataplane.Proxy {
	all := make([]dataplane.Proxy, 0, len(spots))
	for _, s := range spots {
		all = append(all, dataplane.Proxy{Link: s.link, Addr: s.addr, Protocol: k.cfg.Protocol})
	}
	return all
}

// without returns the spots of which no entry is missing.
func without(spots []spot, missing []dataplane.Proxy) []spot {
	return slices.DeleteFunc(slices.Clone(spots), func(s spot) bool {
		return slices.ContainsFunc(missing, func(p dataplane.Proxy) bool { return p.Link == s.link && p.Addr == s.addr })
	})
}
