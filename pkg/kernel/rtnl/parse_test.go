package rtnl

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// Whatever the bytes are, the request that deletes what was found is about the same object, and an object that is written
// as it was read stays the same: programs in pods make links, routes and rules as they like.
func FuzzParse(f *testing.F) {
	f.Add([]byte{})
	nested := AppendAttribute(nil, unix.IFLA_LINKINFO, AppendAttribute(nil, unix.IFLA_INFO_DATA, AppendAttribute(nil, nl.IFLA_IPTUN_LOCAL, []byte{1, 2, 3})))
	f.Add(append(make([]byte, unix.SizeofIfInfomsg), nested...))
	f.Add(AddRule(dataplane.Rule{
		Family: dataplane.IPv6, Priority: 1900, From: netip.MustParsePrefix("fd00::/8"), Input: "eth0", Output: "lo", Mark: 1, Mask: 3, Transport: 17, SourcePort: 5555,
		DestinationPort: 53, Table: 118, Protocol: 30,
	}).body)
	for _, r := range []dataplane.Route{
		{Table: 117, Dst: netip.MustParsePrefix("10.0.0.0/8"), Link: 7, Gateway: netip.MustParseAddr("192.0.2.1"), OnLink: true, Metric: 5, Protocol: 30, Scope: dataplane.LinkScope},
		{Table: 1000, Dst: netip.MustParsePrefix("fd00::/8"), Type: dataplane.Unreachable, Source: netip.MustParseAddr("fd00::1"), Metric: 1024, Protocol: 30},
		{Table: unix.RT_TABLE_LOCAL, Dst: netip.MustParsePrefix("10.0.0.7/32"), Type: dataplane.Local, Link: 1, Protocol: 32, Scope: dataplane.HostScope},
		{Table: 118, Dst: netip.MustParsePrefix("::/0"), Nexthop: 0x63000000, Protocol: 30},
	} {
		f.Add(AddRoute(r).body)
	}
	f.Add(SetNexthop(dataplane.Nexthop{ID: 0x63000000, Family: dataplane.IPv4, Link: 7, Protocol: 30}).body)
	f.Add(AddTunnel("fou4", dataplane.Tunnel{Local: netip.MustParseAddr("10.0.0.1"), Remote: netip.MustParseAddr("10.0.0.2"), Port: 5555, MTU: 1400}).body)
	f.Fuzz(func(t *testing.T, body []byte) {
		parseAll(body)
		if r, _, err := parseRule(body); err == nil {
			mustRead(t, "rule to delete", r.Rule, DelFoundRule(r).body, rule)
			r.Rule, err = rule(AddRule(r.Rule).body) // without what no rule of Coil has
			testkit.Check(t, err)
			mustRead(t, "rule", r.Rule, AddRule(r.Rule).body, rule)
		}
		if r, _, err := parseRoute(body); err == nil {
			mustRead(t, "route to delete", r.Route, DelFoundRoute(r).body, route)
			r.Route, err = route(AddRoute(r.Route).body)
			testkit.Check(t, err)
			mustRead(t, "route", r.Route, AddRoute(r.Route).body, route)
		}
		if n, _, err := parseNexthop(body); err == nil {
			n.Nexthop, err = nexthop(SetNexthop(n.Nexthop).body)
			testkit.Check(t, err)
			mustRead(t, "nexthop", n.Nexthop, SetNexthop(n.Nexthop).body, nexthop)
		}
	})
}

func rule(body []byte) (dataplane.Rule, error) {
	r, _, err := parseRule(body)
	return r.Rule, err
}

func route(body []byte) (dataplane.Route, error) {
	r, _, err := parseRoute(body)
	return r.Route, err
}

func nexthop(body []byte) (dataplane.Nexthop, error) {
	n, _, err := parseNexthop(body)
	return n.Nexthop, err
}

// mustRead fails the test unless a message is read as an object.
func mustRead[T comparable](t *testing.T, what string, want T, body []byte, read func([]byte) (T, error)) {
	t.Helper()
	if got, err := read(body); err != nil || got != want {
		t.Errorf("%s: %x is read as %v, %v; want %v", what, body, got, err, want)
	}
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
