package lbgateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/keepalived"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// highest is the priority of the gateway that is to be the master of an instance, the next one's is lower by step, and so on.
	highest = 200
	step    = 10
	// lookEvery is how often the gateway looks whether keepalived may have changed its states. It asks for them if so, and every statesEvery in any case: keepalived
	// logs each question.
	lookEvery   = 3 * time.Second
	statesEvery = time.Minute
	// faultEvery is after how many looks with a fault keepalived is told again what to do: an address from which it sends may have come.
	faultEvery = 5
	// mostPause is the longest pause between two attempts of a change that keepalived reads and doesn't follow. The first one is lookEvery; each is twice as long as the one before.
	mostPause = time.Minute
)

// VRRP is the machine's keepalived; see package keepalived.
type VRRP interface {
	Apply(context.Context, keepalived.Config) error
	Addresses() ([]netip.Addr, error)
	States(context.Context) ([]keepalived.InstanceState, error)
	Mark() (string, error)
	Used() bool
}

// vrrp is what the gateway knows of its elections. The gateway's mu guards it.
type vrrp struct {
	// applied is what keepalived does, nil if that isn't known, or isn't what it is to do. followed is what it was seen to do last.
	applied, followed *keepalived.Config
	// has are the addresses that keepalived may have, nil if that isn't known. The map never changes.
	has map[netip.Addr]bool
	// problem is why keepalived doesn't do what it is to do.
	problem error
	states  []v2.GatewayVRRPState
	// changes counts those of gateways and pools. done says of which of them, and of which moves of addresses, applied is.
	changes int
	done    turn
	faults  int // looks with a fault
	// unfollowed is what keepalived didn't follow so many times, and isn't told again before a time.
	unfollowed turn
	failures   int
	notSoon    time.Time
}

// turn counts changes of gateways and pools, and moves of addresses.
type turn struct{ changes, moves int }

// asked is when keepalived was asked for its states, what it was seen to do by then, and its mark.
type asked struct {
	at   time.Time
	does *keepalived.Config
	mark string
}

// at is an address of a pool, and the index of its block.
type at struct {
	netip.Addr
	pool  string
	index int32
}

// elections returns the instances by which gateways agree who has some addresses. Each pool has as many as it says, in each family of which the machine has an address
// to send from. All gateways derive the same: the k-th instance is to be at the k-th gateway, by name. The error says what is missing; the rest is returned all the same.
func elections(own *v2.LoadBalancerGateway, gateways []*v2.LoadBalancerGateway, pools []*v2.AddressPool, addresses []at) (c keepalived.Config, err error) {
	var errs []error
	for _, pool := range pools {
		if pool.Spec.VRRP == nil || pool.Spec.Announce != v2.AnnounceGateway || !slices.Contains(own.Spec.Pools, pool.Name) {
			continue
		}
		if own.Spec.VRRP == nil {
			errs = append(errs, fmt.Errorf("AddressPool %s has spec.vrrp: set spec.vrrp of LoadBalancerGateway %s, too", pool.Name, own.Name))
			continue
		}
		members := slices.SortedFunc(slices.Values(gateways), func(a, b *v2.LoadBalancerGateway) int { return cmp.Compare(a.Name, b.Name) })
		members = slices.DeleteFunc(members, func(g *v2.LoadBalancerGateway) bool {
			return g.Spec.VRRP == nil || !slices.Contains(g.Spec.Pools, pool.Name)
		})
		for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
			for k := range pool.Spec.VRRP.Instances {
				if i, ok := instance(own, members, pool, f, k, addresses); ok {
					c.Instances = append(c.Instances, i)
				}
			}
		}
	}
	slices.SortFunc(c.Instances, func(a, b keepalived.Instance) int { return cmp.Compare(a.Name, b.Name) })
	return c, errors.Join(append(errs, c.Validate())...)
}

