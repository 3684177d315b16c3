package nft

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

const (
	nfgenmsgSize = 4      // of struct nfgenmsg, linux/netfilter/nfnetlink.h
	typeMask     = 0x3fff // NLA_TYPE_MASK, linux/netlink.h
)

// rules returns the comments of the rules of each chain, in order. The library can't be
// asked: it refuses rules with expressions that it only writes.
func (t *table) rules(ctx context.Context) (map[string][]string, error) {
	body := append([]byte{byte(family), unix.NFNETLINK_V0, 0, 0}, attribute(unix.NFTA_RULE_TABLE, dataplane.NftTable)...)
	r := rtnl.NewRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, 0, body, func() string {
		return "nft list table inet " + dataplane.NftTable
	})
	rules := map[string][]string{}
	err := t.handle.Dump(ctx, r, func(body []byte) error {
		var table, chain, comment string
		err := attributes(body, func(kind uint16, value []byte) {
			switch kind {
			case unix.NFTA_RULE_TABLE:
				table = unix.ByteSliceToString(value)
			case unix.NFTA_RULE_CHAIN:
				chain = unix.ByteSliceToString(value)
			case unix.NFTA_RULE_USERDATA:
				comment, _ = userdata.GetString(value, userdata.TypeComment)
			}
		})
		if table == dataplane.NftTable {
			rules[chain] = append(rules[chain], comment)
		}
		return err
	})
	return rules, err
}

// attribute is a netlink attribute with a string.
func attribute(kind uint16, s string) []byte {
	size := unix.SizeofNlAttr + len(s) + 1
	b := make([]byte, (size+3)&^3)
	binary.NativeEndian.PutUint16(b, uint16(size))
	binary.NativeEndian.PutUint16(b[2:], kind)
	copy(b[unix.SizeofNlAttr:], s)
	return b
}

// attributes calls found with each attribute after the header of nfnetlink.
func attributes(body []byte, found func(kind uint16, value []byte)) error {
	for b := body[min(nfgenmsgSize, len(body)):]; len(b) > 0; {
		if len(b) < unix.SizeofNlAttr {
			return fmt.Errorf("%d bytes after the last attribute", len(b))
		}
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofNlAttr || size > len(b) {
			return fmt.Errorf("an attribute of %d bytes, of %d", size, len(b))
		}
		found(binary.NativeEndian.Uint16(b[2:])&typeMask, b[unix.SizeofNlAttr:size])
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil
}
