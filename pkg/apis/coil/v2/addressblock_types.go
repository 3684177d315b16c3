package v2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AddressBlock is a range of addresses of a pool that one node holds. Its name
// is "<pool>-<index>": creating the object is what takes the range.
//
// +genclient
// +genclient:nonNamespaced
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:subresource:status
type AddressBlock struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Index is the position of the block in its pool, from 0.
	//
	// +kubebuilder:validation:Minimum=0
	Index int32 `json:"index"`

	// IPv4 is the IPv4 range of the block in CIDR notation.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=18
	IPv4 *string `json:"ipv4,omitempty"`

	// IPv6 is the IPv6 range of the block in CIDR notation.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=43
	IPv6 *string `json:"ipv6,omitempty"`

	// +optional
	Status AddressBlockStatus `json:"status,omitempty"`
}

// AddressBlockStatus is what the coild that holds the block reports, on change
// and at most every 30 seconds.
type AddressBlockStatus struct {
	// Allocated is the number of addresses that pods have.
	//
	// +optional
	Allocated int32 `json:"allocated"`
	// Cooling is the number of addresses that were freed and aren't reused yet.
	//
	// +optional
	Cooling int32 `json:"cooling"`
}

// AddressBlockList is a list of AddressBlocks.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type AddressBlockList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AddressBlock `json:"items"`
}
