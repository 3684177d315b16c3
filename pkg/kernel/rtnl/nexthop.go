package rtnl

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Attributes of linux/nexthop.h.
const (
	nhaResGroup        = 12
	nhaResBucket       = 13
	nhaOpFlags         = 14
	resGroupBuckets    = 1
	resGroupIdleTimer  = 2
	resGroupUnbalanced = 3
	resBucketIdleTime  = 2
	resBucketNexthop   = 3
	groupTypeResilient = 1
	// rtaNexthop is the attribute of a route that refers to a nexthop object (RTA_NH_ID).
	rtaNexthop = 30

	// clock is the unit of timers (USER_HZ).
	clock = 10 * time.Millisecond
)

// Nexthop is a nexthop object that was found in the kernel: a group if it has members.
type Nexthop struct {
	dataplane.Nexthop
	Group dataplane.NexthopGroup
	// Exact says that the value describes the object completely.
	Exact bool
}

// SetNexthop asks for a nexthop object, in place of the one with its ID if there is one.
func SetNexthop(n dataplane.Nexthop) Request {
	var e encoder
	e.nexthopHeader(families[n.Family], n.Protocol)
	e.attrU32(unix.NHA_ID, n.ID)
	e.attrU32(unix.NHA_OIF, uint32(n.Link))
	return Request{unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE | unix.NLM_F_REPLACE, e.b, func() string { return "nexthop replace " + n.String() }}
}

// SetNexthopGroup asks for a group, in place of the one with its ID if there is one: buckets
// in use whose members stay are left to them. ErrInvalid if a member doesn't exist, or if the group
// has another number of buckets. No bucket is taken from a member that uses it, for however
// long the group has been out of balance.
func SetNexthopGroup(g dataplane.NexthopGroup) Request {
	var e encoder
	e.nexthopHeader(unix.AF_UNSPEC, g.Protocol)
	e.attrU32(unix.NHA_ID, g.ID)
	members := make([]byte, 0, len(g.Members)*unix.SizeofNexthopGrp)
	for i := range g.Members {
		m := g.Members[(i+int(g.Turn))%len(g.Members)]
		members = binary.NativeEndian.AppendUint32(members, m.ID)
		members = append(members, uint8(m.Weight-1), 0, 0, 0)
	}
	e.attr(unix.NHA_GROUP, members)
	e.attrU16(unix.NHA_GROUP_TYPE, groupTypeResilient)
	e.nest(nhaResGroup, func() {
		e.attrU16(resGroupBuckets, g.Buckets)
		e.attrU32(resGroupIdleTimer, uint32(g.Idle/clock))
		e.attrU32(resGroupUnbalanced, 0)
	})
	return Request{unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE | unix.NLM_F_REPLACE, e.b, func() string { return "nexthop replace " + g.String() }}
}

// DelNexthop asks for the removal of an object of an ID, and with it of the routes that refer
// to it; a group loses the member. ErrNotExist.
func DelNexthop(id uint32) Request {
	var e encoder
	e.nexthopHeader(unix.AF_UNSPEC, 0)
	e.attrU32(unix.NHA_ID, id)
	return Request{unix.RTM_DELNEXTHOP, 0, e.b, func() string { return fmt.Sprintf("nexthop del %#x", id) }}
}

// nexthopHeader appends a struct nhmsg.
func (e *encoder) nexthopHeader(family uint8, protocol int) {
	e.u8(family, 0, uint8(protocol), 0)
	e.u32(0)
}

// Nexthops returns the nexthop objects of a protocol, or of all if it is 0.
func (h *Handle) Nexthops(ctx context.Context, protocol int) ([]Nexthop, error) {
	var e encoder
	e.nexthopHeader(unix.AF_UNSPEC, 0)
	r := Request{unix.RTM_GETNEXTHOP, 0, e.b, func() string { return "nexthop show" }}
	return List(ctx, h, r, func(body []byte) (Nexthop, bool, error) {
		n, err := parseNexthop(body)
		return n, protocol == 0 || n.Protocol == protocol, err
	})
}

