package conntrack

import (
	"context"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Found is what the kernel knows of a flow.
type Found struct {
	// Source is what packets go on with as their source, and Destination where they go: the flow's own, unless they are translated. The ports of an echo are its identifier.
	Source, Destination netip.AddrPort
	// Answered says that packets came back.
	Answered bool
}

// Find looks a flow of zone 0 up, by the protocol, the source and the destination of its first packet, and says whether it is tracked. Only this one is read. A flow whose first
// packet was dropped isn't tracked. The port of an echo's source is its identifier.
func (t *Table) Find(ctx context.Context, protocol byte, src, dst netip.AddrPort) (found Found, ok bool, err error) {
	f := Flow{Protocol: protocol, Src: src, Dst: dst, Translated: src}
	if err := f.valid(); err != nil {
		return found, false, err
	}
	if _, limit, err := t.Size(); err != nil || limit == 0 {
		return found, false, err // the kernel isn't made to load the module that could
	}
	family := f.family()
	b := append([]byte{family, 0, 0, 0}, f.tuple(ctaTupleOrig, family, false)...)
	err = t.h.Get(ctx, rtnl.NewRequest(typeGet, 0, b, "conntrack -G %s", f), func(body []byte) error {
		x, err := parse(body)
		if err == nil {
			found, ok = x.found(protocol), true
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return Found{}, false, nil // nfnetlink may know no such subsystem
	}
	return found, ok, err
}

// found is read from the tuple of the answers.
func (f *flow) found(protocol byte) Found {
	var as rtnl.Attributes
	at := func(kind uint16) uint16 { return as.Find(f.reply, ctaTupleProto, kind).Port() }
	_, _, back := f.translated()
	x := Found{Source: netip.AddrPortFrom(back, at(ctaProtoDstPort)), Destination: f.forwarded().Endpoint, Answered: f.status&statusSeenReply != 0}
	if id, is := echoID[protocol]; is {
		x.Source, x.Destination = netip.AddrPortFrom(back, at(id)), netip.AddrPortFrom(x.Destination.Addr(), at(id))
	}
	return x
}

// Sent are the flows that a question asks for and that are tracked; nil with an error.
func (t *Table) Sent(ctx context.Context, q inspection.Flows) ([]inspection.Flow, error) {
	all := []inspection.Flow{}
	for _, id := range q.IDs {
		f, ok, err := t.Find(ctx, protocolOf(q.Protocol, q.Client.Is4()), netip.AddrPortFrom(q.Client, id), q.To)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		told := inspection.Flow{ID: id, Source: f.Source.String(), Destination: f.Destination.String(), Answered: f.Answered}
		if q.Protocol == inspection.ICMP {
			told.Source, told.Destination = f.Source.Addr().String(), f.Destination.Addr().String()
		}
		all = append(all, told)
	}
	return all, nil
}

// protocolOf is the number of a protocol in a family.
func protocolOf(name string, v4 bool) byte {
	switch {
	case name == inspection.TCP:
		return unix.IPPROTO_TCP
	case name == inspection.UDP:
		return unix.IPPROTO_UDP
	case v4:
		return unix.IPPROTO_ICMP
	}
	return unix.IPPROTO_ICMPV6
}
