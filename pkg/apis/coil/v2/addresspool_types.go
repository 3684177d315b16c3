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
// +kubebuilder:printcolumn:name="Blocks",type=string,JSONPath=`.status.blocks.summary`,description="Blocks that nodes hold, of all blocks of the pool"
// +kubebuilder:printcolumn:name="Addresses",type=string,JSONPath=`.status.addresses.summary`,description="Addresses that pods have, of all addresses of the pool"
// +kubebuilder:printcolumn:name="Floating",type=integer,priority=1,JSONPath=`.status.floating.used`,description="Floating addresses that belong to an object"
// +kubebuilder:printcolumn:name="Exhausted",type=string,JSONPath=`.status.conditions[?(@.type=="Exhausted")].status`,description="Whether every block is taken"
// +kubebuilder:printcolumn:name="Overlapping",type=string,JSONPath=`.status.conditions[?(@.type=="Overlapping")].status`,description="Whether others use addresses of the pool"
// +kubebuilder:printcolumn:name="Terminating",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Terminating")].message`,description="Blocks that a deleted pool waits for"
// +kubebuilder:printcolumn:name="Drain",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Drained")].message`,description="What is left of a pool that drains"
// +kubebuilder:printcolumn:name="Announce",type=string,priority=1,JSONPath=`.spec.announce`,description="How others learn where the addresses are"
// +kubebuilder:printcolumn:name="BlockSizeBits",type=integer,priority=1,JSONPath=`.spec.blockSizeBits`
// +kubebuilder:printcolumn:name="Subnets",type=string,priority=1,JSONPath=`.spec.subnets`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || self.metadata.name.size() <= 63",optionalOldSelf=true,fieldPath=".metadata.name",message="is the value of a label of the pool's blocks, so it has at most 63 characters"
type AddressPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec AddressPoolSpec `json:"spec"`
	// +optional
	Status AddressPoolStatus `json:"status,omitempty,omitzero"`
}

