package clientnet

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/plan/client"
)

// Parameters of how flows are spread over next hops, and their values
// (Documentation/networking/ip-sysctl.rst).
const (
	policyIPv4 = "net/ipv4/fib_multipath_hash_policy"
	policyIPv6 = "net/ipv6/fib_multipath_hash_policy"
	fieldsIPv6 = "net/ipv6/fib_multipath_hash_fields"
	seed       = "net/ipv4/fib_multipath_hash_seed"

	byAddresses = "0"
	byPorts     = "1"
	byFields    = "3"
	// whereTo are the fields destination, protocol and port of the destination.
	whereTo = "38"
)

var spreadByPorts = []group{{{Key: policyIPv4, Value: byPorts}}, {{Key: policyIPv6, Value: byPorts}}}

// spreadOf returns how the flows of a client are spread. Over routers, by nothing that the kernel
// doesn't know yet when a TCP connection looks its route up the first time: it uses that one until
// routes change, and then looks up with all it knows. If that led elsewhere, the connection would
// end. Of IPv6 it doesn't know the source's address and port (tcp_v6_connect()); of IPv4 it
// does but takes, since 6.16, a random number for the port (FLOWI_FLAG_ANY_SPORT).
func spreadOf(state client.State) []group {
	if len(state.Groups) == 0 {
		return spreadByPorts
	}
	policy := byAddresses
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		policy = policyOf(unix.ByteSliceToString(name.Release[:]))
	}
	own := sysctl.Setting{Key: seed, Value: strconv.FormatUint(uint64(state.Groups[0].Seed()), 10)}
	return []group{
		{{Key: policyIPv4, Value: policy}},
		{{Key: fieldsIPv6, Value: whereTo}, {Key: policyIPv6, Value: byFields}},
		{own}, // since 6.11; before, only the groups' own order tells clients apart
	}
}

// policyOf is that of IPv4 for a release of the kernel.
func policyOf(release string) string {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major > 6 || major == 6 && minor >= 16 {
		return byAddresses
	}
	return byPorts
}
