package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// labelled makes a running pod with labels and annotations.
func (c *cluster) labelled(t *testing.T, namespace, name, node, ip string, labels, annotations map[string]string) {
	t.Helper()
	p := c.runningPod(t, namespace, name, "", node, ip)
	p.Labels, p.Annotations = labels, annotations
	testkit.Must(c.core.CoreV1().Pods(namespace).Update(t.Context(), p, metav1.UpdateOptions{}))(t)
}

// coilctl finds the routers of the Egresses that a pod uses, and asks them, and follows its packets by them.
func TestWhyRouters(t *testing.T) {
	c := ipamCluster(t)
	c.node(t, "n1")
	ways := c.namespaceOf(t, "ways-out", "default")
	shop := c.namespaceOf(t, "shop", "default")
	egress := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Name: "nat"}, Spec: v2.EgressSpec{Replicas: 1, Destinations: []string{"203.0.113.0/24"}}}
	testkit.Must(c.coil.CoilV2().Egresses(ways).Create(t.Context(), egress, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		testkit.Check(t, c.coil.CoilV2().Egresses(ways).Delete(context.WithoutCancel(t.Context()), "nat", metav1.DeleteOptions{}))
	})
	c.labelled(t, metav1.NamespaceSystem, "coild-n1", "n1", "10.0.0.1", map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild"}, nil)
	c.labelled(t, ways, "nat-a", "n1", "10.64.0.8", plan.RouterLabels("nat"), nil)
	c.labelled(t, ways, "other", "n1", "10.64.0.9", plan.RouterLabels("other"), nil)
	c.labelled(t, shop, "cart-0", "n1", "10.64.0.1", nil, map[string]string{v2.AnnotationEgressPrefix + ways: "nat"})
	c.labelled(t, shop, "plain", "n1", "10.64.0.2", nil, nil)

	var asked, sent []string
	refuse := false
	e := coilctl.Examiner{
		Core: c.core, Coil: c.coil,
		Ask: func(_ context.Context, _ *corev1.Pod, words ...string) (*inspection.Answer, error) {
			a := &inspection.Answer{Node: inspection.Node{Name: "n1", Conntrack: &inspection.Conntrack{Count: 1, Limit: 100}}}
			if words[0] == "way" {
				a.Hops = []inspection.Hop{{InPod: true, From: "10.64.0.1", To: words[2]}}
				if words[1] == shop+"/cart-0" {
					a.Hops[0].Tunnels = []string{"10.64.0.8"}
				}
			}
			if words[0] == "send" {
				sent = append(sent, strings.Join(words, " "))
				a.Sending = &inspection.Sending{From: "10.64.0.1", To: "203.0.113.5:443", Packets: []inspection.SentPacket{{ID: 7, Arrived: true, Answer: "SYN-ACK"}, {ID: 8, Arrived: true, Answer: "SYN-ACK"}}}
			}
			return a, nil
		},
		AskRouter: func(_ context.Context, router *corev1.Pod, words ...string) (*inspection.RouterAnswer, error) {
			asked = append(asked, router.Name+": "+strings.Join(words, " "))
			if refuse {
				return nil, errors.New("forbidden")
			}
			return &inspection.RouterAnswer{Router: inspection.Router{Conntrack: inspection.Conntrack{Count: 99, Limit: 100}}, Way: &inspection.RouterWay{Source: "192.0.2.7"},
				Flows: []inspection.Flow{{ID: 7, Source: "192.0.2.7:7", Destination: "203.0.113.5:443"}}}, nil
		},
	}
	step := func(d diagnosis.Diagnosis, name string) diagnosis.Step {
		if i := slices.IndexFunc(d.Steps, func(s diagnosis.Step) bool { return s.Step == name }); i >= 0 {
			return d.Steps[i]
		}
		return diagnosis.Step{}
	}
	d := testkit.Must(e.Pod(t.Context(), shop, "cart-0"))(t)
	if s := step(d, diagnosis.StepConntrack); s.State != diagnosis.Wrong || !strings.Contains(s.Seen, "router "+ways+"/nat-a: 99 of 100") {
		t.Errorf("%+v", d.Steps)
	}
	if want := fmt.Sprintf("nat-a: pod %s/cart-0", shop); len(asked) != 1 || asked[0] != want {
		t.Errorf("asked %q, want %q", asked, want)
	}
	asked, refuse = nil, true
	if s := step(testkit.Must(e.Pod(t.Context(), shop, "cart-0"))(t), diagnosis.StepPeers); s.State != diagnosis.Unknown || !strings.Contains(s.Seen, "forbidden") {
		t.Errorf("a router that doesn't answer: %+v", s)
	}
	asked, refuse = nil, false
	if s := step(testkit.Must(e.Pod(t.Context(), shop, "plain"))(t), diagnosis.StepPeers); s.Step != "" || len(asked) > 0 {
		t.Errorf("a pod without an Egress: %+v, asked %q", s, asked)
	}

	to := netip.MustParseAddrPort("203.0.113.5:443")
	p := testkit.Must(e.Trace(t.Context(), shop, "cart-0", to))(t)
	if !slices.Equal(p.Sources, []string{"192.0.2.7"}) || len(p.Hops) != 2 || p.Hops[1].Where != "router "+ways+"/nat-a" || len(p.Unknown) > 0 || !slices.Equal(asked, []string{"nat-a: way 10.64.0.1 203.0.113.5"}) {
		t.Errorf("%+v; asked %q", p, asked)
	}
	if p := testkit.Must(e.Trace(t.Context(), shop, "plain", to))(t); !slices.Equal(p.Sources, []string{"10.64.0.1"}) || len(p.Hops) != 1 {
		t.Errorf("without an Egress: %+v", p)
	}
	if len(sent) > 0 {
		t.Errorf("without being asked to, it sent %q", sent)
	}

	asked = nil
	p = testkit.Must(e.Send(t.Context(), shop, "cart-0", inspection.Order{Protocol: inspection.TCP, To: to, Count: 2}))(t)
	if p.Sending == nil || !p.Sending.Complete() || len(p.Hops) != 2 || p.Hops[1].Count == nil || p.Hops[1].Count.Out != 1 || len(p.Unknown) > 0 {
		t.Errorf("%+v", p)
	}
	if want := "send " + shop + "/cart-0 tcp 203.0.113.5 443 2"; len(sent) != 1 || sent[0] != want || !slices.Equal(asked, []string{"nat-a: way 10.64.0.1 203.0.113.5", "nat-a: flows 10.64.0.1 tcp 203.0.113.5 443 7,8"}) {
		t.Errorf("sent %q, want %q; asked routers %q", sent, want, asked)
	}
	if _, err := e.Send(t.Context(), shop, "none", inspection.Order{Protocol: inspection.TCP, To: to, Count: 2}); err == nil || len(sent) != 1 {
		t.Errorf("a pod that isn't there sends: %v, %q", err, sent)
	}
	if _, err := e.Trace(t.Context(), shop, "none", to); err == nil {
		t.Error("a pod that isn't there has a way")
	}
}