// instance is the k-th one of a pool in a family, if the machine has an address of that to send from.
func instance(own *v2.LoadBalancerGateway, members []*v2.LoadBalancerGateway, pool *v2.AddressPool, f dataplane.Family, k int32, addresses []at) (i keepalived.Instance, ok bool) {
	source := sourceOf(own, f)
	if !source.IsValid() {
		return i, false
	}
	i = keepalived.Instance{
		Interface: own.Spec.VRRP.Interface, AddressInterface: own.Spec.VRRP.AddressInterface, RouterID: int(pool.Spec.VRRP.RouterID + k), Source: source,
	}
	i.Name = fmt.Sprintf("coil_%d_%s", i.RouterID, strings.ToLower(f.String()))
	members = slices.DeleteFunc(slices.Clone(members), func(g *v2.LoadBalancerGateway) bool { return !sourceOf(g, f).IsValid() })
	for j, g := range members {
		if g.Name == own.Name {
			rank := (j - int(k)%len(members) + len(members)) % len(members)
			i.Priority = max(1, highest-step*rank)
		} else {
			i.Peers = append(i.Peers, sourceOf(g, f))
		}
	}
	for _, a := range addresses {
		if a.pool == pool.Name && dataplane.FamilyOf(a.Addr) == f && a.index%pool.Spec.VRRP.Instances == k {
			i.Addresses = append(i.Addresses, a.Addr)
		}
	}
	slices.SortFunc(i.Addresses, netip.Addr.Compare)
	slices.SortFunc(i.Peers, netip.Addr.Compare)
	return i, true
}

// sourceOf is the address of a family from which a gateway sends.
func sourceOf(g *v2.LoadBalancerGateway, f dataplane.Family) netip.Addr {
	for _, text := range g.Spec.VRRP.Sources {
		if a, err := netip.ParseAddr(text); err == nil && dataplane.FamilyOf(a) == f {
			return a
		}
	}
	return netip.Addr{}
}

