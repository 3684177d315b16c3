package dataplane

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"
)

const (
	// FirstNexthop is the first ID of Coil's nexthop objects. That of a link has the link's
	// index added to it, and the table that leads by the link has the same number.
	FirstNexthop uint32 = 0x63000000
	// firstGroup is the first ID of groups, beyond all indexes of links.
	firstGroup = FirstNexthop + groups
	groups     = 1 << 23
)

// NexthopOf returns the ID of the nexthop object of a link.
func NexthopOf(link int) uint32 { return FirstNexthop + uint32(link) }

// TableOf returns the table in which all destinations lead by a link, and LinkOf the link of
// such a table.
func TableOf(link int) int { return int(FirstNexthop) + link }

// LinkOf see TableOf.
func LinkOf(table int) int { return table - int(FirstNexthop) }

// NexthopGroupOf returns the ID of the group of a name, such as an Egress's, in a family. Two
// names may have one ID: attempt, from 0, chooses others.
func NexthopGroupOf(name string, f Family, attempt int) uint32 {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s %s", name, f)
	return firstGroup + (h.Sum32()+uint32(attempt))%groups
}

// Nexthop is a nexthop object that sends by a link (ip-nexthop(8)). Routes and groups of
// its family refer to it by its ID.
type Nexthop struct {
	ID       uint32
	Family   Family
	Link     int
	Protocol int
}

// String prints the object as "ip nexthop" does.
func (n Nexthop) String() string {
	return fmt.Sprintf("id %#x dev %d proto %d (%s)", n.ID, n.Link, n.Protocol, n.Family)
}

// NexthopGroup is a resilient group of nexthop objects of one family (kernel document
// networking/nexthop-group-resilient). Its buckets are shared out by weight; a bucket keeps
// its member, when members come or go or change their weights, until no lookup of a route has
// come to it for the idle time, or the member leaves. One that was never used moves at once.
type NexthopGroup struct {
	ID uint32
	// Members are sorted by ID.
	Members []NexthopMember
	// Turn is by how much the order is turned in which the members get their buckets when the group
	// is made. A group that is there doesn't differ by it.
	Turn uint32
	// Buckets can't be changed; Idle can, to the hundredth of a second.
	Buckets  uint16
	Idle     time.Duration
	Protocol int
}

// NexthopMember is a member of a group with its weight, 1 to 256.
type NexthopMember struct {
	ID     uint32
	Weight int
}

// String prints the group as "ip nexthop" does.
func (g NexthopGroup) String() string {
	var members []string
	for _, m := range g.Members {
		members = append(members, fmt.Sprintf("%#x,%d", m.ID, m.Weight))
	}
	return fmt.Sprintf("id %#x group %s type resilient buckets %d idle_timer %s proto %d",
		g.ID, strings.Join(members, "/"), g.Buckets, g.Idle, g.Protocol)
}

// Equal says whether the two groups are the same.
func (g NexthopGroup) Equal(o NexthopGroup) bool {
	return g.ID == o.ID && slices.Equal(g.Members, o.Members) && g.Buckets == o.Buckets && g.Idle == o.Idle && g.Protocol == o.Protocol
}

// CompareMembers orders members of a group by ID.
func CompareMembers(a, b NexthopMember) int { return cmp.Compare(a.ID, b.ID) }
