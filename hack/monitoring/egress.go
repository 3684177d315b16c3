package main

var egress = dashboard{
	name: "egress", title: "Coil / Egress",
	description: "Ways out: Egresses, their routers, their policies, and the nodes of their clients.",
	variables: []variable{
		{"namespace", "coil_controller_egress_clients", "namespace"},
		{"egress", `coil_controller_egress_clients{namespace=~"$namespace"}`, "egress"},
	},
	rows: []row{
		{"Egresses", []panel{
			{
				title: "Ready routers", unit: "short", alarm: 1, below: true,
				description: "Router pods of each Egress that are ready. CoilEgressWithoutRouters fires if an Egress with clients has none.",
				queries: []query{{`max by (namespace, egress) (coil_controller_egress_ready_routers{namespace=~"$namespace", egress=~"$egress"})`,
					"{{namespace}}/{{egress}}"}},
			},
			{
				title: "Clients", unit: "short", description: "Pods that use each Egress, as it tells its routers.",
				queries: []query{{`max by (namespace, egress) (coil_controller_egress_clients{namespace=~"$namespace", egress=~"$egress"})`, "{{namespace}}/{{egress}}"}},
			},
			{
				title: "Policies that aren't accepted", unit: "short", alarm: 1,
				description: "EgressPolicies and EgressClusterPolicies of the whole cluster whose condition Accepted isn't true, by its reason.",
				queries:     []query{{`max by (kind, reason) (coil_egress_policy_count{reason!="Accepted"})`, "{{kind}}, {{reason}}"}},
			},
			{
				title: "Policies in conflict", unit: "short", warn: 1,
				description: "Policies of the whole cluster that select pods which follow another policy.",
				queries:     []query{{`max by (kind) (coil_egress_policy_conflicting_count)`, "{{kind}}"}},
			},
		}},
		{"Traffic of routers", []panel{
			{
				title: "Bytes", unit: "Bps", stacked: true,
				description: "What leaves with the address of each router. Packets of floating addresses are counted by the nodes: see Coil / Services.",
				queries: []query{{`sum by (namespace, egress, pod) (rate(coil_egress_nftables_masqueraded_bytes_total{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval]))`,
					"{{namespace}}/{{egress}}, {{pod}}"}},
			},
			{
				title: "Packets", unit: "pps", stacked: true,
				description: "The same in packets.",
				queries: []query{{`sum by (namespace, egress, pod) (rate(coil_egress_nftables_masqueraded_packets_total{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval]))`,
					"{{namespace}}/{{egress}}, {{pod}}"}},
			},
			{
				title: "Dropped packets", unit: "pps", warn: 1,
				description: "Packets that routers dropped, by the reason. CoilEgressForeignSource fires if the reason is foreign_source.",
				queries: []query{
					{`sum by (namespace, egress, reason) (rate(coil_egress_nftables_dropped_packets_total{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval]))`,
						"{{namespace}}/{{egress}}, {{reason}}"},
					{`sum by (namespace, egress) (rate(coil_egress_nftables_invalid_packets_total{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval]))`,
						"{{namespace}}/{{egress}}, of no connection"},
				},
			},
		}},
		{"Limits of routers", []panel{
			{
				title: "Connections", unit: "percentunit", warn: 0.8, alarm: 0.95,
				description: "Share of the connections that each router can track. CoilEgressConnectionsAlmostFull fires above 80 %.",
				queries: []query{{`max by (namespace, egress, pod) (coil_egress_nf_conntrack_entries_count{namespace=~"$namespace", egress=~"$egress"}) / ` +
					`max by (namespace, egress, pod) (coil_egress_nf_conntrack_entries_limit{namespace=~"$namespace", egress=~"$egress"})`, "{{namespace}}/{{egress}}, {{pod}}"}},
			},
			{
				title: "Ports", unit: "percentunit", warn: 0.8, alarm: 0.95,
				description: "Share of the 64,512 ports of a router's address that are used towards one destination, for the destinations with the most. CoilEgressPortsAlmostUsed fires above 80 %.",
				queries: []query{{`max by (namespace, egress, pod, protocol, destination, port) (coil_egress_snat_ports_used{namespace=~"$namespace", egress=~"$egress"}) / 64512`,
					"{{pod}} to {{destination}} {{protocol}} {{port}}"}},
			},
			{
				title: "Lost connections", unit: "cps", alarm: 0.1,
				description: "New connections that a router couldn't track: the table was full, another connection had its port, or one without an answer made room.",
				queries: []query{
					{`sum by (namespace, egress, pod) (rate(coil_egress_nf_conntrack_dropped_total{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval]))`, "{{pod}}, full"},
					{`sum by (namespace, egress, pod) (rate(coil_egress_nf_conntrack_insert_failed_total{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval]))`, "{{pod}}, no port"},
					{`sum by (namespace, egress, pod) (rate(coil_egress_nf_conntrack_early_drop_total{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval]))`, "{{pod}}, made room"},
				},
			},
			{
				title: "Connections by floating address", unit: "short",
				description: "Connections of clients that leave by each floating address.",
				queries: []query{{`sum by (namespace, egress, address) (coil_egress_address_connections{namespace=~"$namespace", egress=~"$egress"})`,
					"{{namespace}}/{{egress}}, {{address}}"}},
			},
		}},
		{"Clients at routers", []panel{
			{
				title: "Clients of each router", unit: "short", description: "Tunnels to clients that each router has, by the protocol of their packets. Routers of an Egress have the same ones.",
				queries: []query{{`max by (namespace, egress, pod, protocol) (coil_egress_tunnels{namespace=~"$namespace", egress=~"$egress"})`, "{{pod}}, {{protocol}}"}},
			},
			{
				title: "Clients without a tunnel", unit: "short", alarm: 1,
				description: "Addresses of clients for which a router has no tunnel; its log says why.",
				queries:     []query{{`max by (namespace, egress, pod) (coil_egress_client_failures{namespace=~"$namespace", egress=~"$egress"})`, "{{namespace}}/{{egress}}, {{pod}}"}},
			},
			{
				title: "Time until a client is served", unit: "s", warn: 2,
				description: "From the notice that clients have changed until the router has followed: 99 of 100 changes take that long at most.",
				queries: []query{{`histogram_quantile(0.99, sum by (le, namespace, egress) (rate(coil_egress_client_latency_seconds_bucket{namespace=~"$namespace", egress=~"$egress"}[$__rate_interval])))`,
					"{{namespace}}/{{egress}}"}},
			},
		}},
		{"Nodes of clients", []panel{
			{
				title: "Clients of each node", unit: "short", description: "Pods of each node that use an Egress.",
				queries: []query{{`sum by (node, namespace, egress) (coil_egress_node_client_pods{namespace=~"$namespace", egress=~"$egress"})`, "{{node}}, {{namespace}}/{{egress}}"}},
			},
			{
				title: "Routers that don't answer", unit: "short", alarm: 1,
				description: "Nodes that take a router for dead, of Egresses with peering Direct.",
				queries: []query{{`count by (namespace, egress, family) (coil_egress_node_routers{namespace=~"$namespace", egress=~"$egress", state="dead"} > 0)`,
					"{{namespace}}/{{egress}}, {{family}}"}},
			},
			{
				title: "Time until another router", unit: "s", warn: 5,
				description: "From the last answer of a router that died until pods send new flows to others, with peering Direct: 99 of 100.",
				queries:     []query{{`histogram_quantile(0.99, sum by (le) (rate(coil_egress_node_failover_duration_seconds_bucket[$__rate_interval])))`, "all nodes"}},
			},
			{
				title: "Past the tunnels", unit: "pps", alarm: 1,
				description: "Packets to destinations of an Egress that came out of pods past their tunnels, and packets of a node's address that it hadn't translated. Both were dropped.",
				queries: []query{
					{`sum by (node) (rate(coil_egress_node_past_tunnel_packets_total[$__rate_interval]))`, "{{node}}, past the tunnel"},
					{`sum by (node) (rate(coil_egress_node_address_untranslated_packets_total[$__rate_interval]))`, "{{node}}, not translated"},
				},
			},
		}},
	},
}
