// Package store is the contract of the node's record of addresses: which pod
// has which address, and which addresses were freed when.
//
// It owns the words of that record and the suite that every implementation
// must pass (storetest). It must not know how a record is kept, nor anything of
// Kubernetes' API or of the kernel.
package store

import (
	"context"
	"errors"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
)

// State is where an address is in its life:
//
//	free -> pending -> attached -> releasing -> cooling -> free
//
// "free" has no record of its own: it is an address of a known block without a
// record, or one that has cooled down.
type State string

// The states that are recorded.
const (
	// Pending is taken from the block; nothing is in the kernel for sure.
	Pending State = "pending"
	// Attached is in use: the pod is wired.
	Attached State = "attached"
	// Releasing is given up, but its link may still exist.
	Releasing State = "releasing"
	// Cooling was released and isn't reused before its cool-down has passed.
	Cooling State = "cooling"
)

// Pod says for whom an address is. UID may be empty when the runtime doesn't
// tell it.
type Pod struct {
	Namespace string
	Name      string
	UID       string
}

// Netns is a network namespace: its path, and its inode to tell another one at
// the same path. Inode 0 is unknown.
type Netns struct {
	Path  string
	Inode uint64
}

// Wiring names the objects that were made in the kernel for an attachment.
type Wiring struct {
	// HostIfName is the name of the veth's end on the host.
	HostIfName string
	// HostIfIndex is its interface index on the host.
	HostIfIndex int
	// Result is the CNI result that ADD answered, as JSON of the newest CNI version.
	Result []byte
}

// Allocation is the record of one address.
type Allocation struct {
	attachment.ID
	Pod
	Netns
	Wiring

	State State
	// Pool and Block are the names of the AddressPool and the AddressBlock.
	Pool, Block string
	// Address is the address, of one or both families.
	Address ipam.Address
	// BootID is the boot in which the state was entered.
	BootID string
	// Since is the wall-clock time at which the state was entered; for people
	// and for grace periods, never for the cool-down. In whole milliseconds, rounded
	// up: a state that was entered after a moment never looks as if it was before.
	Since time.Time
}

// Block is a block that the node holds.
type Block struct {
	// Name is the name of the AddressBlock.
	Name string
	// Pool is the name of its AddressPool.
	Pool string
	ipam.Block
}

// Usage counts the addresses of a block: Allocated are pending, attached or
// releasing; Cooling aren't reusable yet; the rest of Size is free.
type Usage struct {
	Block
	Allocated int
	Cooling   int
}

// Request asks for an address.
type Request struct {
	attachment.ID
	Pod
	Netns
	// Pool is the pool to take from.
	Pool string
	// Blocks are the names of the blocks that may give an address now, in order of
	// preference: a later one is asked only when an earlier one has nothing. Only
	// recorded blocks of the pool count.
	Blocks []string
	// Yield takes the address that has been cooling longest, of all Blocks, when no
	// other is left, rather than to fail.
	Yield bool
}

// Identity says to which node the record belongs.
type Identity struct {
	NodeName  string
	NodeUID   string
	MachineID string
}

// Errors of a Store. Anything else means that the record couldn't be read or
// written: nothing is known, and the caller must not go on as if it were absent.
var (
	// ErrNotFound: there is no such record. DEL is done; CHECK fails.
	ErrNotFound = errors.New("no such allocation")
	// ErrNoAddress: no block of the request has a free address. Ask for another
	// block, or try again with Yield.
	ErrNoAddress = errors.New("no free address")
	// ErrState: the record isn't in a state from which the step is possible,
	// usually because a DEL came in between. Undo the step.
	ErrState = errors.New("allocation is in another state")
	// ErrInUse: the block still has allocated or cooling addresses. Keep it.
	ErrInUse = errors.New("block is in use")
	// ErrConflict: an address is already recorded for another attachment, or the
	// attachment has another address. Both records stay; somebody must look.
	ErrConflict = errors.New("address is allocated to another attachment")
	// ErrReadOnly: the disk is full or can't be written. Report "not ready";
	// the store recovers by itself.
	ErrReadOnly = errors.New("record can't be written")
)

// Store keeps the record of one node. Each method is one transaction: when it
// returns nil, the change survives a crash of the process. All methods may be
// called concurrently.
//
// A caller whose context ends gets an error while the change may still happen,
// even after a Get that doesn't show it. Changes happen in the order in which they
// were asked for, so Release settles it: a record that it doesn't find will not come.
type Store interface {
	// SetBlocks records the blocks that the node holds, so that their addresses
	// can be reserved. Blocks that were recorded and aren't listed stay. A block of
	// the same name with another range or pool is ErrInUse while one of its
	// addresses is allocated or cooling, and gives no new address until both agree;
	// the other blocks are recorded all the same.
	SetBlocks(ctx context.Context, blocks []Block) error

	// AdoptBlocks is SetBlocks for blocks whose history is unknown, because the
	// record was lost: each address without a record counts as cooling from now.
	// Adopting a block again starts that anew.
	AdoptBlocks(ctx context.Context, blocks []Block) error

	// ForgetBlock removes a block and its cooled-down addresses; ErrInUse while
	// one of its addresses is allocated or cooling. Not knowing the block is success.
	ForgetBlock(ctx context.Context, name string) error

	// Reserve takes an address for an attachment, state pending: of the first of
	// the request's blocks that has one, an address that was never used, else the
	// one that cooled down longest ago. If the attachment has a pending or attached
	// record already, that is returned, unchanged. ErrState while it is releasing,
	// ErrNoAddress as above.
	Reserve(ctx context.Context, r Request) (Allocation, error)

	// Attach makes a pending allocation attached and records the wiring.
	// ErrNotFound or ErrState if DEL was faster; ErrState too when it is attached.
	Attach(ctx context.Context, id attachment.ID, w Wiring) error

	// Adopt records an attachment that was found in the kernel, state attached,
	// for an address of a recorded or unrecorded block; the store finds the block
	// by the address. A pending or attached record of the attachment with the same
	// address takes over the fields that the given one has. ErrConflict if another
	// attachment has one of the addresses or this one has another address;
	// ErrState while it is releasing. BootID and Since are set by the store.
	Adopt(ctx context.Context, a Allocation) error

	// Release makes a pending or attached allocation releasing and returns it; a
	// releasing one is returned as it is. ErrNotFound when there is none. Works on
	// a full disk.
	Release(ctx context.Context, id attachment.ID) (Allocation, error)

	// Cool makes releasing allocations cooling, from now on. IDs that aren't
	// releasing are left alone. Works on a full disk.
	Cool(ctx context.Context, ids ...attachment.ID) error

	// Get returns the record of an attachment that isn't cooling; ErrNotFound.
	Get(ctx context.Context, id attachment.ID) (Allocation, error)

	// List returns all records that aren't cooling, ordered by time.
	List(ctx context.Context) ([]Allocation, error)

	// Usage returns the recorded blocks with their counts, ordered by name. Its
	// cost is that of the blocks, the allocations and the cooling addresses, not of all
	// addresses.
	Usage(ctx context.Context) ([]Usage, error)
}
