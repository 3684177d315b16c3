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
	"time"

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
//	           fib daddr oif exists
//	STATEMENT  accept, drop, return, notrack, jump CHAIN, goto CHAIN, counter name COUNTER
//	           FIELD [. FIELD ...] vmap @MAP
//	           masquerade [fully-random]
//	           {snat | dnat} {ip | ip6} to {ADDRESS | FIELD | FIELD [. FIELD ...] map @MAP} [fully-random]
//	           dnat {ip | ip6} addr . port to FIELD [. FIELD ...] map @MAP
//	           reject [with tcp reset]
//	           meta mark set {VALUE | meta mark & MASK | BITS}, and the same of ct mark
//	           meta priority set {VALUE | FIELD [. FIELD ...] map @MAP}
//	           {ip ttl | ip6 hoplimit} set NUMBER
//	           tcp option maxseg size set {BYTES | rt mtu}
//	           {add | update | delete} @SET { FIELD [. FIELD ...] [timeout DURATION] [ct count over NUMBER] }
//	           {add | update | delete} @MAP { FIELD [. FIELD ...] [timeout DURATION] : FIELD }
//
// Other than nft(8) it adds no condition that the text hasn't, such as that of the family before an address, and
// evaluates conditions in the order of the text: that decides the cost of a packet.
func compile(text string) ([]expr.Any, error) {
	r := &reader{words: strings.Fields(text)}
	for len(r.words) > 0 && r.err == nil {
		r.part()
	}
	if r.err != nil {
		return nil, fmt.Errorf("rule %q, before %q: %w", text, strings.Join(r.words, " "), r.err)
	}
	return r.exprs, nil
}

var (
	errUnknown = errors.New("the words aren't known")
	errNumber  = errors.New("the number can't be read")
	// errRegisters: fields don't fit into the kernel's registers.
	errRegisters = fmt.Errorf("the fields have more than %d bytes", registers)
)

// registers is how many bytes all registers have.
const registers = 64

// register is the first of 16 bytes, for data that is compared. Fields of a concatenation follow each other in
// registers of four bytes.
const register = 1

// registerOf is the register of the field of a concatenation that has so many bytes before it.
func registerOf(before uint32) uint32 {
	if before == 0 {
		return register
	}
	return unix.NFT_REG32_00 + before/4
}

// reader reads a rule. After an error it takes no more words.
type reader struct {
	words []string
	exprs []expr.Any
	err   error // the first
}

func (r *reader) add(exprs ...expr.Any) { r.exprs = append(r.exprs, exprs...) }

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// next takes words if they follow.
func (r *reader) next(words ...string) bool {
	if r.err != nil || len(r.words) < len(words) || !slices.Equal(r.words[:len(words)], words) {
		return false
	}
	r.words = r.words[len(words):]
	return true
}

// expect takes a word that must follow.
func (r *reader) expect(word string) {
	if !r.next(word) {
		r.fail(errUnknown)
	}
}

// peek returns the word that follows; none is empty.
func (r *reader) peek() string {
	if len(r.words) == 0 || r.err != nil {
		return ""
	}
	return r.words[0]
}

// word takes a word, whichever follows; none is empty.
func (r *reader) word() string {
	w := r.peek()
	r.next(w)
	return w
}

// name takes the name of a set or map.
func (r *reader) name() string {
	name, ok := strings.CutPrefix(r.word(), "@")
	if !ok {
		r.fail(fmt.Errorf("the name of a set: %w", errUnknown))
	}
	return name
}

// number takes a number.
func (r *reader) number(bits int) uint64 {
	n, err := number(r.word(), bits)
	r.fail(err)
	return n
}

// value takes a value of a field.
func (r *reader) value(f field) []byte { return r.valueIn(f, r.word()) }

// valueIn reads a value of a field in a word that was taken.
func (r *reader) valueIn(f field, word string) []byte {
	if r.err != nil {
		return nil
	}
	value, err := f.value(word)
	r.fail(err)
	return value
}

