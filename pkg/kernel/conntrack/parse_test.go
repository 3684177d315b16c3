package conntrack

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// No bytes make a parser panic.
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
		flow.translated()
		flow.concerns(map[netip.Addr]bool{})
		flow.deletion()
	})
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
