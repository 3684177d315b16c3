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
		if text := flow.deletion().String(); src.IsValid() && !strings.Contains(text, src.String()) {
			t.Errorf("the flow of %s is deleted by %q", src, text)
		}
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
