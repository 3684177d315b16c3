package rtnl

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Values of the kernel's headers that x/sys/unix doesn't have.
const (
	vethInfoPeer    = 1      // VETH_INFO_PEER, linux/veth.h
	addrGenModeNone = 1      // IN6_ADDR_GEN_MODE_NONE, linux/if_link.h
	filterSkipStats = 1 << 3 // RTEXT_FILTER_SKIP_STATS, linux/rtnetlink.h
)

const kindVeth = "veth"

// Veth is a pair of virtual Ethernet links that is made in one step.
type Veth struct {
	// Name and MAC are those of the end in the handle's namespace.
	Name string
	MAC  net.HardwareAddr
	// Up brings that end up. It has no carrier before the other end is up, too.
	Up bool
	// PeerName, PeerMAC and PeerGroup are those of the other end, which appears in
	// the namespace that the descriptor PeerNetns stands for.
	PeerName  string
	PeerMAC   net.HardwareAddr
	PeerGroup uint32
	PeerNetns int
	// MTU is the one of both ends.
	MTU int
}

// AddVeth asks for a new pair. The names and both MAC addresses are final from
// the first moment, so that no other program has a reason to set them.
func AddVeth(v Veth) Request {
	var e encoder
	var flags uint32
	if v.Up {
		flags = unix.IFF_UP
	}
	e.ifInfo(0, flags, flags)
	e.attrString(unix.IFLA_IFNAME, v.Name)
	e.attr(unix.IFLA_ADDRESS, v.MAC)
	e.attrU32(unix.IFLA_MTU, uint32(v.MTU))
	e.nest(unix.IFLA_LINKINFO, func() {
		e.attrString(unix.IFLA_INFO_KIND, kindVeth)
		e.nest(unix.IFLA_INFO_DATA, func() {
			e.nest(vethInfoPeer, func() {
				e.ifInfo(0, 0, 0)
				e.attrString(unix.IFLA_IFNAME, v.PeerName)
				e.attr(unix.IFLA_ADDRESS, v.PeerMAC)
				e.attrU32(unix.IFLA_MTU, uint32(v.MTU))
				e.attrU32(unix.IFLA_GROUP, v.PeerGroup)
				e.attrU32(unix.IFLA_NET_NS_FD, uint32(v.PeerNetns))
			})
		})
	})
	return Request{unix.RTM_NEWLINK, unix.NLM_F_CREATE | unix.NLM_F_EXCL, e.b, func() string {
		return fmt.Sprintf("link add %s type veth peer %s", v.Name, v.PeerName)
	}}
}

// LinkChange is what to change about a link; zero fields stay as they are.
type LinkChange struct {
	Name  string
	Alias string
	// Up brings the link up. The kernel does that before NoAutoAddress.
	Up bool
	// NoAutoAddress keeps the kernel from making an IPv6 link-local address, which
	// would be tentative for a second or two.
	NoAutoAddress bool
	// Group is the group that the link is moved to.
	Group uint32
	MAC   net.HardwareAddr
	MTU   int
	// Forwarding switches on that IPv4 packets are forwarded, RPFilter is IPv4's
	// rp_filter, ARPFilter its arp_filter; all as below /proc/sys/net/ipv4/conf.
	Forwarding bool
	RPFilter   int
	ARPFilter  *bool
}

