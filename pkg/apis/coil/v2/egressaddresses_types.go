package v2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// EgressAddresses says which addresses an Egress has, and who leaves by which.
//
// +kubebuilder:validation:XValidation:rule="self.use == 'Node' || has(self.count) != has(self.list)",message="count or list is required, and not both"
// +kubebuilder:validation:XValidation:rule="self.use == 'Node' || has(self.pool)",fieldPath=".pool",reason=FieldValueRequired,message="the addresses of the uses Router and Client are of an AddressPool"
// +kubebuilder:validation:XValidation:rule="self.use != 'Node' || !has(self.pool)",fieldPath=".pool",message="isn't for the use Node: the addresses are those of the nodes. Take it out, or choose the use Router or Client"
// +kubebuilder:validation:XValidation:rule="self.use != 'Node' || !has(self.count)",fieldPath=".count",message="isn't for the use Node: the addresses are those of the nodes. Take it out, or choose the use Router or Client"
// +kubebuilder:validation:XValidation:rule="self.use != 'Node' || !has(self.list)",fieldPath=".list",message="isn't for the use Node: the addresses are those of the nodes. Take it out, or choose the use Router or Client"
// +kubebuilder:validation:XValidation:rule="self.use == 'Client' || !has(self.shared)",fieldPath=".shared",message="is for the use Client: policies have no addresses of their own otherwise"
// +kubebuilder:validation:XValidation:rule="self.use == 'Client' || !has(self.assignment)",fieldPath=".assignment",message="is for the use Client: policies have no addresses of their own otherwise"
// +kubebuilder:validation:XValidation:rule="self.use == 'Client' || !has(self.placement)",fieldPath=".placement",message="is for the use Client: addresses are where the routers are otherwise"
// +kubebuilder:validation:XValidation:rule="self.use == 'Client' || !has(self.standby) || !self.standby",fieldPath=".standby",message="is for the use Client: clients of a router that fails go to any other router otherwise, and not to the one that takes its address"
type EgressAddresses struct {
	// Use says whose the addresses are. Router spreads them over the routers that are ready. A connection leaves by an address of the router
	// that it goes through. If the router has several, one is drawn for each client. A router without an address gets no clients. Client gives each
	// EgressPolicy one address, and all pods with the annotation together the first one. Their packets go to the router that has it. Node has no
	// addresses of a pool, and none of the other fields: a connection leaves by an address of the node on which its router runs. It is for pools
	// whose pods nobody outside has a route to.
	//
	// +kubebuilder:validation:Enum=Router;Client;Node
	Use EgressAddressUse `json:"use"`

	// Pool, for the uses Router and Client, is the name of an AddressPool with blocks of one address (blockSizeBits: 0).
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Pool string `json:"pool,omitempty"`

	// Count is how many addresses the Egress has; in a dual-stack pool, how many pairs.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1024
	Count *int32 `json:"count,omitempty"`

	// List has the addresses: single ones, ranges such as 198.51.100.20-198.51.100.29, and CIDRs. In a dual-stack pool an
	// address of one family stands for the pair.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=91
	// +kubebuilder:validation:items:XValidation:rule="isIP(self) || isCIDR(self) || self.split('-').size() == 2 && self.split('-').all(p, isIP(p))",message="must be an address, a range such as 198.51.100.20-198.51.100.29, or a CIDR"
	// +kubebuilder:validation:items:XValidation:rule="!isCIDR(self) || cidr(self) == cidr(self).masked()",message="host bits must be zero: the address must be the first one of the CIDR. A single address has no /"
	// +kubebuilder:validation:items:XValidation:rule="!isCIDR(self) || cidr(self).prefixLength() >= (cidr(self).ip().family() == 4 ? 22 : 118)",message="an Egress has at most 1024 addresses: the CIDR must be /22 or smaller, and in IPv6 /118"
	// +kubebuilder:validation:items:XValidation:rule="self.split('-').size() != 2 || !self.split('-').all(p, isIP(p)) || ip(self.split('-')[0]).family() == ip(self.split('-')[1]).family()",message="both ends of a range must be of one family"
	List []string `json:"list,omitempty"`

	// Shared, for the use Client, are addresses that policies of any namespace may have. Each other one belongs to the namespace of its oldest policy.
	// In a dual-stack pool an address of one family stands for the pair.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:MaxLength=39
	// +kubebuilder:validation:items:XValidation:rule="isIP(self)",message="must be an address"
	Shared []string `json:"shared,omitempty"`

	// Placement, for the use Client, says on which nodes with a router the addresses are.
	//
	// +optional
	Placement *EgressPlacement `json:"placement,omitempty"`

	// Assignment, for the use Client, says which address a policy gets that names none.
	//
	// +optional
	Assignment *EgressAssignment `json:"assignment,omitempty"`

	// Standby, for the use Client, has connections copied all the time, from the node that has their address to the node that takes it first when
	// that fails. So connections that are older than a second survive. Without it connections survive moves on purpose only.
	//
	// +optional
	Standby bool `json:"standby,omitempty"`
}

