package nft

import (
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// set is a dataplane.Set with the types that the library has.
type set struct {
	dataplane.Set
	table      *nftables.Table
	key, value nftables.SetDatatype
}

// types are those of fields and values by their names in nft(8).
var types = map[string]nftables.SetDatatype{
	"ipv4_addr": nftables.TypeIPAddr, "ipv6_addr": nftables.TypeIP6Addr, "iface_index": nftables.TypeIFIndex,
	"icmp_type": nftables.TypeICMPType, "icmpv6_type": nftables.TypeICMP6Type, "inet_proto": nftables.TypeInetProto, "mark": nftables.TypeMark,
	"inet_service": nftables.TypeInetService, "verdict": nftables.TypeVerdict,
}

func (t *Table) set(s dataplane.Set) (set, error) {
	key, err := typeOf(s.Key)
	if err != nil {
		return set{}, fmt.Errorf("set %s: %w", s.Name, err)
	}
	defined := set{Set: s, table: t.named(), key: key}
	if s.Value != "" {
		if defined.value, err = typeOf(s.Value); err != nil {
			return set{}, fmt.Errorf("map %s: %w", s.Name, err)
		}
	}
	for _, e := range s.Elements {
		if _, ok := verdictOf(e.Value); s.Value == verdict && !ok {
			return set{}, fmt.Errorf("map %s: verdict %q: %w", s.Name, e.Value, errUnknown)
		}
	}
	return defined, nil
}

// concatenated separates the types of the fields of a concatenation.
const concatenated = " . "

func typeOf(names string) (nftables.SetDatatype, error) {
	var fields []nftables.SetDatatype
	for name := range strings.SplitSeq(names, concatenated) {
		t, ok := types[name]
		if !ok {
			return t, fmt.Errorf("type %q: %w", name, errUnknown)
		}
		fields = append(fields, t)
	}
	if len(fields) == 1 {
		return fields[0], nil
	}
	return nftables.ConcatSetType(fields...)
}

// byRules says whether rules add the elements of a set.
func (s set) byRules() bool { return s.Counting || s.Timeout > 0 }

// maxElements is how many elements of a set one message has, whose attributes hold 64 KiB.
const maxElements = 500

// nft is the set in requests. Rules of the same transaction find it by the ID.
func (s set) nft(id uint32) *nftables.Set {
	n := &nftables.Set{
		Table: s.table, ID: id, Name: s.Name, KeyType: s.key, Interval: s.Interval, Size: s.Size,
		Concatenation: strings.Contains(s.Key, concatenated), Dynamic: s.Counting, HasTimeout: s.Timeout > 0, Timeout: s.Timeout,
		IsMap: s.Value != "", DataType: s.value, Counter: s.Counted,
	}
	if s.Key == nftables.TypeIFIndex.Name {
		n.KeyByteOrder = binaryutil.NativeEndian // by which nft(8) shows names
	}
	return n
}

// add collects requests that make the set. The ID is another one for each set of a transaction.
func (s set) add(conn *nftables.Conn, id uint32) error {
	ns := s.nft(id)
	if err := conn.AddSet(ns, nil); err != nil {
		return err
	}
	return s.collect(conn.SetAddElements, ns, s.wanted())
}

// content is that of a set: elements, or the ranges of a set of intervals of addresses.
type content struct {
	elements []dataplane.Element
	ranges   []netipx.IPRange
}

// size is the number of elements and ranges.
func (c content) size() int { return len(c.elements) + len(c.ranges) }

// wanted is the content that the set should have.
func (s set) wanted() content { return content{s.Elements, s.Ranges} }

// difference returns the content to add to what the set has, and the content to remove from it.
func (s set) difference(have content) (add, remove content) {
	add.elements, remove.elements = differs(have.elements, s.Elements)
	add.ranges, remove.ranges = differs(have.ranges, s.Ranges)
	return add, remove
}

// differs returns the elements to add to those that a set has, and the elements to remove.
func differs[E comparable](have, want []E) (add, remove []E) {
	// The last Sync has left them in this order: most changes are of a few among many.
	for len(have) > 0 && len(want) > 0 && have[0] == want[0] {
		have, want = have[1:], want[1:]
	}
	for len(have) > 0 && len(want) > 0 && have[len(have)-1] == want[len(want)-1] {
		have, want = have[:len(have)-1], want[:len(want)-1]
	}
	missing := make(map[E]bool, len(want))
	for _, e := range want {
		missing[e] = true
	}
	for _, e := range have {
		if missing[e] {
			delete(missing, e)
		} else {
			remove = append(remove, e)
		}
	}
	return slices.DeleteFunc(slices.Clone(want), func(e E) bool { return !missing[e] }), remove
}

// collect collects requests about content of the set, such as the connection's SetAddElements.
func (s set) collect(request func(*nftables.Set, []nftables.SetElement) error, in *nftables.Set, c content) error {
	// Requests take a tenth of the memory that their elements take here.
	var parts []content
	for part := range slices.Chunk(c.elements, maxElements) {
		parts = append(parts, content{elements: part})
	}
	for part := range slices.Chunk(c.ranges, maxElements/2) {
		parts = append(parts, content{ranges: part})
	}
	for _, part := range parts {
		if err := request(in, s.elements(part)); err != nil {
			return fmt.Errorf("set %s: %w", s.Name, err)
		}
	}
	return nil
}

// elements are elements and ranges in requests.
func (s set) elements(c content) []nftables.SetElement {
	all := make([]nftables.SetElement, 0, len(c.elements)+2*len(c.ranges))
	for _, e := range c.elements {
		n := nftables.SetElement{Key: []byte(e.Key)}
		if e.Last != "" {
			n.KeyEnd = []byte(e.Last)
		}
		switch {
		case s.Value == verdict:
			n.VerdictData, _ = verdictOf(e.Value)
		case s.Value != "":
			n.Val = []byte(e.Value)
		}
		all = append(all, n)
	}
	for _, r := range c.ranges {
		all = append(all, interval(r)...)
	}
	return all
}

// verdict is the type of a verdict map's values.
const verdict = "verdict"

// verdicts are those of verdict maps by their words in nft(8); a chain follows the former two.
var verdicts = map[string]expr.VerdictKind{
	"jump": expr.VerdictJump, "goto": expr.VerdictGoto, "accept": expr.VerdictAccept, "drop": expr.VerdictDrop,
}

func verdictOf(text string) (*expr.Verdict, bool) {
	word, chain, _ := strings.Cut(text, " ")
	kind, ok := verdicts[word]
	return &expr.Verdict{Kind: kind, Chain: chain}, ok
}

func (s set) shape() string { return setShape(s.nft(0)) }

func setShape(s *nftables.Set) string {
	kind := "set"
	if s.IsMap {
		kind = fmt.Sprintf("map to %#x", s.DataType.GetNFTMagic())
	}
	return fmt.Sprintf("%s %s: %#x %t %d %t %s %t", kind, s.Name, s.KeyType.GetNFTMagic(), s.Interval, s.Size, s.Dynamic, s.Timeout, s.Counter)
}
