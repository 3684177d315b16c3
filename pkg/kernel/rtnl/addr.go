package rtnl

import (
	"context"
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// AddAddr asks for an address of a link. An IPv6 address is usable at once: no
// duplicate address detection (RFC 4862) is done for it. A prefix route is made
// unless the prefix is a single address.
func AddAddr(index int, p netip.Prefix, scope dataplane.Scope) Request {
	// The flags are wider than the field of struct ifaddrmsg, and are an attribute.
	flags := uint32(unix.IFA_F_NODAD)
	if p.IsSingleIP() {
		flags |= unix.IFA_F_NOPREFIXROUTE
	}
	header := addrHeader(index, p)
	header.Scope = scopes[scope]
	return newRequest(unix.RTM_NEWADDR, create, text("address add %s dev %d", p, index), header,
		address(unix.IFA_LOCAL, p.Addr()), address(unix.IFA_ADDRESS, p.Addr()), number(unix.IFA_FLAGS, flags))
}

func addrHeader(index int, p netip.Prefix) *nl.IfAddrmsg {
	header := nl.NewIfAddrmsg(int(families[dataplane.FamilyOf(p.Addr())]))
	header.Prefixlen, header.Index = uint8(p.Bits()), uint32(index)
	return header
}

// IPv6Addr says whether a link has an IPv6 address, and whether the address is
// tentative: being checked for a duplicate, or found to be one. There is no such
// request for IPv4.
func (h *Handle) IPv6Addr(ctx context.Context, index int, a netip.Addr) (exists, tentative bool, err error) {
	header := addrHeader(index, netip.PrefixFrom(netip.IPv6Unspecified(), 0))
	r := newRequest(unix.RTM_GETADDR, 0, text("address get %s dev %d", a, index), header, address(unix.IFA_ADDRESS, a))
	err = h.Get(ctx, r, func(body []byte) error {
		_, rest, as := Cut(body, unix.SizeofIfAddrmsg)
		tentative = as.Find(rest, unix.IFA_FLAGS).U32()&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0
		return as.Err
	})
	if errors.Is(err, ErrNotExist) {
		return false, false, nil
	}
	return err == nil, tentative, err
}

// DelAddr asks for the removal of an address of a link; the prefix route goes with it.
func DelAddr(index int, p netip.Prefix) Request {
	return newRequest(unix.RTM_DELADDR, 0, text("address del %s dev %d", p, index), addrHeader(index, p),
		address(unix.IFA_LOCAL, p.Addr()), address(unix.IFA_ADDRESS, p.Addr()))
}

// Addr is an address that a link has.
type Addr struct {
	Link   int // index
	Prefix netip.Prefix
	// Dynamic says that the kernel made it because of a router advertisement, or that it has a lifetime.
	Dynamic bool
}

// Addrs returns the addresses of all links, of both families.
func (h *Handle) Addrs(ctx context.Context) ([]Addr, error) {
	var all []Addr
	// A dump for each family: kernels before 6.9 don't tell that one of all families was interrupted in IPv4's part.
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		r := newRequest(unix.RTM_GETADDR, 0, text("address show (%s)", f), nl.NewIfAddrmsg(int(families[f])))
		addrs, err := List(ctx, h, r, func(body []byte) (Addr, bool, error) {
			var c Change
			err := c.parseAddr(body)
			if err != nil {
				return Addr{}, false, err
			}
			// A kernel without the family answers with the addresses of another one.
			ok := c.Addr.IsValid() && dataplane.FamilyOf(c.Addr) == f
			// IFA_F_PERMANENT is one of the flags that the header has room for.
			return Addr{c.Link, netip.PrefixFrom(c.Addr, int(body[1])), body[2]&unix.IFA_F_PERMANENT == 0}, ok, nil
		})
		if err != nil && !errors.Is(err, ErrNoFamily) {
			return nil, err
		}
		all = append(all, addrs...)
	}
	return all, nil
}

// families are the AF_ numbers of the address families.
var families = map[dataplane.Family]uint8{
	dataplane.IPv4: unix.AF_INET,
	dataplane.IPv6: unix.AF_INET6,
}

// familyOf returns the family of an AF_ number, 0 of any other one.
func familyOf(number uint8) dataplane.Family {
	for f, n := range families {
		if n == number {
			return f
		}
	}
	return 0
}

// scopes are the kernel's numbers of the scopes of routes and addresses.
var scopes = []uint8{dataplane.Universe: unix.RT_SCOPE_UNIVERSE, dataplane.LinkScope: unix.RT_SCOPE_LINK, dataplane.HostScope: unix.RT_SCOPE_HOST}