func parseNexthop(body []byte) (Nexthop, error) {
	if len(body) < unix.SizeofNhmsg {
		return Nexthop{}, fmt.Errorf("nexthop in %d bytes: %w", len(body), errMalformed)
	}
	var n Nexthop
	n.Exact = true
	n.Protocol = int(body[2])
	switch body[0] {
	case unix.AF_INET:
		n.Family = dataplane.IPv4
	case unix.AF_INET6:
		n.Family = dataplane.IPv6
	}
	as, err := attributes(body[unix.SizeofNhmsg:])
	if err != nil {
		return Nexthop{}, err
	}
	resilient := false
	for a := range as {
		switch a.kind {
		case unix.NHA_ID:
			n.ID = a.u32()
		case unix.NHA_OIF:
			n.Link = int(a.u32())
		case unix.NHA_GROUP:
			for m := range slices.Chunk(a.value, unix.SizeofNexthopGrp) {
				if len(m) < unix.SizeofNexthopGrp {
					return Nexthop{}, fmt.Errorf("group in %d bytes: %w", len(a.value), errMalformed)
				}
				n.Group.Members = append(n.Group.Members, dataplane.NexthopMember{ID: binary.NativeEndian.Uint32(m), Weight: int(m[4]) + 1})
			}
		case unix.NHA_GROUP_TYPE:
			resilient = a.u16() == groupTypeResilient
		case nhaResGroup:
			err := EachAttribute(a.value, func(kind uint16, value []byte) error {
				switch b := (attribute{kind, value}); kind {
				case resGroupBuckets:
					n.Group.Buckets = b.u16()
				case resGroupIdleTimer:
					n.Group.Idle = time.Duration(b.u32()) * clock
				case resGroupUnbalanced:
					n.Exact = n.Exact && b.u32() == 0
				}
				return nil
			})
			if err != nil {
				return Nexthop{}, err
			}
		case nhaOpFlags: // what the kernel says of its answer
		default:
			n.Exact = n.Exact && a.zero()
		}
	}
	if len(n.Group.Members) > 0 {
		slices.SortFunc(n.Group.Members, dataplane.CompareMembers)
		n.Exact = n.Exact && resilient
		n.Group.ID, n.Group.Protocol = n.ID, n.Protocol
	}
	return n, nil
}

// Bucket is one of a resilient group.
type Bucket struct {
	// Nexthop is the ID of the member that has it.
	Nexthop uint32
	// Idle is for how long no lookup of a route has come to it, or since the group was made. A
	// connected socket looks up once, and again when routes or nexthop objects changed.
	Idle time.Duration
}

// Buckets returns those of a group in their order; ErrNotExist.
func (h *Handle) Buckets(ctx context.Context, group uint32) ([]Bucket, error) {
	var e encoder
	e.nexthopHeader(unix.AF_UNSPEC, 0)
	e.attrU32(unix.NHA_ID, group)
	r := Request{unix.RTM_GETNEXTHOPBUCKET, 0, e.b, func() string { return fmt.Sprintf("nexthop bucket list id %#x", group) }}
	return List(ctx, h, r, func(body []byte) (Bucket, bool, error) {
		b, err := parseBucket(body)
		return b, true, err
	})
}

func parseBucket(body []byte) (b Bucket, err error) {
	if len(body) < unix.SizeofNhmsg {
		return b, fmt.Errorf("bucket in %d bytes: %w", len(body), errMalformed)
	}
	err = EachAttribute(body[unix.SizeofNhmsg:], func(kind uint16, value []byte) error {
		if kind != nhaResBucket {
			return nil
		}
		return EachAttribute(value, func(kind uint16, value []byte) error {
			switch a := (attribute{kind, value}); {
			case kind == resBucketIdleTime && len(value) >= 8:
				b.Idle = time.Duration(binary.NativeEndian.Uint64(value)) * clock
			case kind == resBucketNexthop:
				b.Nexthop = a.u32()
			}
			return nil
		})
	})
	return b, err
}
