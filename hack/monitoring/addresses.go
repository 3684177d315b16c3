package main

var addresses = dashboard{
	name: "addresses", title: "Coil / Addresses",
	description: "AddressPools: what is in use, and until when they last.",
	variables:   []variable{{"pool", "coil_controller_max_blocks", "pool"}},
	rows: []row{
		{"Blocks", []panel{
			{
				title: "Blocks in use", kind: bars, unit: "percentunit", warn: 0.8, alarm: 0.9,
				description: "Share of the blocks of each pool that nodes hold, or that are floating addresses. CoilPoolAlmostFull fires above 90 %.",
				queries: []query{{`max by (pool) (coil_controller_allocated_blocks{pool=~"$pool"}) / max by (pool) (coil_controller_max_blocks{pool=~"$pool"})`,
					"{{pool}}"}},
			},
			{
				title: "Blocks in three days", kind: bars, unit: "percentunit", warn: 0.9, alarm: 1,
				description: "The same share in three days, if the pool grows as it did in the last six hours. CoilPoolFillsUp fires above 100 %, if more than half are in use now.",
				queries: []query{{`predict_linear(max by (pool) (coil_controller_allocated_blocks{pool=~"$pool"})[6h:5m], 3 * 86400) / ` +
					`max by (pool) (coil_controller_max_blocks{pool=~"$pool"})`, "{{pool}}"}},
			},
			{
				title: "Time until the last block", kind: bars, unit: "s",
				description: "How long free blocks last, if the pool grows as it did in the last six hours. Pools that don't grow have no bar.",
				queries: []query{{`(max by (pool) (coil_controller_max_blocks{pool=~"$pool"}) - max by (pool) (coil_controller_allocated_blocks{pool=~"$pool"})) / ` +
					`(deriv(max by (pool) (coil_controller_allocated_blocks{pool=~"$pool"})[6h:5m]) > 0)`, "{{pool}}"}},
			},
			{
				title: "Blocks", unit: "short", description: "Blocks that each pool has, and those in use.",
				queries: []query{
					{`max by (pool) (coil_controller_allocated_blocks{pool=~"$pool"})`, "{{pool}}, in use"},
					{`max by (pool) (coil_controller_max_blocks{pool=~"$pool"})`, "{{pool}}, all"},
				},
			},
		}},
		{"Addresses of pods", []panel{
			{
				title: "Addresses of nodes' blocks", unit: "short", stacked: true,
				description: "Addresses in blocks that nodes hold: allocated to pods, cooling after their pods have gone, or free. A pair of a dual-stack pool counts as one.",
				queries:     []query{{`sum by (pool, state) (coil_node_addresses{pool=~"$pool"})`, "{{pool}}, {{state}}"}},
			},
			{
				title: "Addresses in use, and in three days", unit: "short",
				description: "Addresses of pods in each pool, and what there will be in three days if it goes on as in the last six hours.",
				queries: []query{
					{`sum by (pool) (coil_node_addresses{pool=~"$pool", state="allocated"})`, "{{pool}}"},
					{`clamp_min(predict_linear(sum by (pool) (coil_node_addresses{pool=~"$pool", state="allocated"})[6h:5m], 3 * 86400), 0)`, "{{pool}}, in three days"},
				},
			},
			{
				title: "Nodes without a free address", unit: "short", warn: 1,
				description: "Nodes that hold blocks of a pool and have no free address in them. The next pod there needs a new block.",
				queries:     []query{{`count by (pool) (sum by (node, pool) (coil_node_addresses{pool=~"$pool", state="free"}) == 0)`, "{{pool}}"}},
			},
		}},
		{"Floating addresses", []panel{
			{
				title: "Floating addresses", unit: "short", stacked: true,
				description: "Floating addresses of each pool: used ones belong to an object, cooling ones were released and are given to nobody yet.",
				queries:     []query{{`max by (pool, state) (coil_floating_addresses{pool=~"$pool"})`, "{{pool}}, {{state}}"}},
			},
			{
				title: "AddressClaims that wait", unit: "short", alarm: 1,
				description: "AddressClaims without all of their addresses, by the reason of their condition Ready. CoilFloatingPoolExhausted fires if one has the reason PoolExhausted.",
				queries:     []query{{`max by (pool, reason) (coil_floating_claims{pool=~"$pool", reason!="AddressesHeld"})`, "{{pool}}, {{reason}}"}},
			},
		}},
		{"Requests", []panel{
			{
				title: "BlockRequests", unit: "reqps", stacked: true,
				description: "Requests of nodes for a block that coil-ipam-controller has answered: Complete, or why they failed.",
				queries:     []query{{`sum by (answer) (rate(coil_controller_blockrequests_answered_total[$__rate_interval]))`, "{{answer}}"}},
			},
			{
				title: "Lost blocks", unit: "short", alarm: 1,
				description: "AddressBlocks that don't exist any more although pods have addresses of them, by node. It must be 0.",
				queries:     []query{{`sum by (node) (coil_node_missing_blocks) > 0`, "{{node}}"}},
			},
			{
				title: "Syncs of coil-ipam-controller that failed", unit: "ops", alarm: 1,
				description: "Syncs that ended with an error and are tried again, by loop. Some are normal while the API server is busy. CoilSyncsFail fires if all syncs of a loop fail.",
				queries:     []query{{`sum by (loop) (rate(coil_reconcile_total{component="coil-ipam-controller", result="error"}[$__rate_interval]))`, "{{loop}}"}},
			},
		}},
	},
}
