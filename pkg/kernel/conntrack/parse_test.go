package conntrack

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Whatever the bytes are, a flow that is read concerns its own ends and no other address, and the request that deletes it is
// about it.
func FuzzParse(f *testing.F) {
	f.Add([]byte{})
	for kind := range uint16(20) {
		for inner := range uint16(6) {
			value := rtnl.AppendAttribute(nil, inner, rtnl.AppendAttribute(nil, inner, []byte{1, 2, 3}))
			f.Add(append([]byte{unix.AF_INET6, 0, 0, 0}, rtnl.AppendAttribute(nil, kind, value)...))
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		flow, err := parse(body)
		if err != nil {
			return
		}
		ends := map[netip.Addr]bool{}
		for _, end := range flow.ends {
			if end.IsValid() {
				ends[end] = true
			}
		}
		if flow.concerns(nil) || flow.concerns(ends) != (len(ends) > 0) || flow.concerns(map[netip.Addr]bool{{}: true}) {
			t.Errorf("%+v concerns others, or not its own ends", flow)
		}
		src, dst, back := flow.translated()
		for _, a := range []netip.Addr{src, dst, back} {
			if a.IsValid() && !ends[a] {
				t.Errorf("%+v is translated from %s to %s, back to %s", flow, src, dst, back)
			}
		}
		if c, ok := flow.copyOf(); ok && (c.valid() != nil || !ends[c.Src.Addr()] || !ends[c.Translated.Addr()] || c.insertion().String() == "") {
			t.Errorf("%+v is copied as %+v", flow, c)
		}
		for _, kind := range []uint16{typeNew, typeDelete} {
			e, ok, err := parseEvent(kind, body, func(a netip.Addr) bool { return a.IsValid() })
			if ok && (err != nil || e.valid() != nil || e.removal().String() == "" || !e.Over && e.Flow.Over()) {
				t.Errorf("%+v is the event %+v, %v", flow, e, err)
			}
		}
		if text := flow.deletion().String(); src.IsValid() && !strings.Contains(text, src.String()) {
			t.Errorf("the flow of %s is deleted by %q", src, text)
		}
	})
}

// A connection is told when it is established, and once when it ends; a datagram's flow when both sides have sent, and when it is gone.
func TestEvents(t *testing.T) {
	nest := func(kind uint16, parts ...[]byte) []byte {
		return rtnl.AppendAttribute(nil, kind, slices.Concat(parts...))
	}
	body := func(protocol, state byte, status uint32) []byte {
		f := Flow{Protocol: protocol, Src: netip.MustParseAddrPort("10.0.0.9:1"), Dst: netip.MustParseAddrPort("192.0.2.1:2")}
		r := Flow{Protocol: protocol, Src: f.Dst, Dst: netip.MustParseAddrPort("198.51.100.7:3")}
		b := slices.Concat([]byte{unix.AF_INET, 0, 0, 0}, f.tuple(ctaTupleOrig, unix.AF_INET, false), r.tuple(ctaTupleReply, unix.AF_INET, true), word(ctaStatus, status))
		if state > 0 {
			b = append(b, nest(ctaProtoInfo, nest(ctaProtoInfoTCP, nest(ctaProtoInfoTCPState, []byte{state})))...)
		}
		return b
	}
	const assured = statusSrcNAT | statusAssured | statusSeenReply
	none, begins, ends := "", "begins", "ends"
	for _, c := range []struct {
		kind            uint16
		protocol, state byte
		status          uint32
		want            string
	}{
		{typeNew, unix.IPPROTO_TCP, 2, statusSrcNAT | statusSeenReply, none},
		{typeNew, unix.IPPROTO_TCP, 3, assured, begins},
		{typeNew, unix.IPPROTO_TCP, 3, assured | statusDstNAT, none},
		{typeNew, unix.IPPROTO_TCP, 3, assured &^ statusSrcNAT, none},
		{typeNew, unix.IPPROTO_TCP, 4, assured, none},
		{typeNew, unix.IPPROTO_TCP, 0, assured, none},
		{typeNew, unix.IPPROTO_TCP, 7, assured, ends},
		{typeNew, unix.IPPROTO_TCP, 8, assured, ends},
		{typeDelete, unix.IPPROTO_TCP, 3, assured, ends},
		{typeDelete, unix.IPPROTO_TCP, 0, assured, ends}, // before Linux 5.13
		{typeDelete, unix.IPPROTO_TCP, 7, assured, none}, // that it has ended was told, and another one may have begun
		{typeNew, unix.IPPROTO_UDP, 0, statusSrcNAT | statusSeenReply, none},
		{typeNew, unix.IPPROTO_UDP, 0, assured, begins},
		{typeDelete, unix.IPPROTO_UDP, 0, assured, ends},
		{typeDelete, unix.IPPROTO_UDP, 0, statusSrcNAT, none},
	} {
		for _, wanted := range []bool{true, false} {
			e, ok, err := parseEvent(c.kind, body(c.protocol, c.state, c.status), func(a netip.Addr) bool { return wanted && a == netip.MustParseAddr("198.51.100.7") })
			got := map[bool]string{true: begins}[ok]
			if ok && e.Over {
				got = ends
			}
			want := map[bool]string{true: c.want}[wanted]
			if got != want || err != nil {
				t.Errorf("%+v, wanted %t: %q, %v", c, wanted, got, err)
			}
		}
	}
}

