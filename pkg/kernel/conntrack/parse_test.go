package conntrack

import (
	"net/netip"
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
