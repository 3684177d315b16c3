package natgateway

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Readers compare what a gateway made with what there is, by the functions that repair it, and change nothing.
type Readers struct {
	Tunnels interface {
		Missing(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]error, error)
	}
	Routes interface {
		Missing(ctx context.Context, want []dataplane.Route) ([]dataplane.Route, error)
	}
	Rules interface {
		Missing(ctx context.Context, want []dataplane.Rule) ([]dataplane.Rule, error)
	}
	Filter interface {
		// Differs says in which ways the table isn't as Sync makes it.
		Differs(ctx context.Context, want ruleset.Gateway) error
		Counters(ctx context.Context) ([]nft.Counter, error)
	}
	// Way is the route that a packet takes.
	Way func(ctx context.Context, p rtnl.Packet) (string, error)
	// Traffic counts the packets of a link, by its name.
	Traffic func(ctx context.Context, link string) (rtnl.Traffic, error)
	// Sent are the flows that are tracked, of those that a question asks for.
	Sent func(ctx context.Context, q inspection.Flows) ([]inspection.Flow, error)
}

// Differs is Check of the table.
func (n Nft) Differs(ctx context.Context, want ruleset.Gateway) error {
	return n.Check(ctx, want.Ruleset())
}

// question says what an answer is about.
type question struct {
	text string
	// client selects the clients; brief leaves out those that are as they should be.
	client func(address netip.Addr, pods []string) bool
	brief  bool
	// from and to are of the way that is asked for; invalid for none.
	from, to netip.Addr
	// flows are asked for, if there are any.
	flows inspection.Flows
}

// made is the state that a sync has made, with the links of tunnels.
type made struct {
	gateway.State
	links map[netip.Addr]dataplane.TunnelLink
}

// inspect compares what was made with what there is in the kernel.
func (g *Gateway) inspect(ctx context.Context, r Readers, q question) inspection.RouterAnswer {
	a := inspection.RouterAnswer{
		Question: q.text, Clients: []inspection.RouterClient{}, Shared: []inspection.Comparison{},
		Router: inspection.Router{
			Namespace: g.cfg.Namespace, Egress: g.cfg.Egress, Pod: g.cfg.Pod, Addresses: textsOf(g.cfg.Addresses), Destinations: []string{},
		},
	}
	problem := func(what string, err error) {
		if err != nil {
			a.Problems = append(a.Problems, what+": "+err.Error())
		}
	}
	var err error
	a.Router.Conntrack.Count, a.Router.Conntrack.Limit, err = g.kernel.Flows.Size()
	problem("count connections", err)
	counters, err := r.Filter.Counters(ctx)
	problem("read the counters", err)
	a.Translated, a.Dropped = counted(counters)
	g.mu.Lock()
	applied, links, uplink := g.applied, g.links, g.uplink // which nobody changes
	g.mu.Unlock()
	a.Router.Uplink = uplink.Name
	if applied == nil {
		a.Problems = append(a.Problems, "the router hasn't been set up yet")
		return a
	}
	m := made{*applied, links}
	m.describe(&a.Router)
	a.Clients, err = m.clients(ctx, r, q)
	problem("compare clients", err)
	a.Shared = m.shared(ctx, r)
	if q.to.IsValid() {
		a.Way, err = m.way(ctx, r, q)
		problem("look up the way to "+q.to.String(), err)
	}
	if len(q.flows.IDs) > 0 {
		a.Flows, err = r.Sent(ctx, q.flows)
		problem("look for flows", err)
	}
	return a
}

// describe says what a router has.
func (m made) describe(r *inspection.Router) {
	r.Clients, r.Tunnels, r.MaxPerClient, r.Over, r.Transits = len(m.Tunnels), len(m.links), m.MaxPerClient, textsOf(m.Over), textsOf(m.Transits)
	if m.Floating != nil {
		r.Floating = textsOf(slices.DeleteFunc(slices.Clone(m.Floating.Addresses), func(a netip.Addr) bool { return slices.Contains(m.Transits, a) }))
	}
	for _, d := range m.Destinations {
		r.Destinations = append(r.Destinations, d.String())
	}
}

