package rtnl

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Interest says which notifications a Subscription receives. The kernel filters them,
// so that others cost next to nothing.
type Interest struct {
	// Protocol and Tables are those of routes: the deletion of one of the protocol,
	// and the routes that replace others in the tables.
	Protocol int
	Tables   []int
	// Learned are IPv6 routes that the kernel adds to the main table because of a router
	// advertisement. Routes of a link's addresses are among them, except link-local ones.
	Learned bool
	// Rules are deletions of rules.
	Rules bool
	// Links are all changes of links, of their parameters as far as the kernel tells, and
	// that one loses an address of its own; otherwise only that one goes up or down.
	Links bool
}

// Offsets into a notification: struct nlmsghdr, followed by a struct that depends on
// the type (netlink(7), rtnetlink(7)).
const (
	offType    = 4
	offFlags   = 6
	offBody    = unix.SizeofNlMsghdr
	offRtTable = offBody + 4
	offRtProto = offBody + 5
	offRtType  = offBody + 7
	// IPv6's first attribute is the table, the second the destination unless that is ::/0.
	offRtDst     = offBody + unix.SizeofRtMsg + unix.SizeofRtAttr + 4 + unix.SizeofRtAttr
	offIfFamily  = offBody
	offIfChange  = offBody + 12
	offAddrScope = offBody + 3
	// netconfOne is the size of a notification of one parameter of a link: the header,
	// a struct netconfmsg, the link's index and the value. That of a new link has more.
	netconfOne = unix.SizeofNlMsghdr + 4 + 8 + 8
)

// groups are the multicast groups of these notifications.
func (i Interest) groups() []int {
	groups := []int{
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_LINK,
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
	}
	if i.Rules {
		groups = append(groups, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
	}
	if i.Links {
		groups = append(groups, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
	}
	return groups
}

// program is the filter of a socket (bpf(4), socket(7)).
func (i Interest) program() ([]bpf.RawInstruction, error) {
	isType := func(t uint16) condition { return condition{offType, 2, bpf.JumpEqual, host16(t)} }
	// The addresses of pods' links are of a narrower scope than those of the node.
	wide := condition{offAddrScope, 1, bpf.JumpLessThan, unix.RT_SCOPE_LINK}
	clauses := []clause{
		{isType(unix.RTM_DELROUTE), {offRtProto, 1, bpf.JumpEqual, uint32(i.Protocol)}},
		{isType(unix.RTM_DELRULE)},
		{isType(unix.RTM_DELLINK), {offIfFamily, 1, bpf.JumpEqual, unix.AF_UNSPEC}},
		{isType(unix.RTM_NEWADDR), wide},
		{isType(unix.RTM_NEWNETCONF), {0, 4, bpf.JumpEqual, host32(netconfOne)}},
	}
	for _, t := range i.Tables {
		inHeader := smallTable(t)
		if inHeader == unix.RT_TABLE_UNSPEC {
			inHeader = unix.RT_TABLE_COMPAT
		}
		clauses = append(clauses, clause{
			isType(unix.RTM_NEWROUTE),
			{offFlags, 2, bpf.JumpBitsSet, host16(unix.NLM_F_REPLACE)},
			{offRtTable, 1, bpf.JumpEqual, uint32(inHeader)},
		})
	}
	if i.Learned {
		inMain := clause{
			isType(unix.RTM_NEWROUTE), {offBody, 1, bpf.JumpEqual, unix.AF_INET6}, {offRtTable, 1, bpf.JumpEqual, unix.RT_TABLE_MAIN},
		}
		const linkLocal = 0xfe80 // its first two bytes
		clauses = append(clauses, append(slices.Clone(inMain), condition{offRtProto, 1, bpf.JumpEqual, unix.RTPROT_RA}),
			append(slices.Clone(inMain), condition{offRtProto, 1, bpf.JumpEqual, unix.RTPROT_KERNEL},
				condition{offRtType, 1, bpf.JumpEqual, unix.RTN_UNICAST}, condition{offRtDst, 2, bpf.JumpNotEqual, linkLocal}))
	}
	link := clause{isType(unix.RTM_NEWLINK), {offIfFamily, 1, bpf.JumpEqual, unix.AF_UNSPEC}}
	addr := clause{isType(unix.RTM_DELADDR)}
	if !i.Links {
		link = append(link, condition{offIfChange, 4, bpf.JumpBitsSet, host32(unix.IFF_UP)})
		addr = append(addr, wide)
	}
	program, err := bpf.Assemble(anyOf(append(clauses, link, addr)))
	if err != nil {
		return nil, fmt.Errorf("assemble filter of notifications: %w", err)
	}
	return program, nil
}

// condition compares the value at an offset. A load turns the value from the network's
// byte order, so that values of several bytes are given as they would be read so.
type condition struct {
	offset, size uint32
	test         bpf.JumpTest
	value        uint32
}

// clause is a conjunction of conditions.
type clause []condition

// anyOf is a program that accepts a notification that meets at least one clause.
func anyOf(clauses []clause) []bpf.Instruction {
	var program []bpf.Instruction
	for _, c := range clauses {
		for n, t := range c {
			rest := 2*(len(c)-n-1) + 1 // instructions of the clause after this condition
			program = append(program, bpf.LoadAbsolute{Off: t.offset, Size: int(t.size)},
				bpf.JumpIf{Cond: t.test, Val: t.value, SkipFalse: uint8(rest)})
		}
		program = append(program, bpf.RetConstant{Val: 1 << 18}) // bytes: all
	}
	return append(program, bpf.RetConstant{Val: 0})
}

// host16 is a value in the host's byte order as it is read in the network's.
func host16(v uint16) uint32 {
	return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, v)))
}

