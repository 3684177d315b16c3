package v2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MaxBlockSizeBits bounds AddressPoolSpec.BlockSizeBits: a block has at most
// 65,536 addresses.
const MaxBlockSizeBits = 16

// DefaultBlockSizeBits is the value of AddressPoolSpec.BlockSizeBits when unset.
const DefaultBlockSizeBits = 5

// AddressPool is a set of addresses from which nodes acquire AddressBlocks.
//
// +genclient
// +genclient:nonNamespaced
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:subresource:status
type AddressPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec AddressPoolSpec `json:"spec"`
	// +optional
	Status AddressPoolStatus `json:"status,omitempty"`
}

// AddressPoolSpec is what the admin of a pool decides.
type AddressPoolSpec struct {
	// BlockSizeBits is the size of the blocks that are carved out of the pool: a
	// block has 2^blockSizeBits addresses of each family. It can't be changed.
	//
	// +optional
	// +kubebuilder:default=5
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=16
	BlockSizeBits int32 `json:"blockSizeBits"`

	// Subnets are the addresses of the pool. Subnets can be appended, not
	// changed, reordered or removed.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	Subnets []SubnetSet `json:"subnets"`
}

// SubnetSet is an IPv4 subnet, an IPv6 subnet, or one of each of equal size.
type SubnetSet struct {
	// IPv4 is a subnet in CIDR notation without host bits.
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=18
	IPv4 *string `json:"ipv4,omitempty"`

	// IPv6 is a subnet in CIDR notation without host bits.
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=43
	IPv6 *string `json:"ipv6,omitempty"`
}

// Condition types of an AddressPool.
const (
	// PoolExhausted is True when every block of the pool is taken.
	PoolExhausted = "Exhausted"
	// PoolOverlapping is True when the pool shares addresses with another pool,
	// with a Service range or with a node.
	PoolOverlapping = "Overlapping"
	// PoolTerminating is True while a deleted pool waits for its blocks.
	PoolTerminating = "Terminating"
)

// AddressPoolStatus is what coil-ipam-controller observed.
type AddressPoolStatus struct {
	// ObservedGeneration is the generation that the status is about.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// LastIndex is the index of the block carved last; carving goes on after it.
	//
	// +optional
	LastIndex *int32 `json:"lastIndex,omitempty"`

	// Blocks counts the blocks of the pool.
	//
	// +optional
	Blocks Usage `json:"blocks,omitempty"`

	// Addresses counts the addresses of the pool, one of each family together
	// as one in a dual-stack pool.
	//
	// +optional
	Addresses Usage `json:"addresses,omitempty"`

	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Usage is a part of a whole, both as counts.
type Usage struct {
	// Used is how many are in use.
	Used int64 `json:"used"`
	// Total is how many there are.
	Total int64 `json:"total"`
	// Summary is "used/total", for people.
	//
	// +optional
	Summary string `json:"summary,omitempty"`
}

// AddressPoolList is a list of AddressPools.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type AddressPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AddressPool `json:"items"`
}
