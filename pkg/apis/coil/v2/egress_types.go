package v2

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// EgressContainerName is the container of a router pod that Coil completes.
const EgressContainerName = "egress"

// Egress is a set of NAT routers for destinations that chosen pods reach
// through them.
//
// +genclient
// +genclient:method=GetScale,verb=get,subresource=scale,result=k8s.io/api/autoscaling/v1.Scale
// +genclient:method=UpdateScale,verb=update,subresource=scale,input=k8s.io/api/autoscaling/v1.Scale,result=k8s.io/api/autoscaling/v1.Scale
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:printcolumn:name="Replicas",type=integer,JSONPath=`.spec.replicas`,description="Router pods that are wanted"
// +kubebuilder:printcolumn:name="Available",type=string,JSONPath=`.status.conditions[?(@.type=="Available")].status`,description="Whether routers serve clients"
// +kubebuilder:printcolumn:name="Clients",type=integer,JSONPath=`.status.clients`,description="Pods that use the Egress"
// +kubebuilder:printcolumn:name="Addresses",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="AddressesReady")].status`,description="Whether the addresses by which clients leave are on nodes"
// +kubebuilder:printcolumn:name="Destinations",type=string,priority=1,JSONPath=`.spec.destinations`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="oldSelf.hasValue() || self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",optionalOldSelf=true,fieldPath=".metadata.name",message="is the name of a Service: at most 63 lower case letters, digits and dashes, the first a letter, the last not a dash"
type Egress struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec EgressSpec `json:"spec"`
	// +optional
	Status EgressStatus `json:"status,omitempty,omitzero"`
}

// EgressSpec is what the owner of an Egress decides.
//
// +kubebuilder:validation:XValidation:rule="!has(self.sessionAffinityConfig) || self.sessionAffinity != 'None' || oldSelf.hasValue() && has(oldSelf.value().sessionAffinityConfig) && oldSelf.value().sessionAffinity == 'None'",optionalOldSelf=true,fieldPath=".sessionAffinityConfig",message="goes with the sessionAffinity ClientIP only"
// +kubebuilder:validation:XValidation:rule="!has(self.addresses) || self.addresses.use == 'Node' || has(self.peering) && self.peering == 'Direct'",fieldPath=".peering",message="must be Direct when clients have addresses: they send to the router that has theirs"
type EgressSpec struct {
	// Destinations are the subnets, in CIDR notation, that are reached through
	// the routers.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:items:XValidation:rule="isCIDR(self)",message="must be a subnet in CIDR notation, such as 10.0.0.0/8 or fd00::/8"
	// +kubebuilder:validation:items:XValidation:rule="!isCIDR(self) || cidr(self) == cidr(self).masked()",message="host bits must be zero: the address must be the first one of the subnet"
	// +listType=atomic
	Destinations []string `json:"destinations"`

	// Default makes the Egress that of EgressPolicies and EgressClusterPolicies without one, unless their namespace has another. Of
	// several the oldest is.
	//
	// +optional
	Default bool `json:"default,omitempty"`

	// Replicas is the number of router pods.
	//
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	Replicas int32 `json:"replicas"`

	// Strategy replaces router pods by new ones, as in a Deployment.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.type) || self.type in ['RollingUpdate', 'Recreate']",fieldPath=".type",message="must be RollingUpdate or Recreate"
	// +kubebuilder:validation:XValidation:rule="!has(self.rollingUpdate) || !has(self.type) || self.type == 'RollingUpdate'",fieldPath=".rollingUpdate",message="goes with the type RollingUpdate only"
	Strategy *appsv1.DeploymentStrategy `json:"strategy,omitempty"`

	// Template is merged into the router pods.
	//
	// +optional
	Template *EgressPodTemplate `json:"template,omitempty"`

	// Peering says to whom clients send: Service to the Service, which chooses a router for
	// each; Direct to the routers themselves, of which each client uses all that answer it. Then
	// a router that fails is left within seconds, and no flow moves when others come or go.
	//
	// +optional
	// +kubebuilder:default=Service
	// +kubebuilder:validation:Enum=Service;Direct
	Peering EgressPeering `json:"peering,omitempty"`

	// SessionAffinity of the Service that clients send to. With None a client that has sent nothing
	// for two minutes, or each of its flows with fouSourcePortAuto, may reach another router.
	//
	// +optional
	// +kubebuilder:default=ClientIP
	// +kubebuilder:validation:Enum=ClientIP;None
	SessionAffinity corev1.ServiceAffinity `json:"sessionAffinity,omitempty"`

	// SessionAffinityConfig of the Service that clients send to. The timeout, 3 hours by default, begins
	// when a client first sends: 86400 seconds is best for connections that live long.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.clientIP) || !has(self.clientIP.timeoutSeconds) || self.clientIP.timeoutSeconds > 0 && self.clientIP.timeoutSeconds <= 86400",fieldPath=".clientIP.timeoutSeconds",message="must be within 1 and 86400 seconds"
	SessionAffinityConfig *corev1.SessionAffinityConfig `json:"sessionAffinityConfig,omitempty"`

	// FouSourcePortAuto lets the kernel choose the UDP source port of each flow, so that network cards
	// spread the flows of one client over their queues. Keep the sessionAffinity ClientIP with it: the
	// kernel changes the port when a TCP connection retransmits, and with None the connection then
	// reaches another router, which resets it. To spread flows over routers choose the peering Direct.
	//
	// +optional
	FouSourcePortAuto bool `json:"fouSourcePortAuto,omitempty"`

	// AllowedNamespaces selects the namespaces whose pods may be clients, by their
	// labels; unset allows all, an empty selector too.
	//
	// +optional
	AllowedNamespaces *metav1.LabelSelector `json:"allowedNamespaces,omitempty"`

	// OriginatingOnly routes only connections that a client opens through the routers:
	// those that come in to it from a destination are answered by the way they came.
	//
	// +optional
	OriginatingOnly bool `json:"originatingOnly,omitempty"`

	// MaxConnectionsPerClient bounds the connections that one address of a client has at once in one
	// router, so that ports and connections are left to the others. Unset, it is an eighth of the
	// connections that the router can track, and at most a quarter of its ports towards one
	// destination, 16128; 0 is no bound. TCP connections that have ended don't count. Bounds above 256
	// are kept to within a fifth.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxConnectionsPerClient *int32 `json:"maxConnectionsPerClient,omitempty"`

	// Addresses are those by which clients' packets leave, in place of the routers' own: floating addresses of a pool, which
	// outlive routers and nodes, or the addresses of the routers' nodes.
	//
	// +optional
	Addresses *EgressAddresses `json:"addresses,omitempty"`

	// PodDisruptionBudget bounds how many routers a drain may take away at once.
	//
	// +optional
	PodDisruptionBudget *EgressPDBSpec `json:"podDisruptionBudget,omitempty"`
}

