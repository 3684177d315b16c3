package v2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// EgressAddresses says which floating addresses an Egress has, and who leaves by which.
//
// +kubebuilder:validation:XValidation:rule="has(self.count) != has(self.list)",message="count or list is required, and not both"
type EgressAddresses struct {
	// Use says whose the addresses are: Router gives each router at least one, by which the clients that it serves leave. Client
	// gives each EgressPolicy, and the pods with the annotation together, one; their packets go to the router that has it.
	//
	// +kubebuilder:validation:Enum=Router;Client
	Use EgressAddressUse `json:"use"`

	// Pool is the name of an AddressPool with blocks of one address (blockSizeBits: 0).
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	Pool string `json:"pool"`

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
	// +kubebuilder:validation:XValidation:rule="self.all(e, isIP(e) || isCIDR(e) || e.split('-').size() == 2 && e.split('-').all(p, isIP(p)))",message="must be addresses, ranges such as 198.51.100.20-198.51.100.29, or CIDRs"
	List []string `json:"list,omitempty"`

	// Placement says on which nodes with a router the addresses are.
	//
	// +optional
	Placement *EgressPlacement `json:"placement,omitempty"`
}

// EgressAddressUse says whose the addresses of an Egress are.
type EgressAddressUse string

// The uses.
const (
	EgressAddressOfRouter EgressAddressUse = "Router"
	EgressAddressOfClient EgressAddressUse = "Client"
)

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

// EgressAddressesReady, a condition of an Egress, is True when each of its addresses is on a node.
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
}
