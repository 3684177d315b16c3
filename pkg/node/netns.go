package node

import (
	"errors"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/store"
)

// InspectNetns opens a network namespace by path and tells its inode.
func InspectNetns(path string) (store.Netns, error) {
	ns, err := netns.Open(path)
	if err != nil {
		return store.Netns{}, err
	}
	defer ns.Close()
	return store.Netns{Path: path, Inode: ns.Inode()}, nil
}

// Lives says whether the network namespace that an attachment was made in is there, in this boot. One that can't be
// looked at may be.
func Lives(a store.Allocation, bootID string) bool {
	if a.Netns.Inode == 0 || a.BootID != bootID {
		return false
	}
	now, err := InspectNetns(a.Netns.Path)
	if err != nil {
		return !errors.Is(err, netns.ErrNotExist) && !errors.Is(err, netns.ErrNotNetns)
	}
	return now == a.Netns
}
