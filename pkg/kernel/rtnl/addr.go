package rtnl

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// AddAddr asks for an address of a link. An IPv6 address is usable at once: no
// duplicate address detection (RFC 4862) is done for it. A prefix route is made
// unless the prefix is a single address.
func AddAddr(index int, p netip.Prefix, scope dataplane.Scope) Request {
	var e encoder
	flags := uint32(unix.IFA_F_NODAD)
	if p.IsSingleIP() {
		flags |= unix.IFA_F_NOPREFIXROUTE
	}
	// struct ifaddrmsg: the flags are wider than its field, and are an attribute.
	e.u8(family(p.Addr()), uint8(p.Bits()), 0, kernelScope(scope))
	e.u32(uint32(index))
	e.attrAddr(unix.IFA_LOCAL, p.Addr())
	e.attrAddr(unix.IFA_ADDRESS, p.Addr())
	e.attrU32(unix.IFA_FLAGS, flags)
	return Request{unix.RTM_NEWADDR, unix.NLM_F_CREATE | unix.NLM_F_EXCL, e.b, func() string {
		return fmt.Sprintf("address add %s dev %d", p, index)
	}}
}

// IPv6Addr says whether a link has an IPv6 address, and whether the address is
// tentative: being checked for a duplicate, or found to be one. There is no such
// request for IPv4.
func (h *Handle) IPv6Addr(ctx context.Context, index int, a netip.Addr) (exists, tentative bool, err error) {
	var e encoder
	e.u8(unix.AF_INET6, 0, 0, 0)
	e.u32(uint32(index))
	e.attrAddr(unix.IFA_ADDRESS, a)
	r := Request{unix.RTM_GETADDR, 0, e.b, func() string { return fmt.Sprintf("address get %s dev %d", a, index) }}
	err = h.Get(ctx, r, func(body []byte) error {
		if len(body) < unix.SizeofIfAddrmsg {
			return fmt.Errorf("address in %d bytes: %w", len(body), errMalformed)
		}
		as, err := attributes(body[unix.SizeofIfAddrmsg:])
		for a := range as {
			if a.kind == unix.IFA_FLAGS {
				tentative = a.u32()&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0
			}
		}
		return err
	})
	if errors.Is(err, ErrNotExist) {
		return false, false, nil
	}
	return err == nil, tentative, err
}

// DelAddr asks for the removal of an address of a link; the prefix route goes with it.
func DelAddr(index int, p netip.Prefix) Request {
	var e encoder
	e.u8(family(p.Addr()), uint8(p.Bits()), 0, 0)
	e.u32(uint32(index))
	e.attrAddr(unix.IFA_LOCAL, p.Addr())
	e.attrAddr(unix.IFA_ADDRESS, p.Addr())
	return Request{unix.RTM_DELADDR, 0, e.b, func() string { return fmt.Sprintf("address del %s dev %d", p, index) }}
}

// Addr is an address that a link has.
type Addr struct {
	Link   int // index
	Prefix netip.Prefix
	// Dynamic says that the kernel made it of what a router advertised, or that it has a lifetime.
	Dynamic bool
}

// Addrs returns the addresses of all links, of both families.
func (h *Handle) Addrs(ctx context.Context) ([]Addr, error) {
	var all []Addr
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		var e encoder
		e.u8(families[f], 0, 0, 0)
		e.u32(0)
		r := Request{unix.RTM_GETADDR, 0, e.b, func() string { return fmt.Sprintf("address show (%s)", f) }}
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

// family is the AF_ number of an address.
func family(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// families are the AF_ numbers of the address families.
var families = map[dataplane.Family]uint8{
	dataplane.IPv4: unix.AF_INET,
	dataplane.IPv6: unix.AF_INET6,
}

func kernelScope(s dataplane.Scope) uint8 {
	if s == dataplane.LinkScope {
		return unix.RT_SCOPE_LINK
	}
	return unix.RT_SCOPE_UNIVERSE
}
