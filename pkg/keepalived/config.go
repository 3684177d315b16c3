// Package keepalived makes the keepalived of a gateway machine answer for addresses. It writes Coil's part of its
// configuration, has keepalived check it, makes the daemon read it, and looks whether the daemon does what was written.
//
// It owns one file that keepalived's main configuration includes, and what stands in it. The main configuration, other
// files and other instances are the operator's. It must not know where addresses come from, nor who forwards what is
// sent to them.
package keepalived

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"time"
)

// Config is Coil's part of a configuration of keepalived.
type Config struct{ Instances []Instance }

// Instance is a VRRP instance: a group of gateways of which one, the master, has all addresses. All addresses of an
// instance are of one family: keepalived ignores those of the other one.
type Instance struct {
	// Name is that of the instance in keepalived's logs. No instance of the operator has it.
	Name string
	// Interface is the link that adverts go by.
	Interface string
	// AddressInterface is the link that gets the addresses; empty for Interface. The instance has a fault while one of
	// the two is down.
	AddressInterface string
	// RouterID is the VRID, 1 to 255. The gateways of the instance have the same, and no other instance of the family
	// has it, not even on another link: the address that adverts name depends on it.
	RouterID int
	// Priority is 1 to 254. The gateway with the highest is elected.
	Priority int
	// NoPreempt leaves a master in place when a gateway with a higher priority comes.
	NoPreempt bool
	// PreemptDelay is how long a gateway waits before it replaces a master of lower priority, up to 1,000 s.
	PreemptDelay time.Duration
	// AdvertInterval is a multiple of 10 ms, up to 40.95 s; 0 for DefaultAdvertInterval. The gateways of the instance
	// have the same.
	AdvertInterval time.Duration
	// Source is the address that adverts are sent from, one of the gateway's own. An instance with peers has a fault if the
	// gateway doesn't have it when keepalived reads the configuration.
	Source netip.Addr
	// Peers are the sources of the other gateways. Without any, adverts are multicast.
	Peers []netip.Addr
	// Addresses are what the master answers for.
	Addresses []netip.Addr
}

// DefaultAdvertInterval lets another gateway take over a second after the last advert of a master: VRRP waits for three
// adverts, and for up to one more, which depends on the priority.
const DefaultAdvertInterval = 300 * time.Millisecond

const (
	advertUnit        = 10 * time.Millisecond
	maxAdvertInterval = 4095 * advertUnit // the field of VRRPv3 has 12 bits
	maxPreemptDelay   = 1000 * time.Second
	maxNameLength     = 64
)

