package natgateway

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/fou"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// PodNetwork is the network of the pod that the process runs in, by a handle of the pod's namespace.
type PodNetwork struct{ Handle *rtnl.Handle }

// Uplink implements Network.
func (p PodNetwork) Uplink(ctx context.Context, a netip.Addr) (rtnl.Link, error) {
	addrs, err := p.Handle.Addrs(ctx)
	if err != nil {
		return rtnl.Link{}, fmt.Errorf("find the uplink: %w", err)
	}
	for _, found := range addrs {
		if found.Prefix.Addr() == a {
			return p.Handle.LinkByIndex(ctx, found.Link)
		}
	}
	return rtnl.Link{}, fmt.Errorf("find the uplink: no link has %s, the address of the pod", a)
}

// Transits implements Network: coild gives them to lo.
func (p PodNetwork) Transits(ctx context.Context) ([]netip.Addr, error) {
	addrs, err := p.Handle.Addrs(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for addresses that the node translates: %w", err)
	}
	var all []netip.Addr
	for _, found := range addrs {
		if _, is := dataplane.TransitNumber(found.Prefix.Addr()); is && found.Link == loopback {
			all = append(all, found.Prefix.Addr())
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all, nil
}

// loopback is the index of lo, the same in every namespace.
const loopback = 1

// needed are the kernel parameters that let a pod route, by family. A process in a pod has
// no right to set them.
var needed = map[dataplane.Family]string{
	dataplane.IPv4: "net/ipv4/ip_forward",
	dataplane.IPv6: "net/ipv6/conf/all/forwarding",
}

// Check implements Network: packets must be forwarded, and those that come out of a tunnel
// mustn't be dropped because their source is reached by the uplink, nor answers because the way
// back, which the kernel looks up without the filter's mark, is closed (rp_filter of RFC 3704).
func (p PodNetwork) Check(uplink string, families []dataplane.Family) error {
	var errs []error
	value := func(key string) int {
		text, err := sysctl.Get(nil, key)
		n := 0
		if err == nil {
			n, err = strconv.Atoi(text)
		}
		errs = append(errs, err)
		return n
	}
	for _, f := range families {
		if v := value(needed[f]); v != 1 {
			errs = append(errs, fmt.Errorf("kernel parameter %s is %d, not 1", needed[f], v))
		}
		if f != dataplane.IPv4 {
			continue
		}
		// The larger one of all links' and the link's counts; new tunnels get the default.
		const conf, filter = "net/ipv4/conf/", "/rp_filter"
		all := value(conf + "all" + filter)
		for _, link := range []string{uplink, "default"} {
			if v := max(all, value(conf+link+filter)); v != 0 {
				errs = append(errs, fmt.Errorf("kernel parameter %s%s%s is in effect %d, not 0", conf, link, filter, v))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w; coild sets it in the pods of an Egress when they start", err)
	}
	return nil
}

// Listen implements Network.
func (p PodNetwork) Listen(ctx context.Context, port uint16, families []dataplane.Family) error {
	return fou.Ensure(ctx, nil, port, families...)
}

// Nft is the Filter of a router, and its Counters, in a table of nftables.
type Nft struct{ *nft.Table }

// Prepare has the kernel track connections before the router opens the first one. A table that a former process has left stays.
func (n Nft) Prepare(ctx context.Context) error {
	exists, err := n.Exists(ctx)
	if err == nil && !exists {
		_, err = n.Table.Sync(ctx, ruleset.Before())
	}
	return err
}

// Sync implements Filter.
func (n Nft) Sync(ctx context.Context, want ruleset.Gateway) (dataplane.Result, error) {
	return n.Table.Sync(ctx, want.Ruleset())
}

// AtLimit implements Counters. The addresses are sorted, and the time is less than ruleset.FullFor.
func (n Nft) AtLimit(ctx context.Context, within time.Duration) ([]netip.Addr, error) {
	var clients []netip.Addr
	for _, set := range ruleset.FullSets() {
		elements, err := n.Expiring(ctx, set)
		if err != nil {
			return nil, err
		}
		for key, expires := range elements {
			if a, ok := netip.AddrFromSlice([]byte(key)); ok && ruleset.FullFor-expires < within {
				clients = append(clients, a)
			}
		}
	}
	slices.SortFunc(clients, netip.Addr.Compare)
	return clients, nil
}
