package natgateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// connections is a table of connections.
type connections struct {
	count, limit int
	uses         []conntrack.Use
	err          error
}

func (c connections) Size() (count, limit int, err error) { return c.count, c.limit, c.err }
func (c connections) Stats(context.Context) (conntrack.Stats, error) {
	return conntrack.Stats{}, c.err
}
func (c connections) Uses(context.Context, int, ...netip.Addr) ([]conntrack.Use, error) {
	return c.uses, c.err
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
