// Package holding decides which node has a floating address: one at a time, whatever nodes, networks and the API server do.
//
// It owns the protocol between nodes: what they ask each other, when one of them may answer for an address, and when it has to
// stop. It must not know how messages and records travel, what a node does to answer for an address, nor what time it is.
//
// # The protocol
//
// The API server has a [Record] of each address. A node becomes its holder only by a write that fails if the record has changed
// since the node read it, so that holders follow one another. What remains to be proven is that a former holder has stopped when the
// next one begins. A holder answers only as long as one of these holds:
//
//   - A live read of the API server, begun less than a lease ago, said that it is the holder.
//   - More than half of the address's voters have lent it their voice, each for a lease from the moment when the holder asked for it,
//     and the holder has written the record (a claim) while it had their voices, which it has had without a gap since.
//
// A lease is shorter than the silence after which others take the holder for dead, by more than clocks of machines differ.
//
// A successor takes an address that has a holder when it has heard nothing of that node for the silence, and if at least half of
// the voters say within one promise that they haven't, either; who says so lends that node no voice for the time of a
// promise. So there is a moment before the write in which none of them has lent the former holder its voice: the former holder had no
// majority then, and can't have one again without a claim, which fails since the record has changed, or makes the successor's write
// fail. A former holder that relies on live reads stops at most a lease after the write. The successor answers when it has
// waited for half a second, so that two nodes answer at once for less than a second.
//
// With exactly half of the voters, a successor first writes itself into the record as the contender. A holder that lives, and reaches the
// API server, claims the address within a second then, and keeps it. Else both halves of a divided network would take it in turn.
//
// A holder that gives an address up, or hands it over, stops before it writes the record, and the next one begins at once.
//
// Voters change only by a write of the holder. From the beginning of that write until its outcome is known, the holder needs majorities of
// both sets.
//
// A node that begins, and so has forgotten what it has said, lends and says nothing for the silence.
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
	// Voters are the nodes whose voices count. Only holders change them.
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
	// Greeting asks for the receiver's voice.
	Greeting Kind = iota + 1
	// Reply is the answer to a Greeting.
	Reply
	// Question asks whether the receiver has heard from the node About.
	Question
	// Vote is the answer to a Question.
	Vote
	// Look says that a record has changed.
	Look
)

// Message is what nodes tell each other.
type Message struct {
	Kind  Kind  `json:"kind"`
	Stamp Stamp `json:"stamp"`
	// Echo is a stamp of the receiver. The receiver believes only messages with one that isn't older than the silence: others may be
	// repeated by a third party.
	Echo Stamp `json:"echo,omitzero"`
	// Lend says in a Reply that the receiver has the sender's voice.
	Lend bool `json:"lend,omitempty"`
	// About is the node of a Question or a Vote.
	About string `json:"about,omitempty"`
	// Round is the same in a Question and its Votes.
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
	// Ready says whether this node could answer for an address. It can't when it begins.
	Ready struct {
		ID    string
		Ready bool
	}
	// Copied says that the node to which an address moves has all it needs, or that there is no more time to wait for that.
	Copied struct{ ID string }
	// Disputed says that another node on the link answers for an address, too.
	Disputed struct{ ID string }
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

// rules are the numbers of the protocol, the same on all nodes.
type rules struct {
	// greet is the time between two greetings.
	greet time.Duration
	// silence is the time after which a node that isn't heard may have stopped.
	silence time.Duration
	// lease is how long a holder relies on a voice or a read. It is shorter than silence by more than clocks differ.
	lease time.Duration
	// rank is how much longer each successor waits than the one before it.
	rank time.Duration
	// promise is how long a voter lends no voice to a node of which it has said that it is silent.
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
	// quorum is how many voters of n have to say that a holder is silent.
	quorum func(n int) int
}

func defaults() rules {
	return rules{
		greet:   400 * time.Millisecond,
		silence: 1500 * time.Millisecond,
		lease:   1400 * time.Millisecond,
		rank:    400 * time.Millisecond,
		promise: time.Second,
		settle:  500 * time.Millisecond,
		read:    500 * time.Millisecond,
		reserve: 800 * time.Millisecond,
		votes:   100 * time.Millisecond,
		contend: time.Second, standoff: 5 * time.Second,
		retry:  time.Second,
		quorum: func(n int) int { return (n + 1) / 2 },
	}
}
