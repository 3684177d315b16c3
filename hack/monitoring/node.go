package main

var node = dashboard{
	name: "node", title: "Coil / Nodes",
	description: "What Coil's programs do on nodes: pods that start, what is kept in the kernel, and what it costs.",
	variables:   []variable{{"node", `up{job="coil", component="coild"}`, "node"}},
	rows: []row{
		{"Programs", []panel{
			{
				title: "coild that don't answer", kind: stat, unit: "short", alarm: 1,
				description: "Nodes whose coild gave no metrics. CoildDown names them after five minutes.",
				queries:     []query{{`sum(1 - up{job="coil", component="coild", node=~"$node"})`, "nodes"}},
			},
			{
				title: "Processor", unit: "short", description: "Processors that each program uses.",
				queries: []query{{`sum by (component, node) (rate(process_cpu_seconds_total{job="coil", node=~"$node"}[$__rate_interval]))`, "{{component}} on {{node}}"}},
			},
			{
				title: "Memory", unit: "bytes", description: "Resident memory of each program.",
				queries: []query{{`sum by (component, node) (process_resident_memory_bytes{job="coil", node=~"$node"})`, "{{component}} on {{node}}"}},
			},
		}},
		{"Pods", []panel{
			{
				title: "Calls of the plugin", unit: "reqps", description: "Calls by which the container runtime attaches pods (Add), detaches them (Del) and checks them.",
				queries: []query{{`sum by (method) (rate(coil_cni_request_duration_seconds_count{node=~"$node"}[$__rate_interval]))`, "{{method}}"}},
			},
			{
				title: "Calls that failed", unit: "reqps", alarm: 1,
				description: "Calls of the plugin that ended with an error, by its gRPC code. The runtime tries them again.",
				queries: []query{{`sum by (method, code, node) (rate(coil_cni_request_duration_seconds_count{node=~"$node", code!="OK"}[$__rate_interval]))`,
					"{{method}} {{code}} on {{node}}"}},
			},
			{
				title: "Duration of calls", unit: "s", warn: 1,
				description: "How long calls of the plugin take inside coild at most: half of them, and 99 of 100.",
				queries: []query{
					{`histogram_quantile(0.5, sum by (le, method) (rate(coil_cni_request_duration_seconds_bucket{node=~"$node"}[$__rate_interval])))`, "{{method}}, half"},
					{`histogram_quantile(0.99, sum by (le, method) (rate(coil_cni_request_duration_seconds_bucket{node=~"$node"}[$__rate_interval])))`, "{{method}}, 99 %"},
				},
			},
			{
				title: "Addresses", unit: "short", stacked: true,
				description: "Addresses of the blocks that the nodes hold: allocated, cooling or free.",
				queries:     []query{{`sum by (node, state) (coil_node_addresses{node=~"$node"})`, "{{node}}, {{state}}"}},
			},
		}},
		{"Kernel", []panel{
			{
				title: "Repairs", unit: "short", warn: 10,
				description: "Objects in the kernel that others destroyed and that Coil made again, in ten minutes. CoilNodeTamperedWith fires above ten.",
				queries:     []query{{`sum by (node, kind) (increase(coil_repairs_total{job="coil", node=~"$node"}[10m])) > 0`, "{{kind}} on {{node}}"}},
			},
			{
				title: "Forged packets", unit: "pps", warn: 1,
				description: "Packets of pods that were dropped since their source wasn't the pod's address.",
				queries:     []query{{`sum by (node, family) (rate(coil_source_guard_dropped_packets_total{node=~"$node"}[$__rate_interval]))`, "{{node}}, {{family}}"}},
			},
			{
				title: "Source guard", kind: stat, unit: "short", alarm: 1, below: true,
				description: "1 if all of the nodes drop packets from addresses that aren't the pod's; 0 if one doesn't, or if it is switched off.",
				queries:     []query{{`min(coil_source_guard_active{node=~"$node"})`, "active"}},
			},
		}},
		{"Loops", []panel{
			{
				title: "Syncs that failed", unit: "ops", warn: 1,
				description: "Syncs that ended with an error and are tried again. CoilSyncsFail fires if all syncs of a loop fail for a quarter of an hour.",
				queries: []query{{`sum by (component, node, loop) (rate(coil_reconcile_total{job="coil", node=~"$node", result="error"}[$__rate_interval])) > 0`,
					"{{component}}, {{loop}} on {{node}}"}},
			},
			{
				title: "Duration of syncs", unit: "s", warn: 5,
				description: "How long 99 of 100 syncs of each loop take at most.",
				queries: []query{{`histogram_quantile(0.99, sum by (le, component, loop) (rate(coil_reconcile_duration_seconds_bucket{job="coil", node=~"$node"}[$__rate_interval])))`,
					"{{component}}, {{loop}}"}},
			},
			{
				title: "Routes to other nodes", unit: "short", description: "Routes to blocks of other nodes that coil-router keeps. All nodes have about as many.",
				queries: []query{{`max by (node) (coil_router_routes_synced{node=~"$node"})`, "{{node}}"}},
			},
		}},
		{"Addresses of the LAN", []panel{
			{
				title: "Announced addresses", unit: "short", description: "Addresses for which the node answers by ARP or NDP.",
				queries: []query{{`sum by (node, family) (coil_announce_addresses{node=~"$node"})`, "{{node}}, {{family}}"}},
			},
			{
				title: "Addresses of no link", unit: "short", alarm: 1,
				description: "Addresses for which the node should answer, and that are in the subnet of none of its links.",
				queries:     []query{{`sum by (node, family) (coil_announce_homeless_addresses{node=~"$node"}) > 0`, "{{node}}, {{family}}"}},
			},
			{
				title: "Other hosts with an address", unit: "pps", warn: 0.1,
				description: "Packets in which other hosts said that they have an address for which the node answers.",
				queries:     []query{{`sum by (node, family) (rate(coil_announce_rival_packets_total{node=~"$node"}[$__rate_interval]))`, "{{node}}, {{family}}"}},
			},
		}},
	},
}
