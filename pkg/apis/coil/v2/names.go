package v2

// Names that Coil reads or writes on Kubernetes objects. They are fixed:
// clusters, dashboards and manifests rely on them.
const (
	// AnnotationPool on a Namespace names the AddressPool of its pods.
	AnnotationPool = "coil.cybozu.com/pool"
	// AnnotationSourceGuard on a Namespace is SourceGuardOff to let its pods send from any address.
	AnnotationSourceGuard = "coil.cybozu.com/source-guard"
	// SourceGuardOff is the only value of AnnotationSourceGuard that means anything.
	SourceGuardOff = "off"
	// AnnotationEgressPrefix, followed by a namespace, is a Pod annotation whose
	// value lists Egresses of that namespace, separated by commas.
	AnnotationEgressPrefix = "egress.coil.cybozu.com/"
	// AnnotationNodeUID on an AddressBlock is the UID of the Node that holds
	// it, so that a Node re-created under the same name is told apart.
	AnnotationNodeUID = "coil.cybozu.com/node-uid"
	// AnnotationNodeGone on an AddressBlock is when coil-ipam-controller found its
	// Node gone (RFC 3339) and, after a space, the value that AnnotationNodeUID had
	// then. The quarantine of the block counts from there.
	AnnotationNodeGone = "coil.cybozu.com/node-gone"
	// AnnotationDisowned on an AddressBlock is the UID of a Node of its node's name whose
	// coild found that its machine doesn't use the block: it is another machine's, which
	// may still run.
	AnnotationDisowned = "coil.cybozu.com/disowned-by"
	// AnnotationSuspend on an AddressPool is an admin's word about PoolSuspended: with the value
	// "true" the pool gives no block, with "false" it does.
	AnnotationSuspend = "coil.cybozu.com/suspend"
	// AnnotationAllowClaims on an AddressPool lists claims that an admin allows although the block has the
	// InternalIP of another Node: the name of the block, a slash, the name of the node that claims it; several are
	// separated by commas.
	AnnotationAllowClaims = "coil.cybozu.com/allow-claims"

	// AnnotationAttempt on a BlockRequest tells the attempt of its node to create it from all others: a node whose
	// attempt had no clear answer knows its request by it.
	AnnotationAttempt = "coil.cybozu.com/attempt"

	// AnnotationApplied on what coil-egress-controller makes is a hash of what it applied.
	AnnotationApplied = "coil.cybozu.com/applied"

	// LabelPool on an AddressBlock is the name of its pool.
	LabelPool = "coil.cybozu.com/pool"
	// LabelNode on an AddressBlock or a BlockRequest is the name of its node.
	LabelNode = "coil.cybozu.com/node"
	// LabelRequest on an AddressBlock is the UID of the BlockRequest that it answers.
	LabelRequest = "coil.cybozu.com/request"
	// LabelReserved with the value "true" on an AddressBlock keeps it exported
	// but takes no new address from it.
	LabelReserved = "coil.cybozu.com/reserved"

	// LabelFloating with the value "true" on an AddressBlock marks a floating address. Such a block is reserved as well, and
	// has no LabelNode: programs of versions without floating addresses leave it alone.
	LabelFloating = "coil.cybozu.com/floating"

	// LabelFloatingHolder on an AddressBlock is the node that has the floating address; see FloatingHolding.
	LabelFloatingHolder = "coil.cybozu.com/floating-holder"

	// AnnotationRotated on the Secret kube-system/coil-floating is when its keys were changed last.
	AnnotationRotated = "coil.cybozu.com/rotated-at"

	// AnnotationEgress on a Namespace names its default Egress: "namespace/name". See EgressUse.
	AnnotationEgress = "coil.cybozu.com/egress"
	// LabelPolicyEgress on an EndpointSlice is the name of the Egress, of the same namespace, whose clients it lists by a policy. The
	// policy is in AnnotationPolicy. Routers of versions without policies don't know the label, and let these clients not in.
	LabelPolicyEgress = "coil.cybozu.com/policy-egress"
	// AnnotationPolicy on such an EndpointSlice is the policy, as JSON.
	AnnotationPolicy = "coil.cybozu.com/policy"

	// AnnotationAddress on an EndpointSlice of clients is the floating address by which they leave, or the pair of both families,
	// separated by a comma.
	AnnotationAddress = "coil.cybozu.com/address"
	// LabelAnnounce with the value "Neighbor" on an AddressBlock says that its node answers for the block's addresses by
	// ARP and NDP, with the value "Gateway" that gateways of load balancers have the address. coil-ipam-controller keeps it as
	// AddressPoolSpec.Announce is, so that nodes and gateways needn't watch pools.
	LabelAnnounce = "coil.cybozu.com/announce"

	// LabelClosed on an AddressBlock says that its node gives no new address of it, and gives it back when the last pod that has one has
	// ended: with the value "drain" since spec.drain of the pool is set, with "excluded" since spec.exclude lists one of its addresses.
	// coil-ipam-controller keeps it.
	LabelClosed = "coil.cybozu.com/closed"

	// LabelEgress on an EndpointSlice is the name of the Egress, of the same namespace,
	// whose clients it lists.
	LabelEgress = "coil.cybozu.com/egress"

	// Finalizer keeps blocks that pods use and pools that blocks use.
	Finalizer = "coil.cybozu.com"

	// DefaultPool is the AddressPool of namespaces without AnnotationPool.
	DefaultPool = "default"
)

// ReservedValue is the value of LabelReserved that reserves a block, and FloatingValue that of LabelFloating.
const (
	ReservedValue = "true"
	FloatingValue = "true"
)

// Values of LabelClosed.
const (
	ClosedDrain    = "drain"
	ClosedExcluded = "excluded"
)
