package nft

import (
	"context"
	"errors"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Host is the ruleset of a node. It drops packets of pods from addresses that aren't routed back by
// the pods' links, and packets of clients to destinations past their tunnels.
type Host struct{ *table }

// NewHost returns the ruleset of a namespace, which must stay open as long as the Host is used.
func NewHost(ns *netns.NS) (*Host, error) {
	t, err := open(ns)
	if err != nil {
		return nil, err
	}
	return &Host{t}, nil
}

// Sync makes the table as the rules say; without any there is none.
func (h *Host) Sync(ctx context.Context, r dataplane.HostRules) (dataplane.Result, error) {
	if !r.SourceGuard && len(r.Clients) == 0 {
		return dataplane.Result{}, h.remove()
	}
	var first dataplane.Result
	if r.SourceGuard && len(r.Clients) > 0 {
		// The guards of many clients take a while to make, and may fail by what tenants chose.
		exists, err := h.Exists()
		if err == nil && !exists {
			first, err = h.sync(ctx, host(dataplane.HostRules{SourceGuard: true}))
		}
		if err != nil {
			return dataplane.Result{}, err
		}
	}
	result, err := h.sync(ctx, host(r))
	if first.Changed() && err == nil {
		result = first
	}
	return result, err
}

// Check says what of the ruleset isn't as Sync makes it. Nothing is changed.
func (h *Host) Check(ctx context.Context, r dataplane.HostRules) error {
	if !r.SourceGuard && len(r.Clients) == 0 {
		return nil
	}
	return h.check(ctx, host(r))
}

// Exists says whether there is a table.
func (h *Host) Exists() (bool, error) {
	conn, err := h.connect()
	if err != nil {
		return false, err
	}
	_, err = conn.ListTableOfFamily(dataplane.NftTable, family)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// Remove removes the table; none is no error.
func (h *Host) Remove(context.Context) error { return h.remove() }

// Forged is the Counter of packets with a foreign source, and the name of the chain that drops them.
// What of clients is dropped is counted as PastTunnel.
const Forged = "forged"

// host returns the table of a node. Packets that aren't dropped go on, to other chains, too.
func host(r dataplane.HostRules) definition {
	var d definition
	if r.SourceGuard {
		d.guardSources()
	}
	if len(r.Clients) > 0 {
		d.guardClients(r.Clients)
	}
	return d
}

// guardSources drops packets with foreign sources. The hook comes before connections are tracked, so
// that a forged packet makes none.
func (d *definition) guardSources() {
	drops := chain{name: Forged}
	for _, p := range protocols {
		name := Forged + p.suffix
		d.counters = append(d.counters, name)
		if p.family == dataplane.IPv6 {
			drops.add("link-local, which is never forwarded", p.of(), p.within(linkLocal), back())
		}
		// Duplicate address detection, multicast listener reports and DHCP; never forwarded either.
		drops.add("no address yet", p.of(), p.is(p.src, p.unspecified()), back())
		drops.add("forged", p.of(), count(name), drop())
	}
	entry := chain{name: "prerouting", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityRaw}
	entry.add("from a pod, of a source that isn't routed to its link", iifgroup(dataplane.LinkGroup), sourceMissing(), jump(drops))
	d.chains = append(d.chains, drops, entry)
}
