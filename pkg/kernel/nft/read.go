package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

// A program in a pod may have made any table "coil" there. The library isn't asked for the objects of a table: it
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

// objects are those of a table, but for rules and elements.
type objects struct {
	named  []object
	sets   []*nftables.Set
	chains []*nftables.Chain
}

// object is a named object: a counter, or one of another kind that somebody else has made.
type object struct {
	Counter // of another kind the name alone
	kind    nftables.ObjType
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

// readFlags returns the flags of the table, if it exists.
func (t *Table) readFlags(ctx context.Context) (flags uint32, exists bool, err error) {
	err = t.handle.Get(ctx, t.ask(unix.NFT_MSG_GETTABLE, "flags"), func(body []byte) error {
		attributes, ours, as := t.about(body)
		flags, exists = as.Find(attributes, unix.NFTA_TABLE_FLAGS).BE32(), ours
		return as.Err
	})
	if errors.Is(err, unix.ENOENT) {
		return 0, false, nil
	}
	return flags, exists, err
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
	return rtnl.Collect(ctx, t.handle, t.askElements(set), t.appendElements)
}

func (t *Table) askElements(set string) rtnl.Request {
	return t.ask(unix.NFT_MSG_GETSETELEM, "elements of set "+set, rtnl.AppendAttribute(nil, unix.NFTA_SET_ELEM_LIST_SET, append([]byte(set), 0))...)
}

// shape reads the shape of the table in the kernel (see definition.shapes); it is empty if there is no table.
func (t *Table) shape(ctx context.Context) ([]string, error) {
	flags, exists, err := t.readFlags(ctx)
	if err != nil || !exists {
		return nil, err
	}
	o, err := t.readObjects(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	if flags != 0 {
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
	rules, err := rtnl.List(ctx, t.handle, t.ask(unix.NFT_MSG_GETRULE, "rules"), t.parseRule)
	before := map[string]int{} // rules of each chain
	for _, r := range rules {
		out = append(out, ruleShape(r.chain, before[r.chain], r.comment))
		before[r.chain]++
	}
	slices.Sort(out)
	return out, err
}

// ask is a request about the table; some objects need more attributes.
func (t *Table) ask(kind uint16, objects string, more ...byte) rtnl.Request {
	body := []byte{byte(t.family), unix.NFNETLINK_V0, 0, 0}
	body = rtnl.AppendAttribute(body, tableAttribute, append([]byte(t.name), 0))
	return rtnl.NewRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, 0, append(body, more...), "nft list %s of table %s", objects, t.name)
}

// about returns the attributes of a message and their reader, and says whether the message is about the table.
func (t *Table) about(body []byte) (attributes []byte, ours bool, as rtnl.Attributes) {
	header, attributes, as := rtnl.Cut(body, nfgenmsgSize)
	ours = header[0] == byte(t.family) && as.Find(attributes, tableAttribute).Text() == t.name
	return attributes, ours, as
}

func (t *Table) parseSet(body []byte) (*nftables.Set, bool, error) {
	attributes, ours, as := t.about(body)
	s := &nftables.Set{Table: t.named(), Name: as.Find(attributes, unix.NFTA_SET_NAME).Text()}
	flags := as.Find(attributes, unix.NFTA_SET_FLAGS).BE32()
	s.Anonymous = flags&unix.NFT_SET_ANONYMOUS != 0
	s.Interval = flags&unix.NFT_SET_INTERVAL != 0
	s.IsMap = flags&unix.NFT_SET_MAP != 0
	s.Dynamic = flags&unix.NFT_SET_EVAL != 0
	s.KeyType.SetNFTMagic(as.Find(attributes, unix.NFTA_SET_KEY_TYPE).BE32())
	dataType := as.Find(attributes, unix.NFTA_SET_DATA_TYPE).BE32()
	if s.DataType.SetNFTMagic(dataType); dataType == unix.NFT_DATA_VERDICT {
		s.DataType = nftables.TypeVerdict // whose number in the library is another one
	}
	s.Timeout = milliseconds(as.Find(attributes, unix.NFTA_SET_TIMEOUT))
	s.Size = as.Find(attributes, unix.NFTA_SET_DESC, unix.NFTA_SET_DESC_SIZE).BE32()
	s.Counter = as.Find(attributes, setExpression, unix.NFTA_EXPR_NAME).Text() == counterExpression
	return s, ours, as.Err
}

// appendElements appends those of one message.
func (t *Table) appendElements(all []element, body []byte) ([]element, error) {
	attributes, ours, as := t.about(body)
	if !ours {
		return all, as.Err
	}
	for e := range as.In(as.Find(attributes, unix.NFTA_SET_ELEM_LIST_ELEMENTS).Value) {
		all = append(all, parseElement(&as, e.Value))
	}
	return all, as.Err
}

func parseElement(as *rtnl.Attributes, b []byte) (e element) {
	e.Key = string(as.Find(b, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE).Value)
	e.Last = string(as.Find(b, keyEnd, unix.NFTA_DATA_VALUE).Value)
	e.Value = string(as.Find(b, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE).Value)
	if v := as.Find(b, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VERDICT); v.Kind != 0 {
		e.Value = parseVerdict(as, v.Value)
	}
	e.end = as.Find(b, unix.NFTA_SET_ELEM_FLAGS).BE32()&unix.NFT_SET_ELEM_INTERVAL_END != 0
	e.expires = milliseconds(as.Find(b, unix.NFTA_SET_ELEM_EXPIRATION))
	return e
}

const (
	// keyEnd is NFTA_SET_ELEM_KEY_END, and setExpression NFTA_SET_EXPR, of linux/netfilter/nf_tables.h.
	keyEnd        = 10
	setExpression = 17
	// counterExpression is the name of expressions that count.
	counterExpression = "counter"
)

// parseVerdict returns the text of a verdict.
func parseVerdict(as *rtnl.Attributes, b []byte) string {
	kind := expr.VerdictKind(int32(as.Find(b, unix.NFTA_VERDICT_CODE).BE32()))
	chain := as.Find(b, unix.NFTA_VERDICT_CHAIN).Text()
	for word, k := range verdicts {
		if k == kind {
			return strings.TrimSuffix(word+" "+chain, " ")
		}
	}
	return fmt.Sprintf("verdict %d %s", kind, chain)
}

func (t *Table) parseChain(body []byte) (*nftables.Chain, bool, error) {
	attributes, ours, as := t.about(body)
	c := &nftables.Chain{
		Table: t.named(),
		Name:  as.Find(attributes, unix.NFTA_CHAIN_NAME).Text(),
		Type:  nftables.ChainType(as.Find(attributes, unix.NFTA_CHAIN_TYPE).Text()),
	}
	if a := as.Find(attributes, unix.NFTA_CHAIN_POLICY); a.Kind != 0 {
		c.Policy = new(nftables.ChainPolicy(a.BE32()))
	}
	if hook := as.Find(attributes, unix.NFTA_CHAIN_HOOK); hook.Kind != 0 {
		c.Hooknum = new(nftables.ChainHook(as.Find(hook.Value, unix.NFTA_HOOK_HOOKNUM).BE32()))
		c.Priority = new(nftables.ChainPriority(as.Find(hook.Value, unix.NFTA_HOOK_PRIORITY).BE32()))
	}
	return c, ours, as.Err
}

func (t *Table) parseObject(body []byte) (o object, ours bool, err error) {
	attributes, ours, as := t.about(body)
	o.Name = as.Find(attributes, unix.NFTA_OBJ_NAME).Text()
	o.kind = nftables.ObjType(as.Find(attributes, unix.NFTA_OBJ_TYPE).BE32())
	if o.kind == nftables.ObjTypeCounter {
		o.Bytes = as.Find(attributes, unix.NFTA_OBJ_DATA, unix.NFTA_COUNTER_BYTES).BE64()
		o.Packets = as.Find(attributes, unix.NFTA_OBJ_DATA, unix.NFTA_COUNTER_PACKETS).BE64()
	}
	return o, ours, as.Err
}

func (t *Table) parseRule(body []byte) (r ruleOf, ours bool, err error) {
	attributes, ours, as := t.about(body)
	r.chain = as.Find(attributes, unix.NFTA_RULE_CHAIN).Text()
	r.comment = commentIn(as.Find(attributes, unix.NFTA_RULE_USERDATA).Value)
	return r, ours, as.Err
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

func milliseconds(a rtnl.Attribute) time.Duration { return time.Duration(a.BE64()) * time.Millisecond }
