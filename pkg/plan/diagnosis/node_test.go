package diagnosis

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

func TestNode(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(f *PodFacts)
		wrong string
		says  string
	}{
		{"healthy", func(*PodFacts) {}, "", ""},
		{"another plugin gives addresses", func(f *PodFacts) { f.Answer.Node.IPAM, f.Answer.Host = false, nil }, "", ""},
		{"no coild", func(f *PodFacts) { f.Coilds, f.Answer = nil, nil }, "node", "no pod of coild"},
		{"coild doesn't answer", func(f *PodFacts) { f.Answer, f.Unanswered = nil, "forbidden" }, "", ""},
		{"BlockRequest failed", func(f *PodFacts) { f.ask(0, v2.BlockRequestFailed, v2.ReasonPoolExhausted) }, "request", "PoolExhausted"},
		{"block of an earlier Node", func(f *PodFacts) { f.Blocks[0].Annotations[v2.AnnotationNodeUID] = "earlier" }, "block", "default-0"},
		{"pod without a network namespace", func(f *PodFacts) { f.at().NetnsGone = true }, "record", "shop/cart-0"},
		{"pod without a route", func(f *PodFacts) { f.spoil(inspection.Routes) }, "record", "route to 10.0.0.1"},
		{"rule and table", func(f *PodFacts) {
			f.spoil(inspection.Rules, inspection.Guard)
			f.at().Objects = nil
		}, "rules guard", "rule 2000"},
		{"forwarding", func(f *PodFacts) { f.at().Objects = nil; f.spoil(inspection.Sysctls) }, "sysctls", "ip_forward"},
		{"routes of blocks", func(f *PodFacts) { f.spoil(inspection.Blocks) }, "export", "10.0.0.0/30"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := world()
			c.spoil(f)
			d := Node("n1", f.Facts)
			if got := strings.Join(d.Wrong(), " "); got != c.wrong || d.Subject != "Node n1" {
				t.Fatalf("%s: wrong are %q, want %q:\n%+v", d.Subject, got, c.wrong, d.Steps)
			}
			if c.wrong != "" && !strings.Contains(find(d, d.Wrong()[0]).Seen, c.says) {
				t.Errorf("%q isn't said: %+v", c.says, d.Steps)
			}
		})
	}
}

func TestAddress(t *testing.T) {
	floating := func(f *PodFacts) *v2.AddressBlock {
		b := block("default-0", "10.0.0.1/32", "")
		b.Labels = map[string]string{v2.LabelFloating: v2.FloatingValue}
		b.Floating = &v2.Floating{Owner: v2.FloatingOwner{Kind: "Egress", Namespace: "internet", Name: "nat"}}
		f.Blocks, f.Answer = []*v2.AddressBlock{b}, nil
		return b
	}
	for _, c := range []struct {
		name, address string
		spoil         func(f *PodFacts)
		wrong, says   string // says is of the last step without a fault
	}{
		{"a pod's", addr, func(*PodFacts) {}, "", "blocks in the table of exports"},
		{"free", "10.0.0.2", func(f *PodFacts) { f.Answer.Attachments = nil }, "", "no pod has 10.0.0.2"},
		{"of no block", "10.0.0.99", func(*PodFacts) {}, "", "nobody has the address"},
		{"floating", addr, func(f *PodFacts) { floating(f).Floating.Holding.Holder = "n2" }, "", "at node n2"},
		{"floating, at no node", addr, func(f *PodFacts) { floating(f) }, "", "is at no node"},
		{"of no pool", "192.0.2.1", func(*PodFacts) {}, "pool", "no AddressPool has 192.0.2.1"},
		{"floating, and another host's", addr, func(f *PodFacts) {
			b := floating(f)
			b.Status.Conditions = []metav1.Condition{{Type: v2.BlockConflicting, Status: metav1.ConditionTrue, Message: "02:00:00:00:00:01 has it"}}
		}, "block", "02:00:00:00:00:01"},
		{"a floating IP of OpenStack", "203.0.113.9", func(f *PodFacts) {
			floating(f).Floating.Holding.Holder = "n2"
			f.FloatingIP = &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "lb", Name: "web"}}
			f.FloatingIP.Status.Provided = &v2.ProvidedAddress{PortID: "p1", IPv4: addr, FloatingIP: "203.0.113.9"}
		}, "", "at node n2"},
		{"of claims that nobody may read", "203.0.113.9", func(f *PodFacts) { f.Unread = map[string]string{KindClaims: "forbidden"} }, "", "forbidden"},
		{"of a block without node", addr, func(f *PodFacts) { delete(f.Blocks[0].Labels, v2.LabelNode) }, "block", "is no node's"},
		{"of two blocks", addr, func(f *PodFacts) { f.Blocks = append(f.Blocks, block("other-0", "10.0.0.0/30", "n2")) }, "block", "default-0, other-0 have it"},
		{"of two pods", addr, func(f *PodFacts) { f.Answer.Attachments = append(f.Answer.Attachments, f.Answer.Attachments[0]) }, "record", "several pods"},
		{"of a pod that is gone", addr, func(f *PodFacts) { f.at().NetnsGone, f.at().Since = true, now.Add(-time.Hour) }, "record", "network namespace is gone"},
		{"without its route", addr, func(f *PodFacts) { f.spoil(inspection.Routes) }, "routes", "route to"},
		{"of a node without coild", addr, func(f *PodFacts) { f.Coilds, f.Answer = nil, nil }, "node", "no pod of coild"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := world()
			c.spoil(f)
			d := Address(netip.MustParseAddr(c.address), f.Facts)
			if got := strings.Join(d.Wrong(), " "); got != c.wrong {
				t.Fatalf("wrong are %q, want %q:\n%+v", got, c.wrong, d.Steps)
			}
			seen := d.Steps[len(d.Steps)-1].Seen
			if c.wrong != "" {
				seen = find(d, d.Wrong()[0]).Seen
			}
			if !strings.Contains(seen, c.says) {
				t.Errorf("%q isn't said: %+v", c.says, d.Steps)
			}
		})
	}
}
