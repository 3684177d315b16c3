package server

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

// passOn returns the result of the plugin before, and the answer with it.
func passOn(stdin []byte) (*spec.Result, *cnirpc.AddResponse, error) {
	conf, err := spec.ParseConf(stdin)
	if err != nil {
		return nil, nil, fail(cnirpc.ErrorCode_DECODING_FAILURE, "the network configuration is not usable", err)
	}
	prev, err := conf.Previous()
	if err == nil && prev == nil {
		err = errors.New("there is none")
	}
	if err != nil {
		return nil, nil, fail(cnirpc.ErrorCode_DECODING_FAILURE, "the previous result is not usable", err)
	}
	return prev, &cnirpc.AddResponse{Result: prev.As(spec.Newest)}, nil
}

// previousAddrs returns the addresses that the previous result gives to the
// interface; none when there is no previous result.
func previousAddrs(stdin []byte, ifName string) ([]netip.Addr, error) {
	if len(stdin) == 0 {
		return nil, nil
	}
	conf, err := spec.ParseConf(stdin)
	if err != nil {
		return nil, err
	}
	prev, err := conf.Previous()
	if err != nil || prev == nil {
		return nil, err
	}
	return addrsOf(prev, ifName)
}

// addrsOf returns the addresses that a result gives to an interface.
func addrsOf(r *spec.Result, ifName string) ([]netip.Addr, error) {
	var addrs []netip.Addr
	for _, a := range r.Addresses {
		if i := a.Interface; i >= 0 && i < len(r.Interfaces) && r.Interfaces[i].Name != ifName {
			continue
		}
		addr, err := netip.ParseAddr(a.IP)
		if err != nil {
			return nil, fmt.Errorf("address %q: %w", a.IP, err)
		}
		addrs = append(addrs, addr.Unmap())
	}
	return addrs, nil
}
