package rtnl

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Values of the kernel's headers that neither x/sys/unix nor the library has.
const (
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
//
// Each end has one queue, as by default. Without a number the kernel makes a queue for each processor and removes all but
// one. For that it waits two grace periods of RCU under the lock of all links (drivers/net/veth.c, veth_init_queues),
// which is a millisecond or two of an ADD.
func AddVeth(v Veth) Request {
	mtu, sending, receiving := number(unix.IFLA_MTU, uint32(v.MTU)), number(unix.IFLA_NUM_TX_QUEUES, 1), number(unix.IFLA_NUM_RX_QUEUES, 1)
	peer := nest(nl.VETH_INFO_PEER,
		word(unix.IFLA_IFNAME, v.PeerName), nl.NewRtAttr(unix.IFLA_ADDRESS, v.PeerMAC), mtu, sending, receiving,
		number(unix.IFLA_GROUP, v.PeerGroup), number(unix.IFLA_NET_NS_FD, uint32(v.PeerNetns)))
	peer.Data = linkHeader(0, false).Serialize()
	return newRequest(unix.RTM_NEWLINK, create, text("link add %s type veth peer %s", v.Name, v.PeerName), linkHeader(0, v.Up),
		word(unix.IFLA_IFNAME, v.Name), nl.NewRtAttr(unix.IFLA_ADDRESS, v.MAC), mtu, sending, receiving, linkInfo(kindVeth, nest(unix.IFLA_INFO_DATA, peer)))
}

// linkHeader is the header of a message about a link, which may bring it up.
func linkHeader(index int, up bool) *nl.IfInfomsg {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(index)
	if up {
		header.Flags, header.Change = unix.IFF_UP, unix.IFF_UP
	}
	return header
}

// linkInfo is the kind of a link, with the attributes of this kind.
func linkInfo(kind string, data *nl.RtAttr) *nl.RtAttr {
	return nest(unix.IFLA_LINKINFO, word(unix.IFLA_INFO_KIND, kind), data)
}

// LinkChange is a change of a link; zero fields stay as they are.
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
	return newRequest(unix.RTM_SETLINK, 0, text("link set %d %s", index, c), linkHeader(index, c.Up),
		wordIf(unix.IFLA_IFNAME, c.Name), when(c.Alias != "", nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(c.Alias))),
		numberIf(unix.IFLA_GROUP, c.Group), when(c.MAC != nil, nl.NewRtAttr(unix.IFLA_ADDRESS, c.MAC)),
		numberIf(unix.IFLA_MTU, uint32(c.MTU)), c.parameters())
}

// String prints the change as "ip link set" takes it.
func (c LinkChange) String() string {
	var w dataplane.Words
	w.Add(c.Name != "", "name %s", c.Name)
	w.Add(c.Alias != "", "alias %s", c.Alias)
	w.Add(c.Up, "up")
	w.Add(c.NoAutoAddress, "addrgenmode none")
	w.Add(c.Group != 0, "group %#x", c.Group)
	w.Add(c.MAC != nil, "address %s", c.MAC)
	w.Add(c.MTU != 0, "mtu %d", c.MTU)
	w.Add(c.Forwarding, "forwarding")
	w.Add(c.RPFilter != 0, "rp_filter %d", c.RPFilter)
	if c.ARPFilter != nil {
		w.Add(true, "arp_filter %t", *c.ARPFilter)
	}
	return w.String()
}

// ClearAlias asks for a link to have no alias.
func ClearAlias(index int) Request {
	return newRequest(unix.RTM_SETLINK, 0, text("link set %d alias \"\"", index), linkHeader(index, false), nl.NewRtAttr(unix.IFLA_IFALIAS, nil))
}

// AddAltName asks for an alternative name of a link.
func AddAltName(index int, name string) Request {
	return newRequest(unix.RTM_NEWLINKPROP, create|unix.NLM_F_APPEND, text("link property add %d altname %s", index, name),
		linkHeader(index, false), nest(unix.IFLA_PROP_LIST, word(unix.IFLA_ALT_IFNAME, name)))
}

