// Package faultpoint names the points between the steps of ADD, DEL, the life of a
// block, what a pod needs of Egresses, a floating address, copies of its connections, and translation to a node's address, at which a crash is tested.
//
// It owns their names. In programs that are shipped a point is nothing at all;
// built with the tag faultpoints, a program kills itself at one of them when its
// environment says so, and repairs of the kernel's objects wait while a file exists: what is broken
// then stays broken, so that it can be looked at. It must not know what happens at a point.
package faultpoint

// Point is the name of a point.
type Point string

// The points of ADD, in their order; of the address and the link, either may come first.
const (
	AddBegun     Point = "add.begun"
	AddReserved  Point = "add.reserved"
	AddVeth      Point = "add.veth"       // the link exists, nothing is on it
	AddPodWired  Point = "add.pod-wired"  // the pod's end is complete
	AddHostWired Point = "add.host-wired" // all is in the kernel
	AddRecorded  Point = "add.recorded"
	AddAnswering Point = "add.answering"
)

// The points of DEL, in their order; of the last two, either may come first.
const (
	DelBegun     Point = "del.begun"
	DelReleased  Point = "del.released"
	DelWithdrawn Point = "del.withdrawn"
	DelAnswering Point = "del.answering"
	DelUnlinked  Point = "del.unlinked" // in the background; the address doesn't cool yet
)

// The points of a block that a node acquires and gives back, in their order.
const (
	BlockAsked     Point = "block.asked"     // the BlockRequest exists
	BlockSeen      Point = "block.seen"      // it is answered
	BlockRequested Point = "block.requested" // it is deleted
	BlockRecorded  Point = "block.recorded"
	BlockExported  Point = "block.exported"
	BlockForgotten Point = "block.forgotten"
	BlockWithdrawn Point = "block.withdrawn"
	BlockDeleted   Point = "block.deleted" // but for the finalizer
	BlockReleased  Point = "block.released"
)

// The points of the start of coild, in their order.
const (
	RestoreBlocks   Point = "restore.blocks" // the blocks are recorded
	RestoreAdopted  Point = "restore.adopted"
	RestoreLinks    Point = "restore.links" // all links are recorded
	RestoreDropped  Point = "restore.dropped"
	RestoreReplayed Point = "restore.replayed" // but for the record in the queue
	RestoreInLine   Point = "restore.in-line"  // nothing says yet that it is
)

// Points while a client of Egresses is set up, in their order, and then those while it is cleared.
const (
	EgressRecorded  Point = "egress.recorded"  // the Egresses are, nothing of them is in the kernel
	EgressClosed    Point = "egress.closed"    // destinations are unreachable where a rule looks at them
	EgressRuled     Point = "egress.ruled"     // rules look at them
	EgressTunnelled Point = "egress.tunnelled" // the tunnels are there, no route leads into new ones
	EgressGrouped   Point = "egress.grouped"   // so are groups of routers, and flows have their pins
	EgressOpened    Point = "egress.opened"    // objects of the state before are still there, too
	EgressMade      Point = "egress.made"
	EgressRouteless Point = "egress.routeless" // no route is left, rules and tunnels are
	EgressCleared   Point = "egress.cleared"   // nothing is left in the kernel, the record is
	EgressForgotten Point = "egress.forgotten"
)

// The points of the controller, in their order.
const (
	CarveChosen   Point = "carve.chosen"
	CarveCreated  Point = "carve.created" // the block exists, its request isn't answered
	CarveAnswered Point = "carve.answered"
)

// The points while a Service gets an address, in their order, and then those while it loses one.
const (
	ServeClaimed    Point = "serve.claimed"    // the AddressClaim exists, the Service says nothing of it
	ServeRemembered Point = "serve.remembered" // the Service has the finalizer, and remembers the address
	ServePlaced     Point = "serve.placed"     // nodes may have the address
	ServeTold       Point = "serve.told"       // the Service's status tells it
	ServeUntold     Point = "serve.untold"     // it doesn't any more, the Service remembers it
	ServeReleased   Point = "serve.released"   // nothing of Coil's is in the Service
	ServeUnclaimed  Point = "serve.unclaimed"  // the AddressClaim is deleted
)

// The points while OpenStack provides the address of an AddressClaim, in their order, and then that while it takes one back.
const (
	CloudProvided Point = "cloud.provided" // the cloud has all, the claim says nothing of it
	CloudTold     Point = "cloud.told"     // the claim's status tells it; passed again with each of its conditions
	CloudAllowed  Point = "cloud.allowed"  // gateways may use the address, or may not any more
	CloudDeleted  Point = "cloud.deleted"  // the cloud has nothing, the claim keeps its finalizer
)

// The points while an AddressClaim gets addresses, in their order, and then that while it loses one.
const (
	FloatingChosen  Point = "floating.chosen"
	FloatingCreated Point = "floating.created" // the block exists, the claim doesn't say so
	FloatingTold    Point = "floating.told"
	FloatingDeleted Point = "floating.deleted" // the block is marked deleted, its name isn't free
)

