package rtnl

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
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
	return newRequest(unix.RTM_NEWNEXTHOP, replace, text("nexthop replace %s", n), nexthopHeader{families[n.Family], 0, uint8(n.Protocol)},
		number(unix.NHA_ID, n.ID), number(unix.NHA_OIF, uint32(n.Link)))
}

// SetNexthopGroup asks for a group, in place of the one with its ID if there is one: buckets
// in use whose members stay are left to them. ErrInvalid if a member doesn't exist, or if the group
// has another number of buckets. No bucket is taken from a member that uses it, for however
// long the group has been out of balance.
func SetNexthopGroup(g dataplane.NexthopGroup) Request {
	members := make([]byte, 0, len(g.Members)*unix.SizeofNexthopGrp)
	for i := range g.Members {
		m := g.Members[(i+int(g.Turn))%len(g.Members)]
		members = binary.NativeEndian.AppendUint32(members, m.ID)
		members = append(members, uint8(m.Weight-1), 0, 0, 0)
	}
	return newRequest(unix.RTM_NEWNEXTHOP, replace, text("nexthop replace %s", g), nexthopHeader{2: uint8(g.Protocol)},
		number(unix.NHA_ID, g.ID), nl.NewRtAttr(unix.NHA_GROUP, members), nl.NewRtAttr(unix.NHA_GROUP_TYPE, nl.Uint16Attr(groupTypeResilient)),
		nest(nhaResGroup, nl.NewRtAttr(resGroupBuckets, nl.Uint16Attr(g.Buckets)),
			number(resGroupIdleTimer, uint32(g.Idle/clock)), number(resGroupUnbalanced, 0)))
}

// DelNexthop asks for the removal of an object of an ID, and with it of the routes that refer
// to it; a group loses the member. ErrNotExist.
func DelNexthop(id uint32) Request {
	return newRequest(unix.RTM_DELNEXTHOP, 0, text("nexthop del %#x", id), nexthopHeader{}, number(unix.NHA_ID, id))
}

// nexthopHeader is a struct nhmsg, of which the library knows nothing: the family is its first byte,
// the protocol its third.
type nexthopHeader [unix.SizeofNhmsg]byte

// Len is the size.
func (h nexthopHeader) Len() int { return len(h) }

// Serialize returns the bytes.
func (h nexthopHeader) Serialize() []byte { return h[:] }

// Nexthops returns all nexthop objects.
func (h *Handle) Nexthops(ctx context.Context) ([]Nexthop, error) {
	r := newRequest(unix.RTM_GETNEXTHOP, 0, text("nexthop show"), nexthopHeader{})
	return List(ctx, h, r, parseNexthop)
}

func parseNexthop(body []byte) (n Nexthop, ok bool, err error) {
	header, rest, as := Cut(body, unix.SizeofNhmsg)
	n.Exact, n.Family, n.Protocol = true, familyOf(header[0]), int(header[2])
	resilient := false
	for a := range as.In(rest) {
		switch a.Kind {
		case unix.NHA_ID:
			n.ID = a.U32()
		case unix.NHA_OIF:
			n.Link = int(a.U32())
		case unix.NHA_GROUP:
			for m := range slices.Chunk(a.Value, unix.SizeofNexthopGrp) {
				if len(m) < unix.SizeofNexthopGrp {
					return Nexthop{}, false, fmt.Errorf("group in %d bytes: %w", len(a.Value), errMalformed)
				}
				n.Group.Members = append(n.Group.Members, dataplane.NexthopMember{ID: binary.NativeEndian.Uint32(m), Weight: int(m[4]) + 1})
			}
		case unix.NHA_GROUP_TYPE:
			resilient = a.U16() == groupTypeResilient
		case nhaResGroup:
			n.Group.Buckets = as.Find(a.Value, resGroupBuckets).U16()
			n.Group.Idle = time.Duration(as.Find(a.Value, resGroupIdleTimer).U32()) * clock
			n.Exact = n.Exact && as.Find(a.Value, resGroupUnbalanced).U32() == 0
		case nhaOpFlags: // about the answer
		default:
			n.Exact = n.Exact && a.zero()
		}
	}
	if len(n.Group.Members) > 0 {
		slices.SortFunc(n.Group.Members, dataplane.CompareMembers)
		n.Exact = n.Exact && resilient
		n.Group.ID, n.Group.Protocol = n.ID, n.Protocol
	}
	return n, true, as.Err
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
	r := newRequest(unix.RTM_GETNEXTHOPBUCKET, 0, text("nexthop bucket list id %#x", group), nexthopHeader{}, number(unix.NHA_ID, group))
	return List(ctx, h, r, parseBucket)
}

func parseBucket(body []byte) (b Bucket, ok bool, err error) {
	_, rest, as := Cut(body, unix.SizeofNhmsg)
	b.Idle = time.Duration(binary.NativeEndian.Uint64(as.Find(rest, nhaResBucket, resBucketIdleTime).bytes(8))) * clock
	b.Nexthop = as.Find(rest, nhaResBucket, resBucketNexthop).U32()
	return b, true, as.Err
}
