package conntrack

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Forwarded is a flow whose destination is translated.
type Forwarded struct {
	Protocol byte // of IP, such as unix.IPPROTO_UDP
	// To is where the client sends, and Endpoint where that leads.
	To, Endpoint netip.AddrPort
}

// ForgetForwarded deletes the flows whose destination is translated, and of which the function says so. It returns how many these were. The kernel's table is read once.
// Packets of a flow that was deleted begin a new one, which goes where others that begin now go.
func (t *Table) ForgetForwarded(ctx context.Context, which func(Forwarded) bool) (int, error) {
	return t.forget(ctx, func(f flow) bool {
		to := f.forwarded()
		return to.To != to.Endpoint && which(to)
	})
}

// forwarded is where the flow leads.
func (f flow) forwarded() Forwarded {
	var as rtnl.Attributes
	_, to, _ := f.translated()
	from := f.ends[4]
	if f.family == unix.AF_INET6 {
		from = f.ends[6]
	}
	port := as.Find(f.reply, ctaTupleProto, ctaProtoSrcPort).Port()
	return Forwarded{Protocol: f.protocol, To: netip.AddrPortFrom(to, f.to), Endpoint: netip.AddrPortFrom(from, port)}
}
