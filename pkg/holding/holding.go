// Package holding decides which node has a floating address: one at a time, whatever nodes, networks and the API server do.
//
// It owns the protocol between nodes: what they ask each other, when one of them may answer for an address, and when it has to
// stop. It must not know how messages and records travel, what a node does to answer for an address, nor what time it is.
//
// # The protocol
//
// The API server has a [Record] of each address. A node becomes the holder of an address only by a write that fails if the record has
// changed since the node read it. So holders follow one another. The protocol has to see to the rest: a former holder must have
// stopped when the next one begins. A holder answers only while one of these holds:
//
//   - A live read of the API server, begun less than one lease ago, said that it is the holder.
//   - More than half of the address's voters have granted it a lease, which begins when the holder sent the heartbeat. The holder
//     has also written the record while it had this majority (a claim), and has had a majority without a gap since.
//
// A lease is shorter than the silence after which other nodes take the holder for dead. The difference is more than clocks of
// machines can differ.
//
// A successor takes an address from a holder when it has heard nothing of that node for the silence, and at least half of the
// voters say the same, all within one promise. A voter that says so grants that node no lease for the time of a
// promise. So there is a moment before the successor's write at which none of these voters has granted the former holder a lease. The
// former holder has no majority at that moment, and needs a claim to use one again. Of the claim and the successor's write the
// second fails, since the first has changed the record. A former holder that relies on live reads stops at most one lease after
// the successor's write. The successor waits for half a second before it answers. So two nodes answer at once for less than a
// second.
//
// If exactly half of the voters agree, the successor first writes itself into the record as the contender. A holder that lives and
// reaches the API server sees that within a second, claims the address, and keeps it. Otherwise both halves of a divided network would
// take the address from one another without end.
//
// A holder that gives an address up, or hands it over, stops before it writes the record. The next holder begins at once. A holder that
// isn't ready any more hands the address over to the successor that was prepared, if it hears that one, and else gives it up.
//
// A program that will end gives its addresses up, if other successors are heard and the API server, which has to know, answers.
//
// A holder that finds out that its node drops the address's packets gives the address up, once, if it hears another successor. It takes the
// address again only if no other node does: packets may be dropped everywhere.
//
// Voters change only by a write of the holder. While the outcome of that write isn't known, the holder needs majorities of both
// sets.
//
// A node that starts has forgotten what it granted and promised. It grants nothing for the silence.
package holding

import "time"

// Record is what the API server has about an address.
type Record struct {
	// ID is the address's own, and never that of another.
	ID string
	// Version grows with each write of the record. A write names the version that it replaces, and fails if there is a newer one.
	Version uint64
	// Holder is the node that has the address. Empty if no node has.
	Holder string
	// Epoch counts the changes of Holder.
	Epoch int64
	// Claims counts what a holder writes to find out that it still is the holder.
	Claims int64
	// HandedOver says that nobody answered any more when Holder was written.
	HandedOver bool
	// Voters are the nodes that grant leases. Only holders change them.
	Voters []string
	// Successors are the nodes that may have the address, the preferred ones first. The holder may be among them.
	Successors []string
	// Contender is the node that will take the address from a holder that doesn't claim it. Empty if no node will.
	Contender string
	// MovingTo is the node to which the holder is to hand the address over. Empty if it is to keep it.
	MovingTo string
}

// Stamp names a moment of a life of a node.
type Stamp struct {
	// Life is a random number of each start of the program.
	Life uint64 `json:"life"`
	// Sent is the time by the clock of that node.
	Sent time.Duration `json:"sent"`
}

// Kind is what a message is for.
type Kind uint8

// Kinds of messages. Each is one datagram, whose sender the receiver can be sure of.
const (
	// Heartbeat says that the sender lives, and asks for a lease.
	Heartbeat Kind = iota + 1
	// Ack is the answer to a Heartbeat.
	Ack
	// VoteRequest asks whether the receiver has heard from the node About.
	VoteRequest
	// Vote is the answer to a VoteRequest.
	Vote
	// Notice says that a record has changed.
	Notice
)

// Message is what nodes tell each other.
type Message struct {
	Kind  Kind  `json:"kind"`
	Stamp Stamp `json:"stamp"`
	// Echo is a stamp of the receiver. The receiver believes only messages with one that isn't older than the silence: others may be
	// repeated by a third party.
	Echo Stamp `json:"echo,omitzero"`
	// Grant says in an Ack that the sender grants the receiver a lease, from the Echo's time on.
	Grant bool `json:"grant,omitempty"`
	// About is the node of a VoteRequest or a Vote.
	About string `json:"about,omitempty"`
	// Round is the same in a VoteRequest and its Votes.
	Round time.Duration `json:"round,omitempty"`
	// Silent says in a Vote that the sender hasn't heard from About.
	Silent bool `json:"silent,omitempty"`
}

// Event is what happens to a Machine.
type Event interface{ event() }

