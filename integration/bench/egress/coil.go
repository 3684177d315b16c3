package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/bench/figures"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/fou"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/rule"
	"github.com/coil-net/coil/pkg/kernel/tunnel"
	"github.com/coil-net/coil/pkg/natgateway"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const port = dataplane.FouPort

// The ends of Coil's tunnels, and the floating address by which clients of the second router leave.
var (
	sender    = ipam.Address{IPv4: netip.MustParseAddr("10.0.1.2"), IPv6: netip.MustParseAddr("fd00:1::2")}
	router    = ipam.Address{IPv4: netip.MustParseAddr("10.0.3.2"), IPv6: netip.MustParseAddr("fd00:3::2")}
	addressed = ipam.Address{IPv4: netip.MustParseAddr("10.0.6.2"), IPv6: netip.MustParseAddr("fd00:6::2")}
	held      = ipam.Address{IPv4: netip.MustParseAddr("203.0.113.7"), IPv6: netip.MustParseAddr("2001:db8:113::7")}
)

// coil is a router of an Egress, whose kernel objects are those of coil-egress.
type coil struct {
	cfg     gateway.Config
	tunnels *tunnel.Syncer
	routes  *route.Syncer
	rules   *rule.Syncer
	filter  natgateway.Nft
	// leaveBy is the floating address of all clients; none if they leave by the router's.
	leaveBy ipam.Address
}

// newCoil makes the client's side and a router without clients.
func newCoil(ctx context.Context) (*coil, error) {
	service := client.Egress{Name: "internet/service", Peers: router, Destinations: to(viaService)}
	direct := client.Egress{Name: "internet/direct", Direct: true, Destinations: to(viaDirect)}
	floating := client.Egress{Name: "internet/floating", Peers: addressed, Destinations: to(viaFloating)}
	for _, a := range router.Addrs() {
		direct.Routers = append(direct.Routers, client.Router{Addr: a, State: client.RouterLive})
	}
	if err := makeClient(ctx, "client", sender, service, direct, floating); err != nil {
		return nil, err
	}
	return newRouter(ctx, "coil", router)
}

// to are the destinations that a path leads to.
func to(via int) (all []netip.Prefix) {
	for _, f := range families {
		a := targets[f][via]
		all = append(all, netip.PrefixFrom(a, a.BitLen()))
	}
	return all
}

// newFloating makes a router whose clients leave by a floating address, and the tables of the node that has the address. The node answers for it for
// a day, which is longer than the machine runs.
func newFloating(ctx context.Context) (*coil, error) {
	node, err := netlab.Named("floating-node") // it lives as long as the machine, too
	if err != nil {
		return nil, err
	}
	own := []netip.Addr{netip.MustParseAddr("10.0.6.1"), netip.MustParseAddr("10.1.6.2"), netip.MustParseAddr("fd00:6::1"), netip.MustParseAddr("fd01:6::2")}
	for i, f := range families {
		table, err := nft.NewIP(node.NS, dataplane.NftTableFloating, f)
		if err != nil {
			return nil, err
		}
		if _, err := table.Sync(ctx, ruleset.Floating{Addresses: held.Addrs(), OfEgresses: held.Addrs(), Local: own}.Ruleset(f)); err != nil {
			return nil, err
		}
		if err := table.Renew(ctx, nft.Renewal{Set: ruleset.Answering(f), Key: dataplane.KeyOf(held.Addrs()[i]), For: 24 * time.Hour}); err != nil {
			return nil, err
		}
	}
	c, err := newRouter(ctx, "floating", addressed)
	if err == nil {
		c.leaveBy = held
	}
	return c, err
}

// makeClient makes a namespace a client of Egresses, as coild does.
func makeClient(ctx context.Context, name string, addr ipam.Address, egresses ...client.Egress) error {
	at, err := netnsOf(name)
	if err != nil {
		return err
	}
	_, err = clientnet.New(dataplane.ProtocolNode, clientnet.FoU{}, nil).Client(ctx, at, client.Client{
		Address: addr, Link: "eth0", MTU: 1500, Port: port, Protocol: dataplane.ProtocolNode, Idle: 2 * time.Minute, Egresses: egresses,
	})
	if err != nil {
		return fmt.Errorf("client %s: %w", name, err)
	}
	return nil
}

// netnsOf returns a namespace by its name.
func netnsOf(name string) (store.Netns, error) {
	at, err := netlab.Named(name)
	if err != nil {
		return store.Netns{}, err
	}
	return store.Netns{Path: at.String(), Inode: at.Inode()}, at.Close()
}