// elect has keepalived do what goes with what the table does, which may change meanwhile. What is in the way is a problem that the status tells.
func (g *Gateway) elect(ctx context.Context, _ struct{}) error {
	g.mu.Lock()
	does, v := g.does, g.vrrp
	now := turn{v.changes, does.moves}
	if v.applied != nil && now == v.done || v.failures > 0 && now == v.unfollowed && g.now().Before(v.notSoon) {
		g.mu.Unlock()
		return nil
	}
	if v.has != nil { // from here on the addresses are guarded whatever comes
		g.vrrp.has = maps.Clone(v.has)
		maps.Copy(g.vrrp.has, does.addresses)
	}
	g.mu.Unlock()
	var want keepalived.Config
	var problem error
	if own := g.gateways.Find(g.cfg.Name); own != nil {
		want, problem = elections(own, g.gateways.All(), g.pools.All(), g.at(does))
	}
	err := want.Validate() // which is a part of the problem
	switch {
	case err != nil:
	case v.applied != nil && reflect.DeepEqual(*v.applied, want), len(want.Instances) == 0 && !g.cfg.VRRP.Used():
	default:
		err = g.cfg.VRRP.Apply(ctx, want)
		problem = errors.Join(problem, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.vrrp.problem, g.vrrp.applied = problem, nil
	g.vrrp.tried(now, err, g.now())
	if err == nil {
		g.vrrp.applied, g.vrrp.done, g.vrrp.has = &want, now, map[netip.Addr]bool{}
		if v.applied != nil && reflect.DeepEqual(*v.applied, want) {
			g.vrrp.applied = v.applied // it was told nothing, and needn't be asked what came of it
		}
		g.vrrp.followed = g.vrrp.applied
		for _, i := range want.Instances {
			for _, a := range i.Addresses {
				g.vrrp.has[a] = true
			}
		}
	}
	g.statuses.Add(struct{}{})
	if len(g.unneeded()) > 0 {
		g.applies.Add(struct{}{})
	}
	return nil // watchVRRP has it tried again
}

// tried notes whether keepalived follows a change. One that doesn't run, or refuses to read the change, is told at each look: it doesn't notice, and whoever mends that isn't to wait.
func (v *vrrp) tried(at turn, err error, now time.Time) {
	if at != v.unfollowed || !errors.Is(err, keepalived.ErrNotFollowed) {
		v.failures = 0
	}
	if errors.Is(err, keepalived.ErrNotFollowed) {
		v.unfollowed, v.notSoon = at, now.Add(min(mostPause, lookEvery<<min(v.failures, 10)))
		v.failures++
	}
}

// at are the addresses of a state, with what their blocks say of them.
func (g *Gateway) at(s state) (all []at) {
	for _, b := range g.allBlocks.All() {
		block, err := ipam.ParseBlock(b.IPv4, b.IPv6)
		if err != nil {
			continue
		}
		for _, a := range block.At(0).Addrs() {
			if s.addresses[a] {
				all = append(all, at{a, b.Labels[v2.LabelPool], b.Index})
			}
		}
	}
	return all
}

// watchVRRP asks keepalived for its states, if they may have changed. One that doesn't do what it did, has a fault, or has just been started is told its configuration again. One
// that doesn't take a change goes on as before: its states are told, too.
func (g *Gateway) watchVRRP(ctx context.Context, _ struct{}) error {
	g.mu.Lock()
	applied, does, problem := g.vrrp.applied, g.vrrp.followed, g.vrrp.problem
	g.mu.Unlock()
	again := applied == nil && problem != nil
	mark, err := g.cfg.VRRP.Mark()
	if err != nil || g.asked.does != does || g.asked.mark != mark || time.Since(g.asked.at) >= statesEvery {
		g.asked = asked{time.Now(), does, mark}
		told, fault, err := g.states(ctx, does)
		g.mu.Lock()
		changed := !slices.Equal(told, g.vrrp.states)
		g.vrrp.states = told
		if fault {
			g.vrrp.faults++
			again = again || g.vrrp.faults%faultEvery == 0
			g.asked.does = nil // it is asked again soon
		}
		g.mu.Unlock()
		if changed {
			g.statuses.Add(struct{}{})
		}
		if applied != nil && err != nil {
			again = true
			if !errors.Is(err, errDiffers) {
				problem = err
			}
		}
	}
	g.mu.Lock()
	if again = again && g.vrrp.applied == applied; again { // otherwise it was told something else meanwhile
		g.vrrp.applied, g.vrrp.problem = nil, problem
	}
	g.mu.Unlock()
	if again {
		g.elects.Add(struct{}{})
	}
	return reconcile.Later(lookEvery)
}

// errDiffers says that keepalived doesn't do any more what it was seen to do.
var errDiffers = errors.New("keepalived doesn't do what it did")

// states asks keepalived for the states of instances, and says whether one has a fault. The error is errDiffers if keepalived doesn't do what it did.
func (g *Gateway) states(ctx context.Context, does *keepalived.Config) (told []v2.GatewayVRRPState, fault bool, err error) {
	if does == nil || len(does.Instances) == 0 {
		return nil, false, nil
	}
	states, err := g.cfg.VRRP.States(ctx)
	for _, is := range does.Instances {
		i := slices.IndexFunc(states, func(s keepalived.InstanceState) bool { return s.Name == is.Name })
		fault = fault || i >= 0 && states[i].State == keepalived.Fault
		if i >= 0 && len(told) < v2.MaxGatewayVRRP {
			told = append(told, tellState(states[i]))
		}
	}
	if err == nil && does.Followed(states) != nil {
		err = errDiffers
	}
	return told, fault, err
}

// tellState is the state of an instance as a status tells it.
func tellState(s keepalived.InstanceState) v2.GatewayVRRPState {
	told := v2.GatewayVRRPState{RouterID: int32(s.RouterID), Family: corev1.IPv4Protocol, State: string(s.State), Priority: int32(s.Effective)}
	if !s.Source.Is4() {
		told.Family = corev1.IPv6Protocol
	}
	if s.State == keepalived.Master {
		told.Addresses = int32(s.Assigned())
	}
	return told
}