// Names of other characters could mean something else to keepalived, whose configuration has comments, conditions,
// variables and quotes.
var (
	instanceName  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)
	interfaceName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`)
)

// normal returns the instance with its defaults, and with its peers and addresses in order.
func (i Instance) normal() Instance {
	if i.AddressInterface == "" {
		i.AddressInterface = i.Interface
	}
	if i.AdvertInterval == 0 {
		i.AdvertInterval = DefaultAdvertInterval
	}
	i.Peers = slices.SortedFunc(slices.Values(i.Peers), netip.Addr.Compare)
	i.Addresses = slices.SortedFunc(slices.Values(i.Addresses), netip.Addr.Compare)
	return i
}

// Validate reports all that keepalived would refuse, ignore or change.
func (c Config) Validate() error {
	var errs []error
	for _, i := range c.Instances {
		for _, err := range i.problems() {
			errs = append(errs, fmt.Errorf("VRRP instance %q: %w", i.Name, err))
		}
	}
	return errors.Join(append(errs, c.conflicts()...)...)
}

// conflicts returns what instances have that only one of them may have.
func (c Config) conflicts() (errs []error) {
	type router struct {
		id  int
		ip4 bool
	}
	names, routers, owners := map[string]bool{}, map[router]string{}, map[netip.Addr]string{}
	own := map[netip.Addr]string{}
	for _, i := range c.Instances {
		own[i.Source] = i.Name
		for _, p := range i.Peers {
			own[p] = i.Name
		}
	}
	for _, i := range c.Instances {
		if names[i.Name] {
			errs = append(errs, fmt.Errorf("VRRP instance %q: there are two of this name: give each its own", i.Name))
		}
		names[i.Name] = true
		r := router{i.RouterID, i.Source.Is4()}
		if other, ok := routers[r]; ok {
			errs = append(errs, fmt.Errorf("VRRP instance %q: instance %q has virtual router ID %d, too: give each instance of a family its own", i.Name, other, i.RouterID))
		}
		routers[r] = i.Name
		for _, a := range i.Addresses {
			if other, ok := owners[a]; ok {
				errs = append(errs, fmt.Errorf("VRRP instance %q: instance %q has address %s, too: one of them may", i.Name, other, a))
			}
			owners[a] = i.Name
			// A gateway that isn't the master would lose the address.
			if other, ok := own[a]; ok {
				errs = append(errs, fmt.Errorf("VRRP instance %q: address %s is a gateway's own, that of adverts of instance %q: take another one", i.Name, a, other))
			}
		}
	}
	return errs
}

// problems returns what is wrong with the instance by itself.
func (i Instance) problems() (errs []error) {
	bad := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	bad(!instanceName.MatchString(i.Name) || len(i.Name) > maxNameLength,
		"the name must be 1 to %d letters, digits and _ . - and begin with a letter or a digit", maxNameLength)
	bad(!interfaceName.MatchString(i.Interface),
		"interface %q: a link is needed whose name is 1 to 15 letters, digits and _ . - and begins with a letter or a digit", i.Interface)
	bad(i.Interface == loopback, "interface %s: keepalived sends no adverts by it", loopback)
	bad(i.AddressInterface != "" && !interfaceName.MatchString(i.AddressInterface),
		"address interface %q: a link is needed whose name is 1 to 15 letters, digits and _ . - and begins with a letter or a digit", i.AddressInterface)
	bad(i.RouterID < 1 || i.RouterID > 255, "virtual router ID %d must be 1 to 255", i.RouterID)
	bad(i.Priority < 1 || i.Priority > 254, "priority %d must be 1 to 254", i.Priority)
	bad(i.AdvertInterval < 0 || i.AdvertInterval > maxAdvertInterval || i.AdvertInterval%advertUnit != 0,
		"advert interval %s must be a multiple of %s, up to %s", i.AdvertInterval, advertUnit, maxAdvertInterval)
	bad(i.PreemptDelay < 0 || i.PreemptDelay > maxPreemptDelay || i.PreemptDelay%time.Millisecond != 0,
		"preempt delay %s must be whole milliseconds, up to %s", i.PreemptDelay, maxPreemptDelay)
	bad(i.NoPreempt && i.PreemptDelay != 0, "preempt delay %s has no meaning without preemption: leave out one of them", i.PreemptDelay)
	if !plain(i.Source) {
		bad(true, "source %s must be a unicast address of this gateway, without zone", i.Source)
		return errs // its family is that of the instance
	}
	family := func(a netip.Addr) bool { return a.Is4() == i.Source.Is4() }
	seen := map[netip.Addr]bool{}
	for _, p := range i.Peers {
		bad(!plain(p) || !family(p), "peer %s must be a unicast address of the source's family, without zone", p)
		bad(p == i.Source, "peer %s is the source: name the other gateways only", p)
		bad(seen[p], "peer %s is named twice", p)
		seen[p] = true
	}
	for _, a := range i.Addresses {
		bad(!plain(a) || a.IsLinkLocalUnicast() || !family(a), "address %s must be a unicast address of the source's family and not link-local: make an instance for each family", a)
	}
	return errs
}

// plain tells whether a host can have an address on a link, and whether keepalived reads it as it is written.
func plain(a netip.Addr) bool {
	return a.IsValid() && a.Zone() == "" && !a.Is4In6() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != broadcast
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})
