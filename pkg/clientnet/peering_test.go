package clientnet

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// No flow moves when the peering of an Egress changes: what was sent to before keeps it, until its end,
// and takes no new one. Then nothing is left of that.
func TestFlowsStayWhenThePeeringChanges(t *testing.T) {
	p := newDirectPod(t, 3)
	const service = 3 // which one router is behind
	where := []string{"192.0.2.0/24", "2001:db8::/32"}
	steps := map[string]client.Egress{"Direct": directly("1 live, 2 live", where...), "Service": clientnettest.Gateway("net/a", 0, where...)}
	for name, e := range steps {
		e.Peers = ipam.Address{IPv4: routerAddrs(service)[0], IPv6: routerAddrs(service)[1]}
		e.Routers = directly("1 live, 2 live").Routers
		steps[name] = e
	}
	before := steps["Service"]
	p.mustUse(before)
	for _, name := range []string{"Direct", "Service", "Direct"} {
		flows := p.connect(1, 30)
		now := steps[name]
		now.Switched = true
		p.idle()
		out := p.mustUse(now)
		if out.AllPinned() != len(flows) || out.Unpinned > 0 {
			t.Errorf("%s: %d of %d flows are pinned", name, out.AllPinned(), len(flows))
		}
		p.must("to "+name, flows)
		more := p.connect(31, 60)
		if n := share(more); name == "Service" && n[service] != len(more) || name == "Direct" && (n[1] == 0 || n[2] == 0 || n[service] > 0) {
			t.Errorf("%s: new flows go by %v", name, n)
		}
		if again := p.mustUse(now); again.Changed() {
			t.Errorf("%s, the second time: %+v", name, again)
		}
		p.must("to "+name+", later", append(flows, more...))
		for _, f := range append(flows, more...) {
			f.Close()
		}
		testkit.Eventually(t, 10*time.Second, "pins end with flows", func() error {
			if out := p.mustUse(now); out.AllPinned() > 0 {
				return fmt.Errorf("by link: %v", out.Pinned)
			}
			return nil
		})
		now.Switched = false
		p.mustUse(now)
		routers := map[string][]int{"Direct": {1, 2}, "Service": {service}}[name]
		if d := cmp.Diff(routers, p.tunnels()); d != "" || p.pinned() > 0 {
			t.Errorf("%s: %d pins, links to routers (-want +got):\n%s", name, p.pinned(), d)
		}
		out4, out6 := p.NS.IP(t, "-4", "route", "show", "table", "all"), p.NS.IP(t, "-6", "route", "show", "table", "all")
		if got, want := strings.Count(out4+out6, "default dev fou"), map[string]int{"Direct": 4}[name]; got != want {
			t.Errorf("%s: %d routes for pins, want %d:\n%s%s", name, got, want, out4, out6)
		}
		if nexthops := p.NS.IP(t, "nexthop"); name == "Service" && nexthops != "" {
			t.Errorf("left: %s", nexthops)
		}
	}
}

// From a Service to routers and back, nothing leaves by another way.
func TestPeeringChangesClosed(t *testing.T) {
	destinations := []string{"192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16"}
	service := clientnettest.Gateway("net/a", 1, destinations...)
	switched := directly("1 live, 2 live", destinations...)
	switched.Peers, switched.Switched = service.Peers, true
	back := switched
	back.Direct = false
	steps := []client.Egress{
		service, switched, directly("1 live, 2 live", destinations...), directly("2 draining, 3 live", destinations...),
		directly("1 dead, 2 draining", destinations...), directly("", destinations...), directly("3 live", destinations...),
		directly("1 live, 2 live", destinations...), back, service,
	}
	for i := range steps[1:] {
		t.Run(fmt.Sprintf("step %d", i+1), func(t *testing.T) {
			t.Parallel()
			p := newDirectPod(t, 3)
			for _, earlier := range steps[:i+1] {
				p.mustUse(earlier)
			}
			before, after := steps[i:i+1], steps[i+1:i+2]
			if n := p.changesClosed(before, after, []string{"192.0.2.1", "2001:db8::1", "172.20.0.1"}, "show", "route get"); n < 4 {
				t.Errorf("only %d requests were looked at", n)
			}
			if out := p.NS.IP(t, "nexthop"); i+2 == len(steps) && out != "" {
				t.Errorf("left: %s", out)
			}
		})
	}
}
