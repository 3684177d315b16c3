package nft

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// attr is an attribute of a message.
func attr(kind uint16, parts ...[]byte) []byte {
	return rtnl.AppendAttribute(nil, kind, slices.Concat(parts...))
}

func text(s string) []byte { return append([]byte(s), 0) }

// of is a message about an object of a table.
func of(table string, attrs ...[]byte) []byte {
	return slices.Concat([]byte{byte(mine.family), 0, 0, 0}, attr(tableAttribute, text(table)), slices.Concat(attrs...))
}

// mine reads messages about Coil's table.
var mine = &Table{name: dataplane.NftTable, family: nftables.TableFamilyINet}

func ours(attrs ...[]byte) []byte { return of(dataplane.NftTable, attrs...) }

// crafted are user data that end before they say.
var crafted = [][]byte{nil, {7}, {7, 0xff}, {2, 0xff, 1}, {0, 0xff}, {2, 1, 1}, {0, 1, 0, 9}}

func TestCommentIn(t *testing.T) {
	for _, data := range crafted {
		if got := commentIn(data); got != "" {
			t.Errorf("%v has the comment %q", data, got)
		}
	}
	for want, data := range map[string][]byte{
		"mine":        append([]byte{0, 5}, text("mine")...),
		"behind":      append([]byte{1, 1, 9, 0, 7}, text("behind")...),
		"mine\x00too": append([]byte{0, 9}, text("mine\x00too")...),
		"open":        append([]byte{0, 4}, "open"...),
	} {
		if got := commentIn(data); got != want {
			t.Errorf("%v has the comment %q, want %q", data, got, want)
		}
	}
}

// Whatever a program in a pod has put into the table, it is read, or left out if another table has it.
func TestParse(t *testing.T) {
	for _, data := range crafted {
		s, is, err := mine.parseSet(ours(attr(unix.NFTA_SET_NAME, text("mine")), attr(unix.NFTA_SET_USERDATA, data), attr(unix.NFTA_SET_FLAGS, []byte{0, 0, 0, unix.NFT_SET_MAP})))
		if err != nil || !is || s.Name != "mine" || !s.IsMap {
			t.Errorf("a set with user data %v: %+v, %t, %v", data, s, is, err)
		}
		r, is, err := mine.parseRule(ours(attr(unix.NFTA_RULE_CHAIN, text("mine")), attr(unix.NFTA_RULE_USERDATA, data)))
		if err != nil || !is || r != (ruleOf{chain: "mine"}) {
			t.Errorf("a rule with user data %v: %+v, %t, %v", data, r, is, err)
		}
		entry := attr(unix.NFTA_LIST_ELEM, attr(unix.NFTA_SET_ELEM_KEY, attr(unix.NFTA_DATA_VALUE, []byte{1, 2, 3, 4})), attr(unix.NFTA_SET_ELEM_USERDATA, data),
			attr(unix.NFTA_SET_ELEM_EXPR, data))
		elements, err := mine.appendElements(nil, ours(attr(unix.NFTA_SET_ELEM_LIST_SET, text("mine")), attr(unix.NFTA_SET_ELEM_LIST_ELEMENTS, entry, entry)))
		want := element{Element: dataplane.Element{Key: "\x01\x02\x03\x04"}}
		if !slices.Equal(elements, []element{want, want}) || err != nil {
			t.Errorf("elements with user data %v: %v, %v", data, elements, err)
		}
	}
	o, is, err := mine.parseObject(ours(attr(unix.NFTA_OBJ_NAME, text("mine")), attr(unix.NFTA_OBJ_TYPE, []byte{0, 0, 0, unix.NFT_OBJECT_LIMIT}), attr(unix.NFTA_OBJ_DATA, []byte{1})))
	if err != nil || !is || o.shape() != "object mine of type 4" {
		t.Errorf("an object of another kind: %+v, %t, %v", o, is, err)
	}
	c, is, err := mine.parseChain(ours(attr(unix.NFTA_CHAIN_NAME, text("mine")), attr(unix.NFTA_CHAIN_POLICY, []byte{1}), attr(unix.NFTA_CHAIN_HOOK)))
	if err != nil || !is || chainShape(c) != "chain mine of another policy" {
		t.Errorf("a chain with too short attributes: %+v, %t, %v", c, is, err)
	}
	for name, body := range map[string][]byte{"no header": {1, 2}, "half an attribute": append(ours(), 0xff, 0xff, 1, 0)} {
		if _, _, err := mine.parseChain(body); err == nil {
			t.Errorf("%s is no error", name)
		}
	}
	for name, body := range map[string][]byte{"another table": of("other", attr(unix.NFTA_CHAIN_NAME, text("mine"))), "another family": append([]byte{unix.NFPROTO_IPV4}, ours()[1:]...)} {
		if _, is, err := mine.parseChain(body); is || err != nil {
			t.Errorf("%s: %t, %v", name, is, err)
		}
	}
	if all, err := mine.appendElements(nil, of("other", attr(unix.NFTA_SET_ELEM_LIST_ELEMENTS, attr(unix.NFTA_LIST_ELEM)))); len(all) > 0 || err != nil {
		t.Errorf("elements of another table: %v, %v", all, err)
	}
}

