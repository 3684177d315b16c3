package coilctl_test

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// tracedWorld has a pod that uses an Egress with one router. coild and the router answer from values that a test may change.
type tracedWorld struct {
	*world
	sending *inspection.Sending
	flows   []inspection.Flow
	// asked are the questions, by pods.
	asked []string
}

func newTracedWorld(t *testing.T) *tracedWorld {
	t.Helper()
	w, _ := nodeWorld(t)
	tw := &tracedWorld{world: w}
	w.add(t, "namespaces", object{"metadata": object{"name": "shop"}})
	w.add(t, "egresses", object{"metadata": object{"namespace": "internet", "name": "nat"}, "spec": object{"destinations": []string{"203.0.113.0/24"}, "replicas": 1}})
	w.add(t, "pods",
		object{
			"metadata": object{"namespace": "shop", "name": "cart-1", "annotations": object{v2.AnnotationEgressPrefix + "internet": "nat"}}, "spec": object{"nodeName": "n1"},
			"status": object{"phase": "Running", "podIPs": []object{{"ip": "10.100.0.33"}}},
		},
		object{
			"metadata": object{"namespace": "internet", "name": "nat-a", "labels": plan.RouterLabels("nat")}, "spec": object{"nodeName": "n1"},
			"status": object{"phase": "Running", "podIPs": []object{{"ip": "10.100.2.5"}}},
		})
	tw.sending = &inspection.Sending{
		Protocol: inspection.TCP, From: "10.100.0.33", To: "203.0.113.5:443",
		Links:   []inspection.LinkTraffic{{InPod: true, Link: "fou4_Xk2v", Out: 2}, {InPod: true, Link: "eth0", Out: 2, Back: 2}, {Link: "veth9", Out: 2, Back: 2}},
		Packets: []inspection.SentPacket{{ID: 40001, Answer: "SYN-ACK", By: "203.0.113.5", Arrived: true, Milliseconds: 1.25}, {ID: 40002, Answer: "SYN-ACK", By: "203.0.113.5", Arrived: true, Milliseconds: 1}},
	}
	for _, p := range tw.sending.Packets {
		tw.flows = append(tw.flows, inspection.Flow{ID: p.ID, Source: fmt.Sprint("192.0.2.7:", p.ID), Destination: "203.0.113.5:443", Answered: true})
	}
	w.run = tw.debug
	return tw
}

// debug answers as "coild debug" and "coil-egress debug" do.
func (w *tracedWorld) debug(pod string, command []string, out, errOut io.Writer) int {
	words := command[2:]
	w.mu.Lock()
	w.asked = append(w.asked, pod+": "+strings.Join(words, " "))
	w.mu.Unlock()
	var answer any
	switch words[0] {
	case "way":
		answer = inspection.Answer{Node: inspection.Node{Name: "n1"}, Hops: []inspection.Hop{
			{InPod: true, From: "10.100.0.33", To: "203.0.113.5", Rule: "2100: lookup 118", Table: 118, Links: []string{"fou4_Xk2v"}, Tunnels: []string{"10.100.2.5"}},
			{InPod: true, InTunnel: true, From: "10.100.0.33", To: "10.100.2.5", Table: 254, Links: []string{"eth0"}, Gateway: "169.254.1.1"},
			{InTunnel: true, From: "10.100.0.33", To: "10.100.2.5", Table: 254, Links: []string{"ens3"}},
		}}
		if pod == "nat-a" {
			answer = inspection.RouterAnswer{Way: &inspection.RouterWay{Source: "192.0.2.7", Destination: "203.0.113.5", Allowed: true, Route: "default"}}
		}
	case "send":
		if w.sending == nil {
			fmt.Fprintln(errOut, "error: ask coild: packets are being sent for somebody else: ask again")
			return 1
		}
		answer = inspection.Answer{Sending: w.sending}
	case "flows":
		answer = inspection.RouterAnswer{Flows: w.flows}
	}
	_ = json.NewEncoder(out).Encode(answer)
	return 0
}

