package main

import (
	"errors"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// space is a network namespace that lives as long as it is open here.
type space struct {
	*netlab.NS
	handle *rtnl.Handle
}

// newSpace makes a namespace, in which nothing is up.
func newSpace() (*space, error) { return spaceOf(netns.New()) }

// spaceOf opens the netlink handle of a namespace, from the results of the call that opened it. An error is returned as it is.
func spaceOf(ns *netns.NS, err error) (*space, error) {
	if err != nil {
		return nil, err
	}
	h, err := rtnl.New(ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &space{&netlab.NS{NS: ns}, h}, nil
}

func (s *space) close() error {
	s.handle.Close()
	return s.Close()
}

// has says whether the namespace has a link of a name.
func (s *space) has(link string) (bool, error) {
	_, err := s.handle.IndexByName(link)
	if errors.Is(err, rtnl.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// spaces are namespaces that are used again and again.
type spaces []*space

// grow makes more of them until there are n.
func (ss *spaces) grow(n int) error {
	for len(*ss) < n {
		s, err := newSpace()
		if err != nil {
			return err
		}
		*ss = append(*ss, s)
	}
	return nil
}

func (ss *spaces) close() error {
	var errs []error
	for _, s := range *ss {
		errs = append(errs, s.close())
	}
	*ss = nil
	return errors.Join(errs...)
}
