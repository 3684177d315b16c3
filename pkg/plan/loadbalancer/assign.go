package loadbalancer

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
)

// use is an address with the Services that get it.
type use struct {
	Address
	addrs    []netip.Addr // of the Address
	made     bool         // by this plan
	services []*Service

	// Most addresses are of one claim, and have one Service: here is room for these.
	self  [1]*use
	first [1]*Service
}

// serve adds a Service.
func (u *use) serve(s *Service) {
	if u.services == nil {
		u.services = u.first[:0]
	}
	u.services = append(u.services, s)
}

// assigner makes a plan. A plan of thousands of Services is made for each change, so it looks at all addresses for none of them.
type assigner struct {
	Facts
	uses    []*use
	byClaim map[string]*use
	byAddr  map[netip.Addr][]*use
	byPool  map[string][]*use
	// full is how many addresses of a pool, from the first one, have no room for Services of some kind. An address only gets fuller.
	full map[kindIn]int
}

// kindIn is a kind of Services that look for an address in a pool, only among those that are known if that is asked.
type kindIn struct {
	pool  string
	known bool
	kind  string
}

// add adds an address.
func (a *assigner) add(u *use) {
	u.addrs = u.Addrs()
	a.uses = append(a.uses, u)
	a.byClaim[u.Claim] = u
	a.byPool[u.Pool] = append(a.byPool[u.Pool], u)
	u.self[0] = u
	for _, addr := range u.addrs {
		if others := a.byAddr[addr]; others != nil {
			a.byAddr[addr] = append(others, u)
		} else {
			a.byAddr[addr] = u.self[:]
		}
	}
}

// having are the uses of an address that has all of some addresses.
func (a *assigner) having(addrs []netip.Addr) (all []*use) {
	for _, u := range a.byAddr[addrs[0]] {
		if !slices.ContainsFunc(addrs, func(addr netip.Addr) bool { return !slices.Contains(u.addrs, addr) }) {
			all = append(all, u)
		}
	}
	return all
}

// Assign says which Service gets which address. Services are served in groups, and in each group the oldest first:
//
//	has an address            keeps it, unless an older Service has it and can't share it. Nobody else gets one that a Service still says it has
//	waits for a new one       keeps waiting, unless one that is there has room for it by now
//	asks for one by name      gets that one, or none
//	takes any                 gets the first address with room for it, or a new one
func Assign(f Facts) Plan {
	n := len(f.Addresses)
	a := assigner{Facts: f, uses: make([]*use, 0, n), byClaim: make(map[string]*use, n), byAddr: make(map[netip.Addr][]*use, n), byPool: map[string][]*use{}, full: map[kindIn]int{}}
	var idle []string
	uses := make([]use, n)
	for i, addr := range f.Addresses {
		if uses[i].Address = addr; !addr.Asked {
			a.add(&uses[i])
		}
	}
	for i, addr := range f.Addresses {
		switch {
		case !addr.Asked:
		case len(addr.Addrs()) > 0 && len(a.having(addr.Addrs())) > 0:
			idle = append(idle, addr.Claim) // it never gets what another claim of ours has
		default:
			a.add(&uses[i])
		}
	}
	order := make([]int, len(f.Services))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int { return age(&f.Services[i], &f.Services[j]) })
	plan := Plan{Given: make([]Given, len(f.Services)), Idle: idle}
	group := func(has func(*Service) bool, give func(*Service) Given) {
		for _, i := range order {
			s, before := &f.Services[i], plan.Given[i]
			if before.Claim != "" || s.Leaving || !has(s) {
				continue
			}
			g := give(s)
			if g.Reason == "" {
				g.Reason, g.Message = before.Reason, before.Message // of the address that it had
			}
			plan.Given[i] = g
		}
	}
	group(func(s *Service) bool { return s.Claim != "" || len(s.Has) > 0 }, a.keep)
	for _, i := range order {
		a.stays(&f.Services[i], plan.Given[i])
	}
	for _, i := range order {
		plan.Given[i] = a.sooner(&f.Services[i], plan.Given[i])
	}
	group(func(s *Service) bool { return s.Invalid != "" }, func(s *Service) Given { return Given{Reason: Invalid, Message: s.Invalid} })
	group(func(s *Service) bool { return s.Invalid == "" && len(s.Wants) > 0 }, a.named)
	group(func(s *Service) bool { return s.Invalid == "" && len(s.Wants) == 0 }, a.any)
	for _, u := range a.uses {
		switch used := len(u.services) > 0; {
		case u.made && used:
			plan.Make = append(plan.Make, u.Address)
		case !u.made && !used:
			plan.Idle = append(plan.Idle, u.Claim)
		}
	}
	return plan
}

// refused is what a Service gets that gets nothing.
func refused(r Reason, format string, args ...any) Given {
	return Given{Reason: r, Message: fmt.Sprintf(format, args...)}
}