// Attributes of later kernels, whatever is in them, keep no flow from being read.
func TestUnknownAttributes(t *testing.T) {
	nest := func(kind uint16, parts ...[]byte) []byte {
		return rtnl.AppendAttribute(nil, kind, slices.Concat(parts...))
	}
	unknown := nest(99, []byte{0xff, 0xff, 0xff, 0xff})
	src := nest(ctaTupleIP, nest(ctaIPv4Src, []byte{10, 1, 0, 5}))
	port := nest(ctaTupleProto, nest(ctaProtoNum, []byte{unix.IPPROTO_TCP}), nest(ctaProtoDstPort, []byte{1, 187}))
	state := nest(ctaProtoInfoTCP, nest(ctaProtoInfoTCPState, []byte{tcpClose}))
	f, err := parse(slices.Concat([]byte{unix.AF_INET, 0, 0, 0}, unknown, nest(ctaTupleOrig, unknown, src, unknown, port), nest(ctaProtoInfo, unknown, state)))
	if err != nil || f.ends[0] != netip.MustParseAddr("10.1.0.5") || f.protocol != unix.IPPROTO_TCP || f.to != 443 || f.tcpState != tcpClose {
		t.Errorf("read as %+v, %v", f, err)
	}
}

// What the kernel says of a flow is with which source it goes on, where to, and whether it was answered.
func TestFound(t *testing.T) {
	at := netip.MustParseAddrPort
	for _, c := range []struct {
		name        string
		family      byte
		flow, reply Flow
		status      uint32
		want        Found
	}{
		{
			name: "TCP, translated", family: unix.AF_INET, status: statusSrcNAT | statusSeenReply,
			flow:  Flow{Protocol: unix.IPPROTO_TCP, Src: at("10.0.0.9:1"), Dst: at("192.0.2.1:443")},
			reply: Flow{Protocol: unix.IPPROTO_TCP, Src: at("192.0.2.1:443"), Dst: at("198.51.100.7:3")},
			want:  Found{Source: at("198.51.100.7:3"), Destination: at("192.0.2.1:443"), Answered: true},
		},
		{
			name: "UDP to a Service", family: unix.AF_INET6, status: statusDstNAT,
			flow:  Flow{Protocol: unix.IPPROTO_UDP, Src: at("[fd00::9]:1"), Dst: at("[fd00::1]:53")},
			reply: Flow{Protocol: unix.IPPROTO_UDP, Src: at("[fd01::2]:5353"), Dst: at("[fd00::9]:1")},
			want:  Found{Source: at("[fd00::9]:1"), Destination: at("[fd01::2]:5353")},
		},
		{
			name: "an echo", family: unix.AF_INET, status: statusSrcNAT,
			flow:  Flow{Protocol: unix.IPPROTO_ICMP, Src: at("10.0.0.9:7"), Dst: at("192.0.2.1:0")},
			reply: Flow{Protocol: unix.IPPROTO_ICMP, Src: at("192.0.2.1:8"), Dst: at("198.51.100.7:8")},
			want:  Found{Source: at("198.51.100.7:8"), Destination: at("192.0.2.1:8")},
		},
	} {
		body := slices.Concat([]byte{c.family, 0, 0, 0}, c.flow.tuple(ctaTupleOrig, c.family, false), c.reply.tuple(ctaTupleReply, c.family, true), word(ctaStatus, c.status))
		f, err := parse(body)
		if got := f.found(c.flow.Protocol); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", c.name, got, err, c.want)
		}
	}
}
