package loadbalancer

// Names on Services of the type LoadBalancer. v2.AnnotationPool on such a Service names the AddressPool of its address.
const (
	// Class is spec.loadBalancerClass of Services that Coil serves.
	Class = "coil.cybozu.com/lb"
	// AnnotationWanted lists the addresses that the owner of the Service wants: one, or one of each family, separated by a comma.
	AnnotationWanted = "coil.cybozu.com/wanted-addresses"
	// AnnotationAssigned lists the addresses that Coil has given to the Service, in the same form. It decides who has an address when Coil's
	// controller starts.
	AnnotationAssigned = "coil.cybozu.com/assigned-addresses"
	// AnnotationFloatingIP is the floating IP that OpenStack leads to the IPv4 address: clients reach the Service by it, and its status tells it.
	AnnotationFloatingIP = "coil.cybozu.com/floating-ip"
	// AnnotationSharing is SharingNone, or the name of a group: only Services of one group have an address together. Unset, a Service shares its
	// address with others that have no group.
	AnnotationSharing = "coil.cybozu.com/sharing"
	// SharingNone is the value of AnnotationSharing of a Service that has its address alone.
	SharingNone = "none"
	// Finalizer keeps a Service until its addresses are given back. Kubernetes knows it by this name, too.
	Finalizer = "service.kubernetes.io/load-balancer-cleanup"
	// LabelClaim with the value "true" is on the AddressClaims of Services.
	LabelClaim = "coil.cybozu.com/load-balancer"
	// ReasonMasquerade is the reason of ConditionPolicies.
	ReasonMasquerade = "GatewayMasquerades"
	// ConditionAssigned of a Service says whether it has addresses, and ConditionServed whether a place answers for them.
	ConditionAssigned = "coil.cybozu.com/AddressAssigned"
	ConditionServed   = "coil.cybozu.com/Served"
	// ConditionPolicies of a Service says that NetworkPolicies of its pods can't tell its clients apart. It is there only as long as that is so.
	ConditionPolicies = "coil.cybozu.com/NetworkPoliciesHonored"
)