// SetLink asks for a change of a link.
func SetLink(index int, c LinkChange) Request {
	var e encoder
	var flags uint32
	if c.Up {
		flags = unix.IFF_UP
	}
	e.ifInfo(index, flags, flags)
	if c.Name != "" {
		e.attrString(unix.IFLA_IFNAME, c.Name)
	}
	if c.Alias != "" {
		e.attr(unix.IFLA_IFALIAS, []byte(c.Alias))
	}
	if c.Group != 0 {
		e.attrU32(unix.IFLA_GROUP, c.Group)
	}
	if c.MAC != nil {
		e.attr(unix.IFLA_ADDRESS, c.MAC)
	}
	if c.MTU != 0 {
		e.attrU32(unix.IFLA_MTU, uint32(c.MTU))
	}
	e.parameters(c)
	return Request{unix.RTM_SETLINK, 0, e.b, func() string {
		s := fmt.Sprintf("link set %d", index)
		if c.Name != "" {
			s += " name " + c.Name
		}
		if c.Alias != "" {
			s += " alias " + c.Alias
		}
		if c.Up {
			s += " up"
		}
		if c.NoAutoAddress {
			s += " addrgenmode none"
		}
		if c.Group != 0 {
			s += fmt.Sprintf(" group %#x", c.Group)
		}
		if c.MAC != nil {
			s += " address " + c.MAC.String()
		}
		if c.MTU != 0 {
			s += fmt.Sprintf(" mtu %d", c.MTU)
		}
		if c.Forwarding {
			s += " forwarding"
		}
		if c.RPFilter != 0 {
			s += fmt.Sprintf(" rp_filter %d", c.RPFilter)
		}
		if c.ARPFilter != nil {
			s += fmt.Sprintf(" arp_filter %t", *c.ARPFilter)
		}
		return s
	}}
}

// AddAltName asks for an alternative name of a link.
func AddAltName(index int, name string) Request {
	var e encoder
	e.ifInfo(index, 0, 0)
	e.nest(unix.IFLA_PROP_LIST, func() { e.attrString(unix.IFLA_ALT_IFNAME, name) })
	return Request{unix.RTM_NEWLINKPROP, unix.NLM_F_CREATE | unix.NLM_F_APPEND | unix.NLM_F_EXCL, e.b, func() string {
		return fmt.Sprintf("link property add %d altname %s", index, name)
	}}
}

// DelLink asks for the removal of a link, and so of a veth's other end, and of
// their addresses and routes.
func DelLink(index int) Request {
	var e encoder
	e.ifInfo(index, 0, 0)
	return Request{unix.RTM_DELLINK, 0, e.b, func() string { return fmt.Sprintf("link del %d", index) }}
}

// DelGroup asks for the removal of all links of a group at once, which takes hardly
// longer than that of one: the kernel waits once until nobody uses them any more.
// ErrNotExist if the group has none. If one of them can't be removed, none is.
func DelGroup(group uint32) Request {
	var e encoder
	e.ifInfo(0, 0, 0)
	e.attrU32(unix.IFLA_GROUP, group)
	return Request{unix.RTM_DELLINK, 0, e.b, func() string { return fmt.Sprintf("link del group %#x", group) }}
}

// DelTogether removes links at once, or returns why that wasn't possible: some may be gone
// all the same. Links that aren't there any more are no error.
func (h *Handle) DelTogether(ctx context.Context, links []Link) error {
	group, err := h.removedGroup(ctx)
	if err != nil {
		return err
	}
	reqs := make([]Request, 0, len(links))
	for _, l := range links {
		reqs = append(reqs, SetLink(l.Index, LinkChange{Group: group}))
	}
	for _, err := range h.Each(ctx, reqs...) {
		if err != nil && !errors.Is(err, ErrNotExist) {
			return err
		}
	}
	err = h.Do(ctx, DelGroup(group))
	if errors.Is(err, ErrNotExist) {
		return nil // their namespaces are gone and took them along, or another call has removed them
	}
	return err
}

// removedGroup returns the group in which all calls of the handle remove links. It is one of 2^28, chosen at random by
// the first call, when no link had it: to see that takes a list of all links.
func (h *Handle) removedGroup(ctx context.Context) (uint32, error) {
	h.removal.Lock()
	defer h.removal.Unlock()
	if h.removed != 0 {
		return h.removed, nil
	}
	var random [4]byte
	if _, err := rand.Read(random[:]); err != nil {
		return 0, err
	}
	group := dataplane.LinkGroupRemoved | binary.NativeEndian.Uint32(random[:])&^RemovedMask
	members, err := h.Group(ctx, group)
	if err != nil {
		return 0, err
	}
	if len(members) > 0 {
		return 0, fmt.Errorf("link %s is in group %#x", members[0], group)
	}
	h.removed = group
	return group, nil
}

// RemovedMask is the part of a link's group that says, by dataplane.LinkGroupRemoved, that it
// is being removed.
const RemovedMask = 0xf0000000

