package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

const (
	nfgenmsgSize = 4      // of struct nfgenmsg, linux/netfilter/nfnetlink.h
	typeMask     = 0x3fff // NLA_TYPE_MASK, linux/netlink.h
)

// objects are a table's named objects.
type objects struct {
	counters []*nftables.CounterObj
	sets     []*nftables.Set
	chains   []*nftables.Chain
}

// readObjects reads the objects of the table, which exists.
func readObjects(conn *nftables.Conn) (objects, error) {
	var o objects
	var err error
	if o.counters, err = readCounters(conn); err != nil {
		return o, err
	}
	if o.sets, err = conn.GetSets(named()); err != nil {
		return o, err
	}
	o.chains, err = conn.ListChainsOfTableFamily(family)
	o.chains = slices.DeleteFunc(o.chains, func(c *nftables.Chain) bool { return c.Table.Name != dataplane.NftTable })
	return o, err
}

// shape reads from the kernel what definition.shape describes; it is empty if there is no table.
func (t *table) shape(ctx context.Context, conn *nftables.Conn) ([]string, error) {
	table, err := conn.ListTableOfFamily(dataplane.NftTable, family)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	o, err := readObjects(conn)
	if err != nil {
		return nil, err
	}
	var out []string
	if table.Flags != 0 { // in the wrong byte order, by a fault of the library
		out = append(out, "flags: dormant or another")
	}
	for _, c := range o.counters {
		out = append(out, counterShape(c.Name))
	}
	for _, s := range o.sets {
		out = append(out, setShape(s))
	}
	for _, c := range o.chains {
		out = append(out, chainShape(c))
	}
	rules, err := t.rules(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		for i, mark := range rules[name] {
			out = append(out, fmt.Sprintf("rule %s %03d %s", name, i, mark))
		}
	}
	slices.Sort(out)
	return out, nil
}

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