// AddressPoolSpec is what the admin of a pool decides.
//
// +kubebuilder:validation:XValidation:rule="self.subnets.all(s, !has(s.ipv4) || !isCIDR(s.ipv4) || cidr(s.ipv4).ip().family() != 4 || cidr(s.ipv4).prefixLength() + self.blockSizeBits <= 32)",fieldPath=".subnets",messageExpression="self.subnets[self.subnets.transformList(i, s, has(s.ipv4) && isCIDR(s.ipv4) && cidr(s.ipv4).prefixLength() + self.blockSizeBits > 32, i)[0]].ipv4 + ' is smaller than a block of 2^blockSizeBits addresses'"
// +kubebuilder:validation:XValidation:rule="self.subnets.all(s, !has(s.ipv6) || !isCIDR(s.ipv6) || cidr(s.ipv6).ip().family() != 6 || cidr(s.ipv6).prefixLength() + self.blockSizeBits <= 128)",fieldPath=".subnets",messageExpression="self.subnets[self.subnets.transformList(i, s, has(s.ipv6) && isCIDR(s.ipv6) && cidr(s.ipv6).prefixLength() + self.blockSizeBits > 128, i)[0]].ipv6 + ' is smaller than a block of 2^blockSizeBits addresses'"
// +kubebuilder:validation:XValidation:rule="!has(self.purpose) || self.purpose != 'Floating' || self.blockSizeBits == 0",fieldPath=".purpose",message="a pool of floating addresses needs blockSizeBits: 0"
// +kubebuilder:validation:XValidation:rule="!has(self.announce) || self.announce != 'Gateway' || has(self.purpose) && self.purpose == 'Floating'",fieldPath=".announce",message="a pool of gateways needs purpose: Floating: pods can't have its addresses"
// +kubebuilder:validation:XValidation:rule="!has(self.openstack) || has(self.announce) && self.announce == 'Gateway'",fieldPath=".openstack",message="is for pools with announce: Gateway"
// +kubebuilder:validation:XValidation:rule="has(self.openstack) == has(oldSelf.openstack)",fieldPath=".openstack",message="can't be added or removed: make another pool"
// +kubebuilder:validation:XValidation:rule="!has(self.vrrp) || has(self.announce) && self.announce == 'Gateway'",fieldPath=".vrrp",message="is for pools with announce: Gateway"
// +kubebuilder:validation:XValidation:rule="!has(self.exclude) || self.exclude.all(e, !(isIP(e) || isCIDR(e) || e.split('-').size() == 2 && e.split('-').all(a, isIP(a))) || self.subnets.exists(s, has(s.ipv4) && isCIDR(s.ipv4) && (isCIDR(e) ? cidr(s.ipv4).containsCIDR(e) : cidr(s.ipv4).containsIP(e.split('-')[0]) && cidr(s.ipv4).containsIP(e.split('-')[e.split('-').size() - 1])) || has(s.ipv6) && isCIDR(s.ipv6) && (isCIDR(e) ? cidr(s.ipv6).containsCIDR(e) : cidr(s.ipv6).containsIP(e.split('-')[0]) && cidr(s.ipv6).containsIP(e.split('-')[e.split('-').size() - 1]))))",fieldPath=".exclude",messageExpression="self.exclude.filter(e, (isIP(e) || isCIDR(e) || e.split('-').size() == 2 && e.split('-').all(a, isIP(a))) && !self.subnets.exists(s, has(s.ipv4) && isCIDR(s.ipv4) && (isCIDR(e) ? cidr(s.ipv4).containsCIDR(e) : cidr(s.ipv4).containsIP(e.split('-')[0]) && cidr(s.ipv4).containsIP(e.split('-')[e.split('-').size() - 1])) || has(s.ipv6) && isCIDR(s.ipv6) && (isCIDR(e) ? cidr(s.ipv6).containsCIDR(e) : cidr(s.ipv6).containsIP(e.split('-')[0]) && cidr(s.ipv6).containsIP(e.split('-')[e.split('-').size() - 1]))))[0] + ' is not within one of spec.subnets'"
type AddressPoolSpec struct {
	// Purpose is the use of the pool's addresses. Any, the default, is for pods and AddressClaims. Floating is for
	// AddressClaims only. Pods keep the addresses that they have when it changes.
	//
	// +optional
	// +kubebuilder:validation:Enum=Any;Floating
	Purpose PoolPurpose `json:"purpose,omitempty"`

	// FloatingNamespaces are the namespaces whose AddressClaims, and so whose Egresses, get floating addresses of the pool. Unset: all
	// namespaces. A claim keeps the addresses that it has when its namespace is removed from the list.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	FloatingNamespaces []string `json:"floatingNamespaces,omitempty"`

	// Announce is how hosts outside of the cluster learn which node has an address. Route: by the routes that nodes have in
	// table 119, which routing daemons announce. Neighbor: the node also answers for the address itself, by ARP and NDP, on
	// its links in whose subnets the address is. Gateway: no node has the addresses, which are for Services; machines outside of the cluster have them, the
	// LoadBalancerGateways that name the pool. It can be changed at any time.
	//
	// +optional
	// +kubebuilder:default=Route
	// +kubebuilder:validation:Enum=Route;Neighbor;Gateway
	Announce PoolAnnounce `json:"announce,omitempty"`

	// VRRP has gateways agree by VRRP (RFC 5798) which of them has which address. Unset, the network decides that, as by routes. It is for pools with
	// announce: Gateway.
	//
	// +optional
	VRRP *PoolVRRP `json:"vrrp,omitempty"`

	// OpenStack has each address be a port of Neutron, which OpenStack gives to nobody else. It is for pools with announce: Gateway whose gateways are
	// machines of that cloud. spec.subnets are then ranges of Neutron's subnets.
	//
	// +optional
	OpenStack *PoolOpenStack `json:"openstack,omitempty"`

	// BlockSizeBits is the size of the blocks that are carved out of the pool: a
	// block has 2^blockSizeBits addresses of each family. It can't be changed.
	// In Go the zero value means blocks of one address, not the default.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="can't be changed: the blocks that nodes hold have this size"
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
	// +kubebuilder:validation:XValidation:rule="oldSelf.all(i, s, i < self.size() && self[i] == s)",message="subnets can be appended, not changed, reordered or removed"
	// +kubebuilder:validation:XValidation:rule="self.all(s, has(s.ipv4) == has(self[0].ipv4) && has(s.ipv6) == has(self[0].ipv6))",message="all subnets must have the same address families"
	// +kubebuilder:validation:XValidation:rule="self.all(i, s, oldSelf.hasValue() && i < oldSelf.value().size() || !has(s.ipv4) || !isCIDR(s.ipv4) || cidr(s.ipv4) == cidr(s.ipv4).masked())",optionalOldSelf=true,messageExpression="self[self.transformList(i, s, has(s.ipv4) && isCIDR(s.ipv4) && !(cidr(s.ipv4) == cidr(s.ipv4).masked()), i).max()].ipv4 + ' has host bits: the address must be the first one of the subnet'"
	// +kubebuilder:validation:XValidation:rule="self.all(i, s, oldSelf.hasValue() && i < oldSelf.value().size() || !has(s.ipv6) || !isCIDR(s.ipv6) || cidr(s.ipv6) == cidr(s.ipv6).masked())",optionalOldSelf=true,messageExpression="self[self.transformList(i, s, has(s.ipv6) && isCIDR(s.ipv6) && !(cidr(s.ipv6) == cidr(s.ipv6).masked()), i).max()].ipv6 + ' has host bits: the address must be the first one of the subnet'"
	// +kubebuilder:validation:XValidation:rule="self.all(i, s, oldSelf.hasValue() && i < oldSelf.value().size() || !has(s.ipv4) || !isCIDR(s.ipv4) || self.exists_one(t, has(t.ipv4) && isCIDR(t.ipv4) && (cidr(s.ipv4).containsCIDR(t.ipv4) || cidr(t.ipv4).containsCIDR(s.ipv4))))",optionalOldSelf=true,messageExpression="self[self.transformList(i, s, has(s.ipv4) && isCIDR(s.ipv4) && !(self.exists_one(t, has(t.ipv4) && isCIDR(t.ipv4) && (cidr(s.ipv4).containsCIDR(t.ipv4) || cidr(t.ipv4).containsCIDR(s.ipv4)))), i).max()].ipv4 + ' overlaps another subnet of the pool'"
	// +kubebuilder:validation:XValidation:rule="self.all(i, s, oldSelf.hasValue() && i < oldSelf.value().size() || !has(s.ipv6) || !isCIDR(s.ipv6) || self.exists_one(t, has(t.ipv6) && isCIDR(t.ipv6) && (cidr(s.ipv6).containsCIDR(t.ipv6) || cidr(t.ipv6).containsCIDR(s.ipv6))))",optionalOldSelf=true,messageExpression="self[self.transformList(i, s, has(s.ipv6) && isCIDR(s.ipv6) && !(self.exists_one(t, has(t.ipv6) && isCIDR(t.ipv6) && (cidr(s.ipv6).containsCIDR(t.ipv6) || cidr(t.ipv6).containsCIDR(s.ipv6)))), i).max()].ipv6 + ' overlaps another subnet of the pool'"
	// +kubebuilder:validation:XValidation:rule="self.all(i, s, oldSelf.hasValue() && i < oldSelf.value().size() || !has(s.ipv4) || !isCIDR(s.ipv4) || cidr(s.ipv4).prefixLength() < 8 || cidr(s.ipv4).ip().isGlobalUnicast() && !cidr('0.0.0.0/8').containsCIDR(s.ipv4))",optionalOldSelf=true,messageExpression="self[self.transformList(i, s, has(s.ipv4) && isCIDR(s.ipv4) && cidr(s.ipv4).prefixLength() >= 8 && !(cidr(s.ipv4).ip().isGlobalUnicast() && !cidr('0.0.0.0/8').containsCIDR(s.ipv4)), i).max()].ipv4 + ' has addresses that pods cannot have: unspecified, loopback, link-local or multicast'"
	// +kubebuilder:validation:XValidation:rule="self.all(i, s, oldSelf.hasValue() && i < oldSelf.value().size() || !has(s.ipv6) || !isCIDR(s.ipv6) || cidr(s.ipv6).prefixLength() < 8 || cidr(s.ipv6).ip().isGlobalUnicast())",optionalOldSelf=true,messageExpression="self[self.transformList(i, s, has(s.ipv6) && isCIDR(s.ipv6) && cidr(s.ipv6).prefixLength() >= 8 && !(cidr(s.ipv6).ip().isGlobalUnicast()), i).max()].ipv6 + ' has addresses that pods cannot have: unspecified, loopback, link-local or multicast'"
	Subnets []SubnetSet `json:"subnets"`

	// Exclude lists addresses of spec.subnets that the pool gives to nobody, since others have them: single ones, ranges such as
	// 10.1.2.10-10.1.2.20, whose ends may be in either order, and CIDRs. A block that has one of them is not carved; a pair of addresses neither, if one of both is listed. What
	// exists stays: a node gives no address of such a block any more, and gives it back when the last pod that has one has ended.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=91
	// +kubebuilder:validation:items:XValidation:rule="isIP(self) || isCIDR(self) || self.split('-').size() == 2 && self.split('-').all(a, isIP(a))",message="must be an address, a range such as 10.1.2.10-10.1.2.20, or a CIDR"
	// +kubebuilder:validation:items:XValidation:rule="!isCIDR(self) || cidr(self) == cidr(self).masked()",message="has host bits: the address must be the first one of the CIDR"
	Exclude []string `json:"exclude,omitempty"`

	// Drain has the pool give nothing new: no block, no address of the blocks that nodes have, no floating address. Pods and owners keep what they
	// have. The condition Drained says what is left.
	//
	// +optional
	Drain bool `json:"drain,omitempty"`
}