// Link is what is known of a link.
type Link struct {
	Index    int
	Name     string
	AltNames []string
	Alias    string
	Group    uint32
	// Kind is "veth", "bridge" and so on; empty for hardware.
	Kind     string
	Up       bool
	Loopback bool
	MTU      int
	MAC      net.HardwareAddr
	// Peer is the index of a veth's other end in its namespace; 0 if there is none.
	Peer int
	// PeerElsewhere says that the other end is in another namespace, and PeerNetns is the ID that the
	// namespace of this end has for that; see NetnsID.
	PeerElsewhere bool
	PeerNetns     int
	Parameters
}

// String is the name, the kind and the alias of the link.
func (l Link) String() string {
	kind := l.Kind
	if kind == "" {
		kind = "device"
	}
	if l.Alias == "" {
		return fmt.Sprintf("%s (%s, index %d)", l.Name, kind, l.Index)
	}
	return fmt.Sprintf("%s (%s, index %d, alias %s)", l.Name, kind, l.Index, l.Alias)
}

// LinkByIndex returns the link of an index; ErrNotExist.
func (h *Handle) LinkByIndex(ctx context.Context, index int) (Link, error) {
	var e encoder
	e.ifInfo(index, 0, 0)
	return h.link(ctx, e, func() string { return fmt.Sprintf("link show %d", index) })
}

// LinkByName returns the link of a name, of up to 15 bytes; ErrNotExist.
func (h *Handle) LinkByName(ctx context.Context, name string) (Link, error) {
	var e encoder
	e.ifInfo(0, 0, 0)
	e.attrString(unix.IFLA_IFNAME, name)
	return h.link(ctx, e, func() string { return "link show " + name })
}

// LinkByAltName returns the link of an alternative name, of up to 127 bytes;
// ErrNotExist.
func (h *Handle) LinkByAltName(ctx context.Context, name string) (Link, error) {
	var e encoder
	e.ifInfo(0, 0, 0)
	e.attrString(unix.IFLA_ALT_IFNAME, name)
	return h.link(ctx, e, func() string { return "link show altname " + name })
}

func (h *Handle) link(ctx context.Context, e encoder, text func() string) (Link, error) {
	e.attrU32(unix.IFLA_EXT_MASK, filterSkipStats)
	var l Link
	err := h.Get(ctx, Request{unix.RTM_GETLINK, 0, e.b, text}, func(body []byte) (err error) {
		l, err = parseLink(body)
		return err
	})
	return l, err
}

// Veths returns all veths of the namespace. It is a dump, which other programs'
// changes interrupt: not for the paths of ADD, DEL and CHECK.
func (h *Handle) Veths(ctx context.Context) ([]Link, error) {
	var e encoder
	e.ifInfo(0, 0, 0)
	e.nest(unix.IFLA_LINKINFO, func() { e.attrString(unix.IFLA_INFO_KIND, kindVeth) })
	e.attrU32(unix.IFLA_EXT_MASK, filterSkipStats)
	r := Request{unix.RTM_GETLINK, 0, e.b, func() string { return "link show type veth" }}
	return List(ctx, h, r, func(body []byte) (Link, bool, error) {
		l, err := parseLink(body)
		return l, l.Kind == kindVeth, err
	})
}

// Group returns the links of a group, of all kinds. Links that come and go meanwhile
// don't make it fail. The others are there, though before Linux 6.9, which walks the
// links by their indexes, one may be skipped when another is removed just then.
func (h *Handle) Group(ctx context.Context, group uint32) ([]Link, error) {
	var e encoder
	e.ifInfo(0, 0, 0)
	e.attrU32(unix.IFLA_EXT_MASK, filterSkipStats)
	r := Request{unix.RTM_GETLINK, 0, e.b, func() string { return fmt.Sprintf("link show group %#x", group) }}
	if err := errors.Join(ctx.Err(), observe(ctx, r)); err != nil {
		return nil, fmt.Errorf("%s: %w", r, err)
	}
	var links []Link
	err := h.with(func(c *conn) error {
		return c.dump(r, func(body []byte) error {
			if g, err := groupOf(body); err != nil || g != group {
				return err
			}
			l, err := parseLink(body)
			links = append(links, l)
			return err
		})
	})
	if err != nil && !errors.Is(err, ErrDumpInterrupted) {
		return nil, err
	}
	return links, nil
}

