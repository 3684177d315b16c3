package v2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// LoadBalancerGateway is a machine outside of the cluster by which clients reach Services. coil-lb-agent runs there, and is told the object's name.
//
// +genclient
// +genclient:nonNamespaced
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=lbgw
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Pools",type=string,JSONPath=`.spec.pools`,description="AddressPools whose addresses the machine serves"
// +kubebuilder:printcolumn:name="Services",type=integer,JSONPath=`.status.applied.services`,description="Services that the machine serves"
// +kubebuilder:printcolumn:name="Applied",type=string,JSONPath=`.status.conditions[?(@.type=="Applied")].status`,description="Whether the machine does what the cluster says"
// +kubebuilder:printcolumn:name="Contact",type=date,JSONPath=`.status.lastContact`,description="When the machine was heard of last"
// +kubebuilder:printcolumn:name="Endpoints",type=string,priority=1,JSONPath=`.spec.endpoints`,description="Where the machine sends connections"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || self.metadata.name.size() <= 63",optionalOldSelf=true,fieldPath=".metadata.name",message="has at most 63 characters"
type LoadBalancerGateway struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec LoadBalancerGatewaySpec `json:"spec"`
	// +optional
	Status LoadBalancerGatewayStatus `json:"status,omitempty,omitzero"`
}

// LoadBalancerGatewaySpec is what the admin of a gateway decides.
type LoadBalancerGatewaySpec struct {
	// Pools are the AddressPools with announce: Gateway whose addresses the machine serves. Several gateways may serve a pool.
	//
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	Pools []string `json:"pools"`

	// Endpoints is where the machine sends connections. NodePort: to the NodePorts of nodes, which must be reached by their InternalIPs. ClusterIP: to the Service's
	// ClusterIP, for which the machine needs a route to a Service proxy. Pod: to pods, for which the machine needs routes.
	//
	// +optional
	// +kubebuilder:default=NodePort
	// +kubebuilder:validation:Enum=NodePort;ClusterIP;Pod
	Endpoints GatewayEndpoints `json:"endpoints,omitempty"`

	// Masquerade is Always, the default, if the source of connections becomes an address of the machine, so that answers come back by it. Never keeps the client's address:
	// the way back from endpoints must lead through the machine.
	//
	// +optional
	// +kubebuilder:default=Always
	// +kubebuilder:validation:Enum=Always;Never
	Masquerade GatewayMasquerade `json:"masquerade,omitempty"`

	// UnknownPorts is what becomes of packets for ports that no Service has at its address. Drop, the default, or Refuse.
	//
	// +optional
	// +kubebuilder:default=Drop
	// +kubebuilder:validation:Enum=Drop;Refuse
	UnknownPorts GatewayUnknownPorts `json:"unknownPorts,omitempty"`

	// VRRP is how the machine takes part in the elections of pools with spec.vrrp. keepalived must run on it.
	//
	// +optional
	VRRP *GatewayVRRP `json:"vrrp,omitempty"`

	// OpenStack is the machine's own port, if OpenStack checks which addresses it uses. It is for pools with spec.openstack.
	//
	// +optional
	OpenStack *GatewayOpenStack `json:"openstack,omitempty"`
}

// GatewayOpenStack says which port of Neutron a gateway has.
type GatewayOpenStack struct {
	// PortID is the ID of the port, whose allowed address pairs get the addresses of the machine's pools.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=255
	PortID string `json:"portID"`
	// AddressPairs are ranges that the port gets as address pairs, instead of one for each address in them: a port has ten pairs, unless Neutron's
	// max_allowed_address_pair says otherwise. Under OVN floating IPs need single addresses.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="self.all(r, isCIDR(r))",message="must be ranges, such as 192.0.2.0/26"
	AddressPairs []string `json:"addressPairs,omitempty"`
}

// GatewayVRRP is how a gateway takes part in elections.
type GatewayVRRP struct {
	// Interface is the link by which gateways hear each other.
	//
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`
	Interface string `json:"interface"`
	// AddressInterface is the link that gets the addresses. Default: the same.
	//
	// +optional
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`
	AddressInterface string `json:"addressInterface,omitempty"`
	// Sources are the machine's own addresses, one of each family, from which it sends to the other gateways. Addresses of a family without one aren't served.
	//
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="self.all(a, isIP(a)) && (self.size() < 2 || !self.all(a, isIP(a)) || ip(self[0]).family() != ip(self[1]).family())",message="must be an address, or one of each family"
	Sources []string `json:"sources"`
}

// GatewayEndpoints says where a gateway sends connections.
type GatewayEndpoints string

