package spec

import (
	"errors"
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Kind is the kind of a JSON value.
type Kind uint8

// The kinds of values.
const (
	Null Kind = iota
	Bool
	Number
	String
	Array
	Object
)

// Value is a JSON value (RFC 8259).
type Value struct {
	Kind Kind
	// Raw is the text of the value.
	Raw []byte
	// Text is what a String says.
	Text string
	// Elems are those of an Array.
	Elems []Value
	// Members are those of an Object, in their order.
	Members []Member
}

// Member is a member of an object.
type Member struct {
	Name  string
	Value Value
}

// maxDepth bounds the nesting of values.
const maxDepth = 1000

// Parse reads one JSON value with nothing after it. The Value refers to the data.
func Parse(data []byte) (Value, error) {
	p := parser{data: data}
	v, err := p.value(0)
	if err == nil {
		p.space()
		if p.at < len(data) {
			err = p.unexpected()
		}
	}
	if err != nil {
		return Value{}, err
	}
	return v, nil
}

// Get returns a member of an object, the last one of the name; Null if there is none.
func (v Value) Get(name string) Value {
	for i := len(v.Members) - 1; i >= 0; i-- {
		if v.Members[i].Name == name {
			return v.Members[i].Value
		}
	}
	return Value{}
}

// Has says whether an object has a member.
func (v Value) Has(name string) bool {
	for _, m := range v.Members {
		if m.Name == name {
			return true
		}
	}
	return false
}

type parser struct {
	data []byte
	at   int
}

var errEnd = errors.New("unexpected end of JSON input")

func (p *parser) unexpected() error {
	if p.at >= len(p.data) {
		return errEnd
	}
	return fmt.Errorf("invalid character %q at offset %d", p.data[p.at], p.at)
}

func (p *parser) space() {
	for p.at < len(p.data) {
		switch p.data[p.at] {
		case ' ', '\t', '\n', '\r':
			p.at++
		default:
			return
		}
	}
}

// next skips space and takes c if it comes.
func (p *parser) next(c byte) bool {
	p.space()
	if p.at < len(p.data) && p.data[p.at] == c {
		p.at++
		return true
	}
	return false
}

func (p *parser) value(depth int) (v Value, err error) {
	p.space()
	if depth > maxDepth {
		return v, errors.New("JSON is nested too deeply")
	}
	if p.at >= len(p.data) {
		return v, errEnd
	}
	start := p.at
	switch c := p.data[p.at]; {
	case c == '{':
		v.Kind = Object
		err = p.object(&v, depth)
	case c == '[':
		v.Kind = Array
		err = p.array(&v, depth)
	case c == '"':
		v.Kind = String
		v.Text, err = p.string()
	case c == 't':
		v.Kind = Bool
		err = p.word("true")
	case c == 'f':
		v.Kind = Bool
		err = p.word("false")
	case c == 'n':
		err = p.word("null")
	default:
		v.Kind = Number
		err = p.number()
	}
	v.Raw = p.data[start:p.at]
	return v, err
}

func (p *parser) object(v *Value, depth int) error {
	p.at++
	if p.next('}') {
		return nil
	}
	for {
		p.space()
		if p.at >= len(p.data) || p.data[p.at] != '"' {
			return p.unexpected()
		}
		name, err := p.string()
		if err != nil {
			return err
		}
		if !p.next(':') {
			return p.unexpected()
		}
		m, err := p.value(depth + 1)
		if err != nil {
			return err
		}
		v.Members = append(v.Members, Member{name, m})
		if p.next('}') {
			return nil
		}
		if !p.next(',') {
			return p.unexpected()
		}
	}
}

func (p *parser) array(v *Value, depth int) error {
	p.at++
	if p.next(']') {
		return nil
	}
	for {
		e, err := p.value(depth + 1)
		if err != nil {
			return err
		}
		v.Elems = append(v.Elems, e)
		if p.next(']') {
			return nil
		}
		if !p.next(',') {
			return p.unexpected()
		}
	}
}

func (p *parser) word(w string) error {
	for i := range len(w) {
		if p.at >= len(p.data) || p.data[p.at] != w[i] {
			return p.unexpected()
		}
		p.at++
	}
	return nil
}

func (p *parser) number() error {
	if p.at < len(p.data) && p.data[p.at] == '-' {
		p.at++
	}
	if p.at < len(p.data) && p.data[p.at] == '0' {
		p.at++
	} else if err := p.digits(); err != nil {
		return err
	}
	if p.at < len(p.data) && p.data[p.at] == '.' {
		p.at++
		if err := p.digits(); err != nil {
			return err
		}
	}
	if p.at < len(p.data) && (p.data[p.at] == 'e' || p.data[p.at] == 'E') {
		p.at++
		if p.at < len(p.data) && (p.data[p.at] == '+' || p.data[p.at] == '-') {
			p.at++
		}
		return p.digits()
	}
	return nil
}

func (p *parser) digits() error {
	start := p.at
	for p.at < len(p.data) && p.data[p.at] >= '0' && p.data[p.at] <= '9' {
		p.at++
	}
	if p.at == start {
		return p.unexpected()
	}
	return nil
}

// string reads a string. Bytes that aren't UTF-8 become U+FFFD, as do escaped halves
// of a surrogate pair.
func (p *parser) string() (string, error) {
	p.at++
	start := p.at
	for p.at < len(p.data) {
		switch c := p.data[p.at]; {
		case c == '"':
			s := string(p.data[start:p.at])
			p.at++
			return s, nil
		case c < ' ':
			return "", p.unexpected()
		case c == '\\' || c >= utf8.RuneSelf:
			return p.hardString(append([]byte(nil), p.data[start:p.at]...))
		}
		p.at++
	}
	return "", errEnd
}

// hardString reads the rest of a string after b.
func (p *parser) hardString(b []byte) (string, error) {
	for p.at < len(p.data) {
		switch c := p.data[p.at]; {
		case c == '"':
			p.at++
			return string(b), nil
		case c < ' ':
			return "", p.unexpected()
		case c == '\\':
			p.at++
			r, err := p.escape()
			if err != nil {
				return "", err
			}
			b = utf8.AppendRune(b, r)
		default:
			r, size := utf8.DecodeRune(p.data[p.at:])
			b = utf8.AppendRune(b, r)
			p.at += size
		}
	}
	return "", errEnd
}

// escape reads what follows a backslash.
func (p *parser) escape() (rune, error) {
	if p.at >= len(p.data) {
		return 0, errEnd
	}
	c := p.data[p.at]
	if c != 'u' {
		for _, e := range [][2]byte{{'"', '"'}, {'\\', '\\'}, {'/', '/'}, {'b', '\b'}, {'f', '\f'}, {'n', '\n'}, {'r', '\r'}, {'t', '\t'}} {
			if c == e[0] {
				p.at++
				return rune(e[1]), nil
			}
		}
		return 0, p.unexpected()
	}
	p.at++
	r, err := p.hex()
	if err != nil || !utf16.IsSurrogate(r) {
		return r, err
	}
	if rest := p.data[p.at:]; len(rest) >= 6 && rest[0] == '\\' && rest[1] == 'u' {
		back := p.at
		p.at += 2
		low, err := p.hex()
		if err != nil {
			return 0, err
		}
		if pair := utf16.DecodeRune(r, low); pair != utf8.RuneError {
			return pair, nil
		}
		p.at = back
	}
	return utf8.RuneError, nil
}

func (p *parser) hex() (rune, error) {
	for i := range 4 {
		if p.at+i >= len(p.data) {
			p.at = len(p.data)
			return 0, errEnd
		}
		c := p.data[p.at+i]
		if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F') {
			p.at += i
			return 0, p.unexpected()
		}
	}
	n, err := strconv.ParseUint(string(p.data[p.at:p.at+4]), 16, 32)
	p.at += 4
	return rune(n), err
}

// AppendString appends a JSON string.
func AppendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for _, r := range s { // bytes that aren't UTF-8 become U+FFFD
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r < ' ' || r == 0x7f:
			b = append(b, `\u00`...)
			b = append(b, hex[r>>4], hex[r&15])
		default:
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}
