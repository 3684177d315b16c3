package diagnosis

import (
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// sent are three packets by the tunnel to router internet/nat-a, which all were answered.
func sent() *SendFacts {
	f := &SendFacts{TraceFacts: *traced()}
	f.Sending = &inspection.Sending{
		Protocol: inspection.TCP, From: addr, To: "203.0.113.5:443",
		Links: []inspection.LinkTraffic{{InPod: true, Link: "fou4_1", Out: 3}, {InPod: true, Link: "eth0", Out: 5, Back: 4}, {Link: "veth9", Out: 5, Back: 4}},
	}
	var flows []inspection.Flow
	for id := range uint16(3) {
		f.Sending.Packets = append(f.Sending.Packets, inspection.SentPacket{ID: id + 1, Answer: "SYN-ACK", By: "203.0.113.5", Arrived: true, Milliseconds: 1.5 + float64(id)})
		flows = append(flows, inspection.Flow{ID: id + 1, Source: "192.0.2.7:1", Destination: "203.0.113.5:443", Answered: true})
	}
	f.After = slices.Clone(f.Routers)
	for i := range f.After {
		f.Routers[i].Answer.Clients = []inspection.RouterClient{{Traffic: &inspection.LinkTraffic{Link: "fou4_c", Out: 10}}}
		after := *f.Routers[i].Answer
		after.Flows = []inspection.Flow{}
		f.After[i].Answer = &after
	}
	f.After[0].Answer.Flows = flows
	return f
}

// silent takes the answers away.
func (f *SendFacts) silent() {
	for i := range f.Sending.Packets {
		p := &f.Sending.Packets[i]
		*p = inspection.SentPacket{ID: p.ID}
	}
	flows := slices.Clone(f.After[0].Answer.Flows)
	for i := range flows {
		flows[i].Answered = false
	}
	f.After[0].Answer.Flows = flows
}

// direct takes the tunnel away.
func (f *SendFacts) direct() {
	f.silent()
	f.Sending.Flows = []inspection.Flow{}
	f.Answer.Hops = []inspection.Hop{{InPod: true, From: addr, To: "203.0.113.5", Links: []string{"eth0"}}, {From: addr, To: "203.0.113.5", Links: []string{"ens3"}}}
	f.Sending.Links = f.Sending.Links[1:]
	f.Routers, f.After = nil, nil
}

func TestSend(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(f *SendFacts)
		counts  string // of the hops
		verdict string
	}{
		{"answered", func(*SendFacts) {}, "3 out on fou4_1; 5 out, 4 back on eth0; 5 out, 4 back on veth9; 3 out, 3 back", "3 of 3 answered (SYN-ACK) in 1.5 to 3.5 ms"},
		{"one is answered late", func(f *SendFacts) { f.Sending.Packets[2].Milliseconds = 1023.4 }, "", "3 of 3 answered (SYN-ACK) in 1.5 to 1023 ms"},
		{"all are answered at once", func(f *SendFacts) {
			for i := range f.Sending.Packets {
				f.Sending.Packets[i].Milliseconds = 0.304
			}
		}, "", "3 of 3 answered (SYN-ACK) in 0.304 ms"},
		{"refused", func(f *SendFacts) {
			for i := range f.Sending.Packets {
				f.Sending.Packets[i].Answer = "RST"
			}
			f.After[0].Answer.Flows = []inspection.Flow{} // they are forgotten
			f.Routers[0].Answer.Clients = []inspection.RouterClient{{Traffic: &inspection.LinkTraffic{Link: "fou4_c", Out: 10, Back: 7}}}
			f.After[0].Answer.Clients = []inspection.RouterClient{{Traffic: &inspection.LinkTraffic{Link: "fou4_c", Out: 13, Back: 10}}}
		}, "3 out on fou4_1; 5 out, 4 back on eth0; 5 out, 4 back on veth9; 3 out, 3 back on fou4_c", "3 of 3 answered (RST) in 1.5 to 3.5 ms: the port refuses them, or a firewall does in its name"},
		{"refused by the kernel", func(f *SendFacts) {
			f.silent()
			for i := range f.Sending.Packets {
				f.Sending.Packets[i] = inspection.SentPacket{NotSent: "operation not permitted"}
			}
			f.After = nil
		}, "3 out on fou4_1; 5 out, 4 back on eth0; 5 out, 4 back on veth9; ?", "0 of 3 answered; stopped in the pod: its kernel refuses to send: operation not permitted"},
		{"stopped at the tunnel", func(f *SendFacts) {
			f.silent()
			f.Sending.Links[0].Out = 1
		}, "", "0 of 3 answered; stopped in the pod: 1 of 3 packets left by its link fou4_1"},
		{"stopped before the node", func(f *SendFacts) {
			f.silent()
			f.Sending.Links[2].Out = 0
		}, "", "0 of 3 answered; stopped between the pod and node n1: 0 of 3 packets came in by its link veth9"},
		{"no router got them", func(f *SendFacts) {
			f.silent()
			f.After[0].Answer.Flows = []inspection.Flow{}
		}, "3 out on fou4_1; 5 out, 4 back on eth0; 5 out, 4 back on veth9; 0 out, 0 back", "0 of 3 answered; left the pod and its link to node n1, and none of the routers that were asked got them: internet/nat-a, internet/nat-b"},
		{"the router dropped them", func(f *SendFacts) {
			f.silent()
			f.After[0].Answer.Flows = []inspection.Flow{}
			f.After[0].Answer.Clients = []inspection.RouterClient{{Traffic: &inspection.LinkTraffic{Link: "fou4_c", Out: 13}}}
			f.After[0].Answer.Dropped = map[string]uint64{"non_destination": 4, "invalid": 1}
			f.Routers[0].Answer.Dropped = map[string]uint64{"non_destination": 1, "invalid": 1}
		}, "", "0 of 3 answered; stopped at router internet/nat-a, which dropped packets meanwhile: 3 as non_destination"},
		{"a router dropped them, and doesn't count what comes out of its tunnel", func(f *SendFacts) {
			f.silent()
			f.After[0].Answer.Flows, f.After[0].Answer.Clients = []inspection.Flow{}, nil
			f.After[0].Answer.Dropped = map[string]uint64{"non_destination": 3}
		}, "", "0 of 3 answered; stopped at router internet/nat-a, which dropped packets meanwhile: 3 as non_destination"},
		{"a router that didn't get them dropped others", func(f *SendFacts) {
			f.silent()
			f.After[0].Answer.Flows = []inspection.Flow{}
			f.After[0].Answer.Dropped = map[string]uint64{"unsolicited": 4}
		}, "", "0 of 3 answered; left the pod and its link to node n1, and none of the routers that were asked got them: internet/nat-a, internet/nat-b"},
		{"they end at the router", func(f *SendFacts) {
			f.silent()
			f.After[0].Answer.Flows = []inspection.Flow{}
			f.After[0].Answer.Clients = []inspection.RouterClient{{Traffic: &inspection.LinkTraffic{Link: "fou4_c", Out: 13}}}
		}, "", "0 of 3 answered; stopped at router internet/nat-a: 3 packets of the pod came out of its tunnel, and it tracks none of them, or RST came back to it"},
		{"no answer comes", (*SendFacts).silent, "3 out on fou4_1; 5 out, 4 back on eth0; 5 out, 4 back on veth9; 3 out, 0 back",
			"0 of 3 answered; left the pod, 3 reached router internet/nat-a, translated to 192.0.2.7; no answer came back"},
		{"one of them is lost behind the router", func(f *SendFacts) {
			whole := slices.Clone(f.Sending.Packets)
			f.silent()
			copy(f.Sending.Packets, whole[:2])
		}, "", "2 of 3 answered (SYN-ACK) in 1.5 to 2.5 ms; left the pod, 1 reached router internet/nat-a, translated to 192.0.2.7; no answer came back"},
		{"answers are lost", func(f *SendFacts) {
			flows := f.After[0].Answer.Flows
			f.silent()
			f.After[0].Answer.Flows = flows
		}, "", "0 of 3 answered; left the pod, 3 reached router internet/nat-a, translated to 192.0.2.7; 3 answers came back to the router, and not to the pod"},
		{"the router is silent", func(f *SendFacts) {
			f.silent()
			f.After[0].Answer, f.After[0].Unanswered = nil, "forbidden"
			f.After = f.After[:1]
		}, "", "0 of 3 answered; left the pod and its node; what routers got isn't known: router internet/nat-a: forbidden"},
		{"the router couldn't read its flows", func(f *SendFacts) {
			f.silent()
			f.After[0].Answer.Flows, f.After[0].Answer.Problems = nil, []string{"look for flows: no memory"}
			f.After[0].Answer.Clients = []inspection.RouterClient{{Traffic: &inspection.LinkTraffic{Link: "fou4_c", Out: 13}}}
			f.After = f.After[:1]
		}, "3 out on fou4_1; 5 out, 4 back on eth0; 5 out, 4 back on veth9; 3 out, 0 back on fou4_c",
			"0 of 3 answered; left the pod and its node; what routers got isn't known: router internet/nat-a: look for flows: no memory"},
		{"unreachable", func(f *SendFacts) {
			f.silent()
			for i := range f.Sending.Packets {
				f.Sending.Packets[i].Answer, f.Sending.Packets[i].By = "host unreachable (ICMP type 3, code 1)", "192.0.2.254"
			}
		}, "", "0 of 3 answered; 192.0.2.254 says: host unreachable (ICMP type 3, code 1)"},
		{"no router is known", func(f *SendFacts) {
			f.silent()
			f.After, f.Routers = nil, nil
		}, "", "0 of 3 answered; left the pod and its link to node n1; no router is known that could be asked"},
		{"the pod and the node drop", func(f *SendFacts) {
			f.silent()
			f.Sending.Links[0].Out = 0
			f.Sending.Dropped = inspection.DroppedAt{Pod: map[string]uint64{"past_tunnel": 3, "forged_source": 1}, Node: map[string]uint64{"forged": 2}}
		}, "", "0 of 3 answered; stopped in the pod: 0 of 3 packets left by its link fou4_1; meanwhile Coil's table of nftables dropped in the pod 1 as forged_source, 3 as past_tunnel, on node n1 2 as forged"},
		{"the node drops others", func(f *SendFacts) { f.Sending.Dropped.Node = map[string]uint64{"forged": 2} }, "", "3 of 3 answered (SYN-ACK) in 1.5 to 3.5 ms"},
		{"to itself", func(f *SendFacts) {
			f.direct()
			f.Answer.Hops[0].Links = []string{"lo"}
		}, "", "0 of 3 answered; the pod itself has the address, and doesn't answer"},
		{"without an Egress", (*SendFacts).direct, "5 out, 4 back on eth0; 5 out, 4 back on veth9",
			"0 of 3 answered; reached node n1; node n1 tracks none of their flows: it dropped the packets, or doesn't track connections"},
		{"without an Egress, and the node couldn't read its flows", func(f *SendFacts) {
			f.direct()
			f.Sending.Flows = nil
		}, "", "0 of 3 answered; reached node n1; whether node n1 tracks their flows isn't known"},
		{"without an Egress, and the pod's link to the node isn't known", func(f *SendFacts) {
			f.direct()
			f.Sending.Links = f.Sending.Links[:1]
		}, "", "0 of 3 answered; left the pod; node n1 tracks none of their flows: it dropped the packets, or doesn't track connections"},
		{"without an Egress, tracked", func(f *SendFacts) {
			f.direct()
			f.Sending.Flows = []inspection.Flow{{ID: 1, Source: "192.168.0.1:9"}, {ID: 2, Source: addr + ":9"}, {ID: 3, Source: addr + ":8", Answered: true}}
		}, "5 out, 4 back on eth0; 3 out, 1 back", "0 of 3 answered; left the pod, and node n1, translated to 192.168.0.1; 1 answer came back to node n1, and not to the pod"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := sent()
			c.change(f)
			p := Send(*f)
			var counts []string
			for _, h := range p.Hops {
				text := "?"
				if h.Count != nil {
					text = h.Count.String()
				}
				counts = append(counts, text)
			}
			if got := strings.Join(counts, "; "); c.counts != "" && got != c.counts {
				t.Errorf("counts are %q, want %q", got, c.counts)
			}
			if p.Sending == nil || p.Sending.Verdict != c.verdict {
				t.Fatalf("%+v, want %q", p.Sending, c.verdict)
			}
			if p.Sending.Complete() != strings.HasPrefix(c.verdict, "3 of 3") {
				t.Errorf("complete: %v", p.Sending.Complete())
			}
		})
	}
	f := sent()
	if p := Send(*f); !slices.Equal(p.Sources, []string{"192.0.2.7"}) || p.Hops[3].Note != "packets went on as 192.0.2.7" || p.Hops[0].Note != "tunnel to 10.0.0.8" {
		t.Errorf("by another address than the router would choose: %+v", p)
	}
	f.After[0].Answer.Flows[0].Source = "192.0.2.8:7"
	f.Routers[0].Answer.Way.Source = "192.0.2.7"
	if p := Send(*f); !slices.Equal(p.Sources, []string{"192.0.2.8", "192.0.2.7"}) || p.Hops[3].Note != "packets went on as 192.0.2.8, 192.0.2.7" {
		t.Errorf("by two addresses: %+v", p)
	}
	f = sent()
	f.direct()
	f.Sending.Flows = []inspection.Flow{{ID: 1, Source: addr + ":1", Destination: "10.9.0.1:8443"}}
	if p := Send(*f); !slices.Equal(p.Sources, []string{addr}) || p.Hops[1].Note != "packets went on to 10.9.0.1:8443" {
		t.Errorf("to a Service: %+v", p)
	}
	f = sent()
	f.Sending.Unknown = []string{"packets of eth0: no memory"}
	if p := Send(*f); len(p.Unknown) != 1 || !p.Sending.Complete() {
		t.Errorf("something couldn't be counted: %+v", p)
	}
	f.Sending, f.NotSent = nil, "packets are being sent for somebody else"
	if p := Send(*f); p.Sending != nil || len(p.Unknown) != 1 || !strings.Contains(p.Unknown[0], "somebody else") || len(p.Hops) != 4 || p.Hops[0].Count != nil {
		t.Errorf("nothing was sent: %+v", p)
	}
	if (PathSending{}).Complete() {
		t.Error("no packets are complete")
	}
}
