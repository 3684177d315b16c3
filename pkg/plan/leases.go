package plan

// Leases by which controllers elect their leaders, in the namespace of Coil's programs.
const (
	// IPAMLease is that of coil-ipam-controller.
	IPAMLease = "coil-ipam-leader"
	// EgressLease is that of coil-egress-controller.
	EgressLease = "coil-egress-leader"
	// LBLease is that of coil-lb-controller.
	LBLease = "coil-lb-leader"
)
