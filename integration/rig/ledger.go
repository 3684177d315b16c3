package rig

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Ledger is the runtime's view of who has which address: what ADD answered until
// DEL is asked for. It notices at once when coild breaks its word.
type Ledger struct {
	mu     sync.Mutex
	live   map[*Sandbox][]netip.Addr
	holder map[netip.Addr]*Sandbox
	freed  map[netip.Addr]end
	nodes  map[*Node]*account
}

// end is when a sandbox gave an address up.
type end struct {
	at time.Time
	by *Sandbox
}

// Rest is the time between the end of a use of an address, on whatever node, and the
// answer that gave it again.
type Rest struct {
	Addr     netip.Addr
	From, To *Sandbox
	End      time.Time
	Took     time.Duration
}

func (r Rest) String() string {
	return fmt.Sprintf("%s, given up by %s at %s, was given to %s %s later",
		r.Addr, r.From, r.End.Format("15:04:05.000"), r.To, r.Took.Round(time.Millisecond))
}

// account is what is noted of a node.
type account struct {
	wrongs     []string
	shortest   *Rest
	adds, dels int
}

func newLedger() *Ledger {
	return &Ledger{
		live: map[*Sandbox][]netip.Addr{}, holder: map[netip.Addr]*Sandbox{}, freed: map[netip.Addr]end{}, nodes: map[*Node]*account{},
	}
}

// of returns the account of a node; l.mu is held.
func (l *Ledger) of(n *Node) *account {
	a := l.nodes[n]
	if a == nil {
		a = &account{}
		l.nodes[n] = a
	}
	return a
}

// answered notes that ADD answered.
func (l *Ledger) answered(s *Sandbox, addrs []netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	acc := l.of(s.Node)
	acc.adds++
	if len(addrs) == 0 {
		acc.wrongf("ADD of %s was answered without an address", s)
	}
	if have, ok := l.live[s]; ok {
		if !slices.Equal(have, addrs) {
			acc.wrongf("ADD of %s was answered %v, then %v", s, have, addrs)
		}
		return
	}
	for _, a := range addrs {
		if other := l.holder[a]; other != nil {
			acc.wrongf("%s was given to %s while %s has it", a, s, other)
		}
		if f, ok := l.freed[a]; ok {
			if took := time.Since(f.at); acc.shortest == nil || took < acc.shortest.Took {
				acc.shortest = &Rest{Addr: a, From: f.by, To: s, End: f.at, Took: took}
			}
		}
		l.holder[a] = s
	}
	l.live[s] = addrs
}

func (a *account) wrongf(format string, args ...any) {
	a.wrongs = append(a.wrongs, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

// deleting notes that the runtime gives a sandbox up: its addresses may go to
// others from now on.
func (l *Ledger) deleting(s *Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of(s.Node).dels++
	l.forget(s)
}

// lost notes that a sandbox ended without DEL.
func (l *Ledger) lost(s *Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(s)
}

func (l *Ledger) forget(s *Sandbox) {
	now := time.Now()
	for _, a := range l.live[s] {
		if l.holder[a] == s {
			delete(l.holder, a)
			l.freed[a] = end{now, s}
		}
	}
	delete(l.live, s)
}

// Live returns the sandboxes that have a network, with their addresses.
func (l *Ledger) Live() map[*Sandbox][]netip.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	live := make(map[*Sandbox][]netip.Addr, len(l.live))
	for s, addrs := range l.live {
		live[s] = slices.Clone(addrs)
	}
	return live
}

// Lose says that a sandbox ended and that no DEL will come.
func (l *Ledger) Lose(s *Sandbox) { l.lost(s) }

// Wrongs are the answers of a node that were wrong, whatever came later.
func (l *Ledger) Wrongs(n *Node) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.of(n).wrongs)
}

// ShortestRest is the shortest rest of an address that the node gave; nil when it gave none
// again.
func (l *Ledger) ShortestRest(n *Node) *Rest {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of(n).shortest
}

// Counts returns how many ADDs the node answered, and how many DELs it was asked for.
func (l *Ledger) Counts(n *Node) (adds, dels int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.of(n)
	return a.adds, a.dels
}
