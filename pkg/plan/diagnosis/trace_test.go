package diagnosis

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// traced is a pod whose packets leave by the tunnel to one of two routers.
func traced() *TraceFacts {
	f := world()
	f.askRouters()
	t := &TraceFacts{Pod: f.Pod, To: netip.MustParseAddrPort("203.0.113.5:443"), Answer: f.Answer, Routers: f.Routers}
	t.Answer.Hops = []inspection.Hop{
		{InPod: true, From: addr, To: "203.0.113.5", Table: 118, Links: []string{"fou4_1"}, Tunnels: []string{"10.0.0.8"}},
		{InPod: true, InTunnel: true, From: addr, To: "10.0.0.8", Table: 254, Links: []string{"eth0"}},
		{From: addr, To: "10.0.0.8", Table: 116, Links: []string{"veth9"}},
	}
	for i, ip := range []string{"10.0.0.8", "10.0.0.9"} {
		r := &t.Routers[i]
		r.Pod.Status.PodIPs = []corev1.PodIP{{IP: ip}}
		r.Answer.Way = &inspection.RouterWay{Client: addr, Destination: "203.0.113.5", Allowed: true, Source: ip, Route: "default via 10.0.0.254"}
	}
	return t
}

func TestTrace(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(f *TraceFacts)
		where   string // of the hops, the last words
		sources []string
		says    []string // of what is lost or unknown; nothing otherwise
	}{
		{"by a router", func(*TraceFacts) {}, "shop/cart-0 shop/cart-0 n1 internet/nat-a", []string{"10.0.0.8"}, nil},
		{"by a Service", func(f *TraceFacts) { f.Answer.Hops[0].Tunnels = []string{"10.96.0.7"} }, "shop/cart-0 shop/cart-0 n1 internet/nat-a internet/nat-b", []string{"10.0.0.8", "10.0.0.9"}, nil},
		{"without an Egress", func(f *TraceFacts) {
			f.Answer.Hops = []inspection.Hop{{InPod: true, From: addr, To: "203.0.113.5"}, {From: addr, To: "203.0.113.5"}}
			f.Routers = nil
		}, "shop/cart-0 n1", []string{addr}, nil},
		{"unreachable in the pod", func(f *TraceFacts) {
			f.Answer.Hops = []inspection.Hop{{InPod: true, To: "203.0.113.5", Dropped: "the kernel has no way: no route to host"}}
		}, "shop/cart-0", nil, []string{"pod shop/cart-0: the kernel has no way"}},
		{"refused by the router", func(f *TraceFacts) {
			w := f.Routers[0].Answer.Way
			w.Source, w.Allowed, w.Why = "", false, "it is no destination of the Egress"
		}, "shop/cart-0 shop/cart-0 n1 internet/nat-a", nil, []string{"router internet/nat-a: it is no destination"}},
		{"router is silent", func(f *TraceFacts) { f.Routers[0].Answer, f.Routers[0].Unanswered = nil, "forbidden" }, "shop/cart-0 shop/cart-0 n1", nil, []string{"router internet/nat-a doesn't say", "forbidden"}},
		{"no router is known", func(f *TraceFacts) { f.Routers = nil }, "shop/cart-0 shop/cart-0 n1", nil, []string{"no router", "10.0.0.8"}},
		{"coild is silent", func(f *TraceFacts) { f.Answer, f.Unanswered = nil, "forbidden" }, "", nil, []string{"coild of node n1 doesn't say", "forbidden"}},
		{"coild is older", func(f *TraceFacts) { f.Answer.Hops = nil }, "", nil, []string{"earlier version"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := traced()
			c.change(f)
			p := Trace(*f)
			var where []string
			for _, h := range p.Hops {
				where = append(where, h.Where[strings.LastIndex(h.Where, " ")+1:])
			}
			if got := strings.Join(where, " "); got != c.where || !slices.Equal(p.Sources, c.sources) || p.Subject != "From Pod shop/cart-0 to 203.0.113.5:443" {
				t.Errorf("%s: hops are %q with sources %q, want %q with %q", p.Subject, got, p.Sources, c.where, c.sources)
			}
			said := strings.Join(append(p.Unknown, p.Lost), "\n")
			if (strings.TrimSpace(said) != "") != (len(c.says) > 0) {
				t.Errorf("it says %q", said)
			}
			for _, text := range c.says {
				if !strings.Contains(said, text) {
					t.Errorf("%q isn't said: %s", text, said)
				}
			}
		})
	}
}
