package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// field is something of a packet, or of its connection, that rules look at.
type field struct {
	size uint32 // bytes
	// load is the expression that puts the field into a register.
	load func(register uint32) expr.Any
	// value reads a value that the field is compared with.
	value func(word string) ([]byte, error)
	// bits says that a condition asks for any of some bits.
	bits bool
	// flags says that a condition may be "VALUE / MASK".
	flags bool
}

// field takes a field if one follows. Its name is of up to three words, that of numgen has a number behind it.
func (r *reader) field() (f field, ok bool) {
	if r.next("numgen", "random", "mod") {
		modulus := r.number(32)
		return field{size: 4, value: hostNumber, load: func(to uint32) expr.Any {
			return &expr.Numgen{Register: to, Modulus: uint32(modulus), Type: unix.NFT_NG_RANDOM}
		}}, true
	}
	for n := 1; n <= min(3, len(r.words)); n++ {
		if f, ok := fields[strings.Join(r.words[:n], " ")]; ok {
			return f, r.next(r.words[:n]...)
		}
	}
	if f, ok = raw(r.peek()); ok {
		r.word()
	}
	return f, ok
}

// fields are those that rules of Coil look at. Sources: nft(8), linux/netfilter/nf_tables.h.
var fields = map[string]field{
	"iif":           metaNumber(expr.MetaKeyIIF),
	"oif":           metaNumber(expr.MetaKeyOIF),
	"iifgroup":      metaNumber(expr.MetaKeyIIFGROUP),
	"meta mark":     metaNumber(expr.MetaKeyMARK),
	"meta priority": metaNumber(expr.MetaKeyPRIORITY),
	"iifname":       {size: 16, load: meta(expr.MetaKeyIIFNAME), value: namePrefix},
	"meta nfproto":  {size: 1, load: meta(expr.MetaKeyNFPROTO), value: oneByte(map[string]byte{"ipv4": unix.NFPROTO_IPV4, "ipv6": unix.NFPROTO_IPV6})},
	"meta l4proto": {size: 1, load: meta(expr.MetaKeyL4PROTO), value: oneByte(map[string]byte{
		"icmp": unix.IPPROTO_ICMP, "ipencap": unix.IPPROTO_IPIP, "tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "ipv6": unix.IPPROTO_IPV6, "ipv6-icmp": unix.IPPROTO_ICMPV6,
	})},
	"arp saddr ip": network(14, 4),
	"arp daddr ip": network(24, 4),
	"ip saddr":     network(12, 4),
	"ip daddr":     network(16, 4),
	"ip6 saddr":    network(8, 16),
	"ip6 daddr":    network(24, 16),
	"th sport":     {size: 2, load: payload(expr.PayloadBaseTransportHeader, 0, 2), value: port},
	"th dport":     {size: 2, load: payload(expr.PayloadBaseTransportHeader, 2, 2), value: port},
	"icmp type":    {size: 1, load: payload(expr.PayloadBaseTransportHeader, 0, 1), value: oneByte(map[string]byte{"echo-reply": 0, "echo-request": 8})},
	"icmpv6 type":  {size: 1, load: payload(expr.PayloadBaseTransportHeader, 0, 1), value: oneByte(map[string]byte{"echo-reply": 129, "echo-request": 128, "nd-neighbor-solicit": 135})},
	"tcp flags":    {size: 1, load: payload(expr.PayloadBaseTransportHeader, 13, 1), value: tcpFlags, flags: true},
	"ct mark":      {size: 4, load: ct(expr.CtKeyMARK), value: hostNumber},
	"ct direction": {size: 1, load: ct(expr.CtKeyDIRECTION), value: oneByte(map[string]byte{"original": 0, "reply": 1})},
	"ct state": connection(expr.CtKeySTATE, map[string]uint32{
		"invalid": expr.CtStateBitINVALID, "established": expr.CtStateBitESTABLISHED, "related": expr.CtStateBitRELATED, "new": expr.CtStateBitNEW,
		"untracked": expr.CtStateBitUNTRACKED,
	}),
	// IPS_CONFIRMED from when the first packet of a connection has passed, IPS_SRC_NAT if its source is translated.
	"ct status": connection(expr.CtKeySTATUS, map[string]uint32{"confirmed": 1 << 3, "snat": 1 << 4}),
}

func meta(key expr.MetaKey) func(uint32) expr.Any {
	return func(to uint32) expr.Any { return &expr.Meta{Key: key, Register: to} }
}

func metaNumber(key expr.MetaKey) field {
	return field{size: 4, load: meta(key), value: hostNumber}
}

func ct(key expr.CtKey) func(uint32) expr.Any {
	return func(to uint32) expr.Any { return &expr.Ct{Key: key, Register: to} }
}

func connection(key expr.CtKey, bits map[string]uint32) field {
	return field{size: 4, load: ct(key), bits: true, value: func(words string) ([]byte, error) {
		all, err := bitsOf(words, bits)
		return binaryutil.NativeEndian.PutUint32(all), err
	}}
}

// bitsOf reads names of bits with commas between them.
func bitsOf(words string, bits map[string]uint32) (all uint32, err error) {
	for w := range strings.SplitSeq(words, ",") {
		bit, ok := bits[w]
		if !ok {
			return 0, fmt.Errorf("%q: %w", w, errUnknown)
		}
		all |= bit
	}
	return all, nil
}

func payload(base expr.PayloadBase, offset, size uint32) func(uint32) expr.Any {
	return func(to uint32) expr.Any {
		return &expr.Payload{DestRegister: to, Base: base, Offset: offset, Len: size}
	}
}

func network(offset, size uint32) field {
	return field{size: size, load: payload(expr.PayloadBaseNetworkHeader, offset, size), value: func(word string) ([]byte, error) {
		a, err := netip.ParseAddr(word)
		if err == nil && a.BitLen() != int(size)*8 {
			err = fmt.Errorf("%s isn't of the family", a)
		}
		return a.AsSlice(), err
	}}
}

// hostNumber reads a number that has the processor's byte order.
func hostNumber(word string) ([]byte, error) {
	n, err := number(word, 32)
	return binaryutil.NativeEndian.PutUint32(uint32(n)), err
}

func port(word string) ([]byte, error) {
	n, err := number(word, 16)
	return binary.BigEndian.AppendUint16(nil, uint16(n)), err
}

// oneByte reads a number of one byte, or a name of one.
func oneByte(names map[string]byte) func(string) ([]byte, error) {
	return func(word string) ([]byte, error) {
		if n, ok := names[word]; ok {
			return []byte{n}, nil
		}
		n, err := number(word, 8)
		return []byte{byte(n)}, err
	}
}

// namePrefix reads the beginning of names of links: a word in quotes that ends with an asterisk.
func namePrefix(word string) ([]byte, error) {
	name, err := strconv.Unquote(word)
	prefix, ok := strings.CutSuffix(name, "*")
	if err != nil || !ok {
		return nil, fmt.Errorf("%s isn't the beginning of a name: %w", word, errUnknown)
	}
	return []byte(prefix), nil
}

func tcpFlags(words string) ([]byte, error) {
	all, err := bitsOf(words, map[string]uint32{"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16})
	return []byte{byte(all)}, err
}
