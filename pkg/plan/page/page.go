// Package page derives what the page of "coilctl serve" shows of a cluster.
//
// It owns the rows of the page, which parts of it need which kinds of objects, and what a search finds. It must not know where objects come from, nor how
// rows come to browsers.
package page

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/addressmap"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// The resources that the page shows.
const (
	Pools           = "addresspools"
	Blocks          = "addressblocks"
	Claims          = "addressclaims"
	Egresses        = "egresses"
	Policies        = "egresspolicies"
	ClusterPolicies = "egressclusterpolicies"
	Gateways        = "loadbalancergateways"
	Services        = "services"
	Nodes           = "nodes"
	Pods            = "pods"
	Leases          = "leases"
)

// Source is how a resource is read.
type Source struct {
	Resource string `json:"resource"`
	// Known says that all objects were there once. What is unknown isn't shown: it would look as if there were none.
	Known bool `json:"known"`
	// Problem is the error of the last request, and Since when the first one in a row failed; empty if it was answered.
	Problem string       `json:"problem,omitempty"`
	Since   *metav1.Time `json:"since,omitempty"`
}

// Cluster is what is known of a cluster at one moment.
type Cluster struct {
	Objects inventory.Objects
	Sources []Source
}

// lacks says which of some resources aren't known.
func (c Cluster) lacks(resources ...string) (missing []string) {
	for _, r := range resources {
		if !slices.ContainsFunc(c.Sources, func(s Source) bool { return s.Resource == r && s.Known }) {
			missing = append(missing, r)
		}
	}
	return missing
}

// Row is a part of the page that changes as a whole. Its section and its key name it.
type Row struct {
	Section, Key string
	Value        any
}

// sections are the parts of the page, with the resources that they need.
var sections = []struct {
	name  string
	needs []string
	rows  func(inventory.Objects, func(key string, value any))
}{
	{"pools", []string{Pools}, poolRows},
	{"forecasts", []string{Pools, Blocks}, forecastRows},
	{"maps", []string{Pools, Blocks}, mapRows},
	{"nodes", []string{Nodes, Pods, Blocks}, nodeRows},
	{"egresses", []string{Egresses, Policies, ClusterPolicies}, egressRows},
	{"policies", []string{Policies, ClusterPolicies}, policyRows},
	{"addresses", []string{Blocks}, addressRows},
	{"services", []string{Services, Blocks, Gateways}, serviceRows},
	{"gateways", []string{Gateways}, gatewayRows},
}

// Rows returns all rows.
func Rows(c Cluster) (all []Row) {
	add := func(section string) func(string, any) {
		return func(key string, value any) { all = append(all, Row{section, key, value}) }
	}
	for _, s := range c.Sources {
		add("sources")(s.Resource, s)
	}
	for _, s := range sections {
		missing := c.lacks(s.needs...)
		add("sections")(s.name, Section{missing})
		if len(missing) == 0 {
			s.rows(c.Objects, add(s.name))
		}
	}
	judged(c, add("kinds"), add("findings"))
	return all
}

// Section says which resources a section lacks. As long as there are any it has no rows.
type Section struct {
	Lacks []string `json:"lacks,omitempty"`
}

// kindResources are the resources of kinds that are counted, those that they are judged by included.
var kindResources = map[string][]string{
	"AddressPool": {Pools}, "AddressBlock": {Blocks}, "AddressClaim": {Claims}, "Egress": {Egresses}, "EgressPolicy": {Policies}, "EgressClusterPolicy": {ClusterPolicies},
	"LoadBalancerGateway": {Gateways}, "Service": {Services}, "Node": {Nodes, Pods}, "Lease": {Leases},
}

// judged adds what "coilctl status" says of the kinds that are known.
func judged(c Cluster, kind, finding func(string, any)) {
	seen := health.Look(c.Objects)
	known := func(kind string) bool { return len(c.lacks(kindResources[kind]...)) == 0 }
	for i, k := range seen.Kinds {
		if known(k.Kind) {
			kind(fmt.Sprint(i, " ", k.Kind), k)
		}
	}
	for _, f := range seen.Findings {
		if known(f.Kind) {
			finding(f.Object()+": "+f.Reason, f)
		}
	}
}

// Pool is an AddressPool as the page shows it.
type Pool struct {
	inventory.Pool
	// Floating only says that pods get no address of it.
	FloatingOnly bool `json:"floatingOnly,omitempty"`
	Drains       bool `json:"drains,omitempty"`
	// Excluded are the ranges that it gives to nobody.
	Excluded []string `json:"excluded,omitempty"`
}

func poolRows(o inventory.Objects, add func(string, any)) {
	of := map[string]*v2.AddressPool{}
	for _, p := range o.Pools {
		of[p.Name] = p
	}
	for _, p := range inventory.Pools(o) {
		spec := of[p.Name].Spec
		add(p.Name, Pool{Pool: p, FloatingOnly: spec.Purpose == v2.PurposeFloating, Drains: spec.Drain, Excluded: spec.Exclude})
	}
}

// byPool are blocks by the pools that they count for.
func byPool(blocks []*v2.AddressBlock) map[string][]*v2.AddressBlock {
	of := map[string][]*v2.AddressBlock{}
	for _, b := range blocks {
		for _, p := range pools.BlockPools(b) {
			of[p] = append(of[p], b)
		}
	}
	return of
}

func forecastRows(o inventory.Objects, add func(string, any)) {
	of := byPool(o.Blocks)
	for _, p := range o.Pools {
		add(p.Name, pools.Expect(p, of[p.Name], o.Now))
	}
}

const (
	// mapCells is how many cells the map of a pool has at most: more of them nobody tells apart.
	mapCells = 2048
	// stripCells is how many cells change together.
	stripCells = 64
)