// Packets are sent only if that was asked for: of the protocol and the number that were chosen. What was counted and answered is printed, and decides the exit code.
func TestTraceSend(t *testing.T) {
	w := newTracedWorld(t)
	code, out, errOut := w.coilctl("", "trace", "shop/cart-1", "203.0.113.5:443")
	if code != 0 || errOut != "" || strings.Contains(out, "COUNT") || slices.ContainsFunc(w.asked, func(q string) bool { return strings.Contains(q, "send") }) {
		t.Errorf("without --send: exit code %d, asked %q\n%s%s", code, w.asked, out, errOut)
	}

	w.asked, w.world.asked = nil, nil
	code, out, errOut = w.coilctl("", "trace", "shop/cart-1", "203.0.113.5:443", "--send", "--count=2")
	const want = `From Pod shop/cart-1 to 203.0.113.5:443
HOP   WHERE                   FROM          TO            RULE   TABLE   BY                     COUNT                      NOTE
1     pod shop/cart-1         10.100.0.33   203.0.113.5   2100   118     fou4_Xk2v              2 out on fou4_Xk2v         tunnel to 10.100.2.5
2     pod shop/cart-1         10.100.0.33   10.100.2.5           254     eth0 via 169.254.1.1   2 out, 2 back on eth0      the outer packet
3     node n1                 10.100.0.33   10.100.2.5           254     ens3                   2 out, 2 back on veth9     the outer packet
4     router internet/nat-a   192.0.2.7     203.0.113.5                  default                2 out, 2 back
The destination sees 192.0.2.7
Sent 2 packets by tcp: 2 of 2 answered (SYN-ACK) in 1 to 1.25 ms
`
	if diff := cmp.Diff(lines(want), lines(out)); code != 0 || errOut != "" || diff != "" {
		t.Errorf("exit code %d, %s (-want +got):\n%s", code, errOut, diff)
	}
	wantAsked := []string{
		"coild-x: send shop/cart-1 tcp 203.0.113.5 443 2", "coild-x: way shop/cart-1 203.0.113.5",
		"nat-a: flows 10.100.0.33 tcp 203.0.113.5 443 40001,40002", "nat-a: way 10.100.0.33 203.0.113.5",
	}
	if slices.Sort(w.asked); !slices.Equal(w.asked, wantAsked) {
		t.Errorf("asked %q, want %q", w.asked, wantAsked)
	}
	rights := []string{"get namespaces", "get pods", "get pods/exec", "list egressclusterpolicies", "list egresses", "list egresspolicies", "list pods"}
	slices.Sort(w.world.asked)
	if got := slices.Compact(slices.DeleteFunc(w.world.asked, func(q string) bool { return q == "get nodes" })); !slices.Equal(got, rights) {
		t.Errorf("it needs %q, want %q", got, rights)
	}

	code, out, _ = w.coilctl("", "trace", "shop/cart-1", "203.0.113.5:443", "--send", "-o", "json")
	var p diagnosis.Path
	if err := json.Unmarshal([]byte(out), &p); code != 0 || err != nil || p.Sending == nil || p.Sending.Answered != 2 || p.Sending.Packets[0].ID != 40001 || p.Hops[3].Count == nil || !p.Hops[3].Count.Exact {
		t.Errorf("as JSON: exit code %d, %v\n%s", code, err, out)
	}

	w.sending.Links[2] = inspection.LinkTraffic{Link: "a\x1b[2J", Out: 2}
	if code, out, _ = w.coilctl("", "trace", "shop/cart-1", "203.0.113.5:443", "--send"); code != 0 || strings.Contains(out, "\x1b") || !strings.Contains(out, "2 out, 0 back on a\\x1b[2J") {
		t.Errorf("a link's name controls the terminal: exit code %d\n%q", code, out)
	}

	w.sending.Packets[1] = inspection.SentPacket{ID: 40002}
	w.flows[1].Answered = false
	code, out, errOut = w.coilctl("", "trace", "shop/cart-1", "203.0.113.5:443", "--send", "--count=2")
	if code != 1 || errOut != "error: the destination hasn't answered all packets\n" || !strings.Contains(out, "1 of 2 answered") || !strings.Contains(out, "1 reached router internet/nat-a, translated to 192.0.2.7; no answer came back\n") {
		t.Errorf("a packet is lost: exit code %d\n%s%s", code, out, errOut)
	}
	w.sending = nil
	code, out, errOut = w.coilctl("", "trace", "shop/cart-1", "203.0.113.5:443", "--send")
	if code != 1 || errOut != "error: the destination hasn't answered all packets\n" || !strings.Contains(out, "? no packets were sent: ") || !strings.Contains(out, "somebody else") {
		t.Errorf("nothing was sent: exit code %d\n%s%s", code, out, errOut)
	}
}

// lines are those of a table, without the spaces at their ends.
func lines(text string) (all []string) {
	for line := range strings.Lines(text) {
		all = append(all, strings.Join(strings.Fields(line), " "))
	}
	return all
}

// The protocol follows from the destination. Values that make no sense are refused, and nothing is asked.
func TestTraceSendFlags(t *testing.T) {
	w := newTracedWorld(t)
	for args, want := range map[string]string{
		"203.0.113.5 --send":                       "send shop/cart-1 icmp 203.0.113.5 0 3",
		"203.0.113.5 --send --protocol=icmp":       "send shop/cart-1 icmp 203.0.113.5 0 3",
		"203.0.113.5:53 --send --protocol=udp":     "send shop/cart-1 udp 203.0.113.5 53 3",
		"[2001:db8::5]:443 --send --count=10":      "send shop/cart-1 tcp 2001:db8::5 443 10",
		"203.0.113.5 --send --protocol=udp":        "error: packets of udp need a port: ADDRESS:PORT\n",
		"203.0.113.5:443 --send --protocol=icmp":   "error: packets of icmp have no port: leave 443 out\n",
		"203.0.113.5:443 --send --protocol=sctp":   "error: no packets are sent by the protocol \"sctp\", but by icmp, tcp or udp\n",
		"203.0.113.5 --send --count=11":            "error: 1 to 10 packets can be sent, not 11\n",
		"203.0.113.5 --send --count=0":             "error: 1 to 10 packets can be sent, not 0\n",
		"203.0.113.5 --count=3":                    "error: --count needs --send\n",
		"203.0.113.5:53 --protocol=udp":            "error: --protocol needs --send\n",
		"203.0.113.5:53 --send=false --protocol=x": "error: --protocol needs --send\n",
	} {
		w.asked = nil
		code, _, errOut := w.coilctl("", append([]string{"trace", "shop/cart-1"}, strings.Fields(args)...)...)
		if strings.HasPrefix(want, "error") {
			if code != 1 || errOut != want || len(w.asked) > 0 {
				t.Errorf("%s: exit code %d, asked %q, %q; want %q", args, code, w.asked, errOut, want)
			}
		} else if !slices.Contains(w.asked, "coild-x: "+want) {
			t.Errorf("%s: asked %q, want %q", args, w.asked, want)
		}
	}
}
