package v2

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// EgressPolicy lets pods of its namespace use an Egress, without an annotation on the pods.
//
// +genclient
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Egress",type=string,JSONPath=`.status.summary.egress`,description="The Egress that the pods use"
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=`.status.summary.address`,description="The source address that destinations see"
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.node`,description="The node that has the address"
// +kubebuilder:printcolumn:name="Since",type=date,JSONPath=`.status.since`,description="When the address, the node or the router changed last"
// +kubebuilder:printcolumn:name="Clients",type=integer,JSONPath=`.status.clients`,description="Pods that routers let in by the policy"
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`,description="Whether the policy can be followed"
// +kubebuilder:printcolumn:name="Router",type=string,priority=1,JSONPath=`.status.router`,description="The router pod on the node"
// +kubebuilder:printcolumn:name="Reason",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Accepted")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type EgressPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec EgressPolicySpec `json:"spec"`
	// +optional
	Status EgressPolicyStatus `json:"status,omitempty,omitzero"`
}

// EgressPolicySpec says which pods of the namespace leave by which Egress.
//
// +kubebuilder:validation:XValidation:rule="(has(self.pods) ? 1 : 0) + (has(self.services) ? 1 : 0) + (has(self.podCIDRs) ? 1 : 0) == 1",message="one of pods, services and podCIDRs is required, and no other one of them"
type EgressPolicySpec struct {
	EgressUse `json:",inline"`

	// Pods selects pods of the namespace by their labels.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="has(self.matchLabels) && self.matchLabels.size() > 0 || has(self.matchExpressions) && self.matchExpressions.size() > 0",message="an empty selector is refused, since it may be a mistake: for all pods of the namespace exclude a label that none has, as {matchExpressions: [{key: no-egress, operator: DoesNotExist}]}"
	Pods *metav1.LabelSelector `json:"pods,omitempty"`

	// Services selects the pods that the selectors of Services of the namespace select.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	Services []string `json:"services,omitempty"`

	// PodCIDRs selects pods of the namespace by their addresses.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:items:XValidation:rule="isCIDR(self)",message="must be a subnet in CIDR notation, such as 10.0.0.0/8 or fd00::/8"
	// +kubebuilder:validation:items:XValidation:rule="!isCIDR(self) || cidr(self) == cidr(self).masked()",message="host bits must be zero: the address must be the first one of the subnet"
	PodCIDRs []string `json:"podCIDRs,omitempty"`
}

// EgressUse says how selected pods use an Egress.
type EgressUse struct {
	// Egress is the Egress that the pods use. Unset, it is the default of the policy's namespace (annotation coil.cybozu.com/egress)
	// if that allows the namespace, else that of the cluster (Egress spec.default) if that does. An EgressClusterPolicy has the latter.
	//
	// +optional
	Egress *EgressReference `json:"egress,omitempty"`

	// Destinations are the subnets, in CIDR notation, that the pods reach through the Egress; each is within one of the Egress's
	// destinations. Unset, they are all of the Egress's. Of several policies that select a pod, that with
	// the smallest subnet decides, then the older one.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:items:XValidation:rule="isCIDR(self)",message="must be a subnet in CIDR notation, such as 10.0.0.0/8 or fd00::/8"
	// +kubebuilder:validation:items:XValidation:rule="!isCIDR(self) || cidr(self) == cidr(self).masked()",message="host bits must be zero: the address must be the first one of the subnet"
	Destinations []string `json:"destinations,omitempty"`

	// Address is the address of the Egress (spec.addresses) by which the pods leave. Unset, the Egress assigns one. In a dual-stack pool an
	// address of one family stands for the pair.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="has(self.ipv4) || has(self.ipv6)",message="ipv4 or ipv6 is required"
	Address *EgressAddress `json:"address,omitempty"`

	// OnFailure says what becomes of packets to the destinations while no router can forward them: Closed drops them, Node lets
	// them leave as the packets of pods without an Egress do.
	//
	// +optional
	// +kubebuilder:default=Closed
	// +kubebuilder:validation:Enum=Closed;Node
	OnFailure EgressFailure `json:"onFailure,omitempty"`
}

// EgressFailure is what becomes of packets that no router can forward.
type EgressFailure string

// What becomes of them.
const (
	EgressFailureClosed EgressFailure = "Closed"
	EgressFailureNode   EgressFailure = "Node"
)

