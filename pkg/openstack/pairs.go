package openstack

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
	"go4.org/netipx"
)

const (
	// pairTries is how often a port is read and written while others change it.
	pairTries = 10
	// idsInQuery keeps URLs short.
	idsInQuery = 50
)

// gateway is the port of a machine that uses addresses, in Neutron's words.
type gateway struct {
	ID       string              `json:"id"`
	MAC      string              `json:"mac_address"`
	Revision int                 `json:"revision_number"`
	Pairs    []ports.AddressPair `json:"allowed_address_pairs"`
	// Secure is nil where the cloud has no such extension, and all ports are secure.
	Secure *bool `json:"port_security_enabled"`
}

var gatewayFields = []string{"id", "mac_address", "revision_number", "allowed_address_pairs", "port_security_enabled"}

// EnsurePairs makes the allowed address pairs of the gateways' ports include what is wanted: the addresses of seen that gateways may use, or
// ranges that an admin has named. seen is what List has returned.
//
// A pair is Coil's if it has the port's own MAC address, and is wanted or has addresses of seen only. Those of Coil that aren't wanted are taken
// away; all others stay. So the pair of an address is to be taken away before the address is deleted. A range stays
// when it isn't wanted any more: it is the admin's to take away.
//
// Single addresses are written if the port may have so many pairs. If not, they are joined to prefixes that have
// these addresses and no others. Under OVN a floating IP works only with the single address: the driver compares texts.
//
// It is one call for 50 gateways, and two more for each whose pairs change. A port without port security has no pairs: it may use any address.
func (c *Client) EnsurePairs(ctx context.Context, gateways []string, want []netip.Prefix, seen []Address) error {
	own, err := ownAddresses(want, seen)
	if err != nil {
		return misconfigured("the wanted address pairs: %w", err)
	}
	w := wantedPairs{want, own, c.cfg.MaxPairs}
	return c.do(ctx, func(s *session) error {
		var errs []error
		for ids := range slices.Chunk(gateways, idsInQuery) {
			found, err := s.gateways(ctx, ids)
			if err != nil {
				return errors.Join(append(errs, err)...)
			}
			of := make([]error, len(ids))
			var all sync.WaitGroup
			for i, id := range ids {
				all.Go(func() { of[i] = s.ensurePairs(ctx, id, found[id], w) })
			}
			all.Wait()
			errs = append(errs, of...)
		}
		return errors.Join(errs...)
	})
}

// gateways reads ports of gateways, by their IDs. They may be of another project.
func (s *session) gateways(ctx context.Context, ids []string) (map[string]*gateway, error) {
	found := map[string]*gateway{}
	q := query(url.Values{"id": ids, "fields": gatewayFields})
	type answer struct{ Ports []*gateway }
	err := pages(ctx, ports.List(s.net, q), func(a answer) {
		for _, g := range a.Ports {
			found[g.ID] = g
		}
	})
	return found, explain("read the ports of gateways", err)
}

// ensurePairs writes the pairs of a port, if they change. When somebody else has written it meanwhile, it is read again.
func (s *session) ensurePairs(ctx context.Context, id string, g *gateway, w wantedPairs) error {
	doing := "write the address pairs of gateway port " + id
	for try := 1; ; try++ {
		if g == nil {
			return &Error{Reason: NotFound, Doing: doing, Message: "there is no such port, or it isn't for this project to see"}
		}
		pairs, change, err := w.plan(g)
		if e := new(Error); errors.As(err, &e) {
			e.Doing = doing
		}
		if err != nil || !change {
			return err
		}
		opts := ports.UpdateOpts{AllowedAddressPairs: &pairs, RevisionNumber: &g.Revision}
		err = explain(doing, ports.Update(ctx, s.net, id, opts).Err)
		if e := new(Error); errors.As(err, &e) && e.Reason == TooManyPairs {
			e.Message += "; " + fewerPairs
		}
		if ReasonOf(err) != Changed || try == pairTries {
			return err
		}
		select {
		case <-time.After(rand.N(time.Duration(try) * 50 * time.Millisecond)):
		case <-ctx.Done():
			return explain(doing, context.Cause(ctx))
		}
		found, err := s.gateways(ctx, []string{id})
		if err != nil {
			return err
		}
		g = found[id]
	}
}