// groupOf finds the group of a link without reading the rest of it.
func groupOf(body []byte) (uint32, error) {
	if len(body) < unix.SizeofIfInfomsg {
		return 0, fmt.Errorf("link in %d bytes: %w", len(body), errMalformed)
	}
	for b := body[unix.SizeofIfInfomsg:]; len(b) >= unix.SizeofRtAttr; {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return 0, fmt.Errorf("attribute of %d bytes in %d bytes: %w", n, len(b), errMalformed)
		}
		if binary.NativeEndian.Uint16(b[2:]) == unix.IFLA_GROUP {
			return attribute{value: b[unix.SizeofRtAttr:n]}.u32(), nil
		}
		b = b[min(align(n), len(b)):]
	}
	return 0, nil
}

// IndexByName returns the index of a link by its name, up to 15 bytes, without
// a message and without the lock that all messages wait for; ErrNotExist.
func (h *Handle) IndexByName(name string) (int, error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return 0, fmt.Errorf("index of link %q: %w", name, ErrInvalid)
	}
	index := 0
	err = h.with(func(c *conn) error {
		if err := unix.IoctlIfreq(c.fd, unix.SIOCGIFINDEX, ifr); err != nil {
			request := Request{text: func() string { return "index of link " + name }}
			errno, _ := err.(unix.Errno)
			return &Error{Request: request, Errno: errno}
		}
		index = int(ifr.Uint32())
		return nil
	})
	return index, err
}

// ifInfo appends a struct ifinfomsg.
func (e *encoder) ifInfo(index int, flags, change uint32) {
	e.u8(unix.AF_UNSPEC, 0)
	e.u16(0)
	e.u32(uint32(index))
	e.u32(flags)
	e.u32(change)
}

func parseLink(body []byte) (Link, error) {
	if len(body) < unix.SizeofIfInfomsg {
		return Link{}, fmt.Errorf("link in %d bytes: %w", len(body), errMalformed)
	}
	l := Link{
		Index: int(int32(binary.NativeEndian.Uint32(body[4:]))),
		Up:    binary.NativeEndian.Uint32(body[8:])&unix.IFF_UP != 0,

		Loopback: binary.NativeEndian.Uint32(body[8:])&unix.IFF_LOOPBACK != 0,
	}
	as, err := attributes(body[unix.SizeofIfInfomsg:])
	if err != nil {
		return Link{}, err
	}
	for a := range as {
		switch a.kind {
		case unix.IFLA_IFNAME:
			l.Name = a.string()
		case unix.IFLA_IFALIAS:
			l.Alias = a.string()
		case unix.IFLA_GROUP:
			l.Group = a.u32()
		case unix.IFLA_MTU:
			l.MTU = int(a.u32())
		case unix.IFLA_ADDRESS:
			l.MAC = net.HardwareAddr(append([]byte(nil), a.value...))
		case unix.IFLA_LINK:
			l.Peer = int(a.u32())
		case unix.IFLA_LINK_NETNSID:
			l.PeerElsewhere = true
			l.PeerNetns = int(int32(a.u32()))
		case unix.IFLA_AF_SPEC:
			if err := l.Parameters.parse(a.value); err != nil {
				return Link{}, err
			}
		case unix.IFLA_LINKINFO, unix.IFLA_PROP_LIST:
			inner, err := attributes(a.value)
			if err != nil {
				return Link{}, err
			}
			for i := range inner {
				switch {
				case a.kind == unix.IFLA_LINKINFO && i.kind == unix.IFLA_INFO_KIND:
					l.Kind = i.string()
				case a.kind == unix.IFLA_PROP_LIST && i.kind == unix.IFLA_ALT_IFNAME:
					l.AltNames = append(l.AltNames, i.string())
				}
			}
		}
	}
	return l, nil
}
