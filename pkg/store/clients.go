package store

import (
	"context"
	"net/netip"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
)

// Client is the record of a sandbox that uses Egresses, or that may be asked to later and
// has no Allocation: another plugin has given it the address.
type Client struct {
	Sandbox
	// Egresses are those that it uses, as they were when they were last there.
	Egresses []KnownEgress
}

// Sandbox is a pod's network namespace, and the addresses that it has: of each family the first.
type Sandbox struct {
	attachment.ID
	Pod
	Netns
	Address ipam.Address
}

// KnownEgress is the part of an Egress that is needed after its end: its destinations stay
// unreachable for its clients.
type KnownEgress struct {
	// Name is namespace/name.
	Name string `json:"name"`
	// Policy is the policy that lets the client use it; empty if an annotation does.
	Policy       string         `json:"policy,omitempty"`
	Destinations []netip.Prefix `json:"destinations"`
	// InCluster are the ranges that it didn't capture.
	InCluster []netip.Prefix `json:"inCluster,omitempty"`
	// OriginatingOnly says that connections from its destinations were answered by the way they came.
	OriginatingOnly bool `json:"originatingOnly,omitempty"`
	// Direct says that its routers were sent to directly, and Switched that flows may still go the
	// other way.
	Direct   bool `json:"direct,omitempty"`
	Switched bool `json:"switched,omitempty"`
	// Open says that packets to its destinations leave as those of other pods do while nothing can forward them.
	Open bool `json:"open,omitempty"`
	// Former says that the client doesn't ask for it any more, but for one that isn't known yet. One of
	// which only the kernel told has no name.
	Former bool `json:"former,omitempty"`
}

// Clients keeps the record of the clients of a node, as a Store keeps addresses: each method
// is one transaction, and all may be called concurrently.
type Clients interface {
	// SetClient records a client, in place of an earlier record of the same ID.
	SetClient(ctx context.Context, c Client) error
	// ForgetClients removes records. An ID without a record doesn't matter. Works on a full
	// disk.
	ForgetClients(ctx context.Context, ids ...attachment.ID) error
	// ListClients returns all records, ordered by ID.
	ListClients(ctx context.Context) ([]Client, error)
}