// keep gives a Service the address that it has, also if the claim of that was lost.
func (a *assigner) keep(s *Service) Given {
	u, why := a.had(s)
	known := u != nil && len(u.addrs) > 0
	switch {
	case u == nil:
		return why
	case s.Pool != "" && s.Pool != u.Pool && known:
		return refused(AddressChanged, "It has %s of AddressPool %s, and asks for one of %s", u.Address.Address, u.Pool, s.Pool)
	case slices.ContainsFunc(s.Wants, func(w netip.Addr) bool { return !slices.Contains(u.addrs, w) }) && known:
		return refused(AddressChanged, "It has %s, and asks for %s", u.Address.Address, joined(s.Wants))
	case u.Asked && len(s.Wants) == 0 && len(s.Has) == 0:
		return Given{} // it asked for it before
	case !known && (cmp.Or(s.Pool, a.Default) != u.Pool || len(s.Wants) > 0 || s.Invalid != ""):
		return Given{} // it asks for something else by now, or for nothing that there could be
	}
	return a.give(u, s)
}

// had returns the address that a Service was given before or, if that isn't known, that it says it has; nil and no reason for none.
func (a *assigner) had(s *Service) (*use, Given) {
	if u := a.byClaim[s.Claim]; u != nil {
		return u, Given{}
	}
	if len(s.Has) == 0 {
		return nil, Given{}
	}
	return a.of(s.Has, "")
}

// stays keeps an address for a Service that says that it has it, and doesn't get it any more.
func (a *assigner) stays(s *Service, given Given) {
	if !slices.ContainsFunc(s.Has, func(addr netip.Addr) bool { return !given.Address.Has(addr) }) {
		return
	}
	for _, addr := range s.Has {
		for _, u := range a.byAddr[addr] {
			if unclaimed := u.made && len(u.services) == 0; !unclaimed && !slices.Contains(u.services, s) {
				u.serve(s)
			}
		}
	}
}

// named gives a Service the address that it asks for.
func (a *assigner) named(s *Service) Given {
	u, why := a.of(s.Wants, s.Pool)
	if u == nil {
		return why
	}
	return a.give(u, s)
}

// any gives a Service the first address that has room for it.
func (a *assigner) any(s *Service) Given {
	name := cmp.Or(s.Pool, a.Default)
	if _, ok := a.Pools[name]; !ok {
		return refused(PoolNotFound, "There is no AddressPool %q: make it, or name another one in the annotation %s", name, v2.AnnotationPool)
	}
	if why := a.lacks(name, nil, s); why.Reason != "" {
		return why
	}
	if u := a.room(name, s, false); u != nil {
		return a.give(u, s)
	}
	return a.give(a.make(Address{Claim: a.unused(claimFor(s.UID)), Pool: name}), s)
}

// room returns the first address of a pool with room for a Service, only of addresses that are known if that is asked; nil if there is none.
func (a *assigner) room(pool string, s *Service, known bool) *use {
	kind := kindIn{pool, known, s.Kind()}
	for _, u := range a.byPool[pool][a.full[kind]:] {
		if !u.Asked && (!known || len(u.addrs) > 0) && u.inTheWay(s) == nil && u.rest() >= len(s.Ports) && a.lacks(u.Pool, u.addrs, s).Reason == "" {
			return u
		}
		a.full[kind]++
	}
	return nil
}

// sooner gives a Service that waits for an address one that is known, if that has room for it by now.
func (a *assigner) sooner(s *Service, given Given) Given {
	waits := a.byClaim[given.Claim]
	if waits == nil || waits.Asked || len(waits.addrs) > 0 || len(s.Has) > 0 || len(s.Wants) > 0 {
		return given
	}
	u := a.room(waits.Pool, s, true)
	if u == nil {
		return given
	}
	waits.services = slices.DeleteFunc(waits.services, func(o *Service) bool { return o == s })
	return a.give(u, s)
}

// give lets a Service have an address, if it can.
func (a *assigner) give(u *use, s *Service) Given {
	if why := a.lacks(u.Pool, u.addrs, s); why.Reason != "" {
		return why
	}
	if o := u.inTheWay(s); o != nil {
		return refused(AddressInUse, "Service %s has %s: %s", o.Name, u.Address.Address, conflictOf(o, s).explain(o, s))
	}
	if rest := u.rest(); rest < len(s.Ports) {
		return refused(TooManyPorts, "It has %s, and of the %d ports that an address may have %d are left: have it share its address with fewer Services (annotation %s)",
			plan.Count(len(s.Ports), "port", "ports"), v2.MaxFloatingPorts, rest, AnnotationSharing)
	}
	u.serve(s)
	return Given{Claim: u.Claim, Address: u.Address.Address}
}

