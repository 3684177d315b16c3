package main

var services = dashboard{
	name: "services", title: "Coil / Services",
	description: "Ways in: Services of the type LoadBalancer, the floating addresses that nodes and gateways have for them, and those of Egresses.",
	variables: []variable{
		{"node", `coil_floating_unheld_addresses{job="coil"}`, "node"},
		{"gateway", "coil_lb_gateway_reason", "gateway"},
	},
	rows: []row{
		{"Services", []panel{
			{
				title: "Services that aren't reached", kind: stat, unit: "short", alarm: 1,
				description: "Services that Coil is to serve, and that have no address, or one that nobody answers for. CoilServicesNotServed fires if there are any.",
				queries:     []query{{`sum(max by (reason) (coil_lb_service_count{reason!="Served"})) or vector(0)`, "Services"}},
			},
			{
				title: "Services", unit: "short", stacked: true,
				description: "Services that Coil serves, and others by the reason why not.",
				queries:     []query{{`max by (reason) (coil_lb_service_count)`, "{{reason}}"}},
			},
			{
				title: "Syncs of coil-lb-controller that failed", unit: "ops", warn: 0.1,
				description: "Syncs that ended with an error and are tried again, by loop.",
				queries:     []query{{`sum by (loop) (rate(coil_reconcile_total{component="coil-lb-controller", result="error"}[$__rate_interval]))`, "{{loop}}"}},
			},
		}},
		{"Floating addresses", []panel{
			{
				title: "Addresses on no node", kind: stat, unit: "short", alarm: 1,
				description: "Floating addresses with an owner that no node has. CoilFloatingAddressUnheld fires if there are any.",
				queries:     []query{{`max(coil_floating_unheld_addresses{node=~"$node"})`, "addresses"}},
			},
			{
				title: "Troubled addresses", unit: "short", alarm: 1,
				description: "Floating addresses that another host has too (Conflicting), or whose packets don't pass the node (ForwardingBlocked).",
				queries:     []query{{`max by (node, condition) (coil_floating_troubled_addresses{node=~"$node"})`, "{{node}}, {{condition}}"}},
			},
			{
				title: "Moves", unit: "short", warn: 5,
				description: "How often in half an hour a node got an address of another one, which gave it or failed. CoilFloatingAddressUnsteady fires above five for one address.",
				queries:     []query{{`sum by (block, reason) (increase(coil_floating_taken_total{node=~"$node", reason!="first"}[30m])) > 0`, "{{block}}, {{reason}}"}},
			},
			{
				title: "Services' addresses that nodes answer for", unit: "short",
				description: "Addresses of Services for which each node answers, whether it holds them or not.",
				queries:     []query{{`sum by (node) (coil_floating_spread_addresses{node=~"$node"})`, "{{node}}"}},
			},
		}},
		{"Traffic", []panel{
			{
				title: "Bytes", unit: "Bps", description: "Bytes from (sent) and to (received) each floating address, of Services and of Egresses, on all nodes together.",
				queries: []query{{`sum by (address, direction) (rate(coil_floating_bytes_total{node=~"$node"}[$__rate_interval]))`, "{{address}}, {{direction}}"}},
			},
			{
				title: "Packets", unit: "pps", description: "The same in packets.",
				queries: []query{{`sum by (address, direction) (rate(coil_floating_packets_total{node=~"$node"}[$__rate_interval]))`, "{{address}}, {{direction}}"}},
			},
			{
				title: "Not translated", unit: "pps", warn: 1,
				description: "Packets to a port of a Service that were dropped, since no Service proxy of the node had translated them.",
				queries:     []query{{`sum by (node, address) (rate(coil_floating_untranslated_packets_total{node=~"$node"}[$__rate_interval]))`, "{{node}}, {{address}}"}},
			},
		}},
		{"Connections that outlive their node", []panel{
			{
				title: "Standby", unit: "short", stacked: true,
				description: "Addresses whose connections another node copies all the time: in step, behind, or alone without such a node. CoilFloatingStandbyBehind fires if any are behind or alone.",
				queries:     []query{{`sum by (node, state) (coil_floating_standby_addresses{node=~"$node"})`, "{{node}}, {{state}}"}},
			},
			{
				title: "Behind", unit: "s", warn: 5,
				description: "The longest time for which another node has lacked connections of one of these addresses.",
				queries:     []query{{`max by (node) (coil_floating_standby_behind_seconds{node=~"$node"})`, "{{node}}"}},
			},
			{
				title: "Handovers", unit: "short",
				description: "Times in ten minutes that the connections of an address were to be copied to its next node. Refused and failed ones end connections.",
				queries:     []query{{`sum by (side, result) (increase(coil_floating_handover_total{node=~"$node"}[10m]))`, "{{side}}, {{result}}"}},
			},
			{
				title: "Duration of handovers", unit: "s", warn: 1,
				description: "How long 99 of 100 addresses have waited at most for their connections to be copied.",
				queries:     []query{{`histogram_quantile(0.99, sum by (le) (rate(coil_floating_handover_seconds_bucket{node=~"$node"}[$__rate_interval])))`, "all nodes"}},
			},
		}},
		{"Gateways", []panel{
			{
				title: "Gateways that aren't well", unit: "short", alarm: 1,
				description: "Gateways whose condition Applied isn't true, or that are silent or behind, by the reason. The alerts whose names begin with CoilGateway fire for them.",
				queries:     []query{{`max by (gateway, reason) (coil_lb_gateway_reason{gateway=~"$gateway", reason!="AllServed"})`, "{{gateway}}, {{reason}}"}},
			},
			{
				title: "Masters", unit: "short", alarm: 2,
				description: "Gateways that say that they have the addresses of an election by VRRP. It must be 1 for each election.",
				queries:     []query{{`max by (pool, router_id, family) (coil_lb_gateway_masters)`, "{{pool}} {{router_id}}, {{family}}"}},
			},
			{
				title: "Dropped packets", unit: "pps", warn: 100,
				description: "Packets to addresses of Services that gateways didn't send on, by the reason. Only gateways that Prometheus reaches have such lines.",
				queries:     []query{{`sum by (instance, reason) (rate(coil_lb_gateway_dropped_packets_total[$__rate_interval]))`, "{{instance}}, {{reason}}"}},
			},
			{
				title: "Services of gateways", unit: "short",
				description: "Services that each gateway serves (true), and can't serve (false). Only gateways that Prometheus reaches have such lines.",
				queries:     []query{{`sum by (instance, served) (coil_lb_gateway_services)`, "{{instance}}, {{served}}"}},
			},
		}},
		{"OpenStack", []panel{
			{
				title: "Calls", unit: "reqps", description: "Calls of OpenStack's API by resource and the code of the answer; 0 is no answer.",
				queries: []query{{`sum by (resource, code) (rate(coil_lb_openstack_calls_total[$__rate_interval]))`, "{{resource}}, {{code}}"}},
			},
			{
				title: "Duration of calls", unit: "s", warn: 5,
				description: "How long 99 of 100 calls of OpenStack's API take at most.",
				queries:     []query{{`histogram_quantile(0.99, sum by (le, resource) (rate(coil_lb_openstack_call_duration_seconds_bucket[$__rate_interval])))`, "{{resource}}"}},
			},
		}},
	},
}
