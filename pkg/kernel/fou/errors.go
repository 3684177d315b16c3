// Package fou opens UDP ports at which the kernel takes IP packets out of UDP (Foo over
// UDP, linux/fou.h).
//
// It owns the messages about these ports. It must not know who sends to them.
//
// Other packages have one Sync. Here its halves are apart, since tunnels come and go between them: Ensure opens a port
// before the first, Remove closes it after the last.
package fou

import "errors"

var (
	// ErrUnavailable: the kernel has no FoU: its module isn't loaded, and nothing loads it
	// by itself.
	ErrUnavailable = errors.New("the kernel has no FoU: the module fou is not loaded")
	// ErrTaken: something else in the network namespace has the port.
	ErrTaken = errors.New("the UDP port is taken")
)
