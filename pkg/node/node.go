// Package node has the words that the use-cases of coild share; each use-case is
// a package below it.
//
// It must not know any of them.
package node

import (
	"context"
	"errors"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

// AddRequest asks to attach a pod.
type AddRequest struct {
	attachment.ID
	store.Pod
	// Netns is the pod's network namespace.
	Netns store.Netns
	// Pool is the AddressPool of the pod's namespace.
	Pool string
	// Finish completes the network of the pod, which has its link and addresses; its error
	// undoes all. nil is that nothing else is to be done.
	Finish func(context.Context, Sandbox) error
}

// Sandbox is a pod's network namespace, and the addresses that it has.
type Sandbox = store.Sandbox

// ErrUnavailable: no address can be had now; the runtime should try again later.
var ErrUnavailable = errors.New("no address can be had now")

// ErrWithdrawn: the node's blocks aren't announced any more, so that others don't reach its pods.
var ErrWithdrawn = errors.New("its blocks are withdrawn")

// ErrDeleted: a DEL for the attachment came while ADD was at work; nothing is
// left of it.
var ErrDeleted = errors.New("the pod was deleted meanwhile")