// The points while a node takes a floating address, in their order, and then those while it gives one up.
const (
	HoldWritten   Point = "hold.written"   // by this node, since the holder is away: the kernel answers for nothing yet
	HoldLed       Point = "hold.led"       // the route leads to the pod, packets are dropped
	HoldOpened    Point = "hold.opened"    // packets pass; passed again whenever that is prolonged
	HoldSettled   Point = "hold.settled"   // routing daemons are told
	HoldAnnounced Point = "hold.announced" // the hosts of links are
	GiveClosed    Point = "give.closed"    // packets are dropped, routes are there
	GiveSettled   Point = "give.settled"   // they aren't, hosts of links may still ask this node
	GiveWithdrawn Point = "give.withdrawn" // they don't, the record isn't written
	GiveWritten   Point = "give.written"
)

// The points while a node copies the connections of a floating address to the next holder, in their order.
const (
	HandoverOffered Point = "handover.offered" // the next holder waits for them
	HandoverCopied  Point = "handover.copied"  // it has those that there were at first
	HandoverReady   Point = "handover.ready"   // it has those that changed meanwhile, the address moves now
	HandoverMoved   Point = "handover.moved"   // the address has moved, those of the last moment aren't copied
	HandoverDone    Point = "handover.done"    // they are, the router here has all of them, too
)

// The points while the next holder takes connections, in their order.
const (
	ReceiveOffered Point = "receive.offered" // those of before are still there
	ReceiveBegun   Point = "receive.begun"   // they aren't, none has come
	ReceiveOpened  Point = "receive.opened"  // some have
	ReceivePassed  Point = "receive.passed"  // all of a pass have, the holder doesn't know
)

// The points while a holder copies connections all the time, and then those while the other node takes them, each in their order.
const (
	StandbyBegun   Point = "standby.begun"   // all connections of an address are to follow
	StandbySent    Point = "standby.sent"    // they have, no answer has come
	StandbySettled Point = "standby.settled" // one has
	FollowBegun    Point = "follow.begun"    // those of before are still there
	FollowOpened   Point = "follow.opened"   // some have come
	FollowTaken    Point = "follow.taken"    // all have, others are forgotten, the holder doesn't know
)

// The points while a node makes what lets clients leave by its address, in their order. Those of objects that it removes are the same.
const (
	TransitTabled Point = "transit.tabled" // the rules have changed, the routes haven't
	TransitRouted Point = "transit.routed" // they have, routers weren't told
	TransitTold   Point = "transit.told"   // one was
)

// The points for tests, each list in its order.
var (
	Add   = []Point{AddBegun, AddReserved, AddVeth, AddPodWired, AddHostWired, AddRecorded, AddAnswering}
	Del   = []Point{DelBegun, DelReleased, DelWithdrawn, DelAnswering, DelUnlinked}
	Block = []Point{
		BlockAsked, BlockSeen, BlockRequested, BlockRecorded, BlockExported, BlockForgotten, BlockWithdrawn, BlockDeleted, BlockReleased,
	}
	Restore = []Point{RestoreBlocks, RestoreAdopted, RestoreLinks, RestoreDropped, RestoreReplayed, RestoreInLine}
	// EgressSetup are the points at which a pod gets what Egresses need, or other things than before, and EgressRemoval
	// those at which it loses them.
	EgressSetup   = []Point{EgressRecorded, EgressClosed, EgressRuled, EgressTunnelled, EgressGrouped, EgressOpened, EgressMade}
	EgressRemoval = []Point{EgressRouteless, EgressCleared, EgressForgotten}
	Carve         = []Point{CarveChosen, CarveCreated, CarveAnswered}
	Floating      = []Point{FloatingChosen, FloatingCreated, FloatingTold, FloatingDeleted}
	Serve         = []Point{ServeClaimed, ServeRemembered, ServePlaced, ServeTold, ServeUntold, ServeReleased, ServeUnclaimed}
	Cloud         = []Point{CloudProvided, CloudTold, CloudAllowed, CloudDeleted}
	Hold          = []Point{HoldWritten, HoldLed, HoldOpened, HoldSettled, HoldAnnounced}
	Give          = []Point{GiveClosed, GiveSettled, GiveWithdrawn, GiveWritten}
	Handover      = []Point{HandoverOffered, HandoverCopied, HandoverReady, HandoverMoved, HandoverDone}
	Receive       = []Point{ReceiveOffered, ReceiveBegun, ReceiveOpened, ReceivePassed}
	Standby       = []Point{StandbyBegun, StandbySent, StandbySettled}
	Transit       = []Point{TransitTabled, TransitRouted, TransitTold}
	Follow        = []Point{FollowBegun, FollowOpened, FollowTaken}
)

// Env is the environment variable that selects points, as "add.reserved=3": the
// process ends at the third passage, as by SIGKILL. Several are separated by commas.
const Env = "COIL_FAULTPOINTS"

// EnvHeld is the environment variable with the path of a file: repairs wait while it exists. See Held.
const EnvHeld = "COIL_REPAIRS_HELD"
