package nft

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// compile translates the text of a rule into the expressions that the kernel evaluates. It knows the words of
// nft(8) that rules of Coil use:
//
//	[CONDITION ...] [STATEMENT ...]
//
//	CONDITION  FIELD [. FIELD ...] [& MASK] [!=] {VALUE | @SET}
//	           {ct state | ct status} [!] BIT[,BIT ...]
//	           tcp flags FLAG[,FLAG ...] / FLAG[,FLAG ...]
//	           fib saddr . iif oif missing
//	STATEMENT  accept, drop, return, notrack, jump CHAIN, goto CHAIN, counter name COUNTER
//	           FIELD [. FIELD ...] vmap @MAP
//	           {snat | dnat} {ip | ip6} to {ADDRESS | FIELD [. FIELD ...] map @MAP} [fully-random]
//	           meta mark set {VALUE | meta mark & MASK | BITS}, and the same of ct mark
//	           tcp option maxseg size set {BYTES | rt mtu}
//	           {add | update | delete} @SET { FIELD [ct count over NUMBER] }
//
// Other than nft(8) it adds no condition that the text hasn't, such as that of the family before an address, and
// evaluates conditions in the order of the text: that decides what a packet costs.
func compile(text string) ([]expr.Any, error) {
	r := &reader{words: strings.Fields(text)}
	for len(r.words) > 0 {
		if err := r.part(); err != nil {
			return nil, fmt.Errorf("rule %q, before %q: %w", text, strings.Join(r.words, " "), err)
		}
	}
	return r.exprs, nil
}

var (
	errUnknown = errors.New("the words aren't known")
	errNumber  = errors.New("the number can't be read")
)

// register is the first of 16 bytes, for what is compared. Fields of a concatenation follow each other in
// registers of four bytes.
const register = 1

// registerOf is the register of the field of a concatenation that has so many bytes before it.
func registerOf(before uint32) uint32 {
	if before == 0 {
		return register
	}
	return unix.NFT_REG32_00 + before/4
}

// reader reads a rule.
type reader struct {
	words []string
	exprs []expr.Any
}

func (r *reader) add(exprs ...expr.Any) { r.exprs = append(r.exprs, exprs...) }

// next takes words if they follow.
func (r *reader) next(words ...string) bool {
	if len(r.words) < len(words) || !slices.Equal(r.words[:len(words)], words) {
		return false
	}
	r.words = r.words[len(words):]
	return true
}

// word takes a word, whichever follows; none is empty.
func (r *reader) word() string {
	if len(r.words) == 0 {
		return ""
	}
	w := r.words[0]
	r.words = r.words[1:]
	return w
}

// name takes the name of a set or map.
func (r *reader) name() (string, error) {
	name, ok := strings.CutPrefix(r.word(), "@")
	if !ok {
		return "", fmt.Errorf("the name of a set: %w", errUnknown)
	}
	return name, nil
}

// part reads a condition or statement.
func (r *reader) part() error {
	const objectCounter = 1 // NFT_OBJECT_COUNTER
	switch {
	case r.next("accept"):
		r.add(&expr.Verdict{Kind: expr.VerdictAccept})
	case r.next("drop"):
		r.add(&expr.Verdict{Kind: expr.VerdictDrop})
	case r.next("return"):
		r.add(&expr.Verdict{Kind: expr.VerdictReturn})
	case r.next("jump"):
		r.add(&expr.Verdict{Kind: expr.VerdictJump, Chain: r.word()})
	case r.next("goto"):
		r.add(&expr.Verdict{Kind: expr.VerdictGoto, Chain: r.word()})
	case r.next("notrack"):
		r.add(&expr.Notrack{})
	case r.next("counter", "name"):
		r.add(&expr.Objref{Type: objectCounter, Name: r.word()})
	case r.next("snat"):
		return r.translate(expr.NATTypeSourceNAT)
	case r.next("dnat"):
		return r.translate(expr.NATTypeDestNAT)
	case r.next("meta", "mark", "set"):
		return r.set(&expr.Meta{Key: expr.MetaKeyMARK, Register: register, SourceRegister: true})
	case r.next("ct", "mark", "set"):
		return r.set(&expr.Ct{Key: expr.CtKeyMARK, Register: register, SourceRegister: true})
	case r.next("tcp", "option", "maxseg", "size", "set"):
		return r.segment()
	case r.next("add"):
		return r.element(unix.NFT_DYNSET_OP_ADD)
	case r.next("update"):
		return r.element(unix.NFT_DYNSET_OP_UPDATE)
	case r.next("delete"):
		return r.element(deleteElement)
	case r.next("fib", "saddr", ".", "iif", "oif", "missing"):
		r.add(&expr.Fib{Register: register, ResultOIF: true, FlagSADDR: true, FlagIIF: true, FlagPRESENT: true}, compare(expr.CmpOpEq, make([]byte, 4)))
	default:
		return r.condition()
	}
	return nil
}

