package rtnl

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// No bytes make a parser panic: programs in pods make links, routes and rules as they like.
func FuzzParse(f *testing.F) {
	f.Add([]byte{})
	nested := AppendAttribute(nil, unix.IFLA_LINKINFO, AppendAttribute(nil, unix.IFLA_INFO_DATA, AppendAttribute(nil, nl.IFLA_IPTUN_LOCAL, []byte{1, 2, 3})))
	f.Add(append(make([]byte, unix.SizeofIfInfomsg), nested...))
	f.Fuzz(func(_ *testing.T, body []byte) { parseAll(body) })
}

// No short or unknown attribute makes a parser panic, wherever it begins.
func TestParseAnyAttribute(t *testing.T) {
	header := append([]byte{unix.AF_INET6, 200, 7}, make([]byte, 13)...)
	for size := range len(header) + 1 {
		parseAll(make([]byte, size))
		for kind := range uint16(64) {
			for _, value := range [][]byte{nil, {1}, {0, 9, 1, 2, 3}, make([]byte, 8), make([]byte, 16)} {
				body := slices.Concat(header[:size], AppendAttribute(nil, kind, value))
				func() {
					defer func() {
						if p := recover(); p != nil {
							t.Errorf("%x: %v", body, p)
						}
					}()
					parseAll(body)
				}()
			}
		}
	}
}

// parseAll lets each parser of messages of the kernel read a body.
func parseAll(body []byte) {
	l, err := parseLink(body)
	_ = l.String()
	for family := range families {
		if err == nil {
			_, _ = parseTunnel(family, l, body)
		}
	}
	if r, _, err := parseRule(body); err == nil {
		_ = r.String()
	}
	if r, _, err := parseRoute(body); err == nil {
		_, _ = r.String(), dataplane.FamilyOf(r.Dst.Addr())
	}
	_, _, _ = parseNexthop(body)
	_, _, _ = parseBucket(body)
	_, _ = new(Change).parseAddr(body), new(Change).parseNetconf(body)
	for kind := uint16(unix.RTM_NEWLINK); kind <= unix.RTM_NEWNETCONF; kind++ {
		_, _, _ = parseChange(Message{kind: kind, Body: body})
	}
	for _, flags := range []uint16{unix.NLM_F_ACK_TLVS, unix.NLM_F_ACK_TLVS | unix.NLM_F_CAPPED} {
		_, _, _ = Message{kind: unix.NLMSG_ERROR, flags: flags, Body: body}.acknowledged()
	}
	_, _ = split(slices.Concat(binary.NativeEndian.AppendUint32(nil, uint32(len(body))), body), func(Message) (bool, error) { return true, nil })
}