// PoolVRRP says how gateways of a pool agree.
//
// +kubebuilder:validation:XValidation:rule="self.routerID + self.instances <= 256",message="routerID and instances lead to virtual router IDs above 255"
type PoolVRRP struct {
	// RouterID is the first virtual router ID (VRID). The pool has as many as instances, in both families. No other VRRP routers of the gateways' link, and no other
	// pool of one of the gateways, may have these.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=255
	RouterID int32 `json:"routerID"`
	// Instances is how many groups the addresses are spread over. Each has a gateway of its own as master, as long as there are as many gateways.
	//
	// +optional
	// +kubebuilder:default=2
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16
	Instances int32 `json:"instances"`
}

// PoolOpenStack says where in OpenStack the ports of a pool's addresses are.
type PoolOpenStack struct {
	// Cloud is the name of a cloud in the clouds.yaml of coil-lb-controller; it has credentials of one project. Default: the one of the variable OS_CLOUD.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Cloud string `json:"cloud,omitempty"`
	// SubnetIDs are the IDs of Neutron's subnets: one of each family that the pool has, of one network. They can't be changed. With both families the project must
	// own the network: OpenStack chooses one address of a pair, and the other one follows from spec.subnets.
	//
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=255
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="can't be changed: make another pool"
	SubnetIDs []string `json:"subnetIDs"`
	// FloatingNetworkID is the ID of an external network. With it each IPv4 address gets a floating IP of that network, which is the one that Services tell.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=255
	FloatingNetworkID string `json:"floatingNetworkID,omitempty"`
}