func host32(v uint32) uint32 {
	return binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, v))
}

// parseChange reads a notification that the filter let pass; the other result is false
// for a kind that isn't known.
func parseChange(m Message) (c Change, known bool, err error) {
	switch m.kind {
	case unix.RTM_DELROUTE, unix.RTM_NEWROUTE:
		c.Kind = RouteLost
		if m.kind == unix.RTM_NEWROUTE && m.flags&unix.NLM_F_REPLACE == 0 {
			c.Kind = RouteLearned
		}
		var r Route
		r, _, err = parseRoute(m.Body)
		c.Route = r.Route
	case unix.RTM_DELRULE:
		c.Kind = RuleLost
		var r Rule
		r, _, err = parseRule(m.Body)
		c.Rule = r.Rule
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		var l Link
		l, err = parseLink(m.Body)
		c.Kind, c.Link, c.State = LinkChanged, l.Index, &l
		if m.kind == unix.RTM_DELLINK {
			c.Kind, c.State = LinkLost, nil
		}
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		c.Kind = AddrAdded
		if m.kind == unix.RTM_DELADDR {
			c.Kind = AddrLost
		}
		err = c.parseAddr(m.Body)
	case unix.RTM_NEWNETCONF:
		c.Kind = LinkChanged
		err = c.parseNetconf(m.Body)
	default:
		return c, false, nil
	}
	return c, err == nil, err
}

// parseAddr reads a struct ifaddrmsg and its attributes.
func (c *Change) parseAddr(body []byte) error {
	b, rest, as := Cut(body, unix.SizeofIfAddrmsg)
	c.Link = int(nl.DeserializeIfAddrmsg(b).Index)
	// IFA_LOCAL is the own address where IFA_ADDRESS is the other end's; IPv6 has only the latter.
	c.Addr = cmp.Or(as.Find(rest, unix.IFA_LOCAL).Addr(), as.Find(rest, unix.IFA_ADDRESS).Addr())
	return as.Err
}

// netconfIfIndex is NETCONFA_IFINDEX of linux/netconf.h. Values below 1 are not of a link.
const netconfIfIndex = 1

// parseNetconf reads a struct netconfmsg and its attributes.
func (c *Change) parseNetconf(body []byte) error {
	_, rest, as := Cut(body, 4)
	c.Link = int(int32(as.Find(rest, netconfIfIndex).U32()))
	return as.Err
}
