// Package v2 is the Kubernetes API of Coil, group coil.cybozu.com, version v2:
// AddressPool, AddressBlock, BlockRequest, AddressClaim and Egress.
//
// It owns the types, their defaults and the names (labels, annotations,
// finalizers) that other programs may rely on. It must not know how any of
// them is carried out: it imports nothing but the Kubernetes API machinery.
//
// +k8s:deepcopy-gen=package
// +groupName=coil.cybozu.com
package v2