// newRouter makes a namespace a router with these addresses, without clients.
func newRouter(ctx context.Context, name string, addrs ipam.Address) (*coil, error) {
	// All of them live as long as the machine.
	at, err := netlab.Named(name)
	if err != nil {
		return nil, err
	}
	ns := at.NS
	h, err := rtnl.New(ns)
	if err != nil {
		return nil, err
	}
	uplink, err := h.LinkByName(ctx, "eth0")
	if err != nil {
		return nil, err
	}
	table, err := nft.New(ns, dataplane.NftTable)
	if err != nil {
		return nil, err
	}
	c := &coil{
		cfg:     gateway.Config{Addresses: addrs.Addrs(), Uplink: uplink.Name, UplinkIndex: uplink.Index, MTU: uplink.MTU, Port: port},
		tunnels: tunnel.New(h), filter: natgateway.Nft{Table: table},
		routes: route.New(h, dataplane.ProtocolNode, dataplane.TableWide),
		rules:  rule.New(h, dataplane.ProtocolNode, dataplane.RouterPriorities...),
	}
	return c, fou.Ensure(ctx, ns, port, families...)
}

// crowd is the addresses of so many clients: the one that measures, and others.
func crowd(clients int) []ipam.Address {
	var all []ipam.Address
	for i := range clients {
		a := sender
		if i > 0 {
			a = ipam.Address{IPv4: netip.AddrFrom4([4]byte{10, 64, byte(i >> 8), byte(i)}), IPv6: netip.MustParseAddr(fmt.Sprintf("fd64::%x", i))}
		}
		all = append(all, a)
	}
	return all
}

// state is what the router has with these clients.
func (c *coil) state(clients []ipam.Address) gateway.State {
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "nat-clients-0"}}
	for i, a := range clients {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a.IPv4.String(), a.IPv6.String()}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "clients", Name: fmt.Sprint("p", i), UID: types.UID(fmt.Sprint(i))},
		})
	}
	e := &v2.Egress{Spec: v2.EgressSpec{Destinations: []string{"192.0.2.0/24", "2001:db8::/64"}}}
	if a := c.leaveBy; len(a.Addrs()) > 0 {
		e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfClient}
		e.Status.Addresses = []v2.EgressAddressStatus{{EgressAddress: v2.EgressAddress{IPv4: a.IPv4.String(), IPv6: a.IPv6.String()}}}
		slice.Annotations = map[string]string{v2.AnnotationAddress: a.IPv4.String() + "," + a.IPv6.String()}
	}
	g, _ := gateway.StateOf(c.cfg, e, []*discoveryv1.EndpointSlice{slice})
	return g
}

// resize gives the router so many clients, starting from none, and says how long that took.
func (c *coil) resize(ctx context.Context, clients int) (Sync, error) {
	s := Sync{Clients: clients}
	if _, err := c.sync(ctx, gateway.State{Config: c.cfg}); err != nil {
		return s, err
	}
	now, more := c.state(crowd(clients)), c.state(crowd(clients+1))
	for _, step := range []struct {
		sync func() (time.Duration, error)
		took *float64
	}{
		{func() (time.Duration, error) { return c.sync(ctx, now) }, &s.All},
		{func() (time.Duration, error) { return c.sync(ctx, now) }, &s.None},
		{func() (time.Duration, error) { return c.follow(ctx, now, more) }, &s.One},
	} {
		took, err := step.sync()
		if err != nil {
			return s, err
		}
		*step.took = figures.Milliseconds(took)
	}
	return s, nil
}

// follow makes what clients need that came since before, in the order of coil-egress.
func (c *coil) follow(ctx context.Context, before, g gateway.State) (time.Duration, error) {
	links, err := c.tunnels.Links(ctx)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	change, ok := g.Since(before)
	if !ok {
		return 0, errors.New("more has changed than clients")
	}
	made, err := c.tunnels.Add(ctx, change.Came)
	if err != nil {
		return 0, err
	}
	maps.Copy(links, made)
	routes, _ := gateway.State{Tunnels: change.Came}.Routes(links)
	if err := c.routes.Add(ctx, routes...); err != nil {
		return 0, err
	}
	_, err = c.filter.Sync(ctx, g.Filter(links))
	return time.Since(start), err
}

// sync makes what a router should have, in the order of coil-egress.
func (c *coil) sync(ctx context.Context, g gateway.State) (time.Duration, error) {
	start := time.Now()
	links, _, tunnelErr := c.tunnels.Ensure(ctx, g.Tunnels)
	routes, rules := g.Routes(links)
	_, ruleErr := c.rules.Sync(ctx, rules)
	_, routeErr := c.routes.Sync(ctx, routes)
	_, filterErr := c.filter.Sync(ctx, g.Filter(links))
	_, pruneErr := c.tunnels.Prune(ctx, g.Tunnels)
	return time.Since(start), errors.Join(tunnelErr, ruleErr, routeErr, filterErr, pruneErr)
}
