// Package openstack keeps addresses in a cloud with OpenStack: each address is a port of Neutron that no machine has, and a
// floating IP that leads to it, if one is wanted. Gateways may use the addresses by the address pairs of their own ports.
//
// It owns the ports and floating IPs with the mark of its cluster, and in the address pairs of gateways the addresses of these ports. It
// must not know what the addresses are for, nor Kubernetes.
//
// An address has a key, which the caller chooses. Each object of the address has a description with the key, which it has since it
// was made, and tags, which come with the next call. Either of the two marks says whose it is. So nothing is lost when
// a program ends between two calls, or when an answer is: each operation may be repeated, and then goes on.
//
//	the cloud has                                       Ensure
//	all that is wanted                                  nothing; no call, if the last listing says so
//	no port of the key                                  makes it
//	a port with a description and no tags               adds them
//	a port without an address of a wanted family        adds one
//	a port without an address that is named             adds it, or has it take the place of the port's own
//	a floating IP that leads elsewhere, or nowhere      leads it to the port
//	no floating IP of the key                           makes it
//	two ports of the key                                takes the older one; Sweep deletes the other
//
// No state is kept but the session, and what the last Sweep has seen. What List and Ensure return may be old: it only spares
// calls. Whatever is written follows from what was read just before.
package openstack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"sync"
	"time"
)

const (
	defaultGrace    = 10 * time.Minute
	defaultParallel = 4
	// defaultMaxPairs is Neutron's own limit (max_allowed_address_pair), which the API doesn't tell.
	defaultMaxPairs = 10
)

// Config says which cloud is meant, and which objects in it.
type Config struct {
	// CloudsFile is a clouds.yaml, beside which a secure.yaml may be. It is read again when the cloud has refused what it has said. When it
	// is empty, the file is looked for where the program openstack does it.
	CloudsFile string
	// Cloud is the name of the cloud in that file; the default is the environment variable OS_CLOUD. The cloud has a password or an application
	// credential, of one project.
	Cloud string
	// ClusterID tells the objects of this cluster from those of others in the project: up to 63 small letters, digits and hyphens.
	ClusterID string
	// SubnetIDs are the subnets of the addresses: one of each family at most, all of one network.
	SubnetIDs []string
	// FloatingNetworkID is the external network of new floating IPs. Without it none can be wanted.
	FloatingNetworkID string
	// Grace is how old an object is at least that Sweep deletes; the default is ten minutes.
	Grace time.Duration
	// Parallel is how many calls are made at a time; the default is 4.
	Parallel int
	// MaxPairs is how many address pairs a port may have; the default is 10, as in Neutron.
	MaxPairs int
	// Observe is told of each call when it has ended. It may be nil.
	Observe func(Call)
}

// Call is a call of the cloud's API that has ended.
type Call struct {
	Method string
	// Resource is the kind of object, such as ports, ports/tags or tokens; there are a dozen.
	Resource string
	// Code is that of the answer; 0 says that there was none.
	Code int
	Took time.Duration
}

var clusterID = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)

// Validate returns all that is wrong with the configuration.
func (c Config) Validate() error {
	var errs []error
	if !clusterID.MatchString(c.ClusterID) {
		errs = append(errs, fmt.Errorf("the cluster ID %q isn't 1 to 63 small letters, digits and hyphens", c.ClusterID))
	}
	if n := len(c.SubnetIDs); n < 1 || n > 2 {
		errs = append(errs, fmt.Errorf("there are %d subnets; there must be one of IPv4, one of IPv6, or both", n))
	}
	for _, id := range c.SubnetIDs {
		if id == "" {
			errs = append(errs, errors.New("the ID of a subnet is empty"))
		}
	}
	if c.Grace < 0 || c.Parallel < 0 || c.MaxPairs < 0 {
		errs = append(errs, errors.New("the grace time, the number of parallel calls and that of address pairs can't be negative"))
	}
	return errors.Join(errs...)
}

// Client keeps addresses. It may be used by several goroutines, but only by one at a time for the same key.
type Client struct {
	cfg   Config
	marks marks
	now   func() time.Time

	login chan struct{} // has a token while somebody logs in

	mu      sync.Mutex // guards what follows
	session *session
	// unused are the IDs of the objects that the last Sweep has found unused, and since when.
	unused map[string]time.Time
}

// New returns a client. It logs in when it makes its first call.
func New(cfg Config) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Grace == 0 {
		cfg.Grace = defaultGrace
	}
	if cfg.Parallel == 0 {
		cfg.Parallel = defaultParallel
	}
	if cfg.MaxPairs == 0 {
		cfg.MaxPairs = defaultMaxPairs
	}
	return &Client{cfg: cfg, marks: marks{cluster: cfg.ClusterID}, now: time.Now, login: make(chan struct{}, 1)}, nil
}

// Want is what an address is to have.
type Want struct {
	// IPv4 and IPv6 want a fixed address of the family.
	IPv4, IPv6 bool
	// Addresses are fixed addresses that the port is to have, at most one of each wanted family. Neutron chooses the others. Only the owner of
	// the network may choose.
	Addresses []netip.Addr
	// Replace has Addresses take the place of what the port has of their families; otherwise they are added. It is for a port whose addresses nobody uses yet.
	Replace bool
	// Floating wants a floating IP, which leads to the fixed address of IPv4. One that isn't wanted any more stays until the address is deleted: others
	// may have it on their lists.
	Floating bool
}

// validate returns what is wrong with what is wanted of this cloud.
func (w Want) validate(c Config, s *session) error {
	var errs []error
	if !w.IPv4 && !w.IPv6 {
		errs = append(errs, errors.New("an address of no family is wanted"))
	}
	if w.Floating && !w.IPv4 {
		errs = append(errs, errors.New("a floating IP leads to an IPv4 address, and none is wanted"))
	}
	if w.Floating && c.FloatingNetworkID == "" {
		errs = append(errs, errors.New("a floating IP is wanted, but no network for them is configured"))
	}
	subnets := s.wanted(w)
	if len(subnets) < w.families() {
		errs = append(errs, errors.New("no subnet is configured of a wanted family"))
	}
	for i, a := range w.Addresses {
		if !slices.ContainsFunc(subnets, func(n subnet) bool { return n.prefix.Contains(a) }) {
			errs = append(errs, fmt.Errorf("the address %s is wanted, and isn't in a configured subnet of a wanted family", a))
		}
		if slices.ContainsFunc(w.Addresses[:i], func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			errs = append(errs, errors.New("two addresses of one family are wanted"))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return &Error{Reason: Misconfigured, Message: err.Error(), err: err}
	}
	return nil
}

func (w Want) families() (n int) {
	for _, wanted := range []bool{w.IPv4, w.IPv6} {
		if wanted {
			n++
		}
	}
	return n
}

// of says whether an address of the family of a is wanted.
func (w Want) of(a netip.Addr) bool {
	if a.Is4() {
		return w.IPv4
	}
	return w.IPv6
}

// named returns the wanted address of a family, invalid if Neutron chooses it.
func (w Want) named(is4 bool) netip.Addr {
	for _, a := range w.Addresses {
		if a.Is4() == is4 {
			return a
		}
	}
	return netip.Addr{}
}

// List returns all addresses of the cluster, sorted by their keys, also those that are incomplete.
func (c *Client) List(ctx context.Context) (all []Address, err error) {
	err = c.do(ctx, func(s *session) error {
		found, err := s.all(ctx)
		all = found.addresses(s.marks, s.subnets)
		return err
	})
	return all, err
}