// clients compares what clients need.
func (m made) clients(ctx context.Context, r Readers, q question) ([]inspection.RouterClient, error) {
	pods := map[netip.Addr][]string{}
	for _, p := range m.Pods {
		pods[p.Addr] = append(pods[p.Addr], p.Namespace+"/"+p.Name)
	}
	only := gateway.State{Config: m.Config}
	for _, t := range m.Tunnels {
		if q.client(t.Remote, pods[t.Remote]) {
			only.Tunnels = append(only.Tunnels, t)
		}
	}
	all := []inspection.RouterClient{}
	if len(only.Tunnels) == 0 {
		return all, nil
	}
	wrong, err := r.Tunnels.Missing(ctx, only.Tunnels)
	if err != nil {
		return all, err
	}
	routes, _ := only.Routes(m.links)
	missing, err := r.Routes.Missing(ctx, routes)
	if err != nil {
		return all, err
	}
	objects := map[netip.Addr][]inspection.Comparison{}
	for _, t := range only.Tunnels {
		c := inspection.Comparison{Topic: inspection.RouterTunnel, Object: "tunnel to " + t.Remote.String(), Want: t.String(), Have: t.String(), OK: true}
		if err := wrong[t.Remote]; err != nil {
			c.OK, c.Have = false, err.Error()
		} else if m.links[t.Remote].Index == 0 {
			c.OK, c.Have = false, ""
		}
		objects[t.Remote] = append(objects[t.Remote], c)
	}
	for _, route := range routes {
		to := route.Dst.Addr()
		c := inspection.Comparison{Topic: inspection.RouterRoute, Object: "route to " + to.String(), Want: route.String(), Have: route.String(), OK: true}
		if slices.Contains(missing, route) {
			c.OK, c.Have = false, ""
		}
		objects[to] = append(objects[to], c)
	}
	for _, t := range only.Tunnels {
		c := inspection.RouterClient{Address: t.Remote.String(), Pods: pods[t.Remote], Link: m.links[t.Remote].Name, Objects: objects[t.Remote]}
		if q.brief {
			c.Objects = inspection.Wrong(c.Objects)
		} else if c.Link != "" {
			if n, err := r.Traffic(ctx, c.Link); err == nil { // a tunnel that is missing is told above
				c.Traffic = &inspection.LinkTraffic{Link: c.Link, Out: n.In, Back: n.Out, Lost: n.Lost}
			}
		}
		if !q.brief || len(c.Objects) > 0 {
			all = append(all, c)
		}
	}
	return all, nil
}

// shared compares what all clients need.
func (m made) shared(ctx context.Context, r Readers) (all []inspection.Comparison) {
	_, rules := m.Routes(m.links)
	missing, err := r.Rules.Missing(ctx, rules)
	for _, rule := range rules {
		c := inspection.Comparison{Topic: inspection.RouterRules, Object: fmt.Sprintf("rule %d (%s)", rule.Priority, rule.Family), Want: rule.String(), Have: rule.String(), OK: true}
		if err != nil {
			c.Unknown = err.Error()
		} else if slices.Contains(missing, rule) {
			c.OK, c.Have = false, ""
		}
		all = append(all, c)
	}
	const so = "as coil-egress makes it"
	table := inspection.Comparison{Topic: inspection.RouterFilter, Object: "table inet " + dataplane.NftTable, Want: so, Have: so, OK: true}
	if err := r.Filter.Differs(ctx, m.Filter(m.links)); err != nil {
		table.OK, table.Have = false, err.Error()
	}
	return append(all, table)
}

// way says how packets of a client leave.
func (m made) way(ctx context.Context, r Readers, q question) (*inspection.RouterWay, error) {
	from, to := q.from, q.to
	w := &inspection.RouterWay{Client: from.String(), Destination: to.String(), Allowed: m.Allows(to)}
	source := m.SourceOf(from, to)
	switch {
	case !slices.ContainsFunc(m.Tunnels, func(t dataplane.Tunnel) bool { return t.Remote == from }):
		w.Why = "the router has no client with this address"
	case !w.Allowed:
		w.Why = "it is no destination of the Egress"
	case slices.Contains(m.Over, from):
		w.Why = "the client has more connections than one may have"
	case !source.IsValid():
		w.Why = "the client has no address of the family by which it could leave"
	default:
		w.Source = source.String()
		if slices.Contains(m.Transits, source) {
			w.Why = "the router's node translates this address to its own"
		}
	}
	var err error
	w.Route, err = r.Way(ctx, rtnl.Packet{To: to, From: from, In: m.links[from].Index, Mark: dataplane.MarkFiltered}) // as the filter lets it pass
	return w, err
}

// counted are the packets that left with another source, and those that were dropped, by the reason, of all families.
func counted(all []nft.Counter) (translated uint64, dropped map[string]uint64) {
	dropped = map[string]uint64{}
	for _, c := range all {
		if name, _ := dataplane.CutFamily(c.Name); name == ruleset.Masqueraded {
			translated += c.Packets
		} else if c.Packets > 0 {
			dropped[name] += c.Packets
		}
	}
	return translated, dropped
}

func textsOf(addrs []netip.Addr) []string {
	all := []string{}
	for _, a := range addrs {
		all = append(all, a.String())
	}
	return all
}
