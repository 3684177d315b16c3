package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/store"
)

// passOn answers with the result of the plugin before.
func passOn(stdin []byte) (*cnirpc.AddResponse, error) {
	var conf struct {
		PrevResult json.RawMessage `json:"prevResult"`
	}
	if err := json.Unmarshal(stdin, &conf); err != nil || len(conf.PrevResult) == 0 {
		return nil, fail(cnirpc.ErrorCode_DECODING_FAILURE, "the previous result is not usable", err)
	}
	return &cnirpc.AddResponse{Result: conf.PrevResult}, nil
}

// previousAddrs returns the addresses that the previous result gives to the
// interface; none when there is no previous result.
func previousAddrs(stdin []byte, ifName string) ([]netip.Addr, error) {
	var conf struct {
		PrevResult json.RawMessage `json:"prevResult"`
	}
	if len(stdin) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(stdin, &conf); err != nil || len(conf.PrevResult) == 0 {
		return nil, err
	}
	r, err := types100.NewResult(conf.PrevResult)
	if err != nil {
		return nil, err
	}
	res, err := types100.GetResult(r)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, ip := range res.IPs {
		if i := ip.Interface; i != nil && *i >= 0 && *i < len(res.Interfaces) && res.Interfaces[*i].Name != ifName {
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

// validAttachments reads the list of GC, in both spellings that are in use.
func validAttachments(stdin []byte) ([]store.ID, error) {
	var conf map[string]json.RawMessage
	if err := json.Unmarshal(stdin, &conf); err != nil {
		return nil, err
	}
	raw, ok := conf["cni.dev/valid-attachments"]
	if !ok {
		raw, ok = conf["cni.dev/attachments"]
	}
	if !ok {
		// Not "nothing is valid": that would release every pod of the node.
		return nil, errors.New("it has neither cni.dev/valid-attachments nor cni.dev/attachments")
	}
	var list []types.GCAttachment
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, err
	}
	ids := make([]store.ID, 0, len(list))
	for _, a := range list {
		ids = append(ids, store.ID{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return ids, nil
}