// Map is the map of a pool without its cells.
type Map struct {
	addressmap.Map
	// Subnets are in place of those of the map: their cells are in strips.
	Subnets []MapSubnet `json:"subnets"`
	// Problem is why there is none.
	Problem string `json:"problem,omitempty"`
}

// MapSubnet is a subnet of a pool.
type MapSubnet struct {
	// Name is its prefixes, Says how much of it somebody has, and Cells how many cells it has.
	Name  string `json:"name"`
	Says  string `json:"says"`
	Cells int    `json:"cells"`
}

// Strip is a part of a subnet: some cells that follow each other.
type Strip struct {
	Pool string `json:"pool"`
	// Subnet is the index of the subnet, and From that of the first cell.
	Subnet int               `json:"subnet"`
	From   int               `json:"from"`
	Cells  []addressmap.Cell `json:"cells"`
}

// mapRows has a row for each pool, and one for each strip of it.
func mapRows(o inventory.Objects, add func(string, any)) {
	of := byPool(o.Blocks)
	for _, p := range o.Pools {
		m, err := addressmap.New(p, of[p.Name], mapCells)
		if err != nil {
			add(p.Name, Map{Map: addressmap.Map{Pool: p.Name}, Problem: err.Error()})
			continue
		}
		shown := Map{Map: m}
		for i, s := range m.Subnets {
			shown.Subnets = append(shown.Subnets, MapSubnet{s.Name(), s.Says(m), len(s.Cells)})
			for from := 0; from < len(s.Cells); from += stripCells {
				add(fmt.Sprintf("%s/%d/%d", p.Name, i, from), Strip{p.Name, i, from, s.Cells[from:min(from+stripCells, len(s.Cells))]})
			}
		}
		add(p.Name, shown)
	}
}

func nodeRows(o inventory.Objects, add func(string, any)) {
	for _, n := range inventory.Nodes(o) {
		add(n.Name, n)
	}
}

// Egress is an Egress as the page shows it.
type Egress struct {
	inventory.Egress
	// Use says whose addresses clients leave by: empty are those of routers.
	Use string `json:"use,omitempty"`
	// Default says that it is that of policies without one.
	Default bool `json:"default,omitempty"`
	// At are the routers that are ready and the addresses of their nodes, by which clients leave.
	At []At `json:"at,omitempty"`
	// Attention are the messages of conditions that somebody should look at.
	Attention []string `json:"attention,omitempty"`
}

// At is where a router is.
type At struct {
	Router  string `json:"router"`
	Node    string `json:"node"`
	Address string `json:"address"`
}

func egressRows(o inventory.Objects, add func(string, any)) {
	of, attention := map[string]*v2.Egress{}, map[string][]string{}
	for _, e := range o.Egresses {
		of[e.Namespace+"/"+e.Name] = e
	}
	for _, f := range health.Findings(inventory.Objects{Egresses: o.Egresses, Now: o.Now}) {
		if f.Kind == "Egress" {
			attention[f.Namespace+"/"+f.Name] = append(attention[f.Namespace+"/"+f.Name], f.Message)
		}
	}
	for _, e := range inventory.Egresses(o) {
		key := e.Namespace + "/" + e.Name
		row := Egress{Egress: e, Default: of[key].Spec.Default, Attention: attention[key]}
		if a := of[key].Spec.Addresses; a != nil {
			row.Use = string(a.Use)
		}
		for _, a := range of[key].Status.NodeAddresses {
			row.At = append(row.At, At{a.Router, a.Node, joined(a.IPv4, a.IPv6)})
		}
		add(key, row)
	}
}

// joined are the addresses of both families.
func joined(addrs ...string) string {
	return strings.Join(slices.DeleteFunc(addrs, func(a string) bool { return a == "" }), ",")
}

func policyRows(o inventory.Objects, add func(string, any)) {
	for _, p := range inventory.Policies(o) {
		add(p.Namespace+"/"+p.Name, p)
	}
}

func addressRows(o inventory.Objects, add func(string, any)) {
	for _, a := range inventory.Addresses(o) {
		add(a.Block, a)
	}
}

// Service is a Service as the page shows it.
type Service struct {
	inventory.Service
	// At are the nodes, or gateways, at which packets for its addresses arrive.
	At []string `json:"at,omitempty"`
	// Waits says that it isn't as it should be.
	Waits bool `json:"waits,omitempty"`
}

func serviceRows(o inventory.Objects, add func(string, any)) {
	holders := map[string][]string{} // by address
	gateways := map[string][]string{}
	for _, g := range o.Gateways {
		for _, p := range g.Spec.Pools {
			gateways[p] = append(gateways[p], g.Name)
		}
	}
	for _, a := range inventory.Addresses(o) {
		at := gateways[a.Pool]
		if a.Holder != "" {
			at = []string{a.Holder}
		}
		for addr := range strings.SplitSeq(a.Address, ",") {
			holders[addr] = at
		}
	}
	waits := map[string]bool{}
	for _, f := range health.Findings(inventory.Objects{Services: o.Services, Now: o.Now}) {
		if f.Kind == "Service" {
			waits[f.Namespace+"/"+f.Name] = true
		}
	}
	for _, s := range inventory.Services(o) {
		key := s.Namespace + "/" + s.Name
		row := Service{Service: s, Waits: waits[key] || len(s.Addresses) == 0}
		for _, a := range s.Addresses {
			row.At = append(row.At, holders[a]...)
		}
		slices.Sort(row.At)
		row.At = slices.Compact(row.At)
		add(key, row)
	}
}

func gatewayRows(o inventory.Objects, add func(string, any)) {
	for _, g := range inventory.Gateways(o) {
		add(g.Name, g)
	}
}