// DelLink asks for the removal of a link, and so of a veth's other end, and of
// their addresses and routes.
func DelLink(index int) Request {
	return newRequest(unix.RTM_DELLINK, 0, text("link del %d", index), linkHeader(index, false))
}

// DelTogether removes links, by their indexes, at once, or returns why that wasn't possible: some may be gone
// all the same. Links that aren't there any more are no error.
func (h *Handle) DelTogether(ctx context.Context, indexes []int) error {
	group, err := h.removedGroup(ctx)
	if err != nil {
		return err
	}
	moves := Requests(indexes, func(index int) Request { return SetLink(index, LinkChange{Group: group}) })
	if _, err := h.Apply(ctx, ErrNotExist, moves...); err != nil {
		return err
	}
	// The removal of a group takes hardly longer than that of one link: the kernel waits once until nobody uses them any
	// more. If one of them can't be removed, none is. The group has none if their namespaces are gone and took them along,
	// or another call has removed them.
	remove := newRequest(unix.RTM_DELLINK, 0, text("link del group %#x", group), linkHeader(0, false), number(unix.IFLA_GROUP, group))
	_, err = h.Apply(ctx, ErrNotExist, remove)
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
	group := dataplane.LinkGroupRemoved | rand.Uint32()&^RemovedMask
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

// Link is a link that was found in the kernel.
type Link struct {
	Index    int
	Name     string
	AltNames []string
	Alias    string
	Group    uint32
	// Kind is "veth", "bridge" and so on; empty for hardware.
	Kind string
	Up   bool
	// Carrier says that the link below is up, too, as with a cable.
	Carrier  bool
	Loopback bool
	// Ethernet says that hosts on the link find each other by ARP and NDP.
	Ethernet bool
	MTU      int
	MAC      net.HardwareAddr
	// Peer is the index of a veth's other end in its namespace; 0 if there is none.
	Peer int
	// PeerElsewhere says that the other end is in another namespace, and PeerNetns is the ID that the
	// namespace of this end has for that; see NetnsID.
	PeerElsewhere bool
	PeerNetns     int
	// Master is the index of the bridge, bond or the like that the link is a port of; 0 for none.
	Master int
	Parameters
}

// String is the name, the kind and the alias of the link.
func (l Link) String() string {
	alias := l.Alias
	if alias != "" {
		alias = ", alias " + alias
	}
	return fmt.Sprintf("%s (%s, index %d%s)", l.Name, cmp.Or(l.Kind, "device"), l.Index, alias)
}

// LinkByIndex returns the link of an index; ErrNotExist.
func (h *Handle) LinkByIndex(ctx context.Context, index int) (Link, error) {
	return h.link(ctx, text("link show %d", index), index, nil)
}

// LinkByName returns the link of a name, of up to 15 bytes; ErrNotExist.
func (h *Handle) LinkByName(ctx context.Context, name string) (Link, error) {
	return h.link(ctx, text("link show %s", name), 0, word(unix.IFLA_IFNAME, name))
}

// LinkByAltName returns the link of an alternative name, of up to 127 bytes;
// ErrNotExist.
func (h *Handle) LinkByAltName(ctx context.Context, name string) (Link, error) {
	return h.link(ctx, text("link show altname %s", name), 0, word(unix.IFLA_ALT_IFNAME, name))
}

func (h *Handle) link(ctx context.Context, text func() string, index int, named *nl.RtAttr) (Link, error) {
	var l Link
	err := h.Get(ctx, getLinks(text, index, named), func(body []byte) (err error) {
		l, err = parseLink(body)
		return err
	})
	return l, err
}

// getLinks asks for links, without their statistics.
func getLinks(text func() string, index int, which *nl.RtAttr) Request {
	return newRequest(unix.RTM_GETLINK, 0, text, linkHeader(index, false), which, number(unix.IFLA_EXT_MASK, filterSkipStats))
}

// Veths returns all veths of the namespace. It is a dump, which other programs'
// changes interrupt: not for the paths of ADD, DEL and CHECK.
func (h *Handle) Veths(ctx context.Context) ([]Link, error) {
	r := getLinks(text("link show type veth"), 0, linkInfo(kindVeth, nil))
	return List(ctx, h, r, func(body []byte) (Link, bool, error) {
		l, err := parseLink(body)
		return l, l.Kind == kindVeth, err
	})
}

// Group returns the links of a group, of all kinds. Links that come and go meanwhile
// don't make it fail. The others are there, though before Linux 6.9, which walks the
// links by their indexes, one may be skipped when another is removed just then.
func (h *Handle) Group(ctx context.Context, group uint32) ([]Link, error) {
	var links []Link
	err := h.Dump(ctx, getLinks(text("link show group %#x", group), 0, nil), func(body []byte) error {
		l, err := parseLink(body)
		if l.Group == group {
			links = append(links, l)
		}
		return err
	})
	if err != nil && !errors.Is(err, ErrDumpInterrupted) {
		return nil, err
	}
	return links, nil
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
			errno, _ := err.(unix.Errno)
			return &Error{Request: Request{text: text("index of link %s", name)}, Errno: errno}
		}
		index = int(ifr.Uint32())
		return nil
	})
	return index, err
}