// fewerPairs says what helps when a port can't have so many pairs.
const fewerPairs = "use fewer addresses, allow the gateways a whole range, or have max_allowed_address_pair of Neutron raised"

// wantedPairs are what gateways are to have.
type wantedPairs struct {
	want  []netip.Prefix
	own   *netipx.IPSet // the addresses whose pairs are Coil's, whoever has written them
	limit int
}

// ownAddresses are the addresses whose pairs are Coil's. A wanted range isn't among them: others may have pairs inside of it.
func ownAddresses(want []netip.Prefix, seen []Address) (*netipx.IPSet, error) {
	var b netipx.IPSetBuilder
	for _, p := range want {
		if !p.IsValid() {
			return nil, fmt.Errorf("%s is no range", p)
		}
		if p.IsSingleIP() {
			b.Add(p.Addr())
		}
	}
	for _, a := range seen {
		for _, f := range a.Fixed {
			b.Add(f)
		}
	}
	return b.IPSet()
}

// owns says whether a pair with the port's MAC address is Coil's.
func (w wantedPairs) owns(p netip.Prefix) bool {
	return w.own.ContainsPrefix(p) || slices.ContainsFunc(w.want, func(o netip.Prefix) bool { return o.Masked() == p })
}

// plan returns the pairs that a port is to have, and whether that is a change. Others may have written the same address in another
// way, as Neutron keeps texts: they are compared as what they mean.
func (w wantedPairs) plan(g *gateway) (next []ports.AddressPair, change bool, err error) {
	if g.Secure != nil && !*g.Secure {
		return nil, false, nil
	}
	has := map[netip.Prefix]bool{}
	for _, p := range g.Pairs {
		if prefix, ok := parsePair(p.IPAddress); ok && p.MACAddress == g.MAC && w.owns(prefix) {
			has[prefix] = true
		} else {
			next = append(next, p)
		}
	}
	goal, err := fit(w.want, w.limit-len(next))
	if err != nil {
		return nil, false, &Error{Reason: TooManyPairs, Message: err.Error() + "; " + fewerPairs, err: err}
	}
	change = len(goal) != len(has)
	for _, p := range goal {
		change = change || !has[p]
		next = append(next, ports.AddressPair{IPAddress: pairText(p)})
	}
	if next == nil {
		next = []ports.AddressPair{} // which clears them
	}
	return next, change, nil
}

// fit returns what is wanted in no more prefixes than there is room for, sorted.
func fit(want []netip.Prefix, room int) ([]netip.Prefix, error) {
	goal := make([]netip.Prefix, 0, len(want))
	for _, p := range want {
		goal = append(goal, p.Masked())
	}
	slices.SortFunc(goal, netip.Prefix.Compare)
	goal = slices.Compact(goal)
	if len(goal) <= room {
		return goal, nil
	}
	var b netipx.IPSetBuilder
	for _, p := range goal {
		b.AddPrefix(p)
	}
	set, err := b.IPSet()
	if err != nil {
		return nil, err
	}
	joined := set.Prefixes()
	if len(joined) > room {
		return nil, fmt.Errorf("%d addresses need %d address pairs, and there is room for %d", len(goal), len(joined), max(room, 0))
	}
	return joined, nil
}

// parsePair reads the text of a pair: an address, or one with the length of a prefix.
func parsePair(text string) (netip.Prefix, bool) {
	if a := parse(text); a.IsValid() && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	p, err := netip.ParsePrefix(text)
	return p.Masked(), err == nil
}

// pairText writes a pair: a single address without a length, as OVN's driver looks for it.
func pairText(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}
