package health

import "github.com/coil-net/coil/pkg/plan/inventory"

// Kind is how many objects of a kind there are.
type Kind struct {
	Kind  string `json:"kind"`
	Count int    `json:"count"`
	// Attention is how many of them have findings.
	Attention int `json:"attention"`
}

// Overview is how a cluster is.
type Overview struct {
	Kinds    []Kind    `json:"kinds"`
	Findings []Finding `json:"findings"`
}

// Look judges the objects of a cluster.
func Look(f inventory.Objects) Overview {
	seen := Overview{Findings: Findings(f)}
	seen.Kinds = []Kind{
		{Kind: "AddressPool", Count: len(f.Pools)}, {Kind: "AddressBlock", Count: len(f.Blocks)},
		{Kind: "AddressClaim", Count: len(f.Claims)}, {Kind: "Egress", Count: len(f.Egresses)}, {Kind: "EgressPolicy", Count: len(f.Policies)},
		{Kind: "EgressClusterPolicy", Count: len(f.ClusterPolicies)}, {Kind: "LoadBalancerGateway", Count: len(f.Gateways)}, {Kind: "Service", Count: len(inventory.Services(f))},
		{Kind: "Node", Count: len(f.Nodes)}, {Kind: "Lease", Count: len(f.Leases)},
	}
	objects := map[string]bool{}
	for _, found := range seen.Findings {
		if objects[found.Object()] {
			continue
		}
		objects[found.Object()] = true
		for i := range seen.Kinds {
			if seen.Kinds[i].Kind == found.Kind {
				seen.Kinds[i].Attention++
			}
		}
	}
	return seen
}