// PoolPurpose says which addresses a pool gives.
type PoolPurpose string

// Purposes of an AddressPool. The empty one is PurposeAny.
const (
	// PurposeAny: for pods, and floating ones.
	PurposeAny PoolPurpose = "Any"
	// PurposeFloating: floating ones only.
	PurposeFloating PoolPurpose = "Floating"
)

// PoolAnnounce says how hosts outside of the cluster learn which node has an address.
type PoolAnnounce string

// Values of AddressPoolSpec.Announce. The empty one is AnnounceRoute.
const (
	// AnnounceRoute: by routes.
	AnnounceRoute PoolAnnounce = "Route"
	// AnnounceNeighbor: by routes, and by ARP and NDP.
	AnnounceNeighbor PoolAnnounce = "Neighbor"
	// AnnounceGateway: not by nodes, but by gateways of load balancers.
	AnnounceGateway PoolAnnounce = "Gateway"
)

// SubnetSet is an IPv4 subnet, an IPv6 subnet, or one of each of equal size.
//
// +kubebuilder:validation:XValidation:rule="has(self.ipv4) || has(self.ipv6)",message="ipv4, ipv6 or both are required"
// +kubebuilder:validation:XValidation:rule="!has(self.ipv4) || !has(self.ipv6) || !isCIDR(self.ipv4) || !isCIDR(self.ipv6) || 32 - cidr(self.ipv4).prefixLength() == 128 - cidr(self.ipv6).prefixLength()",message="ipv4 and ipv6 must be of equal size, as 10.1.0.0/16 and fd00:1::/112 are"
type SubnetSet struct {
	// IPv4 is a subnet in CIDR notation without host bits.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self).ip().family() == 4",message="must be an IPv4 subnet in CIDR notation, such as 10.1.0.0/16"
	IPv4 *string `json:"ipv4,omitempty"`

	// IPv6 is a subnet in CIDR notation without host bits.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self).ip().family() == 6",message="must be an IPv6 subnet in CIDR notation, such as fd00:1::/112"
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
	// PoolSuspended is True while the pool gives no block because a node held one that doesn't
	// exist: others may be lost, too, and would be given twice. See AnnotationSuspend.
	PoolSuspended = "Suspended"
	// PoolExcludedInUse is True while a block or a floating address has addresses of spec.exclude.
	PoolExcludedInUse = "ExcludedInUse"
	// PoolDrained, of a pool with spec.drain, is True when nobody has anything of the pool any more.
	PoolDrained = "Drained"
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

	// Blocks counts the blocks of the pool. Those that spec.exclude keeps from being carved don't count, unless they exist.
	//
	// +optional
	Blocks Usage `json:"blocks,omitempty,omitzero"`

	// Addresses counts the addresses that pods have, of all of the pool, one of each family together
	// as one in a dual-stack pool.
	//
	// +optional
	Addresses Usage `json:"addresses,omitempty,omitzero"`

	// Floating counts the floating addresses of the pool, pairs as one in a dual-stack pool.
	//
	// +optional
	Floating FloatingUsage `json:"floating,omitempty,omitzero"`

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

// FloatingUsage counts floating addresses.
type FloatingUsage struct {
	// Used is how many belong to an object.
	//
	// +optional
	Used int64 `json:"used"`
	// Cooling is how many were released and aren't given to others yet.
	//
	// +optional
	Cooling int64 `json:"cooling"`
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