// deleteElement is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h.
const deleteElement = 2

func compare(op expr.CmpOp, data []byte) expr.Any {
	return &expr.Cmp{Op: op, Register: register, Data: data}
}

// bitwise keeps the bits of a mask of what is in the register, and then turns those of xor.
func bitwise(mask, xor []byte) expr.Any {
	return &expr.Bitwise{SourceRegister: register, DestRegister: register, Len: uint32(len(mask)), Mask: mask, Xor: xor}
}

// fields reads fields, which are loaded into registers, and returns the last of them.
func (r *reader) fields() (field, error) {
	var before uint32
	for {
		f, err := r.field()
		if err != nil {
			return f, err
		}
		r.add(f.load(registerOf(before)))
		if !r.next(".") {
			return f, nil
		}
		before += (f.size + 3) / 4 * 4
	}
}

// condition reads fields and what they are compared with, or looked up in.
func (r *reader) condition() error {
	f, err := r.fields()
	if err != nil {
		return err
	}
	if r.next("vmap") {
		name, err := r.name()
		r.add(&expr.Lookup{SourceRegister: register, IsDestRegSet: true, SetName: name})
		return err
	}
	var mask []byte
	if r.next("&") {
		if mask, err = f.value(r.word()); err != nil {
			return err
		}
	}
	op := expr.CmpOpEq
	if r.next("!=") {
		op = expr.CmpOpNeq
	}
	if f.bits && mask == nil && op == expr.CmpOpEq {
		return r.anyOf(f)
	}
	if len(r.words) > 0 && strings.HasPrefix(r.words[0], "@") {
		name, err := r.name()
		r.add(&expr.Lookup{SourceRegister: register, SetName: name, Invert: op == expr.CmpOpNeq})
		return err
	}
	data := r.word()
	if prefix, err := netip.ParsePrefix(data); err == nil && mask == nil && prefix.Addr().BitLen() == int(f.size)*8 {
		mask, data = maskOf(prefix), prefix.Masked().Addr().String()
	}
	if f.flags && r.next("/") { // "tcp flags VALUE / MASK"
		if mask, err = f.value(r.word()); err != nil {
			return err
		}
	}
	value, err := f.value(data)
	if err != nil {
		return err
	}
	if mask != nil {
		r.add(bitwise(mask, make([]byte, len(mask))))
	}
	r.add(compare(op, value))
	return nil
}

// anyOf reads bits of which any must be set or, after an exclamation mark, none.
func (r *reader) anyOf(f field) error {
	op := expr.CmpOpNeq
	if r.next("!") {
		op = expr.CmpOpEq
	}
	value, err := f.value(r.word())
	r.add(bitwise(value, make([]byte, len(value))), compare(op, make([]byte, len(value))))
	return err
}

