package natgateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// connections is a table of connections.
type connections struct {
	count, limit int
	uses         []conntrack.Use
	leaving      map[netip.Addr]int
	err          error
}

func (c connections) Size() (count, limit int, err error) { return c.count, c.limit, c.err }
func (c connections) Stats(context.Context) (conntrack.Stats, error) {
	return conntrack.Stats{}, c.err
}
func (c connections) Uses(context.Context, int, ...netip.Addr) ([]conntrack.Use, error) {
	return c.uses, c.err
}

func (c connections) Leaving(_ context.Context, own ...netip.Addr) (map[netip.Addr]int, error) {
	all := map[netip.Addr]int{}
	for _, a := range own {
		if n := c.leaving[a]; n > 0 {
			all[a] = n
		}
	}
	return all, c.err
}

// refusing is a filter that counts nothing, and has refused connections of these clients.
type refusing []netip.Addr

func (refusing) Counters(context.Context) ([]nft.Counter, error) { return nil, nil }
func (r refusing) AtLimit(context.Context, time.Duration) ([]netip.Addr, error) {
	return r, nil
}

// A router answers its controller with its Pressure.
func TestPressure(t *testing.T) {
	https := conntrack.Use{Protocol: unix.IPPROTO_TCP, Destination: netip.MustParseAddrPort("[2001:db8::1]:443"), Ports: 600}
	dns := conntrack.Use{Protocol: unix.IPPROTO_UDP, Destination: netip.MustParseAddrPort("192.0.2.1:53"), Ports: 5}
	for _, tt := range []struct {
		name   string
		table  connections
		filter refusing
		status int
		want   gateway.Pressure
	}{
		{"nothing", connections{limit: 1000}, nil, http.StatusOK, gateway.Pressure{MaxConnections: 1000, MaxPorts: 64512}},
		{"the destination with the most", connections{count: 700, limit: 1000, uses: []conntrack.Use{https, dns}}, nil, http.StatusOK,
			gateway.Pressure{Connections: 700, MaxConnections: 1000, Ports: 600, MaxPorts: 64512, Destination: "tcp [2001:db8::1]:443"}},
		{"clients with as many connections as one may have", connections{limit: 1000}, refusing{netip.MustParseAddr("10.1.0.5"), netip.MustParseAddr("fd00::5")}, http.StatusOK,
			gateway.Pressure{MaxConnections: 1000, MaxPorts: 64512, Limited: 2, Client: "10.1.0.5"}},
		{"unreadable", connections{err: errors.New("no such file")}, nil, http.StatusInternalServerError, gateway.Pressure{}},
	} {
		answer := httptest.NewRecorder()
		NewCollector(t.Context(), Config{}, (&Gateway{}).Addresses, tt.filter, tt.table).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, gateway.PressurePath, nil))
		var got gateway.Pressure
		if err := json.Unmarshal(answer.Body.Bytes(), &got); err != nil && tt.status == http.StatusOK {
			t.Errorf("%s: %v", tt.name, err)
		}
		if answer.Code != tt.status || got != tt.want {
			t.Errorf("%s: status %d, %+v, want %+v", tt.name, answer.Code, got, tt.want)
		}
	}
}

// A router tells how many connections leave by each floating address; without such addresses it tells of none.
func TestConnectionsOfAddresses(t *testing.T) {
	router, one, other := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8::1")
	transit := dataplane.TransitAddr(dataplane.IPv4, 7)
	table := connections{leaving: map[netip.Addr]int{router: 7, one: 3, other: 2, transit: 5}}
	for _, tt := range []struct {
		own  []netip.Addr
		want string
	}{
		{[]netip.Addr{router}, ""},
		{[]netip.Addr{router, transit}, ""},
		{[]netip.Addr{router, one, other, netip.MustParseAddr("198.51.100.2")}, `
			# HELP coil_egress_address_connections Connections of clients that leave by a floating address, at most 30 s old; of addresses that have some.
			# TYPE coil_egress_address_connections gauge
			coil_egress_address_connections{address="198.51.100.1",egress="nat",namespace="internet",pod="p"} 3
			coil_egress_address_connections{address="2001:db8::1",egress="nat",namespace="internet",pod="p"} 2
		`},
	} {
		cfg := Config{Namespace: "internet", Egress: "nat", Config: gateway.Config{Pod: "p", Addresses: []netip.Addr{router}}}
		c := NewCollector(t.Context(), cfg, func() []netip.Addr { return tt.own }, refusing{}, table)
		if err := testutil.CollectAndCompare(c, strings.NewReader(tt.want), "coil_egress_address_connections"); err != nil {
			t.Error(err)
		}
	}
}
