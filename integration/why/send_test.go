package why

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// sends has packets sent from a client of an Egress and from a pod without one, to destinations that the node has or drops, and checks what is told of them.
func (f *fixture) sends(t *testing.T, e coilctl.Examiner, client *rig.Sandbox, router *rig.Router) {
	t.Helper()
	ctx := t.Context()
	f.sh("ip address add 203.0.113.5/32 dev lo; ip route add blackhole 203.0.113.6; ip route add unreachable 203.0.113.7")
	defer f.sh("ip address del 203.0.113.5/32 dev lo; ip route del blackhole 203.0.113.6; ip route del unreachable 203.0.113.7")
	node := testkit.Must(netlab.Open(f.NetnsPath()))(t)
	defer func() { testkit.Check(t, node.Close()) }()
	l := testkit.Must(node.Listen(ctx, "tcp", "203.0.113.5:443"))(t)
	defer func() { testkit.Check(t, l.Close()) }()
	source, own := router.Addrs[0].String(), f.Ledger.Live()[f.pod][0].String()
	for _, c := range []struct {
		name     string
		pod      *rig.Sandbox
		protocol string
		to       string
		count    int
		answered int
		says     []string
	}{
		{"accepted", client, inspection.TCP, "203.0.113.5:443", 3, 3, []string{"3 of 3 answered (SYN-ACK)"}},
		{"refused", client, inspection.TCP, "203.0.113.5:9", 3, 3, []string{"3 of 3 answered (RST)", "the port refuses"}},
		{"UDP is refused", client, inspection.UDP, "203.0.113.5:9", 3, 3, []string{"3 of 3 answered (port unreachable", "the port refuses"}},
		{"echo", client, inspection.ICMP, "203.0.113.5:0", 3, 3, []string{"3 of 3 answered (echo reply)"}},
		{"silent", client, inspection.ICMP, "203.0.113.6:0", 3, 0, []string{"0 of 3 answered; left the pod, 3 reached router " + router.Namespace + "/" + router.Name + ", translated to " + source + "; no answer came back"}},
		{"unreachable", client, inspection.UDP, "203.0.113.7:9", 1, 0, []string{"0 of 1 answered; ", " says: host unreachable (ICMP type 3, code 1)"}},
		{"without an Egress", f.pod, inspection.TCP, "203.0.113.5:443", 3, 3, []string{"3 of 3 answered (SYN-ACK)"}},
		{"without an Egress, unreachable", f.pod, inspection.TCP, "203.0.113.7:443", 1, 0, []string{"0 of 1 answered; ", " says: host unreachable (ICMP type 3, code 1)"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := testkit.Must(e.Send(ctx, f.pool, c.pod.Name, inspection.Order{Protocol: c.protocol, To: netip.MustParseAddrPort(c.to), Count: c.count}))(t)
			s := p.Sending
			if s == nil || len(s.Packets) != c.count || len(p.Unknown) > 0 {
				t.Fatalf("nothing was sent: %+v", p)
			}
			if s.Answered != c.answered || s.Complete() != (c.answered == c.count) {
				t.Errorf("%d are answered: %+v", s.Answered, s)
			}
			for _, text := range c.says {
				if !strings.Contains(s.Verdict, text) {
					t.Errorf("%q isn't said: %s", text, s.Verdict)
				}
			}
			for _, h := range p.Hops {
				if h.Count == nil || h.Count.Out < uint64(c.count) {
					t.Errorf("hop %s counts %+v", h.Where, h.Count)
				}
			}
			if c.pod == f.pod {
				if s.From != own || len(p.Hops) != 2 {
					t.Errorf("from %s, by %+v", s.From, p.Hops)
				}
				return
			}
			if len(p.Hops) != 4 {
				t.Fatalf("hops: %+v", p.Hops)
			}
			// Flows that RST has ended are forgotten, and an error of ICMP doesn't answer one.
			n := p.Hops[3].Count
			exact, back := c.name != "refused", map[bool]uint64{true: 3}[c.answered == 3 && c.protocol != inspection.UDP]
			if n.Exact != exact || exact && n.Out != uint64(c.count) || n.Back < back {
				t.Errorf("the router counts %+v", n)
			}
		})
	}
	if left := testkit.Must(client.Run(ctx, "ss", "-Htan"))(t); strings.Contains(left, "203.0.113.5") {
		t.Errorf("sockets are left: %s", left)
	}
}

// stops checks that packets which a client's own kernel refuses end in the pod.
func (f *fixture) stops(t *testing.T, e coilctl.Examiner, client *rig.Sandbox) {
	t.Helper()
	testkit.Check(t, f.HoldRepairs(true))
	defer func() { testkit.Check(t, f.HoldRepairs(false)) }()
	testkit.Must(client.Run(t.Context(), "ip", "route", "replace", "unreachable", "203.0.113.5", "table", "117", "proto", "30"))(t)
	p := testkit.Must(e.Send(t.Context(), f.pool, client.Name, inspection.Order{Protocol: inspection.TCP, To: netip.MustParseAddrPort("203.0.113.5:443"), Count: 2}))(t)
	if s := p.Sending; s == nil || s.Complete() || !strings.Contains(s.Verdict, "0 of 2 answered; stopped in the pod: its kernel refuses to send: no route to host") || p.Lost == "" {
		t.Errorf("with an unreachable route: %+v", p)
	}
}
