// Package netlab makes small networks of network namespaces, runs programs and opens sockets in them, and sends and
// captures packets.
//
// It owns how a namespace, a link or a packet comes about, for tests and benches alike: its functions return errors.
// Package netnstest is the layer of tests on top. It must not know what is tested or measured.
package netlab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// NS is a network namespace that lives as long as it is open here, is bound to a path, or has processes.
type NS struct{ *netns.NS }

// New makes a namespace whose lo is up.
func New() (*NS, error) {
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}
	if err := ns.Do(loopbackUp); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &NS{ns}, nil
}

// loopbackUp brings up lo of the thread's namespace.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	return nil
}

// Open opens the namespace at a path.
func Open(path string) (*NS, error) {
	ns, err := netns.Open(path)
	if err != nil {
		return nil, err
	}
	return &NS{ns}, nil
}

// Named opens a namespace that "ip netns add" made.
func Named(name string) (*NS, error) { return Open("/run/netns/" + name) }

// Machine is the namespace that the process was started in. It has no Path, and isn't closed.
func Machine() *NS { return &NS{} }

// Path leads to the namespace from any process, while it is open here.
func (n *NS) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.Fd()) }

// Sysctl sets parameters below net, such as "ipv4/ip_forward=1".
func (n *NS) Sysctl(settings ...string) error {
	for _, s := range settings {
		key, value, _ := strings.Cut(s, "=")
		if _, err := sysctl.Set(n.NS, sysctl.Setting{Key: "net/" + key, Value: value}); err != nil {
			return err
		}
	}
	return nil
}

// Forward makes the namespace a router in both families.
func (n *NS) Forward() error { return n.Sysctl("ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1") }

// RPFilter sets how the source of an IPv4 packet is checked that comes in by one of the links, or by any that is made
// later: 0 not at all, 1 strictly.
func (n *NS) RPFilter(mode int, links ...string) error {
	for _, l := range append([]string{"all", "default"}, links...) {
		if err := n.Sysctl(fmt.Sprintf("ipv4/conf/%s/rp_filter=%d", l, mode)); err != nil {
			return err
		}
	}
	return nil
}

// IP runs commands of ip(8), one a line, by one process: to start one takes long where processors are emulated. Those
// that begin with -6 follow by another one.
func (n *NS) IP(ctx context.Context, commands ...string) error {
	var any, six []string
	for line := range strings.Lines(strings.Join(commands, "\n")) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "-6 "); ok {
			six = append(six, rest)
		} else if line != "" {
			any = append(any, line)
		}
	}
	if err := n.batch(ctx, any); err != nil {
		return err
	}
	return n.batch(ctx, six, "-6")
}

// batch has one ip run lines, if there are any.
func (n *NS) batch(ctx context.Context, lines []string, options ...string) error {
	if len(lines) == 0 {
		return nil
	}
	text := strings.Join(lines, "\n") + "\n"
	if _, err := n.output(ctx, text, "ip", append(options, "-batch", "-")...); err != nil {
		return fmt.Errorf("%w, of\n%s", err, text)
	}
	return nil
}

// AgeRoutes counts changes of IPv6 routes in a namespace that has a link. A socket's route that has a nexthop object is
// valid as long as there was no change in the namespace of the route's device; but when a group is replaced, the kernel
// (net/ipv6/route.c: rt6_is_valid, fib6_nh_release_dsts) takes the device away, and what it puts in its place is of the
// first namespace. If that has just as many changes, the socket sends nowhere. There are few in a machine that has just
// started, and in a pod.
func (n *NS) AgeRoutes(ctx context.Context, link string) error {
	return n.IP(ctx, strings.Repeat(fmt.Sprintf("route add 2001:db8:ffff::/64 dev %[1]s\nroute del 2001:db8:ffff::/64 dev %[1]s\n", link), 1000))
}

// Lines runs ip(8) once for each line of a text, in the namespace that the process was started in. A line may begin with
// options, such as -n NAME for a namespace.
func Lines(ctx context.Context, text string) error {
	for line := range strings.Lines(text) {
		if args := strings.Fields(line); len(args) > 0 {
			if _, err := Machine().Run(ctx, "ip", args...); err != nil {
				return err
			}
		}
	}
	return nil
}

// AddAddr is the command that gives a link an address. Nobody else has it: the second that a check for duplicates takes
// is saved.
func AddAddr(a netip.Prefix, link string) string {
	if a.Addr().Is4() {
		return fmt.Sprintf("addr add %s dev %s", a, link)
	}
	return fmt.Sprintf("addr add %s dev %s nodad", a, link)
}

// AddBridge are the commands that make a bridge with addresses.
func AddBridge(name string, addrs ...netip.Prefix) []string {
	// Without an address of its own the bridge takes the lowest of its ports', another one when a port comes that has a
	// lower one; neighbours that knew the old one would send nowhere for up to a minute. Without a querier snooping stops
	// neighbour discovery sooner or later.
	all := []string{"link add " + name + " address 02:00:00:00:00:fe type bridge mcast_snooping 0", "link set " + name + " up"}
	for _, a := range addrs {
		all = append(all, AddAddr(a, name))
	}
	return all
}