// parseLink reads a struct ifinfomsg and its attributes. The library's reader has no parameters,
// and panics at a message that is too short.
func parseLink(body []byte) (Link, error) {
	b, rest, as := Cut(body, unix.SizeofIfInfomsg)
	header := nl.DeserializeIfInfomsg(b)
	l := Link{
		Index:    int(header.Index),
		Name:     as.Find(rest, unix.IFLA_IFNAME).Text(),
		Alias:    as.Find(rest, unix.IFLA_IFALIAS).Text(),
		Group:    as.Find(rest, unix.IFLA_GROUP).U32(),
		Kind:     as.Find(rest, unix.IFLA_LINKINFO, unix.IFLA_INFO_KIND).Text(),
		Up:       header.Flags&unix.IFF_UP != 0,
		Carrier:  header.Flags&unix.IFF_LOWER_UP != 0,
		Loopback: header.Flags&unix.IFF_LOOPBACK != 0,
		Ethernet: header.Type == unix.ARPHRD_ETHER && header.Flags&unix.IFF_NOARP == 0,
		MTU:      int(as.Find(rest, unix.IFLA_MTU).U32()),
		MAC:      bytes.Clone(as.Find(rest, unix.IFLA_ADDRESS).Value),
		Peer:     int(as.Find(rest, unix.IFLA_LINK).U32()),
		Master:   int(as.Find(rest, unix.IFLA_MASTER).U32()),
	}
	for name := range as.In(as.Find(rest, unix.IFLA_PROP_LIST).Value) {
		if name.Kind == unix.IFLA_ALT_IFNAME {
			l.AltNames = append(l.AltNames, name.Text())
		}
	}
	if id := as.Find(rest, unix.IFLA_LINK_NETNSID); id.Kind != 0 {
		l.PeerElsewhere = true
		l.PeerNetns = int(int32(id.U32()))
	}
	l.Parameters.parse(&as, as.Find(rest, unix.IFLA_AF_SPEC).Value)
	return l, as.Err
}

// Attributes of RTM_GETNSID (linux/net_namespace.h).
const (
	netnsaNSID = 1
	netnsaFD   = 3
)

// NetnsID returns the ID that the handle's namespace has for another one, by which links name the
// namespace of their other end; -1 if it has none.
func (h *Handle) NetnsID(ctx context.Context, ns *netns.NS) (int, error) {
	r := newRequest(unix.RTM_GETNSID, 0, text("netns list-id of descriptor %d", ns.Fd()), nl.NewRtGenMsg(), number(netnsaFD, uint32(ns.Fd())))
	id := -1
	err := h.Get(ctx, r, func(body []byte) error {
		_, rest, as := Cut(body, nl.NewRtGenMsg().Len())
		if a := as.Find(rest, netnsaNSID); a.Kind != 0 {
			id = int(int32(a.U32()))
		}
		return as.Err
	})
	return id, err
}
