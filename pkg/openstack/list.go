package openstack

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"time"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
	"github.com/gophercloud/gophercloud/v2/pagination"
)

// object is what ports and floating IPs have in common, in Neutron's words.
type object struct {
	ID          string   `json:"id"`
	Description string   `json:"description"`
	Tags        []string `json:"tags"`
	CreatedAt   string   `json:"created_at"`
	Revision    int      `json:"revision_number"`
	// key is that of the address.
	key string
}

// created is when the object was made. Neutron's clock shows whole seconds; some releases leave out the zone, which is UTC.
func (o object) created() time.Time {
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05"} {
		if at, err := time.Parse(layout, o.CreatedAt); err == nil {
			return at
		}
	}
	return time.Time{}
}

// older orders objects: of two with one key, the first is the address.
func older(a, b object) int {
	return cmp.Or(a.created().Compare(b.created()), cmp.Compare(a.ID, b.ID))
}

// port is a port of an address.
type port struct {
	object
	FixedIPs []fixedIP `json:"fixed_ips"`
}

type fixedIP struct {
	SubnetID  string `json:"subnet_id"`
	IPAddress string `json:"ip_address,omitempty"`
}

// addr is invalid if there is no such address.
func (f fixedIP) addr() netip.Addr { return parse(f.IPAddress) }

// in returns the addresses that a port has of a subnet, sorted. Those of other subnets may be of no concern: one with SLAAC gives each port one.
func (p *port) in(s subnet) (all []netip.Addr) {
	for _, f := range p.FixedIPs {
		if a := f.addr(); f.SubnetID == s.id && a.IsValid() {
			all = append(all, a)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// float is a floating IP of an address.
type float struct {
	object
	Address string `json:"floating_ip_address"`
	PortID  string `json:"port_id"`
	// FixedIP stays when the port has lost this address.
	FixedIP string `json:"fixed_ip_address"`
}

// parse returns an invalid address for what is none.
func parse(text string) netip.Addr {
	a, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}
	}
	return a.Unmap()
}

// found are objects of the cluster.
type found struct {
	ports  []*port
	floats []*float
}

// query is the query of a list. gophercloud's own has no fields, and drops filters for what is empty.
type query url.Values

// ToPortListQuery implements ports.ListOptsBuilder.
func (q query) ToPortListQuery() (string, error) { return "?" + url.Values(q).Encode(), nil }

// ToFloatingIPListQuery implements floatingips.ListOptsBuilder.
func (q query) ToFloatingIPListQuery() (string, error) { return q.ToPortListQuery() }

var (
	commonFields = []string{"id", "description", "tags", "created_at", "revision_number"}
	portFields   = slices.Concat(commonFields, []string{"fixed_ips"})
	floatFields  = slices.Concat(commonFields, []string{"floating_ip_address", "port_id", "fixed_ip_address"})
)

// all lists the objects of the cluster. Those without tags are few: ports that no machine has, and floating IPs. They come
// first, so that one that gets its tags meanwhile is in one list or in both.
func (s *session) all(ctx context.Context) (found, error) {
	tagged := url.Values{"tags": {s.marks.clusterTag()}}
	return s.list(ctx,
		lists{ports: url.Values{"not-tags": {s.marks.clusterTag()}, "network_id": {s.network}, "device_owner": {""}},
			floats: url.Values{"not-tags": {s.marks.clusterTag()}}},
		lists{ports: tagged, floats: tagged})
}

// find lists the objects of an address.
func (s *session) find(ctx context.Context, key string) (found, error) {
	described := url.Values{"description": {s.marks.description(key)}}
	// Neutron splits at commas; several tags must all be there.
	tagged := url.Values{"tags": {s.marks.clusterTag() + "," + addressTag + key}}
	f, err := s.list(ctx, lists{described, described}, lists{tagged, tagged})
	if err != nil {
		return found{}, err
	}
	f.ports = slices.DeleteFunc(f.ports, func(p *port) bool { return p.key != key })
	f.floats = slices.DeleteFunc(f.floats, func(f *float) bool { return f.key != key })
	return f, nil
}

// lists are the filters of two lists.
type lists struct{ ports, floats url.Values }

// list makes lists, and returns the objects of the cluster in them, sorted by age. It fails if one of them does: what couldn't be read isn't
// absent.
func (s *session) list(ctx context.Context, of ...lists) (f found, err error) {
	for _, l := range of {
		if err := pages(ctx, ports.List(s.net, s.query(l.ports, portFields)), func(a answer) { f.ports = append(f.ports, a.Ports...) }); err != nil {
			return found{}, explain("list ports", err)
		}
	}
	for _, l := range of {
		if err := pages(ctx, floatingips.List(s.net, s.query(l.floats, floatFields)), func(a answer) { f.floats = append(f.floats, a.Floats...) }); err != nil {
			return found{}, explain("list floating IPs", err)
		}
	}
	f.ports = ours(s.marks, f.ports, func(p *port) *object { return &p.object })
	f.floats = ours(s.marks, f.floats, func(f *float) *object { return &f.object })
	return f, nil
}

// answer is what Neutron answers, of which one field is there.
type answer struct {
	Port   *port    `json:"port"`
	Float  *float   `json:"floatingip"`
	Ports  []*port  `json:"ports"`
	Floats []*float `json:"floatingips"`
}

// pages reads all pages of a list.
func pages[T any](ctx context.Context, list pagination.Pager, keep func(T)) error {
	return list.EachPage(ctx, func(_ context.Context, page pagination.Page) (bool, error) {
		p, ok := page.(interface{ ExtractInto(any) error })
		if !ok {
			return false, fmt.Errorf("a page is %T", page)
		}
		var got T
		if err := p.ExtractInto(&got); err != nil {
			return false, err
		}
		keep(got)
		return true, nil
	})
}

// query is a filter within the project: an admin would see those of all.
func (s *session) query(filter url.Values, fields []string) query {
	q := query{"project_id": {s.project}, "fields": fields}
	for k, v := range filter {
		q[k] = v
	}
	return q
}

// ours returns each object of the cluster once, sorted by age.
func ours[T any](m marks, all []T, of func(T) *object) []T {
	seen := map[string]bool{}
	all = slices.DeleteFunc(all, func(t T) bool {
		o := of(t)
		key, ok := m.keyOf(o.Description, o.Tags)
		o.key = key
		if !ok || seen[o.ID] {
			return true
		}
		seen[o.ID] = true
		return false
	})
	slices.SortFunc(all, func(a, b T) int { return older(*of(a), *of(b)) })
	return all
}
