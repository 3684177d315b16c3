package podnet

// guarded says whether a pod may only send from its own addresses. Then its ARP requests in the
// name of others get no answer either (arp_filter), and so no entry in the table of neighbours that
// the whole node shares. A pod that sends from an address of another link asks in its name, too.
func (n *Network) guarded(p Pod) bool { return n.opts.SourceGuard && !p.AnySource }