// of returns the address that some addresses are, which is made if there is none, of a pool or of any.
func (a *assigner) of(addrs []netip.Addr, pool string) (*use, Given) {
	for _, u := range a.having(addrs) {
		if pool == "" || pool == u.Pool {
			return u, Given{}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.Pools)) {
		index, ok := a.Pools[name].Containing(addrs[0])
		if !ok || pool != "" && pool != name {
			continue
		}
		b, err := a.Pools[name].Block(index)
		if err != nil {
			return nil, refused(AddressOutsidePool, "AddressPool %s: %v", name, err)
		}
		whole := b.At(0)
		if slices.ContainsFunc(addrs, func(addr netip.Addr) bool { return !whole.Has(addr) }) {
			return nil, refused(AddressPair, "In AddressPool %s the pair is %s: ask for one of the two", name, whole)
		}
		return a.make(Address{Asked: true, Claim: a.unused(claimOfAddress(addrs[0])), Pool: name, Address: whole}), Given{}
	}
	if pool != "" {
		return nil, refused(AddressOutsidePool, "AddressPool %s hasn't %s: ask for one of its addresses, or for another pool", pool, addrs[0])
	}
	return nil, refused(AddressOutsidePool, "No AddressPool has %s: ask for an address of one", addrs[0])
}

// make adds an address that there is none yet of.
func (a *assigner) make(addr Address) *use {
	u := &use{Address: addr, made: true}
	a.add(u)
	return u
}

// unused returns the name of a claim that begins as name does.
func (a *assigner) unused(name string) string {
	for n, unique := 2, name; ; n++ {
		if a.byClaim[unique] == nil {
			return unique
		}
		unique = fmt.Sprintf("%s-%d", name, n)
	}
}

// lacks says which family of a Service an address of a pool hasn't. If the address isn't known yet it is one like any other.
func (a *assigner) lacks(pool string, addrs []netip.Addr, s *Service) Given {
	if len(addrs) == 0 {
		if b, err := a.Pools[pool].Block(0); err == nil {
			addrs = b.At(0).Addrs()
		}
	}
	for i, f := range s.Families {
		if (i == 0 || s.Both) && !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return dataplane.FamilyOf(a) == f }) {
			return refused(FamilyMissing, "It needs an address of %s, and AddressPool %s has none: ask for another pool, or for other families (spec.ipFamilies, spec.ipFamilyPolicy)", f, pool)
		}
	}
	return Given{}
}

// inTheWay returns a Service that has the address and can't share it with another one, nil if there is none.
func (u *use) inTheWay(s *Service) *Service {
	i := slices.IndexFunc(u.services, func(o *Service) bool { return conflictOf(o, s) != noConflict })
	if i < 0 {
		return nil
	}
	return u.services[i]
}

// rest is how many more ports the address may have.
func (u *use) rest() int {
	n := v2.MaxFloatingPorts
	for _, s := range u.services {
		n -= len(s.Ports)
	}
	return n
}

// conflict is why two Services can't share an address.
type conflict int

const (
	noConflict conflict = iota
	hasAlone
	wantsAlone
	otherGroup
	samePort
	otherEndpoints
)

// conflictOf returns the first conflict between a Service that has an address and one that wants it.
func conflictOf(has, wants *Service) conflict {
	switch {
	case has.Alone:
		return hasAlone
	case wants.Alone:
		return wantsAlone
	case has.Group != wants.Group:
		return otherGroup
	case commonPort(has, wants) != nil && slices.ContainsFunc(has.Families, func(f dataplane.Family) bool { return slices.Contains(wants.Families, f) }):
		return samePort
	case has.Endpoints != "" && wants.Endpoints != "" && has.Endpoints != wants.Endpoints:
		return otherEndpoints
	}
	return noConflict
}

// explain says in words what the conflict is.
func (c conflict) explain(has, wants *Service) string {
	switch c {
	case hasAlone:
		return "it shares the address with none"
	case wantsAlone:
		return "this one is to share its address with none"
	case otherGroup:
		return fmt.Sprintf("it shares the address in the group %q, and this one in %q", has.Group, wants.Group)
	case samePort:
		return fmt.Sprintf("both have the port %s", commonPort(has, wants))
	case otherEndpoints:
		return "both have externalTrafficPolicy Local, and other endpoints"
	}
	return ""
}

// commonPort returns the first port of a Service that another one has, too, nil if there is none.
func commonPort(has, wants *Service) *Port {
	for i, p := range wants.Ports {
		if slices.Contains(has.Ports, p) {
			return &wants.Ports[i]
		}
	}
	return nil
}

func joined(addrs []netip.Addr) string {
	var all []string
	for _, a := range addrs {
		all = append(all, a.String())
	}
	return strings.Join(all, " and ")
}