func maskOf(p netip.Prefix) []byte {
	mask := make([]byte, p.Addr().BitLen()/8)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// translate reads what an address is translated to.
func (r *reader) translate(kind expr.NATType) error {
	families := map[string]uint32{"ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6}
	family, ok := families[r.word()]
	if !ok || !r.next("to") {
		return errUnknown
	}
	if a, err := netip.ParseAddr(strings.Join(r.words[:min(1, len(r.words))], "")); err == nil {
		r.word()
		r.add(&expr.Immediate{Register: register, Data: a.AsSlice()})
	} else {
		if _, err := r.fields(); err != nil {
			return err
		}
		if !r.next("map") {
			return errUnknown
		}
		name, err := r.name()
		if err != nil {
			return err
		}
		r.add(&expr.Lookup{SourceRegister: register, DestRegister: register, IsDestRegSet: true, SetName: name})
	}
	r.add(&expr.NAT{Type: kind, Family: family, RegAddrMin: register, FullyRandom: r.next("fully-random")})
	return nil
}

// set reads the value that a mark is set to.
func (r *reader) set(mark expr.Any) error {
	from, err := r.field()
	if err != nil {
		value, err := number(r.word(), 32)
		r.add(&expr.Immediate{Register: register, Data: binaryutil.NativeEndian.PutUint32(uint32(value))}, mark)
		return err
	}
	r.add(from.load(register))
	if !r.next("&") {
		return errUnknown
	}
	mask, err := from.value(r.word())
	if err != nil || !r.next("|") {
		return errors.Join(err, errUnknown)
	}
	bits, err := from.value(r.word())
	r.add(bitwise(mask, bits), mark)
	return err
}

// segment reads the largest segment of a new TCP connection (RFC 9293, section 3.7.1). The kernel lowers the
// option if there is one, and adds none.
func (r *reader) segment() error {
	const mss = 2 // kind of option
	if r.next("rt", "mtu") {
		r.add(&expr.Rt{Register: register, Key: expr.RtTCPMSS},
			&expr.Byteorder{SourceRegister: register, DestRegister: register, Op: expr.ByteorderHton, Len: 2, Size: 2})
	} else {
		size, err := number(r.word(), 16)
		if err != nil {
			return err
		}
		r.add(&expr.Immediate{Register: register, Data: binary.BigEndian.AppendUint16(nil, uint16(size))})
	}
	r.add(&expr.Exthdr{SourceRegister: register, Type: mss, Offset: 2, Len: 2, Op: expr.ExthdrOpTcpopt})
	return nil
}

// element reads a change of an element of a set.
func (r *reader) element(operation uint32) error {
	name, err := r.name()
	if err != nil || !r.next("{") {
		return errors.Join(err, errUnknown)
	}
	if _, err := r.fields(); err != nil {
		return err
	}
	change := &expr.Dynset{SrcRegKey: register, SetName: name, Operation: operation}
	if r.next("ct", "count", "over") {
		count, err := number(r.word(), 32)
		if err != nil {
			return err
		}
		change.Exprs = []expr.Any{&expr.Connlimit{Count: uint32(count), Flags: expr.NFT_CONNLIMIT_F_INV}}
	}
	if !r.next("}") {
		return errUnknown
	}
	r.add(change)
	return nil
}

func number(word string, bits int) (uint64, error) {
	n, err := strconv.ParseUint(word, 0, bits)
	if err != nil {
		return 0, fmt.Errorf("%q: %w", word, errNumber)
	}
	return n, nil
}

// raw reads the field "@th,OFFSET,LENGTH", in bits.
func raw(word string) (f field, ok bool) {
	var offset, bits uint32
	if n, err := fmt.Sscanf(word, "@th,%d,%d", &offset, &bits); err != nil || n != 2 || offset%8 != 0 || bits%8 != 0 || bits == 0 {
		return f, false
	}
	return field{size: bits / 8, load: payload(expr.PayloadBaseTransportHeader, offset/8, bits/8), value: func(word string) ([]byte, error) {
		digits, ok := strings.CutPrefix(word, "0x")
		data, err := hex.DecodeString(digits)
		if !ok || err != nil || len(data) != int(bits/8) {
			return nil, fmt.Errorf("%q isn't 0x and %d digits: %w", word, bits/4, errNumber)
		}
		return data, nil
	}}, true
}
