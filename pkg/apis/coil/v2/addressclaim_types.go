package v2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MaxClaimedAddresses bounds how many addresses, or pairs of them, an AddressClaim has.
const MaxClaimedAddresses = 1024

// AddressClaim asks for floating addresses of a pool: addresses that belong to an object, such as an Egress, and not
// to a pod or a node. Its controller (metadata.ownerReferences) is the owner of the addresses; a claim without one owns
// them itself. Each address is an AddressBlock with the label coil.cybozu.com/floating.
//
// +genclient
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="Addresses",type=string,JSONPath=`.status.summary`,description="Addresses that the claim has, of those it asks for"
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`,description="Whether it has all of them"
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type AddressClaim struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec AddressClaimSpec `json:"spec"`
	// +optional
	Status AddressClaimStatus `json:"status,omitempty,omitzero"`
}

// AddressClaimSpec says how many or which addresses of which pool are asked for.
//
// +kubebuilder:validation:XValidation:rule="has(self.count) != has(self.addresses)",message="count or addresses is required, and not both"
type AddressClaimSpec struct {
	// Pool is the name of an AddressPool with blocks of one address (blockSizeBits: 0).
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="can't be changed: make another claim"
	Pool string `json:"pool"`

	// Count is how many addresses the claim has; in a dual-stack pool, how many pairs.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1024
	Count *int32 `json:"count,omitempty"`

	// Addresses lists the addresses that are asked for: single ones, ranges such as 198.51.100.20-198.51.100.29, and
	// CIDRs. In a dual-stack pool an address of one family stands for the pair.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=91
	// +kubebuilder:validation:XValidation:rule="self.all(e, isIP(e) || isCIDR(e) || e.split('-').size() == 2 && e.split('-').all(p, isIP(p)))",message="must be addresses, ranges such as 198.51.100.20-198.51.100.29, or CIDRs"
	Addresses []string `json:"addresses,omitempty"`

	// CoolDownSeconds is for how long a released address is given to nobody else.
	// In Go the zero value means no time at all, not the default.
	//
	// +optional
	// +kubebuilder:default=3600
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=31536000
	CoolDownSeconds int32 `json:"coolDownSeconds"`
}

// Condition types of an AddressClaim.
const (
	// ClaimReady is True when the claim has all addresses that it asks for.
	ClaimReady = "Ready"
	// ClaimProvided, of a claim in a pool with spec.openstack, is True when OpenStack has all that the address needs. If it is False, the reason and the message are
	// OpenStack's.
	ClaimProvided = "Provided"
	// ClaimAllowed, of the same claims, is True when the ports of gateways may use the address. The message names those that can't be told.
	ClaimAllowed = "Allowed"
)

// Reasons of ClaimProvided and ClaimAllowed beside those of OpenStack.
const (
	// ReasonAddressProvided: ClaimProvided is True.
	ReasonAddressProvided = "AddressProvided"
	// ReasonPairsWritten: ClaimAllowed is True.
	ReasonPairsWritten = "AddressPairsWritten"
	// ReasonPairsRefused: ClaimAllowed is False, as no gateway's port may use the address.
	ReasonPairsRefused = "AddressPairsRefused"
)

// Reasons of ClaimReady, beside ReasonPoolNotFound, ReasonPoolTerminating, ReasonPoolExhausted, ReasonPoolInvalid,
// ReasonPoolDraining and ReasonPoolSuspended.
const (
	// ReasonAddressesHeld: the condition is True.
	ReasonAddressesHeld = "AddressesHeld"
	// ReasonClaimNamespace: the AddressPool gives floating addresses to other namespaces only.
	ReasonClaimNamespace = "NamespaceNotAllowed"
	// ReasonBlockSize: blocks of the AddressPool have more than one address.
	ReasonBlockSize = "BlockSize"
	// ReasonAddressInvalid: an entry of the list can't be understood, or the list has too many addresses.
	ReasonAddressInvalid = "AddressInvalid"
	// ReasonAddressOutsidePool: an address of the list isn't one of the AddressPool's.
	ReasonAddressOutsidePool = "AddressOutsidePool"
	// ReasonAddressExcluded: the AddressPool excludes an address of the list. See AddressPoolSpec.Exclude.
	ReasonAddressExcluded = "AddressExcluded"
	// ReasonAddressInUse: a pod or a node has an address of the list.
	ReasonAddressInUse = "AddressInUse"
	// ReasonWaitsForOpenStack: the AddressPool's addresses come from OpenStack, which hasn't provided one yet.
	ReasonWaitsForOpenStack = "WaitsForOpenStack"
	// ReasonAddressTaken: an address of the list belongs to another claim, or cools down after it did.
	ReasonAddressTaken = "AddressTaken"
)

// AddressClaimStatus is the answer of coil-ipam-controller.
type AddressClaimStatus struct {
	// ObservedGeneration is the generation that the status is about.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Addresses are the addresses of the claim. An address keeps its place while others come and go.
	//
	// +optional
	// +listType=map
	// +listMapKey=block
	// +kubebuilder:validation:MaxItems=1024
	Addresses []ClaimedAddress `json:"addresses,omitempty"`

	// Provided is the address that OpenStack provides, if the pool has spec.openstack.
	//
	// +optional
	Provided *ProvidedAddress `json:"provided,omitempty"`

	// Summary is "those it has/those it asks for", for people.
	//
	// +optional
	Summary string `json:"summary,omitempty"`

	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ClaimedAddress is one address, or the pair of a dual-stack pool.
type ClaimedAddress struct {
	// Block is the name of the AddressBlock.
	//
	// +kubebuilder:validation:MaxLength=253
	Block string `json:"block"`
	// IPv4 is the IPv4 address.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=15
	IPv4 string `json:"ipv4,omitempty"`
	// IPv6 is the IPv6 address.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=39
	IPv6 string `json:"ipv6,omitempty"`
}

// ProvidedAddress is an address, or the pair of a dual-stack pool, that OpenStack provides.
type ProvidedAddress struct {
	// PortID is the ID of the port of Neutron that has the address.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=255
	PortID string `json:"portID,omitempty"`
	// IPv4 is the IPv4 address.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=15
	IPv4 string `json:"ipv4,omitempty"`
	// IPv6 is the IPv6 address.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=39
	IPv6 string `json:"ipv6,omitempty"`
	// FloatingIP is the floating IP that leads to the IPv4 address.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=15
	FloatingIP string `json:"floatingIP,omitempty"`
}

// AddressClaimList is a list of AddressClaims.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type AddressClaimList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AddressClaim `json:"items"`
}
