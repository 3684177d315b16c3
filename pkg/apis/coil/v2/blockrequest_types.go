package v2

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BlockRequest is a node's request for one more AddressBlock of a pool.
//
// +genclient
// +genclient:nonNamespaced
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.poolName`
// +kubebuilder:printcolumn:name="Block",type=string,JSONPath=`.status.addressBlockName`,description="The block that answers the request"
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.status=="True")].type`,description="Complete, Failed, or nothing while the request waits"
// +kubebuilder:printcolumn:name="Reason",type=string,priority=1,JSONPath=`.status.conditions[?(@.status=="True")].message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type BlockRequest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec BlockRequestSpec `json:"spec"`
	// +optional
	Status BlockRequestStatus `json:"status,omitempty,omitzero"`
}

// BlockRequestSpec says who asks for a block of which pool.
//
// +kubebuilder:validation:XValidation:rule="has(self.claim) == has(oldSelf.claim) && (!has(self.claim) || self.claim == oldSelf.claim)",fieldPath=".claim",message="can't be changed: make another request"
type BlockRequestSpec struct {
	// NodeName is the name of the Node that asks.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="can't be changed: make another request"
	NodeName string `json:"nodeName"`

	// PoolName is the name of the AddressPool.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="can't be changed: make another request"
	PoolName string `json:"poolName"`

	// Claim is the name of a block of the pool that the node holds and that doesn't exist any
	// more, as after etcd was restored from a backup. The answer is that block and no other.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Claim string `json:"claim,omitempty"`
}

// BlockRequestStatus is the answer of coil-ipam-controller.
type BlockRequestStatus struct {
	// AddressBlockName is the name of the block that answers the request.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	AddressBlockName string `json:"addressBlockName,omitempty"`

	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []BlockRequestCondition `json:"conditions,omitempty"`
}

// BlockRequestConditionType is a type of BlockRequestCondition.
type BlockRequestConditionType string

// Condition types of a BlockRequest.
const (
	// BlockRequestComplete is True when AddressBlockName is set.
	BlockRequestComplete BlockRequestConditionType = "Complete"
	// BlockRequestFailed is True when the request can't be answered; reason and
	// message say why.
	BlockRequestFailed BlockRequestConditionType = "Failed"
)

// Reasons of BlockRequestComplete.
const (
	// ReasonBlockAssigned: the block has the request's UID as a label.
	ReasonBlockAssigned = "BlockAssigned"
)

// Reasons of BlockRequestFailed.
const (
	// ReasonPoolNotFound: no AddressPool has the name.
	ReasonPoolNotFound = "PoolNotFound"
	// ReasonPoolTerminating: the AddressPool is being deleted.
	ReasonPoolTerminating = "PoolTerminating"
	// ReasonPoolExhausted: every block of the AddressPool is taken.
	ReasonPoolExhausted = "PoolExhausted"
	// ReasonPoolInvalid: the spec of the AddressPool can't be understood.
	ReasonPoolInvalid = "PoolInvalid"
	// ReasonPoolPurpose: the AddressPool has no addresses for pods. See AddressPoolSpec.Purpose.
	ReasonPoolPurpose = "PoolPurpose"
	// ReasonPoolDraining: the AddressPool gives nothing new. See AddressPoolSpec.Drain.
	ReasonPoolDraining = "PoolDraining"
	// ReasonPoolSuspended: see PoolSuspended.
	ReasonPoolSuspended = "PoolSuspended"
	// ReasonBlockTaken: another node has the block that the request claims, or its addresses.
	ReasonBlockTaken = "BlockTaken"
	// ReasonNodeAddress: the block that the request claims has an address of another Node. See
	// AnnotationAllowClaims.
	ReasonNodeAddress = "NodeAddress"
	// ReasonNodeNotFound: no Node has the name.
	ReasonNodeNotFound = "NodeNotFound"
	// ReasonNodeLimit: the node holds more addresses of the AddressPool than its pods can need.
	ReasonNodeLimit = "NodeLimit"
)

// BlockRequestCondition has the shape that version 2 of the API has always had.
type BlockRequestCondition struct {
	// Type is Complete or Failed.
	//
	// +kubebuilder:validation:MaxLength=316
	Type BlockRequestConditionType `json:"type"`
	// Status is True, False or Unknown.
	//
	// +kubebuilder:validation:Enum=True;False;Unknown
	Status corev1.ConditionStatus `json:"status"`
	// Reason is a word in CamelCase.
	//
	// +kubebuilder:validation:MaxLength=1024
	Reason string `json:"reason"`
	// Message is a sentence for people.
	//
	// +kubebuilder:validation:MaxLength=32768
	Message string `json:"message"`
	// LastProbeTime is when the condition was checked last.
	//
	// +optional
	LastProbeTime metav1.Time `json:"lastProbeTime,omitempty,omitzero"`
	// LastTransitionTime is when the status changed last.
	//
	// +optional
	LastTransitionTime metav1.Time `json:"lastTransitionTime,omitempty,omitzero"`
}

// TrueCondition returns the condition of a type if it is True, or nil.
func (r *BlockRequest) TrueCondition(t BlockRequestConditionType) *BlockRequestCondition {
	for i, c := range r.Status.Conditions {
		if c.Type == t && c.Status == corev1.ConditionTrue {
			return &r.Status.Conditions[i]
		}
	}
	return nil
}

// BlockRequestList is a list of BlockRequests.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type BlockRequestList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []BlockRequest `json:"items"`
}
