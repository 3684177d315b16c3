package nft

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"

	"github.com/coil-net/coil/pkg/dataplane"
)

// set is a named set and its elements; of a set of intervals, which protocol.ranged makes, the ranges.
type set struct {
	name     string
	key      nftables.SetDatatype
	interval bool
	// size is how many elements there may be, 0 any number. The kernel finds them faster then.
	size     uint32
	elements []nftables.SetElement
	ranges   []dataplane.Range
	// counting sets are those whose elements rules add, each with a state of its own, and those with
	// a timeout whose elements rules add for so long. What rules have added stays.
	counting bool
	timeout  time.Duration
}

// byRules says whether rules add the elements of a set.
func (s set) byRules() bool { return s.counting || s.timeout > 0 }

// maxElements is how many elements of a set one message has, whose attributes hold 64 KiB.
const maxElements = 500

// nft is the set in requests. The ID is what rules of the same transaction find it by.
func (s set) nft(id uint32) *nftables.Set {
	n := &nftables.Set{
		Table: named(), ID: id, Name: s.name, KeyType: s.key, Interval: s.interval, Size: s.size,
		Concatenation: strings.Contains(s.key.Name, " . "), Dynamic: s.counting, HasTimeout: s.timeout > 0, Timeout: s.timeout,
	}
	if s.key == nftables.TypeIFIndex {
		n.KeyByteOrder = binaryutil.NativeEndian // by which nft(8) shows names
	}
	return n
}

// add collects what makes the set. The ID is another one for each set of a transaction.
func (s set) add(conn *nftables.Conn, id uint32) error {
	ns := s.nft(id)
	if err := conn.AddSet(ns, nil); err != nil {
		return err
	}
	return addElements(conn, ns, s.all())
}

// all returns the elements, of a set of intervals the ends of its ranges.
func (s set) all() []nftables.SetElement {
	all := s.elements
	for _, r := range s.ranges {
		all = append(all, interval(r)...)
	}
	return all
}

// content is what a set has.
type content struct {
	elements []nftables.SetElement
	// intact says that a set of intervals has its ranges. They are thousands, and never change: only that is kept.
	intact bool
}

// holds returns elements as the content of the set.
func (s set) holds(elements []nftables.SetElement) content {
	if s.interval {
		return content{intact: slices.Equal(rangesOf(elements), s.ranges)}
	}
	return content{elements: elements}
}

// wanted is the content that the set should have.
func (s set) wanted() content { return content{s.elements, s.interval} }

// is tells whether a set has what it should have.
func (s set) is(have content) bool {
	if s.interval {
		return have.intact
	}
	add, remove := s.differs(have.elements)
	return len(add)+len(remove) == 0
}

// differs returns what is to be added to the elements that a set has, and what to be deleted.
func (s set) differs(have []nftables.SetElement) (add, remove []nftables.SetElement) {
	// Who was here last has left them in this order: most changes are of a few among many.
	want := s.elements
	for len(have) > 0 && len(want) > 0 && sameElement(have[0], want[0]) {
		have, want = have[1:], want[1:]
	}
	for len(have) > 0 && len(want) > 0 && sameElement(have[len(have)-1], want[len(want)-1]) {
		have, want = have[:len(have)-1], want[:len(want)-1]
	}
	wanted := make(map[string]bool, len(want))
	for _, e := range want {
		wanted[elementKey(e)] = true
	}
	for _, e := range have {
		if key := elementKey(e); wanted[key] {
			delete(wanted, key)
		} else {
			remove = append(remove, nftables.SetElement{Key: e.Key, IntervalEnd: e.IntervalEnd})
		}
	}
	return slices.DeleteFunc(slices.Clone(want), func(e nftables.SetElement) bool { return !wanted[elementKey(e)] }), remove
}

// update collects what changes the elements of a set from those that it has.
func (s set) update(conn *nftables.Conn, have content) (dataplane.Result, error) {
	ns := s.nft(0)
	if s.interval {
		if s.is(have) {
			return dataplane.Result{}, nil
		}
		// Somebody else changed it. The two ends of intervals can't be mended apart.
		conn.FlushSet(ns)
		return dataplane.Result{Replaced: 1}, addElements(conn, ns, s.all())
	}
	add, remove := s.differs(have.elements)
	for part := range slices.Chunk(remove, maxElements) {
		if err := conn.SetDeleteElements(ns, part); err != nil {
			return dataplane.Result{}, err
		}
	}
	return dataplane.Result{Added: len(add), Deleted: len(remove)}, addElements(conn, ns, add)
}

func addElements(conn *nftables.Conn, s *nftables.Set, elements []nftables.SetElement) error {
	for part := range slices.Chunk(elements, maxElements) {
		if err := conn.SetAddElements(s, part); err != nil {
			return err
		}
	}
	return nil
}

func sameElement(a, b nftables.SetElement) bool {
	return a.IntervalEnd == b.IntervalEnd && bytes.Equal(a.Key, b.Key)
}

// elementKey tells elements of a set apart.
func elementKey(e nftables.SetElement) string {
	if e.IntervalEnd {
		return string(e.Key) + "\x00end"
	}
	return string(e.Key)
}

func (s set) shape() string { return setShape(s.nft(0)) }

func setShape(s *nftables.Set) string {
	if s.IsMap {
		return "map " + s.Name
	}
	return fmt.Sprintf("set %s: %#x %t %d %t %s", s.Name, s.KeyType.GetNFTMagic(), s.Interval, s.Size, s.Dynamic, s.Timeout)
}
