package place

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Tables are the tables dataplane.NftTableFloating of a network namespace: ip and ip6, which packets meet, and arp. A packet meets the rules of
// its family alone.
type Tables struct{ ip4, ip6, arp *nft.Table }

// OpenTables returns those of a namespace, nil for the one that the process was started in. The namespace must stay open as long as they are used.
func OpenTables(ns *netns.NS) (t Tables, err error) {
	if t.ip4, err = nft.NewIP(ns, dataplane.NftTableFloating, dataplane.IPv4); err != nil {
		return t, err
	}
	if t.ip6, err = nft.NewIP(ns, dataplane.NftTableFloating, dataplane.IPv6); err != nil {
		t.ip4.Close()
		return t, err
	}
	if t.arp, err = nft.NewARP(ns, dataplane.NftTableFloating); err != nil {
		t.ip4.Close()
		t.ip6.Close()
	}
	return t, err
}

// all are the tables.
func (t Tables) all() []*nft.Table { return []*nft.Table{t.ip4, t.ip6, t.arp} }

// of is the table of a family of addresses.
func (t Tables) of(f dataplane.Family) *nft.Table {
	if f == dataplane.IPv4 {
		return t.ip4
	}
	return t.ip6
}

// Close closes them; they stay as they are. No call may be in progress.
func (t Tables) Close() {
	for _, table := range t.all() {
		table.Close()
	}
}

// Dropping returns the base chains of all tables that drop forwarded packets unless a rule accepts them; see nft.Table.
func (t Tables) Dropping() ([]string, error) { return t.ip4.Dropping() }

// exist says whether there are any.
func (t Tables) exist(ctx context.Context) (bool, error) {
	for _, table := range t.all() {
		if exists, err := table.Exists(ctx); exists || err != nil {
			return exists, err
		}
	}
	return false, nil
}

// complete says whether there are those that some addresses need. Elements that end by themselves are gone with a table.
func (t Tables) complete(ctx context.Context, addrs []netip.Addr) (bool, error) {
	needed := map[*nft.Table]bool{}
	for _, a := range addrs {
		needed[t.of(dataplane.FamilyOf(a))] = true
		needed[t.arp] = needed[t.arp] || a.Is4()
	}
	for _, table := range t.all() {
		if !needed[table] {
			continue
		}
		if exists, err := table.Exists(ctx); !exists || err != nil {
			return false, err
		}
	}
	return true, nil
}

// services returns the Services at some addresses, as the tables have them.
func (t Tables) services(ctx context.Context, at map[netip.Addr]bool) (all []ruleset.Service, err error) {
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		elements, err := t.of(f).Counted(ctx, ruleset.Ports(f))
		if err != nil {
			return nil, err
		}
		var keys []string
		for _, e := range elements {
			keys = append(keys, e.Key)
		}
		ports := ruleset.ServicesOf(f, keys)
		for a := range at {
			if dataplane.FamilyOf(a) == f {
				all = append(all, ruleset.Service{Address: a, Ports: ports[a]})
			}
		}
	}
	return all, nil
}

// sync makes them.
func (t Tables) sync(ctx context.Context, want ruleset.Floating) (dataplane.Result, error) {
	made4, err4 := t.ip4.Sync(ctx, want.Ruleset(dataplane.IPv4))
	made6, err6 := t.ip6.Sync(ctx, want.Ruleset(dataplane.IPv6))
	madeARP, errARP := t.arp.Sync(ctx, want.ARP())
	return made4.Plus(made6).Plus(madeARP), errors.Join(err4, err6, errARP)
}

// open lets packets of some addresses pass for a time.
func (t Tables) open(ctx context.Context, jobs []*job, lasting func(floating.Order) time.Duration) error {
	return nft.Renew(ctx, t.renewals(jobs, lasting)...)
}

// close lets no packets of some addresses pass any more, and says whether there are all tables: else there may be none that drops them.
func (t Tables) close(ctx context.Context, jobs []*job) (complete bool, err error) {
	var here []nft.Renewals
	complete = true
	for _, of := range t.renewals(jobs, func(floating.Order) time.Duration { return 0 }) {
		exists, err := of.Table.Exists(ctx)
		switch {
		case err != nil:
			return false, err
		case exists:
			here = append(here, of)
		default:
			complete = false
		}
	}
	return complete, nft.Renew(ctx, here...)
}

// renewals are the elements of the tables that say for how long the node answers for some addresses.
func (t Tables) renewals(jobs []*job, lasting func(floating.Order) time.Duration) (all []nft.Renewals) {
	elements := map[*nft.Table][]nft.Renewal{}
	for _, j := range jobs {
		for _, a := range j.order.Addrs() {
			f := dataplane.FamilyOf(a)
			r := nft.Renewal{Set: ruleset.Answering(f), Key: dataplane.KeyOf(a), For: lasting(j.order)}
			elements[t.of(f)] = append(elements[t.of(f)], r)
			if f == dataplane.IPv4 {
				elements[t.arp] = append(elements[t.arp], r)
			}
		}
	}
	for _, table := range t.all() {
		if of := elements[table]; len(of) > 0 {
			all = append(all, nft.Renewals{Table: table, Elements: of})
		}
	}
	return all
}
