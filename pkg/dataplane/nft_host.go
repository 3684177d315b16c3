package dataplane

// HostRules are what nftables does on a node. SourceGuard drops what comes in by links of
// LinkGroup from addresses that aren't routed back by the same link.
type HostRules struct {
	SourceGuard bool
}
