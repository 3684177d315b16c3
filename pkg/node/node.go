// Package node has the words that the use-cases of coild share; each use-case is
// a package below it.
//
// It must not know any of them.
package node

import (
	"errors"

	"github.com/coil-net/coil/pkg/store"
)

// AddRequest asks to attach a pod.
type AddRequest struct {
	store.ID
	store.Pod
	// Netns is the pod's network namespace.
	Netns store.Netns
	// Pool is the AddressPool of the pod's namespace.
	Pool string
}

// ErrUnavailable: no address can be had now; the runtime should try again later.
var ErrUnavailable = errors.New("no address can be had now")

// ErrDeleted: a DEL for the attachment came while ADD was at work; nothing is
// left of it.
var ErrDeleted = errors.New("the pod was deleted meanwhile")