// A notification wakes the watch of its table, also one that isn't understood.
func TestConcerns(t *testing.T) {
	for name, c := range map[string]struct {
		body []byte
		want bool
	}{
		"the table":      {ours(attr(unix.NFTA_CHAIN_NAME, text("mine"))), true},
		"another table":  {of("other", attr(unix.NFTA_CHAIN_NAME, text("mine"))), false},
		"another family": {append([]byte{unix.NFPROTO_IPV4}, ours()[1:]...), false},
		"a generation":   {append([]byte{unix.NFPROTO_UNSPEC, 0, 0, 0}, attr(unix.NFTA_GEN_ID, []byte{0, 0, 0, 1})...), false},
		"no header":      {[]byte{1, 2}, true},
		"no attribute":   {append(ours()[:4:4], 0xff, 0xff, 1, 0), true},
	} {
		if got := mine.concerns(c.body); got != c.want {
			t.Errorf("%s concerns the table: %t", name, got)
		}
	}
}

func TestParseCrafted(t *testing.T) {
	for _, data := range crafted {
		for kind := range uint16(16) { // NFTA_SET_USERDATA, _RULE_USERDATA, _CHAIN_HOOK and all others
			mustParse(t, ours(attr(kind, data)))
			mustParse(t, ours(attr(kind, attr(unix.NFTA_HOOK_PRIORITY, data))))
		}
	}
}

// The seeds are few, because fuzzing takes some 40 ms for each before it tries anything else.
func FuzzParse(f *testing.F) {
	f.Add([]byte{})
	for _, data := range crafted {
		key := attr(unix.NFTA_SET_ELEM_KEY, attr(unix.NFTA_DATA_VALUE, data))
		f.Add(ours(attr(unix.NFTA_SET_ELEM_LIST_ELEMENTS, attr(unix.NFTA_LIST_ELEM, key, attr(unix.NFTA_SET_ELEM_USERDATA, data), attr(unix.NFTA_SET_ELEM_FLAGS, data)))))
		f.Add(ours(attr(unix.NFTA_SET_USERDATA, data)))
		f.Add(ours(attr(unix.NFTA_CHAIN_HOOK, attr(unix.NFTA_HOOK_PRIORITY, data))))
	}
	f.Fuzz(mustParse)
}

// mustParse fails the test unless, whatever the bytes are, names and comments are from the message, what is read of the table
// concerns it, and a set needs no change to have the content that it has.
func mustParse(t *testing.T, body []byte) {
	t.Helper()
	has := func(what, text string) {
		if !bytes.Contains(body, []byte(text)) {
			t.Errorf("%x has the %s %q", body, what, text)
		}
	}
	var concerned []string
	note := func(reader string, ours bool, err error) bool {
		if ours && err == nil {
			concerned = append(concerned, reader)
		}
		return err == nil
	}
	if s, ours, err := mine.parseSet(body); note("set", ours, err) {
		has("set", s.Name)
		if shape := setShape(s); !strings.Contains(shape, s.Name) {
			t.Errorf("set %q has the shape %q", s.Name, shape)
		}
	}
	if c, ours, err := mine.parseChain(body); note("chain", ours, err) {
		has("chain", c.Name)
		if shape := chainShape(c); !strings.Contains(shape, c.Name) {
			t.Errorf("chain %q has the shape %q", c.Name, shape)
		}
	}
	if o, ours, err := mine.parseObject(body); note("object", ours, err) {
		has("object", o.Name)
		if shape := o.shape(); !strings.Contains(shape, o.Name) {
			t.Errorf("object %q has the shape %q", o.Name, shape)
		}
	}
	if r, ours, err := mine.parseRule(body); note("rule", ours, err) {
		has("chain", r.chain)
		has("comment", r.comment)
	}
	if len(concerned) > 0 && !mine.concerns(body) {
		t.Errorf("%x is read as %v of the table, but doesn't concern it", body, concerned)
	}
	elements, _ := mine.appendElements(nil, body)
	for _, interval := range []bool{false, true} {
		have := contentOf(interval, elements)
		if len(have.elements) > len(elements) || len(have.ranges) > len(elements) {
			t.Errorf("of %d elements: %+v", len(elements), have)
		}
		add, remove := set{Set: dataplane.Set{Elements: have.elements, Ranges: have.ranges}}.difference(have)
		if add.size()+remove.size() != 0 {
			t.Errorf("%+v needs %+v, and less %+v", have, add, remove)
		}
	}
}