// Events.
type (
	// Tick says that the time of [Machine.Next] has come.
	Tick struct{}
	// Received is a message of a node.
	Received struct {
		From string
		Message
	}
	// Seen is a record of the watch, in any order.
	Seen struct{ Record }
	// Gone says that an address isn't a floating one any more.
	Gone struct{ ID string }
	// ReadDone is the answer to a Read. Records are those of which this node is the holder, Version is that of the whole list.
	ReadDone struct {
		Err     error
		Version uint64
		Records []Record
	}
	// WriteDone is the answer to a Write.
	WriteDone struct {
		ID      string
		Outcome Outcome
		// Written has the new version, if the outcome is Written.
		Written Record
	}
	// Ready says whether this node could answer for an address. Until the first one the node neither answers nor gives the address up. Next is a
	// node that has all it needs to have the address in place of one that isn't ready; empty if there is none.
	Ready struct {
		ID    string
		Ready bool
		Next  string
	}
	// Copied says that the node to which an address moves has all it needs, or that there is no more time to wait for that.
	Copied struct{ ID string }
	// Disputed says that another host on the link says that an address is at it.
	Disputed struct{ ID string }
	// Leave says that this program will end, and that it isn't known when it is back.
	Leave struct{}
	// Blocked says whether this node, while it has an address, drops packets of it that it should forward.
	Blocked struct {
		ID      string
		Blocked bool
	}
)

func (Tick) event()      {}
func (Received) event()  {}
func (Seen) event()      {}
func (Gone) event()      {}
func (ReadDone) event()  {}
func (WriteDone) event() {}
func (Ready) event()     {}
func (Copied) event()    {}
func (Disputed) event()  {}
func (Blocked) event()   {}
func (Leave) event()     {}

// Outcome is what is known about a Write.
type Outcome uint8

// Outcomes.
const (
	// Unknown: it may have been done, or may be done later.
	Unknown Outcome = iota
	// Written: the record is as it was to be.
	Written
	// Changed: the record had another version, and nothing was written.
	Changed
)

// Action is what a Machine wants to be done.
type Action interface{ action() }

// Actions.
type (
	// Send is a message to a node. It may be lost.
	Send struct {
		To string
		Message
	}
	// Read asks for the records of which this node is the holder, by a live read: one that has all that was written before it began.
	// Its end is a ReadDone, within the time of a lease.
	Read struct{}
	// Write asks to replace a record that still has the version of Record. Its end is a WriteDone.
	Write struct{ Record }
	// Answer asks to answer for an address until the time Until, whether this program still runs then or not. Announce asks to tell so to
	// all on the link.
	Answer struct {
		ID       string
		Epoch    int64
		Until    time.Duration
		Announce bool
	}
	// Stop asks to stop answering for an address, at once.
	Stop struct{ ID string }
)

func (Send) action()   {}
func (Read) action()   {}
func (Write) action()  {}
func (Answer) action() {}
func (Stop) action()   {}

// Lease is how long a node answers at most when nothing tells it to go on.
const Lease = 1400 * time.Millisecond

// rules are the numbers of the protocol, the same on all nodes.
type rules struct {
	// heartbeat is the time between two heartbeats.
	heartbeat time.Duration
	// silence is the time after which a node that isn't heard may have stopped.
	silence time.Duration
	// lease is how long a holder relies on a grant or a read. It is shorter than silence by more than clocks can differ.
	lease time.Duration
	// rank is how much longer each successor waits than the one before it. It is deference when the holder isn't heard, and one before it is: that one may
	// have the connections, and be late.
	rank, deference time.Duration
	// promise is how long a voter grants no lease to a node of which it has said that it is silent.
	promise time.Duration
	// settle is how long a node that has taken an address waits before it answers.
	settle time.Duration
	// read is the time between two reads of a holder that relies on them, and reserve the rest of a lease at which it begins with them.
	read, reserve time.Duration
	// votes is the time that voters who are heard have for their answer.
	votes time.Duration
	// contend is how long a contender waits for the holder, and standoff how long it lets a holder be that has claimed the address then.
	contend, standoff time.Duration
	// retry is the time between two writes of a record that came to nothing, and between two announcements in a dispute.
	retry time.Duration
	// reluctance is how much longer a successor waits that has dropped the address's packets.
	reluctance time.Duration
	// quorum is how many voters of n have to say that a holder is silent.
	quorum func(n int) int
}

func defaults() rules {
	return rules{
		heartbeat: 400 * time.Millisecond,
		silence:   1500 * time.Millisecond,
		lease:     Lease,
		rank:      400 * time.Millisecond, deference: time.Second,
		promise: time.Second,
		settle:  500 * time.Millisecond,
		read:    500 * time.Millisecond,
		reserve: 800 * time.Millisecond,
		votes:   100 * time.Millisecond,
		contend: time.Second, standoff: 5 * time.Second,
		retry: time.Second, reluctance: 10 * time.Second,
		quorum: func(n int) int { return (n + 1) / 2 },
	}
}
