// Package loadbalancer says which addresses Services of the type LoadBalancer get, which of them share one, and whether a place answers for it.
// A place is where packets for an address arrive: the node that holds it, or the gateways.
//
// It owns the order in which Services are served, the rules of sharing, and what Services say of their addresses. It must not know who makes addresses, how objects are read,
// nor how packets reach the endpoints of a Service.
package loadbalancer

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
)

// Port is one of a Service's that clients reach by its address.
type Port struct {
	Protocol corev1.Protocol
	Number   uint16
}

// String is such as "TCP 443".
func (p Port) String() string { return fmt.Sprintf("%s %d", p.Protocol, p.Number) }

// Service is a Service of the type LoadBalancer.
type Service struct {
	Name    types.NamespacedName
	UID     types.UID
	Created time.Time
	Ports   []Port
	// Families are those of its ClusterIPs, the first one being required. The second one, if there is one, is required if Both is set.
	Families []dataplane.Family
	Both     bool
	// Pool is the AddressPool that it asks for, "" for the default.
	Pool string
	// Wants are the addresses that it asks for by name, at most one of each family.
	Wants []netip.Addr
	// Invalid says what can't be understood of what it asks for, and what to do. It keeps what it has, and gets nothing else.
	Invalid string
	// Has are the addresses that it got before. They stay its own as long as they are what it asks for.
	Has []netip.Addr
	// Claim is the AddressClaim of the address that it was given before, whatever the Service says: the write may be on its way. Empty if that isn't known,
	// as when a program starts.
	Claim string
	// Leaving says that it is to have no address any more: it is deleted, or of another type or class. As long as it says that it has one, nobody else gets its
	// ports there.
	Leaving bool
	// Alone says that no other Service has its address, and Group that only those of the same group have.
	Alone bool
	Group string
	// Endpoints tells the endpoints of the Service from those of others, if the place that has the address must have some of them
	// (externalTrafficPolicy: Local). Two Services whose endpoints differ may have no such place in common, and don't share an address.
	Endpoints string

	// kind is the result of Kind, "" before its first call.
	kind string
}

// Kind is equal for Services that ask the same of an address: an address has room for all of them, or for none. It is made once.
func (s *Service) Kind() string {
	if s.kind == "" {
		s.kind = fmt.Sprintf("%v %v %t %t %q %q", s.Ports, s.Families, s.Both, s.Alone, s.Group, s.Endpoints)
	}
	return s.kind
}

// age orders Services: the oldest first.
func age(a, b *Service) int {
	return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name.Namespace, b.Name.Namespace), strings.Compare(a.Name.Name, b.Name.Name))
}

// Address is a floating address, or the pair of a dual-stack pool.
type Address struct {
	// Claim is the name of the AddressClaim that has it.
	Claim string
	Pool  string
	// Address is unknown as long as the claim asks for any address of the pool and has no answer.
	ipam.Address
	// Asked says that the claim asks for the address by name, and hasn't got it yet. Only Services get it that ask for it, too, or that have it.
	Asked bool
}

// Reason says why a Service has no address, as a reason of a condition.
type Reason string

// Reasons.
const (
	// PoolNotFound: there is no such AddressPool.
	PoolNotFound Reason = "PoolNotFound"
	// FamilyMissing: the AddressPool, or the address, isn't of the families that the Service needs.
	FamilyMissing Reason = "FamilyMissing"
	// AddressOutsidePool: no AddressPool that the Service may use has the address.
	AddressOutsidePool Reason = "AddressOutsidePool"
	// AddressPair: the two addresses that the Service asks for aren't a pair.
	AddressPair Reason = "AddressPair"
	// AddressInUse: another Service that has the address has the same port, or doesn't share it.
	AddressInUse Reason = "AddressInUse"
	// TooManyPorts: an address hasn't room for all ports of the Service beside those of others that have it.
	TooManyPorts Reason = "TooManyPorts"
	// Invalid: what the Service asks for can't be understood.
	Invalid Reason = "Invalid"
	// AddressChanged: the Service asks for another address, or another pool, than it had.
	AddressChanged Reason = "AddressChanged"
)

// Given is what a Service gets.
type Given struct {
	// Claim is the AddressClaim of the address. It is empty if the Service gets none.
	Claim string
	// Address is the claim's, unknown as long as the claim asks for any and has no answer.
	Address ipam.Address
	// Reason and Message say why it gets none, or another one than it had.
	Reason  Reason
	Message string
}

// Plan is who gets which address.
type Plan struct {
	// Given has an entry for each Service, in the order in which they were passed.
	Given []Given
	// Make are claims that don't exist yet.
	Make []Address
	// Idle are claims of addresses that no Service gets.
	Idle []string
}

// Facts are all that a plan depends on.
type Facts struct {
	// Pools are those that exist, by name, and Default is that of Services that ask for none.
	Pools   map[string]ipam.Pool
	Default string
	// Addresses are those that there are, in the order in which they are to be used.
	Addresses []Address
	Services  []Service
}
