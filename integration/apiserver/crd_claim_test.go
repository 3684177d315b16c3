package apiserver

import (
	"strings"
)

// claimAttempts are attempts to create or change an AddressClaim.
func claimAttempts() []attempt {
	const (
		either = "count or addresses is required, and not both"
		entry  = "must be addresses, ranges such as 198.51.100.20-198.51.100.29, or CIDRs"
	)
	return []attempt{
		{name: "a count", new: `spec: {pool: p, count: 4}`},
		{name: "none", new: `spec: {pool: p, count: 0}`},
		{name: "addresses, ranges and CIDRs", new: `spec: {pool: p, addresses: [198.51.100.10, 198.51.100.20-198.51.100.29, "2001:db8::/126", "2001:db8::7-2001:db8::9"]}`},
		{name: "no cool-down", new: `spec: {pool: p, count: 1, coolDownSeconds: 0}`},
		{name: "another count", old: `spec: {pool: p, count: 4}`, new: `spec: {pool: p, count: 5}`},
		{name: "a list for a count", old: `spec: {pool: p, count: 4}`, new: `spec: {pool: p, addresses: [198.51.100.10]}`},

		{name: "no pool", new: `spec: {count: 4}`, field: "spec.pool", reason: "Required value"},
		{name: "a name that no pool can have", new: `spec: {count: 4, pool: ` + strings.Repeat("p", 64) + `}`, field: "spec.pool", reason: "Too long"},
		{name: "a name with a space", new: `spec: {count: 4, pool: "a b"}`, field: "spec.pool", reason: "should match"},
		{name: "a name with a dash first", new: `spec: {count: 4, pool: -x}`, field: "spec.pool", reason: "should match"},
		{name: "another pool", old: `spec: {pool: p, count: 4}`, new: `spec: {pool: q, count: 4}`, field: "spec.pool", reason: "can't be changed: make another claim"},
		{name: "neither a count nor addresses", new: `spec: {pool: p}`, field: "spec", reason: either},
		{name: "both", new: `spec: {pool: p, count: 1, addresses: [198.51.100.10]}`, field: "spec", reason: either},
		{name: "fewer than none", new: `spec: {pool: p, count: -1}`, field: "spec.count", reason: "greater than or equal to 0"},
		{name: "too many", new: `spec: {pool: p, count: 1025}`, field: "spec.count", reason: "less than or equal to 1024"},
		{name: "an empty list", new: `spec: {pool: p, addresses: []}`, field: "spec.addresses", reason: "should have at least 1 items"},
		{name: "a word", new: `spec: {pool: p, addresses: [some]}`, field: "spec.addresses", reason: entry},
		{name: "half a range", new: `spec: {pool: p, addresses: [198.51.100.10-]}`, field: "spec.addresses", reason: entry},
		{name: "a range of ranges", new: `spec: {pool: p, addresses: [198.51.100.10-198.51.100.11-198.51.100.12]}`, field: "spec.addresses", reason: entry},
		{name: "too long a list", new: `spec: {pool: p, addresses: [` + strings.Repeat("198.51.100.10, ", 65) + `]}`, field: "spec.addresses", reason: "must have at most 64 items"},
		{name: "less than no cool-down", new: `spec: {pool: p, count: 1, coolDownSeconds: -1}`, field: "spec.coolDownSeconds", reason: "greater than or equal to 0"},
	}
}