// EgressReference names an Egress.
type EgressReference struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`
}

// EgressClusterPolicy lets pods of many namespaces use an Egress.
//
// +genclient
// +genclient:nonNamespaced
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Egress",type=string,JSONPath=`.status.summary.egress`,description="The Egress that the pods use"
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=`.status.summary.address`,description="The source address that destinations see"
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.node`,description="The node that has the address"
// +kubebuilder:printcolumn:name="Since",type=date,JSONPath=`.status.since`,description="When the address, the node or the router changed last"
// +kubebuilder:printcolumn:name="Clients",type=integer,JSONPath=`.status.clients`,description="Pods that routers let in by the policy"
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`,description="Whether the policy can be followed"
// +kubebuilder:printcolumn:name="Router",type=string,priority=1,JSONPath=`.status.router`,description="The router pod on the node"
// +kubebuilder:printcolumn:name="Reason",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Accepted")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type EgressClusterPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec EgressClusterPolicySpec `json:"spec"`
	// +optional
	Status EgressPolicyStatus `json:"status,omitempty,omitzero"`
}

// EgressClusterPolicySpec says which pods of which namespaces leave by which Egress.
//
// +kubebuilder:validation:XValidation:rule="has(self.pods) != has(self.podCIDRs)",message="pods or podCIDRs is required, and not both"
type EgressClusterPolicySpec struct {
	EgressUse `json:",inline"`

	// NamespaceSelector selects namespaces by their labels. An empty selector selects all.
	NamespaceSelector metav1.LabelSelector `json:"namespaceSelector"`

	// Pods selects pods of these namespaces by their labels. An empty selector selects all.
	//
	// +optional
	Pods *metav1.LabelSelector `json:"pods,omitempty"`

	// PodCIDRs selects pods of these namespaces by their addresses.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:items:XValidation:rule="isCIDR(self)",message="must be a subnet in CIDR notation, such as 10.0.0.0/8 or fd00::/8"
	// +kubebuilder:validation:items:XValidation:rule="!isCIDR(self) || cidr(self) == cidr(self).masked()",message="host bits must be zero: the address must be the first one of the subnet"
	PodCIDRs []string `json:"podCIDRs,omitempty"`
}

// Condition types of an EgressPolicy and an EgressClusterPolicy.
const (
	// PolicyAccepted is True when the policy can be followed; else its reason and message say what to change.
	PolicyAccepted = "Accepted"
	// PolicyConflicting is True when a pod of the policy follows another one, or its annotation, to another Egress for one of the
	// destinations; the message names them.
	PolicyConflicting = "Conflicting"
)

// EgressPolicyStatus is what coil-egress-controller observed.
type EgressPolicyStatus struct {
	// ObservedGeneration is the generation that the status is about.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Resolved is what nodes follow: the policy without defaults and Services.
	//
	// +optional
	Resolved *ResolvedPolicy `json:"resolved,omitempty"`

	// Node is the node that has the address by which the pods leave, and Router is the router pod there. If the pods leave by the addresses of nodes,
	// Node is set if only one node has a router that is ready, and Router if only one router is ready.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Router string `json:"router,omitempty"`
	// Since is when the address, the node or the router changed last.
	//
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// Clients is the number of pods that routers let in by the policy. It is written every 30 seconds at most if nothing else changes.
	//
	// +optional
	Clients int32 `json:"clients,omitempty"`

	// Summary has values for people.
	//
	// +optional
	Summary PolicySummary `json:"summary,omitempty,omitzero"`

	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ResolvedPolicy is a policy without defaults and Services. It is written only when it changes.
type ResolvedPolicy struct {
	// ObservedGeneration is the generation of the policy that was resolved.
	ObservedGeneration int64 `json:"observedGeneration"`

	// Egress is the Egress that the pods use. Unset, there is none.
	//
	// +optional
	Egress *EgressReference `json:"egress,omitempty"`

	// Pods select the pods: those that one of the selectors selects. They are the selectors of spec.services, and, as long as
	// one of these has none, those that were here before.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Pods []metav1.LabelSelector `json:"pods,omitempty"`

	// Address is the floating address by which the pods leave, if the Egress has such addresses.
	//
	// +optional
	Address *ResolvedAddress `json:"address,omitempty"`
}

// ResolvedAddress is a floating address of an Egress.
type ResolvedAddress struct {
	// Block is the name of its AddressBlock.
	//
	// +kubebuilder:validation:MaxLength=253
	Block         string `json:"block"`
	EgressAddress `json:",inline"`
}

// PolicySummary has values for people.
type PolicySummary struct {
	// Egress is "namespace/name".
	//
	// +optional
	Egress string `json:"egress,omitempty"`
	// Address is the address by which the pods leave, or both of a pair. If they leave by the addresses of nodes, it has those of all nodes with a
	// router that is ready.
	//
	// +optional
	Address string `json:"address,omitempty"`
}

// EgressPolicyList is a list of EgressPolicies.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type EgressPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []EgressPolicy `json:"items"`
}

// EgressClusterPolicyList is a list of EgressClusterPolicies.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type EgressClusterPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []EgressClusterPolicy `json:"items"`
}
