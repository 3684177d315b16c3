package nft

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// A program in a pod may have made any table "coil" there. The library isn't asked for what a table has: it
// panics at some user data, refuses expressions that it only writes, and keeps answers of any size.

const (
	nfgenmsgSize = 4 // of struct nfgenmsg, linux/netfilter/nfnetlink.h
	// tableAttribute has the name of the table in messages about all kinds of objects: NFTA_CHAIN_TABLE,
	// NFTA_RULE_TABLE, NFTA_SET_TABLE, NFTA_SET_ELEM_LIST_TABLE, NFTA_OBJ_TABLE.
	tableAttribute = 1
)

// maxElementsOfPod bounds the elements of all sets of a client, maxMessagesOfPod the messages of one list: a list of
// chains or sets takes the kernel a time that grows with the square of their number.
const (
	maxElementsOfPod = 100_000
	maxMessagesOfPod = 4096
)

// objects are what a table has but for rules and elements.
type objects struct {
	named  []object
	sets   []*nftables.Set
	chains []*nftables.Chain
}

// object is a named object: a counter, or one of another kind that somebody else has made.
type object struct {
	name           string
	kind           nftables.ObjType
	packets, bytes uint64
}

// ruleOf is a rule in the kernel.
type ruleOf struct{ chain, comment string }

// readObjects reads the objects of the table, which exists.
func (t *Table) readObjects(ctx context.Context) (o objects, err error) {
	if o.named, err = t.readNamed(ctx); err != nil {
		return o, err
	}
	if o.sets, err = t.readSets(ctx); err != nil {
		return o, err
	}
	// Older kernels return the chains of all tables.
	o.chains, err = rtnl.List(ctx, t.handle, t.ask(unix.NFT_MSG_GETCHAIN, "chains"), t.parseChain)
	return o, err
}

func (t *Table) readNamed(ctx context.Context) ([]object, error) {
	return rtnl.List(ctx, t.handle, t.ask(unix.NFT_MSG_GETOBJ, "counters"), t.parseObject)
}

func (t *Table) readSets(ctx context.Context) ([]*nftables.Set, error) {
	return rtnl.List(ctx, t.handle, t.ask(unix.NFT_MSG_GETSET, "sets"), t.parseSet)
}

// element is an element in the kernel.
type element struct {
	dataplane.Element
	end     bool          // it is only the end of a range, behind its last key
	expires time.Duration // from now
}

// readElements returns the elements of a set, as far as sets of Coil differ in them.
func (t *Table) readElements(ctx context.Context, set string) ([]element, error) {
	r := t.ask(unix.NFT_MSG_GETSETELEM, "elements of set "+set, rtnl.AppendAttribute(nil, unix.NFTA_SET_ELEM_LIST_SET, append([]byte(set), 0))...)
	return rtnl.Collect(ctx, t.handle, r, t.appendElements)
}

// shape reads from the kernel what definition.shape describes; it is empty if there is no table.
func (t *Table) shape(ctx context.Context, conn *nftables.Conn) ([]string, error) {
	table, err := conn.ListTableOfFamily(t.name, family)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	o, err := t.readObjects(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	if table.Flags != 0 { // in the wrong byte order, by a fault of the library
		out = append(out, "flags: dormant or another")
	}
	for _, n := range o.named {
		out = append(out, n.shape())
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
			out = append(out, ruleShape(name, i, mark))
		}
	}
	slices.Sort(out)
	return out, nil
}

// rules returns the comments of the rules of each chain, in order.
func (t *Table) rules(ctx context.Context) (map[string][]string, error) {
	all, err := rtnl.List(ctx, t.handle, t.ask(unix.NFT_MSG_GETRULE, "rules"), t.parseRule)
	rules := map[string][]string{}
	for _, r := range all {
		rules[r.chain] = append(rules[r.chain], r.comment)
	}
	return rules, err
}

// ask is a request about the table; some objects need more attributes.
func (t *Table) ask(kind uint16, objects string, more ...byte) rtnl.Request {
	body := []byte{byte(family), unix.NFNETLINK_V0, 0, 0}
	body = rtnl.AppendAttribute(body, tableAttribute, append([]byte(t.name), 0))
	return rtnl.NewRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, 0, append(body, more...), func() string {
		return fmt.Sprintf("nft list %s of table inet %s", objects, t.name)
	})
}

// about calls found with the attributes of a message, and says whether the message is about the table.
func (t *Table) about(body []byte, found func(kind uint16, value []byte) error) (ours bool, err error) {
	if len(body) < nfgenmsgSize {
		return false, fmt.Errorf("message of nftables of %d bytes", len(body))
	}
	err = rtnl.EachAttribute(body[nfgenmsgSize:], func(kind uint16, value []byte) error {
		if kind == tableAttribute {
			ours = body[0] == byte(family) && unix.ByteSliceToString(value) == t.name
			return nil
		}
		return found(kind, value)
	})
	return ours, err
}

func (t *Table) parseSet(body []byte) (*nftables.Set, bool, error) {
	s := &nftables.Set{Table: t.named()}
	ours, err := t.about(body, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_SET_NAME:
			s.Name = unix.ByteSliceToString(value)
		case unix.NFTA_SET_FLAGS:
			flags := be32(value)
			s.Anonymous = flags&unix.NFT_SET_ANONYMOUS != 0
			s.Interval = flags&unix.NFT_SET_INTERVAL != 0
			s.IsMap = flags&unix.NFT_SET_MAP != 0
			s.Dynamic = flags&unix.NFT_SET_EVAL != 0
		case unix.NFTA_SET_KEY_TYPE:
			s.KeyType.SetNFTMagic(be32(value))
		case unix.NFTA_SET_DATA_TYPE:
			if s.DataType.SetNFTMagic(be32(value)); be32(value) == unix.NFT_DATA_VERDICT {
				s.DataType = nftables.TypeVerdict // whose number in the library is another one
			}
		case unix.NFTA_SET_TIMEOUT:
			s.Timeout = milliseconds(value)
		case unix.NFTA_SET_DESC:
			return rtnl.EachAttribute(value, func(kind uint16, value []byte) error {
				if kind == unix.NFTA_SET_DESC_SIZE {
					s.Size = be32(value)
				}
				return nil
			})
		}
		return nil
	})
	return s, ours, err
}

