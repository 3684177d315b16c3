package v2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// AddressBlock is a range of addresses of a pool that one node holds, or one floating address, which belongs to an
// object. Its name is "<pool>-<index>": creating the object is what takes the range.
//
// +genclient
// +genclient:nonNamespaced
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.metadata.labels.coil\.cybozu\.com/node`,description="The node that holds the block"
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.metadata.labels.coil\.cybozu\.com/pool`
// +kubebuilder:printcolumn:name="IPv4",type=string,JSONPath=`.ipv4`
// +kubebuilder:printcolumn:name="IPv6",type=string,JSONPath=`.ipv6`
// +kubebuilder:printcolumn:name="Used",type=integer,JSONPath=`.status.allocated`,description="Addresses that pods have"
// +kubebuilder:printcolumn:name="Cooling",type=integer,JSONPath=`.status.cooling`,description="Addresses that were freed and aren't reused yet"
// +kubebuilder:printcolumn:name="Owner",type=string,JSONPath=`.floating.owner.summary`,description="The object that a floating address belongs to"
// +kubebuilder:printcolumn:name="Holder",type=string,JSONPath=`.floating.holding.holder`,description="The node that has a floating address"
// +kubebuilder:printcolumn:name="Since",type=date,priority=1,JSONPath=`.floating.holding.since`,description="When the holder got the floating address"
// +kubebuilder:printcolumn:name="Reserved",type=string,priority=1,JSONPath=`.metadata.labels.coil\.cybozu\.com/reserved`,description="true: no new address is taken from the block"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || self.metadata.name.matches('-(0|[1-9][0-9]{0,9})$') && int(self.metadata.name.substring(self.metadata.name.lastIndexOf('-') + 1)) == self.index",optionalOldSelf=true,fieldPath=".metadata.name",message="must be the name of the pool, a dash and the index"
// +kubebuilder:validation:XValidation:rule="has(self.ipv4) || has(self.ipv6)",fieldPath=".ipv4",message="ipv4, ipv6 or both are required"
// +kubebuilder:validation:XValidation:rule="has(self.ipv4) == has(oldSelf.ipv4) && (!has(self.ipv4) || self.ipv4 == oldSelf.ipv4)",fieldPath=".ipv4",message="can't be changed: pods have addresses of the block"
// +kubebuilder:validation:XValidation:rule="has(self.ipv6) == has(oldSelf.ipv6) && (!has(self.ipv6) || self.ipv6 == oldSelf.ipv6)",fieldPath=".ipv6",message="can't be changed: pods have addresses of the block"
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || !has(self.ipv4) || !has(self.ipv6) || !isCIDR(self.ipv4) || !isCIDR(self.ipv6) || 32 - cidr(self.ipv4).prefixLength() == 128 - cidr(self.ipv6).prefixLength()",optionalOldSelf=true,fieldPath=".ipv6",message="ipv4 and ipv6 must be of equal size, as 10.1.0.32/27 and fd00:1::20/123 are"
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() && has(oldSelf.value().floating) || !has(self.floating) || (!has(self.ipv4) || !isCIDR(self.ipv4) || cidr(self.ipv4).prefixLength() == 32) && (!has(self.ipv6) || !isCIDR(self.ipv6) || cidr(self.ipv6).prefixLength() == 128)",optionalOldSelf=true,fieldPath=".floating",message="is for blocks of one address"
type AddressBlock struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Index is the position of the block in its pool, from 0.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="can't be changed: the name of the block has it"
	Index int32 `json:"index"`

	// IPv4 is the IPv4 range of the block in CIDR notation.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self).ip().family() == 4 && cidr(self) == cidr(self).masked() && cidr(self).prefixLength() >= 16",message="must be an IPv4 range in CIDR notation, without host bits, of at most 2^16 addresses, such as 10.1.0.32/27"
	IPv4 *string `json:"ipv4,omitempty"`

	// IPv6 is the IPv6 range of the block in CIDR notation.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self).ip().family() == 6 && cidr(self) == cidr(self).masked() && cidr(self).prefixLength() >= 112",message="must be an IPv6 range in CIDR notation, without host bits, of at most 2^16 addresses, such as fd00:1::20/123"
	IPv6 *string `json:"ipv6,omitempty"`

	// Floating is the owner and the state of a floating address. Its block has the label coil.cybozu.com/floating.
	//
	// +optional
	Floating *Floating `json:"floating,omitempty"`

	// +optional
	Status AddressBlockStatus `json:"status,omitempty,omitzero"`
}

// Floating is the state of a floating address, or of the pair of a dual-stack pool.
type Floating struct {
	// Owner is the object that the address belongs to.
	Owner FloatingOwner `json:"owner"`

	// Claim is the name of the AddressClaim, in the owner's namespace, that has the address.
	//
	// +kubebuilder:validation:MaxLength=253
	Claim string `json:"claim"`

	// CoolDownSeconds is for how long the address is given to nobody else when the claim has released it.
	//
	// +optional
	CoolDownSeconds int32 `json:"coolDownSeconds"`

	// ReleasedAt is when the claim released the address. A claim of the same name gets it back until the cool-down is over.
	//
	// +optional
	ReleasedAt *metav1.Time `json:"releasedAt,omitempty"`

	// Ports are those by which clients reach Services at the address. If there are any, packets for the address go to no pod: the node that has the
	// address takes those for these ports, and leaves it to the cluster's Service proxy, such as kube-proxy, to send them to endpoints. The owner's
	// controller writes them. Two Services may have one port of a pair of addresses, each in a family of its own.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1024
	Ports []FloatingPort `json:"ports,omitempty"`

	// Successors are the nodes that may have the address, the preferred ones first. The owner's controller writes them. Unset, the
	// address is on no node.
	//
	// +optional
	// +listType=map
	// +listMapKey=node
	// +kubebuilder:validation:MaxItems=16
	Successors []FloatingNode `json:"successors,omitempty"`

	// MovingTo is the node to which the holder is to hand the address over. The owner's controller writes it; a node that changes
	// the holder takes it away.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	MovingTo string `json:"movingTo,omitempty"`

	// Standby has the holder copy connections of the address all the time, to the first of the successors that isn't the holder. That node takes
	// the address when the holder fails. The owner's controller writes it.
	//
	// +optional
	Standby bool `json:"standby,omitempty"`

	// Announcers are nodes that answer for the address beside the holder, so that routers of the network spread packets over them. It is for addresses of
	// Services in pools that are announced by routes alone; in others it has no effect. The owner's controller writes it.
	//
	// +optional
	Announcers FloatingAnnouncers `json:"announcers,omitempty,omitzero"`

	// Holding says which node has the address. Nodes write it.
	//
	// +optional
	Holding FloatingHolding `json:"holding,omitempty,omitzero"`
}