// EgressPeering is to whom the clients of an Egress send.
type EgressPeering string

// The ways of peering.
const (
	EgressPeeringService EgressPeering = "Service"
	EgressPeeringDirect  EgressPeering = "Direct"
)

// EgressPodTemplate is metadata and a pod spec. The spec is decoded strictly as
// a core/v1 PodSpec by coil-egress-controller, and isn't part of the schema: that
// keeps the definition small enough for client-side apply.
type EgressPodTemplate struct {
	// +optional
	Metadata Metadata `json:"metadata,omitempty,omitzero"`

	// Spec is a core/v1 PodSpec whose containers are optional.
	//
	// +optional
	// +kubebuilder:validation:Type=object
	// +kubebuilder:validation:XPreserveUnknownFields
	Spec *runtime.RawExtension `json:"spec,omitempty"`
}

// Metadata is the part of ObjectMeta that a template may set.
type Metadata struct {
	// +optional
	// +kubebuilder:validation:MaxProperties=256
	Annotations map[string]string `json:"annotations,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxProperties=256
	Labels map[string]string `json:"labels,omitempty"`
}

// EgressPDBSpec has one of the two fields of a PodDisruptionBudget.
//
// +kubebuilder:validation:XValidation:rule="!has(self.minAvailable) || !has(self.maxUnavailable)",message="minAvailable and maxUnavailable exclude each other"
type EgressPDBSpec struct {
	// MinAvailable is a number of pods or a percentage.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 : self.matches('^([0-9]|[1-9][0-9]|100)%$')",message="must be a number of pods or a percentage, such as 1 or 50%"
	MinAvailable *intstr.IntOrString `json:"minAvailable,omitempty"`
	// MaxUnavailable is a number of pods or a percentage.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 : self.matches('^([0-9]|[1-9][0-9]|100)%$')",message="must be a number of pods or a percentage, such as 1 or 50%"
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
}

// Condition types of an Egress.
const (
	// EgressAvailable is True when at least one router serves clients.
	EgressAvailable = "Available"
	// EgressInvalidTemplate is True when template.spec isn't a PodSpec; the
	// message says where.
	EgressInvalidTemplate = "InvalidTemplate"
	// EgressConntrackPressure is True when a router tracks almost as many connections
	// as it can.
	EgressConntrackPressure = "ConntrackPressure"
	// EgressPortPressure is True when a router uses almost all of its ports towards one
	// destination.
	EgressPortPressure = "PortPressure"
	// EgressClientPressure is True when a router has refused connections of a client that has
	// as many as one may have.
	EgressClientPressure = "ClientPressure"
	// EgressUnstableFlows is True when the spec lets connections move to another router, which
	// resets them; the message says what to change.
	EgressUnstableFlows = "UnstableFlows"
	// EgressConflicting is True when other Egresses have spec.default, too; the message says which one is the default.
	EgressConflicting = "Conflicting"
)

// EgressStatus is what coil-egress-controller observed.
type EgressStatus struct {
	// ObservedGeneration is the generation that the status is about.
	//
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Replicas is the number of router pods.
	//
	// +optional
	Replicas int32 `json:"replicas,omitempty"`

	// Selector selects the router pods, for the scale subresource.
	//
	// +optional
	Selector string `json:"selector,omitempty"`

	// Clients is the number of pods that use the Egress.
	//
	// +optional
	Clients int32 `json:"clients,omitempty"`

	// Addresses are the floating addresses of the Egress.
	//
	// +optional
	// +listType=map
	// +listMapKey=block
	// +kubebuilder:validation:MaxItems=1024
	Addresses []EgressAddressStatus `json:"addresses,omitempty"`

	// NodeAddresses, for the use Node, have an entry for each router that is ready: its node, and the node's addresses.
	//
	// +optional
	// +listType=map
	// +listMapKey=router
	// +kubebuilder:validation:MaxItems=1024
	NodeAddresses []EgressNodeAddress `json:"nodeAddresses,omitempty"`

	// InClusterCIDRs are the ranges of pods, nodes and Services that no Egress
	// captures, but for private ones of which a destination is a smaller part. Private ones
	// that are in no destination may be joined to a few wider ones.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4096
	// +kubebuilder:validation:items:MaxLength=43
	InClusterCIDRs []string `json:"inClusterCIDRs,omitempty"`

	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// EgressList is a list of Egresses.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
// +kubebuilder:object:root=true
type EgressList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Egress `json:"items"`
}