// appendElements appends those of one message.
func (t *Table) appendElements(all []element, body []byte) ([]element, error) {
	before := len(all)
	ours, err := t.about(body, func(kind uint16, list []byte) error {
		if kind != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return nil
		}
		return rtnl.EachAttribute(list, func(_ uint16, value []byte) error {
			e, err := parseElement(value)
			all = append(all, e)
			return err
		})
	})
	if !ours {
		all = all[:before]
	}
	return all, err
}

func parseElement(b []byte) (e element, err error) {
	data := func(to *string) func(uint16, []byte) error {
		return func(kind uint16, value []byte) error {
			switch kind {
			case unix.NFTA_DATA_VALUE:
				*to = string(value)
			case unix.NFTA_DATA_VERDICT:
				text, err := parseVerdict(value)
				*to = text
				return err
			}
			return nil
		}
	}
	err = rtnl.EachAttribute(b, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			return rtnl.EachAttribute(value, data(&e.Key))
		case keyEnd:
			return rtnl.EachAttribute(value, data(&e.Last))
		case unix.NFTA_SET_ELEM_DATA:
			return rtnl.EachAttribute(value, data(&e.Value))
		case unix.NFTA_SET_ELEM_FLAGS:
			e.end = be32(value)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_EXPIRATION:
			e.expires = milliseconds(value)
		}
		return nil
	})
	return e, err
}

// keyEnd is NFTA_SET_ELEM_KEY_END of linux/netfilter/nf_tables.h.
const keyEnd = 10

// parseVerdict returns the text of a verdict.
func parseVerdict(b []byte) (string, error) {
	var kind expr.VerdictKind
	var chain string
	err := rtnl.EachAttribute(b, func(attribute uint16, value []byte) error {
		switch attribute {
		case unix.NFTA_VERDICT_CODE:
			kind = expr.VerdictKind(int32(be32(value)))
		case unix.NFTA_VERDICT_CHAIN:
			chain = unix.ByteSliceToString(value)
		}
		return nil
	})
	for word, k := range verdicts {
		if k == kind {
			return strings.TrimSuffix(word+" "+chain, " "), err
		}
	}
	return fmt.Sprintf("verdict %d %s", kind, chain), err
}

func (t *Table) parseChain(body []byte) (*nftables.Chain, bool, error) {
	c := &nftables.Chain{Table: t.named()}
	ours, err := t.about(body, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_CHAIN_NAME:
			c.Name = unix.ByteSliceToString(value)
		case unix.NFTA_CHAIN_TYPE:
			c.Type = nftables.ChainType(unix.ByteSliceToString(value))
		case unix.NFTA_CHAIN_POLICY:
			policy := nftables.ChainPolicy(be32(value))
			c.Policy = &policy
		case unix.NFTA_CHAIN_HOOK:
			c.Hooknum, c.Priority = new(nftables.ChainHook), new(nftables.ChainPriority)
			return rtnl.EachAttribute(value, func(kind uint16, value []byte) error {
				switch kind {
				case unix.NFTA_HOOK_HOOKNUM:
					*c.Hooknum = nftables.ChainHook(be32(value))
				case unix.NFTA_HOOK_PRIORITY:
					*c.Priority = nftables.ChainPriority(be32(value))
				}
				return nil
			})
		}
		return nil
	})
	return c, ours, err
}

func (t *Table) parseObject(body []byte) (o object, ours bool, err error) {
	var data []byte
	ours, err = t.about(body, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_OBJ_NAME:
			o.name = unix.ByteSliceToString(value)
		case unix.NFTA_OBJ_TYPE:
			o.kind = nftables.ObjType(be32(value))
		case unix.NFTA_OBJ_DATA:
			data = value
		}
		return nil
	})
	if err != nil || o.kind != nftables.ObjTypeCounter {
		return o, ours, err
	}
	err = rtnl.EachAttribute(data, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_COUNTER_BYTES:
			o.bytes = be64(value)
		case unix.NFTA_COUNTER_PACKETS:
			o.packets = be64(value)
		}
		return nil
	})
	return o, ours, err
}

func (t *Table) parseRule(body []byte) (r ruleOf, ours bool, err error) {
	ours, err = t.about(body, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_RULE_CHAIN:
			r.chain = unix.ByteSliceToString(value)
		case unix.NFTA_RULE_USERDATA:
			r.comment = commentIn(value)
		}
		return nil
	})
	return r, ours, err
}

// commentIn returns the comment in user data, which programs fill as they like: entries of a type, a length
// and as many bytes (libnftnl/udata.h).
func commentIn(data []byte) string {
	for len(data) >= 2 {
		kind, end := userdata.Type(data[0]), 2+int(data[1])
		if end > len(data) {
			return ""
		}
		if kind == userdata.TypeComment {
			return string(bytes.TrimSuffix(data[2:end], []byte{0}))
		}
		data = data[end:]
	}
	return ""
}

// be32 reads a number in the network's byte order; 0 if there are too few bytes.
func be32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

func be64(b []byte) uint64 {
	if len(b) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

func milliseconds(b []byte) time.Duration { return time.Duration(be64(b)) * time.Millisecond }