// FloatingAnnouncers are nodes that answer for a floating address.
type FloatingAnnouncers struct {
	// All adds all nodes that are ready. Nodes with the taint ToBeDeletedByClusterAutoscaler, or the label
	// node.kubernetes.io/exclude-from-external-load-balancers, are left out.
	//
	// +optional
	All bool `json:"all,omitempty"`
	// Nodes are the names of further nodes.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=253
	Nodes []string `json:"nodes,omitempty"`
}

// MaxFloatingAnnouncers bounds the nodes of FloatingAnnouncers.
const MaxFloatingAnnouncers = 256

// MaxFloatingPorts bounds the ports of a floating address.
const MaxFloatingPorts = 1024

// FloatingPort is a port by which clients reach a Service.
type FloatingPort struct {
	// +kubebuilder:validation:Enum=TCP;UDP;SCTP
	Protocol corev1.Protocol `json:"protocol"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
	// Service is the Service, as namespace/name.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=317
	Service string `json:"service,omitempty"`
}

// FloatingNode is a node that may have a floating address.
type FloatingNode struct {
	// Node is the name of the Node.
	//
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`
	// Addresses are the InternalIPs of the Node, at which nodes ask each other.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=39
	Addresses []string `json:"addresses,omitempty"`
	// PodUID is the UID of the pod on the node to which packets for the address go.
	//
	// +optional
	PodUID types.UID `json:"podUID,omitempty"`
}

// FloatingHolding is the agreement of nodes about who has a floating address.
type FloatingHolding struct {
	// Holder is the node that has the address. Unset, no node has. It is also the label coil.cybozu.com/floating-holder of the block.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Holder string `json:"holder,omitempty"`
	// PodUID is the UID of the pod on the holder to which packets for the address go.
	//
	// +optional
	PodUID types.UID `json:"podUID,omitempty"`
	// Epoch counts the changes of the holder.
	//
	// +optional
	Epoch int64 `json:"epoch,omitempty"`
	// Since is when the holder was written.
	//
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
	// Claims counts the writes by which a holder finds out that it still has the address.
	//
	// +optional
	Claims int64 `json:"claims,omitempty"`
	// HandedOver says that no node answered any more when the holder was written.
	//
	// +optional
	HandedOver bool `json:"handedOver,omitempty"`
	// Voters are the nodes that grant the holder its lease. Only holders change them.
	//
	// +optional
	// +listType=map
	// +listMapKey=node
	// +kubebuilder:validation:MaxItems=16
	Voters []FloatingNode `json:"voters,omitempty"`
	// Contender is the node that will take the address from a holder that doesn't claim it.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Contender string `json:"contender,omitempty"`
}

// FloatingOwner is an object that has floating addresses.
type FloatingOwner struct {
	// Kind is such as Egress.
	//
	// +kubebuilder:validation:MaxLength=253
	Kind string `json:"kind"`
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=253
	Name string    `json:"name"`
	UID  types.UID `json:"uid"`
	// Summary is "kind namespace/name", for people.
	//
	// +optional
	Summary string `json:"summary,omitempty"`
}

// Condition types of an AddressBlock with a floating address. The message says which node has seen it.
const (
	// BlockConflicting is True while another host on a link says that the address is at it. The holder defends the address.
	BlockConflicting = "Conflicting"
	// BlockForwardingBlocked is True if a node drops packets of the address that it should forward for its pod or, if it is one of Services, that no Service proxy of the
	// node translates.
	BlockForwardingBlocked = "ForwardingBlocked"
	// BlockStandbyInStep is True while the node that takes the address when its holder fails has all of the address's connections that are older
	// than a second. Addresses without a standby don't have the condition.
	BlockStandbyInStep = "StandbyInStep"
)

// Reasons of BlockConflicting and BlockForwardingBlocked.
const (
	// ReasonOtherHost: another host said so within the last minutes.
	ReasonOtherHost = "OtherHost"
	// ReasonPacketsDropped: a probe didn't leave the node, or clients' packets weren't translated.
	ReasonPacketsDropped = "PacketsDropped"
	// ReasonOver: the condition is False.
	ReasonOver = "Over"
)

// Reasons of BlockStandbyInStep.
const (
	// ReasonInStep: the condition is True.
	ReasonInStep = "InStep"
	// ReasonBehind: the other node has lacked connections for more than five seconds. The message says why.
	ReasonBehind = "Behind"
	// ReasonNoFollower: no other node may have the address.
	ReasonNoFollower = "NoFollower"
	// ReasonNoHolder: no node has the address. The condition is Unknown.
	ReasonNoHolder = "NoHolder"
)

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

	// Conditions are those of a floating address: Conflicting, ForwardingBlocked and StandbyInStep.
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
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