// EgressAssignment says which address a policy gets that names none. A policy keeps its address.
type EgressAssignment struct {
	// Strategy is Unused, an address that no policy has; Default, the first one with room; LeastUsed, the one that the fewest policies
	// have; or Random, drawn once.
	//
	// +optional
	// +kubebuilder:default=Unused
	// +kubebuilder:validation:Enum=Default;Unused;LeastUsed;Random
	Strategy EgressAssignmentStrategy `json:"strategy,omitempty"`

	// MaxPolicies is how many policies an address has before another one is chosen; 0 is any number.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxPolicies int32 `json:"maxPolicies,omitempty"`

	// WhenFull says what a policy gets for which the strategy finds no address: Overflow the one that the fewest policies have, of
	// those that its namespace may have; Refuse none.
	//
	// +optional
	// +kubebuilder:default=Overflow
	// +kubebuilder:validation:Enum=Overflow;Refuse
	WhenFull EgressWhenFull `json:"whenFull,omitempty"`
}

// EgressAssignmentStrategy is a strategy of assignment.
type EgressAssignmentStrategy string

// The strategies.
const (
	EgressAssignmentDefault   EgressAssignmentStrategy = "Default"
	EgressAssignmentUnused    EgressAssignmentStrategy = "Unused"
	EgressAssignmentLeastUsed EgressAssignmentStrategy = "LeastUsed"
	EgressAssignmentRandom    EgressAssignmentStrategy = "Random"
)

// EgressWhenFull says what a policy gets for which there is no address.
type EgressWhenFull string

// What it gets.
const (
	EgressWhenFullOverflow EgressWhenFull = "Overflow"
	EgressWhenFullRefuse   EgressWhenFull = "Refuse"
)

// EgressAddressUse says whose the addresses of an Egress are.
type EgressAddressUse string

// The uses.
const (
	// EgressAddressOfRouter gives each router one or more.
	EgressAddressOfRouter EgressAddressUse = "Router"
	// EgressAddressOfClient gives each policy one.
	EgressAddressOfClient EgressAddressUse = "Client"
	// EgressAddressOfNode is for the address of the node on which a router runs.
	EgressAddressOfNode EgressAddressUse = "Node"
)

// For says whether there are addresses, and whose they are.
func (a *EgressAddresses) For(use EgressAddressUse) bool { return a != nil && a.Use == use }

// Float says whether there are floating addresses, those of a pool.
func (a *EgressAddresses) Float() bool { return a != nil && a.Use != EgressAddressOfNode }

// EgressPlacement says on which nodes addresses are.
type EgressPlacement struct {
	// Strategy is Spread, by which the numbers of addresses of two nodes differ by at most one, or Pack, which fills one node after the
	// other up to MaxPerNode.
	//
	// +optional
	// +kubebuilder:default=Spread
	// +kubebuilder:validation:Enum=Spread;Pack
	Strategy EgressPlacementStrategy `json:"strategy,omitempty"`

	// MaxPerNode is how many addresses a node has at most; 0 is any number.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1024
	MaxPerNode int32 `json:"maxPerNode,omitempty"`
}

// EgressPlacementStrategy is a strategy of placement.
type EgressPlacementStrategy string

// The strategies.
const (
	EgressPlacementSpread EgressPlacementStrategy = "Spread"
	EgressPlacementPack   EgressPlacementStrategy = "Pack"
)

// EgressAddressesReady, a condition of an Egress, is True when it has all addresses that its spec names, and each is on a node.
const EgressAddressesReady = "AddressesReady"

// EgressAddress is an address, or the pair of a dual-stack pool.
type EgressAddress struct {
	// +optional
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).family() == 4",message="must be an IPv4 address"
	IPv4 string `json:"ipv4,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).family() == 6",message="must be an IPv6 address"
	IPv6 string `json:"ipv6,omitempty"`
}

// String is the address, or both of a pair.
func (a EgressAddress) String() string {
	if a.IPv4 != "" && a.IPv6 != "" {
		return a.IPv4 + " and " + a.IPv6
	}
	return a.IPv4 + a.IPv6
}

// EgressAddressStatus is a floating address of an Egress, or the pair of a dual-stack pool.
type EgressAddressStatus struct {
	// Block is the name of the AddressBlock.
	//
	// +kubebuilder:validation:MaxLength=253
	Block         string `json:"block"`
	EgressAddress `json:",inline"`
	// Node is the node that has the address. Unset, none has.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node,omitempty"`
	// Router is the name of the router pod on the node to which packets for the address go.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Router string `json:"router,omitempty"`
	// Since is when the node got the address.
	//
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
	// PolicyCount is the number of EgressPolicies and EgressClusterPolicies whose pods leave by the address. It is written every 30 seconds at most
	// if nothing else changes.
	//
	// +optional
	PolicyCount int32 `json:"policyCount,omitempty"`
	// Policies are the names of some of these policies: "namespace/name" of an EgressPolicy, the name of an EgressClusterPolicy.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=317
	Policies []string `json:"policies,omitempty"`
}

// EgressNodeAddress has the addresses by which connections through a router leave, with the use Node.
type EgressNodeAddress struct {
	// Router is the name of the router pod.
	//
	// +kubebuilder:validation:MaxLength=253
	Router string `json:"router"`
	// Node is the name of the router's Node. The addresses are its first InternalIPs, of the families that the router has. A node with several
	// addresses takes that of the link by which a packet leaves.
	//
	// +kubebuilder:validation:MaxLength=253
	Node          string `json:"node"`
	EgressAddress `json:",inline"`
}
