package openstack

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

var (
	net4    = subnet{id: "net4", prefix: netip.MustParsePrefix("10.1.0.0/24")}
	net6    = subnet{id: "net6", prefix: netip.MustParsePrefix("fd00:1::/64")}
	subnet2 = []subnet{net4, net6}
)

func objectOf(id, key, created string) object {
	return object{ID: id, Description: "Coil: cluster one, address " + key, Tags: marks{"one"}.tags(key), CreatedAt: created}
}

// TestJoin joins ports and floating IPs to addresses.
func TestJoin(t *testing.T) {
	const early, late = "2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z"
	portOf := func(id, key, created string, ips ...fixedIP) *port { return &port{objectOf(id, key, created), ips} }
	floatOf := func(id, key, created, port, to string) *float {
		return &float{objectOf(id, key, created), "203.0.113.7", port, to}
	}
	ip4, ip6 := fixedIP{"net4", "10.1.0.9"}, fixedIP{"net6", "fd00:1::9"}
	for _, tt := range []struct {
		name        string
		ports       []*port
		floats      []*float
		port, float string
		leads       bool
		fixed       int
		surplus     []string
		incomplete  int
	}{
		{"complete", []*port{portOf("p", "web", early, ip4, ip6)}, []*float{floatOf("f", "web", early, "p", "10.1.0.9")}, "p", "f", true, 2, nil, 0},
		{"no floating IP", []*port{portOf("p", "web", early, ip4)}, nil, "p", "", false, 1, nil, 0},
		{"no port", nil, []*float{floatOf("f", "web", early, "", "")}, "", "f", false, 0, nil, 2},
		{"leads nowhere", []*port{portOf("p", "web", early, ip4)}, []*float{floatOf("f", "web", early, "", "")}, "p", "f", false, 1, nil, 1},
		{"leads to a former address", []*port{portOf("p", "web", early, ip4)}, []*float{floatOf("f", "web", early, "p", "10.1.0.8")}, "p", "f", false, 1, nil, 1},
		{"leads to somebody else", []*port{portOf("p", "web", early, ip4)}, []*float{floatOf("f", "web", early, "q", "10.1.0.9")}, "p", "f", false, 1, nil, 1},
		{"no address", []*port{portOf("p", "web", early, fixedIP{"other", "10.9.0.1"})}, nil, "p", "", false, 0, nil, 1},
		{"one of SLAAC, too", []*port{portOf("p", "web", early, fixedIP{"slaac", "fd00:2::1"}, ip4)}, nil, "p", "", false, 1, nil, 0},
		{"two ports", []*port{portOf("a", "web", late, ip4), portOf("b", "web", early, ip4)}, nil, "b", "", false, 1, []string{"a"}, 0},
		{"two ports of one second", []*port{portOf("b", "web", early, ip4), portOf("a", "web", early, ip4)}, nil, "a", "", false, 1, []string{"b"}, 0},
		{"two floating IPs", []*port{portOf("p", "web", early, ip4)}, []*float{floatOf("f", "web", early, "", ""), floatOf("g", "web", late, "p", "10.1.0.9")},
			"p", "g", true, 1, []string{"f"}, 0},
		{"two alone", []*port{portOf("p", "web", early, ip4)}, []*float{floatOf("g", "web", late, "", ""), floatOf("f", "web", early, "", "")},
			"p", "f", false, 1, []string{"g"}, 1},
		{"listed twice", []*port{portOf("p", "web", early, ip4), portOf("p", "web", early, ip4)}, nil, "p", "", false, 1, nil, 0},
	} {
		m := marks{"one"}
		f := found{ours(m, tt.ports, func(p *port) *object { return &p.object }), ours(m, tt.floats, func(f *float) *object { return &f.object })}
		all := f.addresses(m, subnet2)
		if len(all) != 1 {
			t.Errorf("%s: %d addresses", tt.name, len(all))
			continue
		}
		a := all[0]
		if a.PortID != tt.port || a.FloatingID != tt.float || a.Floating.IsValid() != tt.leads || len(a.Fixed) != tt.fixed ||
			!slices.Equal(a.surplus, tt.surplus) || len(a.Incomplete) != tt.incomplete {
			t.Errorf("%s: %+v with the surplus %q", tt.name, a, a.surplus)
		}
		wanted := []subnet{net4}
		if got, want := a.complete(m, wanted, Want{IPv4: true, Floating: true}), tt.leads; got != want {
			t.Errorf("%s: it is complete with a floating IP: %t, want %t", tt.name, got, want)
		}
	}
}

// TestDue has what two sweeps see.
func TestDue(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c := &Client{cfg: Config{Grace: time.Minute}, now: func() time.Time { return now }}
	old, young, unknown := Object{ID: "old", object: object{CreatedAt: "2025-12-31T23:00:00"}},
		Object{ID: "young", object: object{CreatedAt: "2026-01-01T00:00:00Z"}}, Object{ID: "unknown"}
	for i, step := range []struct {
		seen []Object
		due  []string
	}{
		{[]Object{old, young, unknown}, nil},
		{[]Object{young, unknown}, nil}, // the old one is used
		{[]Object{old, young, unknown}, nil},
		{[]Object{old, young, unknown}, []string{"old", "young", "unknown"}},
		{[]Object{old}, []string{"old"}}, // wasn't deleted
	} {
		var got []string
		for _, o := range c.due(step.seen) {
			got = append(got, o.ID)
		}
		if !slices.Equal(got, step.due) {
			t.Errorf("sweep %d: %q are due, want %q", i, got, step.due)
		}
		now = now.Add(20 * time.Second)
	}
}

func TestValidate(t *testing.T) {
	good := Config{ClusterID: "one", SubnetIDs: []string{"a", "b"}}
	for name, tt := range map[string]struct {
		change func(*Config)
		ok     bool
	}{
		"good":          {func(*Config) {}, true},
		"no cluster":    {func(c *Config) { c.ClusterID = "" }, false},
		"slash":         {func(c *Config) { c.ClusterID = "a/b" }, false},
		"no subnet":     {func(c *Config) { c.SubnetIDs = nil }, false},
		"three subnets": {func(c *Config) { c.SubnetIDs = []string{"a", "b", "c"} }, false},
		"empty subnet":  {func(c *Config) { c.SubnetIDs = []string{""} }, false},
		"negative":      {func(c *Config) { c.Grace = -1 }, false},
	} {
		cfg := good
		tt.change(&cfg)
		if _, err := New(cfg); (err == nil) != tt.ok {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
