package rtnl

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
)

// ChangeKind is the kind of a change.
type ChangeKind uint8

// The kinds of changes. The kernel doesn't tell everything: when a link goes down or
// an address is lost, IPv4 routes that need it go without a word.
const (
	// Unknown says that notifications were lost: anything may have happened.
	Unknown ChangeKind = iota
	// RouteLost: Route was deleted, or something else replaced it, which is then Route.
	RouteLost
	// RouteLearned: the kernel added Route, of a router advertisement or of an address.
	RouteLearned
	// RuleLost: Rule was deleted.
	RuleLost
	// LinkChanged: Link appeared or is another in some way.
	LinkChanged
	// LinkLost: Link is gone.
	LinkLost
	// AddrAdded: Link has Addr, whose scope is wider than the link.
	AddrAdded
	// AddrLost: Link has Addr no more.
	AddrLost
)

// Change is one notification. Only the fields of its kind are set.
type Change struct {
	Kind  ChangeKind
	Route dataplane.Route
	Rule  dataplane.Rule
	Link  int // index
	// State is that of a link that changed; nil if the kernel didn't tell.
	State *Link
	Addr  netip.Addr
	// Port is the netlink port of the socket that asked for it: often the ID of its process; 0 is the
	// kernel's own doing, or unknown.
	Port uint32
}

// String describes the change, with the port if that is known.
func (c Change) String() string {
	var s string
	switch c.Kind {
	case RouteLost:
		s = "route lost: " + c.Route.String()
	case RouteLearned:
		s = "route learned: " + c.Route.String()
	case RuleLost:
		s = "rule lost: " + c.Rule.String()
	case LinkChanged:
		s = fmt.Sprintf("link %d changed", c.Link)
	case LinkLost:
		s = fmt.Sprintf("link %d lost", c.Link)
	case AddrAdded:
		s = fmt.Sprintf("address %s added to link %d", c.Addr, c.Link)
	case AddrLost:
		s = fmt.Sprintf("address %s of link %d lost", c.Addr, c.Link)
	default:
		return "notifications lost"
	}
	if c.Port != 0 {
		s += fmt.Sprintf(" by netlink port %d", c.Port)
	}
	return s
}

// Subscription receives changes. It isn't safe for concurrent use, but for Close.
type Subscription struct {
	*Listener
	handle *Handle
}

// Subscribe begins to receive changes in the handle's namespace. Changes that the handle
// itself asked for aren't among them, as far as the kernel tells the port that asked:
// for routes and rules.
func (h *Handle) Subscribe(i Interest) (*Subscription, error) {
	program, err := i.program()
	if err != nil {
		return nil, err
	}
	l, err := h.Listen(program, i.groups()...)
	if err != nil {
		return nil, err
	}
	return &Subscription{l, h}, nil
}

// loopback is the index of lo, the first link of each namespace.
const loopback = 1

// Run calls told with the changes, at once and then at most once in every settle, and
// never with nothing, until ctx ends.
func (s *Subscription) Run(ctx context.Context, settle time.Duration, told func([]Change)) error {
	var changes []Change
	heard := func(m *Message) bool {
		c, ok := s.change(m)
		if ok {
			changes = append(changes, c)
		}
		return ok
	}
	return s.Listener.Run(ctx, settle, heard, func() {
		// The kernel tells of a link or an address before it deletes the routes that need
		// it. All of that is one turn of the lock that this request waits for; its answer
		// doesn't matter.
		_, _ = s.handle.LinkByIndex(ctx, loopback)
		told(changes)
		changes = nil
	})
}

// change reads a notification; ok is false if it is of no interest. A notification that was lost, or can't be
// understood, may be any.
func (s *Subscription) change(m *Message) (c Change, ok bool) {
	if m == nil {
		return Change{}, true
	}
	c, known, err := parseChange(*m)
	if err != nil {
		return Change{}, true
	}
	// nlmsg_pid is the port of the socket that asked, where the kernel knows it.
	c.Port = m.port
	return c, known && !s.handle.owns(c.Port)
}

// portMemory is for how long the port of a closed socket is remembered: notifications of
// its changes may still be on their way.
const portMemory = 10 * time.Second

// owns says whether a port is, or was a moment ago, of a socket of the handle.
func (h *Handle) owns(port uint32) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	closed, ok := h.ports[port]
	return ok && (closed.IsZero() || time.Since(closed) < portMemory)
}

// opened remembers the port of a socket.
func (h *Handle) opened(c *conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for port, closed := range h.ports {
		if !closed.IsZero() && time.Since(closed) >= portMemory {
			delete(h.ports, port)
		}
	}
	h.ports[c.port] = time.Time{}
}

// closing closes a socket.
func (h *Handle) closing(c *conn) {
	h.mu.Lock()
	h.ports[c.port] = time.Now()
	h.mu.Unlock()
	c.close()
}