// Values of LoadBalancerGatewaySpec.Endpoints. The empty one is EndpointsNodePort.
const (
	EndpointsNodePort  GatewayEndpoints = "NodePort"
	EndpointsClusterIP GatewayEndpoints = "ClusterIP"
	EndpointsPod       GatewayEndpoints = "Pod"
)

// GatewayMasquerade says whether a gateway translates the source of connections.
type GatewayMasquerade string

// Values of LoadBalancerGatewaySpec.Masquerade. The empty one is MasqueradeAlways.
const (
	MasqueradeAlways GatewayMasquerade = "Always"
	MasqueradeNever  GatewayMasquerade = "Never"
)

// GatewayUnknownPorts says what becomes of packets for ports that no Service has.
type GatewayUnknownPorts string

// Values of LoadBalancerGatewaySpec.UnknownPorts. The empty one is UnknownPortsDrop.
const (
	UnknownPortsDrop   GatewayUnknownPorts = "Drop"
	UnknownPortsRefuse GatewayUnknownPorts = "Refuse"
)

// GatewayApplied is the condition type of a LoadBalancerGateway that is True if the machine does what the cluster says.
const GatewayApplied = "Applied"

// Reasons of GatewayApplied.
const (
	// ReasonAllServed: the machine serves all Services that it is to serve.
	ReasonAllServed = "AllServed"
	// ReasonServiceErrors: some Services can't be served. The status lists them.
	ReasonServiceErrors = "ServiceErrors"
	// ReasonVRRPFailed: keepalived doesn't do what it is to do, or isn't told how.
	ReasonVRRPFailed = "VRRPFailed"
	// ReasonKernelRefused: the kernel refuses the rules. The machine does what it did before.
	ReasonKernelRefused = "KernelRefused"
)

// MaxGatewayErrors bounds the errors that a LoadBalancerGateway lists.
const MaxGatewayErrors = 64

// LoadBalancerGatewayStatus is what coil-lb-agent on the machine reports, on change and every 20 seconds.
type LoadBalancerGatewayStatus struct {
	// Applied is what the machine does.
	//
	// +optional
	Applied GatewayState `json:"applied,omitempty,omitzero"`

	// Errors are Services that the machine can't serve, 64 at most.
	//
	// +optional
	// +listType=map
	// +listMapKey=service
	// +kubebuilder:validation:MaxItems=64
	Errors []GatewayError `json:"errors,omitempty"`

	// VRRP are the elections in which the machine takes part, 64 at most.
	//
	// +optional
	// +listType=map
	// +listMapKey=routerID
	// +listMapKey=family
	// +kubebuilder:validation:MaxItems=64
	VRRP []GatewayVRRPState `json:"vrrp,omitempty"`

	// LastContact is when the agent wrote the status last.
	//
	// +optional
	LastContact *metav1.Time `json:"lastContact,omitempty"`

	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// MaxGatewayVRRP bounds the elections that a LoadBalancerGateway lists.
const MaxGatewayVRRP = 64

// GatewayVRRPState is the state of an election, as keepalived tells it.
type GatewayVRRPState struct {
	// RouterID is the virtual router ID.
	RouterID int32 `json:"routerID"`
	// +kubebuilder:validation:Enum=IPv4;IPv6
	Family corev1.IPFamily `json:"family"`
	// State is MASTER, BACKUP, FAULT or INIT.
	//
	// +kubebuilder:validation:MaxLength=16
	State string `json:"state"`
	// Priority is what the machine sends; the highest is elected.
	//
	// +optional
	Priority int32 `json:"priority,omitempty"`
	// Addresses is how many addresses the machine has as the master.
	//
	// +optional
	Addresses int32 `json:"addresses"`
}

// GatewayState is what a gateway does.
type GatewayState struct {
	// Generation is that of the spec.
	//
	// +optional
	Generation int64 `json:"generation,omitempty"`
	// Blocks is the resource version up to which the machine does what AddressBlocks say. Resource versions of one resource are numbers that grow.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Blocks string `json:"blocks,omitempty"`
	// Services, Ports and Endpoints are how many there are.
	//
	// +optional
	Services int32 `json:"services"`
	// +optional
	Ports int32 `json:"ports"`
	// +optional
	Endpoints int32 `json:"endpoints"`
	// Hash is another one when anything is different. Two gateways of the same spec that do the same have the same.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Hash string `json:"hash,omitempty"`
}

// GatewayError says why a gateway can't serve a Service.
type GatewayError struct {
	// Service is namespace/name.
	//
	// +kubebuilder:validation:MaxLength=317
	Service string `json:"service"`
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message"`
}

// LoadBalancerGatewayList is a list of LoadBalancerGateways.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type LoadBalancerGatewayList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []LoadBalancerGateway `json:"items"`
}