// part reads a condition or statement.
func (r *reader) part() {
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
	case r.next("reject", "with", "tcp", "reset"):
		r.add(&expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	case r.next("reject"):
		r.add(&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH})
	case r.next("snat"):
		r.translate(expr.NATTypeSourceNAT)
	case r.next("dnat"):
		r.translate(expr.NATTypeDestNAT)
	case r.next("masquerade"):
		r.add(&expr.Masq{FullyRandom: r.next("fully-random")})
	case r.next("meta", "mark", "set"):
		r.set(&expr.Meta{Key: expr.MetaKeyMARK, Register: register, SourceRegister: true})
	case r.next("ct", "mark", "set"):
		r.set(&expr.Ct{Key: expr.CtKeyMARK, Register: register, SourceRegister: true})
	case r.next("meta", "priority", "set"):
		r.set(&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: register, SourceRegister: true})
	case r.next("ip", "ttl", "set"):
		r.hops(8, true)
	case r.next("ip6", "hoplimit", "set"):
		r.hops(7, false)
	case r.next("tcp", "option", "maxseg", "size", "set"):
		r.segment()
	case r.next("add"):
		r.element(unix.NFT_DYNSET_OP_ADD)
	case r.next("update"):
		r.element(unix.NFT_DYNSET_OP_UPDATE)
	case r.next("delete"):
		r.element(deleteElement)
	case r.next("fib", "saddr", ".", "iif", "oif", "missing"):
		r.add(&expr.Fib{Register: register, ResultOIF: true, FlagSADDR: true, FlagIIF: true, FlagPRESENT: true}, compare(expr.CmpOpEq, make([]byte, 4)))
	case r.next("fib", "daddr", "oif", "exists"):
		r.add(&expr.Fib{Register: register, ResultOIF: true, FlagDADDR: true, FlagPRESENT: true}, compare(expr.CmpOpEq, []byte{1}))
	default:
		r.condition()
	}
}

// deleteElement is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h.
const deleteElement = 2

func compare(op expr.CmpOp, data []byte) expr.Any {
	return &expr.Cmp{Op: op, Register: register, Data: data}
}

// bitwise keeps the bits of a mask in the register, and then turns those of xor.
func bitwise(mask, xor []byte) expr.Any {
	return &expr.Bitwise{SourceRegister: register, DestRegister: register, Len: uint32(len(mask)), Mask: mask, Xor: xor}
}

// fieldList reads fields with dots between them.
func (r *reader) fieldList() (all []field) {
	for {
		f, ok := r.field()
		if !ok {
			r.fail(errUnknown)
			return []field{{}}
		}
		if all = append(all, f); !r.next(".") {
			return all
		}
	}
}

// width is how many bytes of registers fields take.
func width(all []field) (n uint32) {
	for _, f := range all {
		n += (f.size + 3) / 4 * 4
	}
	return n
}

// load loads fields into registers.
func (r *reader) load(all []field) {
	var before uint32
	for _, f := range all {
		if before+f.size > registers {
			r.fail(errRegisters)
		}
		if r.err == nil {
			r.add(f.load(registerOf(before)))
		}
		before += width([]field{f})
	}
}

// find loads fields, and replaces them by what a map has for them, whose name follows.
func (r *reader) find(all []field) {
	r.load(all)
	r.add(&expr.Lookup{SourceRegister: register, DestRegister: register, IsDestRegSet: true, SetName: r.name()})
}

// condition reads fields, and the value that they are compared with or the set that they are looked up in.
func (r *reader) condition() {
	all := r.fieldList()
	r.load(all)
	f := all[len(all)-1]
	if r.next("vmap") {
		r.add(&expr.Lookup{SourceRegister: register, IsDestRegSet: true, SetName: r.name()})
		return
	}
	var mask []byte
	if r.next("&") {
		mask = r.value(f)
	}
	op := expr.CmpOpEq
	if r.next("!=") {
		op = expr.CmpOpNeq
	}
	if f.bits && mask == nil && op == expr.CmpOpEq {
		r.anyOf(f)
		return
	}
	if strings.HasPrefix(r.peek(), "@") {
		r.add(&expr.Lookup{SourceRegister: register, SetName: r.name(), Invert: op == expr.CmpOpNeq})
		return
	}
	data := r.word()
	if prefix, err := netip.ParsePrefix(data); err == nil && mask == nil && prefix.Addr().BitLen() == int(f.size)*8 {
		mask, data = maskOf(prefix), prefix.Masked().Addr().String()
	}
	if f.flags && r.next("/") { // "tcp flags VALUE / MASK"
		mask = r.value(f)
	}
	value := r.valueIn(f, data)
	if mask != nil {
		r.add(bitwise(mask, make([]byte, len(mask))))
	}
	r.add(compare(op, value))
}

// anyOf reads bits of which any must be set or, after an exclamation mark, none.
func (r *reader) anyOf(f field) {
	op := expr.CmpOpNeq
	if r.next("!") {
		op = expr.CmpOpEq
	}
	value := r.value(f)
	r.add(bitwise(value, make([]byte, len(value))), compare(op, make([]byte, len(value))))
}

