package policy

import (
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// locate adds the address by which the pods leave, its node and router, and since when. The Egress is nil if the policy has none.
func (f Facts) locate(st *v2.EgressPolicyStatus, e *v2.Egress) {
	at := &v2.EgressAddressStatus{}
	if a := st.Resolved.Address; a != nil {
		st.Summary.Address = a.String()
		at = plan.AddressOf(e, a.Block)
		st.Node, st.Router = at.Node, at.Router
	} else if e != nil {
		locateNodes(st, e)
	}
	if st.Summary.Address == "" {
		st.Since = nil
		return
	}
	was := f.Status
	// A node has its addresses whichever of its routers is used.
	router := was.Router == st.Router || e != nil && e.Spec.Addresses.For(v2.EgressAddressOfNode)
	switch same := was.Summary.Address == st.Summary.Address; {
	case same && was.Node == st.Node && router && was.Since != nil:
	case same && at.Since != nil && (was.Node != st.Node || was.Since == nil):
		st.Since = at.Since
	default:
		st.Since = &f.Now
	}
}

// AtNodes says whether a status says that pods leave through an Egress by addresses of nodes.
func AtNodes(st v2.EgressPolicyStatus, egress string) bool {
	return st.Summary.Egress == egress && st.Summary.Address != "" && st.Resolved != nil && st.Resolved.Address == nil
}

// SamePlace says whether pods leave by the same addresses, node and router in two states.
func SamePlace(a, b v2.EgressPolicyStatus) bool {
	return a.Summary.Address == b.Summary.Address && a.Node == b.Node && a.Router == b.Router
}

// WithPlace returns a status by which pods leave where another one says.
func WithPlace(st, at v2.EgressPolicyStatus) v2.EgressPolicyStatus {
	st.Summary.Address, st.Node, st.Router, st.Since = at.Summary.Address, at.Node, at.Router, at.Since
	return st
}

// locateNodes adds the addresses of nodes by which the pods leave. It has those of all routers, since connections go through any of them.
func locateNodes(st *v2.EgressPolicyStatus, e *v2.Egress) {
	nodes, addrs := map[string]bool{}, []string(nil)
	for _, at := range e.Status.NodeAddresses {
		if !nodes[at.Node] {
			nodes[at.Node] = true
			addrs = append(addrs, at.EgressAddress.String())
		}
	}
	st.Summary.Address = plan.Enumerate(addrs)
	if all := e.Status.NodeAddresses; len(nodes) == 1 {
		st.Node = all[0].Node
		if len(all) == 1 {
			st.Router = all[0].Router
		}
	}
}
