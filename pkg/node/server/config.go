package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/cniconf/netconf"
)

// passOn returns the result of the plugin before, and the answer with it.
func passOn(stdin []byte) (*types100.Result, *cnirpc.AddResponse, error) {
	conf, err := netconf.Parse(stdin)
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
	b, err := json.Marshal(prev)
	if err != nil {
		return nil, nil, fail(cnirpc.ErrorCode_INTERNAL, "encode the result", err)
	}
	return prev, &cnirpc.AddResponse{Result: b}, nil
}

// previousAddrs returns the addresses that the previous result gives to the
// interface; none when there is no previous result.
func previousAddrs(stdin []byte, ifName string) ([]netip.Addr, error) {
	if len(stdin) == 0 {
		return nil, nil
	}
	conf, err := netconf.Parse(stdin)
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
func addrsOf(r *types100.Result, ifName string) ([]netip.Addr, error) {
	var addrs []netip.Addr
	for _, ip := range r.IPs {
		if i := ip.Interface; i != nil && *i >= 0 && *i < len(r.Interfaces) && r.Interfaces[*i].Name != ifName {
			continue
		}
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return nil, fmt.Errorf("address %s", ip.Address.IP)
		}
		addrs = append(addrs, addr.Unmap())
	}
	return addrs, nil
}