func maskOf(p netip.Prefix) []byte {
	mask := make([]byte, p.Addr().BitLen()/8)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// translate reads the address, or the address and the port, that others are translated to.
func (r *reader) translate(kind expr.NATType) {
	family, ok := map[string]uint32{"ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6}[r.word()]
	if !ok {
		r.fail(errUnknown)
	}
	size := map[uint32]uint32{unix.NFPROTO_IPV4: 4, unix.NFPROTO_IPV6: 16}[family]
	nat := &expr.NAT{Type: kind, Family: family, RegAddrMin: register}
	if kind == expr.NATTypeDestNAT && r.next("addr", ".", "port") {
		nat.RegProtoMin = registerOf(size)
	}
	r.expect("to")
	if a, err := netip.ParseAddr(r.peek()); err == nil && nat.RegProtoMin == 0 {
		r.word()
		r.add(&expr.Immediate{Register: register, Data: a.AsSlice()})
	} else {
		from := r.fieldList()
		switch {
		case r.next("map"):
			r.find(from)
		case len(from) == 1 && from[0].size == size && nat.RegProtoMin == 0:
			r.load(from)
		default:
			r.fail(errUnknown)
		}
	}
	nat.FullyRandom = r.next("fully-random")
	r.add(nat)
}

// set reads the value that something of a packet is set to.
func (r *reader) set(to expr.Any) {
	if n, err := number(r.peek(), 32); err == nil {
		r.word()
		r.add(&expr.Immediate{Register: register, Data: binaryutil.NativeEndian.PutUint32(uint32(n))}, to)
		return
	}
	from := r.fieldList()
	if r.next("map") {
		r.find(from)
		r.add(to)
		return
	}
	r.load(from)
	r.expect("&")
	mask := r.value(from[0])
	r.expect("|")
	r.add(bitwise(mask, r.value(from[0])), to)
}

// hops reads how many hops a packet may still take, in a byte of its IP header. Where that has a checksum, which sums up words of two bytes, it is the first
// of two that are written, as nft(8) does.
func (r *reader) hops(offset uint32, checksum bool) {
	n := byte(r.number(8))
	write := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 1}
	if !checksum {
		r.add(&expr.Immediate{Register: register, Data: []byte{n}}, write)
		return
	}
	write.Len, write.CsumType, write.CsumOffset = 2, expr.CsumTypeInet, 10
	r.add(payload(expr.PayloadBaseNetworkHeader, offset, 2)(register), bitwise([]byte{0, 0xff}, []byte{n, 0}), write)
}

// segment reads the largest segment of a new TCP connection (RFC 9293, section 3.7.1). The kernel lowers the
// option if there is one, and adds none.
func (r *reader) segment() {
	const mss = 2 // kind of option
	if r.next("rt", "mtu") {
		r.add(&expr.Rt{Register: register, Key: expr.RtTCPMSS},
			&expr.Byteorder{SourceRegister: register, DestRegister: register, Op: expr.ByteorderHton, Len: 2, Size: 2})
	} else {
		r.add(&expr.Immediate{Register: register, Data: binary.BigEndian.AppendUint16(nil, uint16(r.number(16)))})
	}
	r.add(&expr.Exthdr{SourceRegister: register, Type: mss, Offset: 2, Len: 2, Op: expr.ExthdrOpTcpopt})
}

// element reads a change of an element of a set, or of a map.
func (r *reader) element(operation uint32) {
	change := &expr.Dynset{SrcRegKey: register, SetName: r.name(), Operation: operation}
	r.expect("{")
	key := r.fieldList()
	if r.next("timeout") {
		d, err := time.ParseDuration(r.peek())
		if err == nil && d < time.Millisecond {
			err = errNumber
		}
		r.fail(err)
		r.word()
		change.Timeout = d
	}
	if r.next("ct", "count", "over") {
		change.Exprs = []expr.Any{&expr.Connlimit{Count: uint32(r.number(32)), Flags: expr.NFT_CONNLIMIT_F_INV}}
	}
	r.load(key)
	if r.next(":") {
		value, ok := r.field()
		if !ok || width(key)+value.size > registers {
			r.fail(errUnknown)
			return
		}
		change.SrcRegData = registerOf(width(key))
		r.add(value.load(change.SrcRegData))
	}
	r.expect("}")
	r.add(change)
}

func number(word string, bits int) (uint64, error) {
	n, err := strconv.ParseUint(word, 0, bits)
	if err != nil {
		return 0, fmt.Errorf("%q: %w", word, errNumber)
	}
	return n, nil
}

// raw reads the field "@nh,OFFSET,LENGTH" of the network header, or "@th,OFFSET,LENGTH" of the transport header, in bits.
func raw(word string) (f field, ok bool) {
	base := expr.PayloadBaseTransportHeader
	numbers, ok := strings.CutPrefix(word, "@th,")
	if !ok {
		base = expr.PayloadBaseNetworkHeader
		numbers, ok = strings.CutPrefix(word, "@nh,")
	}
	var offset, bits uint32
	if n, err := fmt.Sscanf(numbers, "%d,%d", &offset, &bits); !ok || err != nil || n != 2 || offset%8 != 0 || bits%8 != 0 || bits == 0 {
		return f, false
	}
	return field{size: bits / 8, load: payload(base, offset/8, bits/8), value: func(word string) ([]byte, error) {
		digits, ok := strings.CutPrefix(word, "0x")
		data, err := hex.DecodeString(digits)
		if !ok || err != nil || len(data) != int(bits/8) {
			return nil, fmt.Errorf("%q isn't 0x and %d digits: %w", word, bits/4, errNumber)
		}
		return data, nil
	}}, true
}
