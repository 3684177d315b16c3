package clientnet

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// The link by which answers go when there is no tunnel is checked and repaired, too.
func TestSinkIsRepaired(t *testing.T) {
	p := newPod(t)
	e := clientnettest.Gateway("net/a", 0, "192.0.2.0/24", "2001:db8::/32")
	e.OriginatingOnly = true
	made := p.mustUse(e).State
	lost := func() error {
		for link, dst := range map[string]string{dataplane.ReceiverIPv4: "192.0.2.1", dataplane.ReceiverIPv6: "2001:db8::1"} {
			if out, err := p.NS.Run("ip", "route", "get", dst); err != nil || !strings.Contains(out, "dev "+link) {
				return errors.Join(err, fmt.Errorf("way to %s: %s", dst, out))
			}
		}
		return nil
	}
	check := func() error { return p.check(made) }
	mtu := func(want string) {
		t.Helper()
		for _, link := range clientnettest.SinkNames {
			if out := p.NS.IP(t, "link", "show", link); !strings.Contains(out, " mtu "+want+" ") {
				t.Errorf("answers are made for another MTU than eth0's %s:\n%s", want, out)
			}
		}
	}
	testkit.Check(t, lost(), check())
	mtu("1400")
	for _, c := range []struct{ damage, says string }{
		{"ip link del coil_ipip4", "coil_ipip4"},
		{"ip link set coil_ipip6 down", "2001:db8::/32"},
		{"ip route del 192.0.2.0/24 dev coil_ipip4 table 118", "192.0.2.0/24"},
	} {
		testkit.Must(p.NS.Run("sh", "-c", c.damage))(t)
		for range 2 { // nothing is repaired
			if err := check(); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("after %s: %v", c.damage, err)
			}
		}
		if p.Escapes("192.0.2.1") || p.Escapes("2001:db8::1") {
			t.Errorf("after %s: it isn't closed", c.damage)
		}
		if out := p.mustUse(e); !out.Routes.Changed() {
			t.Errorf("the repair after %s isn't counted: %+v", c.damage, out)
		}
		if err := errors.Join(check(), lost()); err != nil {
			t.Errorf("restored after %s: %v", c.damage, err)
		}
	}
	p.NS.IP(t, "link", "set", "eth0", "mtu", "1300")
	p.mustUse(e)
	mtu("1300")

	e.OriginatingOnly = false
	p.mustUse(e)
	p.WantWays(map[string]string{"192.0.2.1": "nowhere", "2001:db8::1": "nowhere"})
	if links := p.NS.IP(t, "link"); strings.Contains(links, "coil_ipip") {
		t.Errorf("left without a use:\n%s", links)
	}
}

// Where packets can't get lost, destinations are unreachable.
func TestWithoutSink(t *testing.T) {
	p := newPod(t)
	p.Links.Leaky = true
	e := clientnettest.Gateway("net/a", 0, "192.0.2.0/24", "2001:db8::/32")
	e.OriginatingOnly = true
	if _, err := p.use(t.Context(), e); err == nil || !strings.Contains(err.Error(), "no sink") {
		t.Errorf("error is %v", err)
	}
	p.WantWays(map[string]string{"192.0.2.1": "nowhere", "2001:db8::1": "nowhere"})
}
