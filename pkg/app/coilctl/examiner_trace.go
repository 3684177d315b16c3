package coilctl

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Trace follows the packets of a pod to an address.
func (e Examiner) Trace(ctx context.Context, namespace, name string, to netip.AddrPort) (diagnosis.Path, error) {
	_, t, err := e.wayOf(ctx, namespace, name, to)
	if err != nil {
		return diagnosis.Path{}, err
	}
	return diagnosis.Trace(t), nil
}

// wayOf asks which way the packets of a pod go to an address.
func (e Examiner) wayOf(ctx context.Context, namespace, name string, to netip.AddrPort) (*reading, diagnosis.TraceFacts, error) {
	pod, err := e.Core.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, diagnosis.TraceFacts{}, fmt.Errorf("read Pod %s/%s: %w", namespace, name, err)
	}
	switch {
	case pod.Spec.HostNetwork:
		return nil, diagnosis.TraceFacts{}, fmt.Errorf("Pod %s/%s has the network of its node: ask there with \"ip route get %s\"", namespace, name, to.Addr())
	case pod.Spec.NodeName == "":
		return nil, diagnosis.TraceFacts{}, fmt.Errorf("Pod %s/%s isn't bound to a node", namespace, name)
	}
	f := diagnosis.PodFacts{Pod: pod}
	r := e.reading(&f.Facts)
	r.node(ctx, pod.Spec.NodeName, "way", namespace+"/"+name, to.Addr().String())
	r.egresses(ctx, namespace)
	r.do(diagnosis.KindNamespace, func() (err error) {
		f.Namespace, err = found(e.Core.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{}))
		return err
	})
	r.wait()
	t := diagnosis.TraceFacts{Pod: pod, To: to, Answer: f.Answer, Unanswered: f.Unanswered}
	if client := clientOf(f.Answer); client != "" {
		r.routers(ctx, diagnosis.EgressesOf(f), "way", client, to.Addr().String())
		t.Routers = f.Routers
	}
	if t.Answer == nil && t.Unanswered == "" {
		t.Unanswered = "none runs there"
		for kind, why := range f.Unread {
			t.Unanswered = kind + " couldn't be read: " + why
		}
	}
	return r, t, nil
}

// clientOf is the address with which a pod's packets come to routers; empty if they go to none.
func clientOf(a *inspection.Answer) string {
	if a == nil || len(a.Hops) == 0 || len(a.Hops[0].Tunnels) == 0 {
		return ""
	}
	return a.Hops[0].From
}

// sentWithin is for how long a coild that sends packets is waited for.
const sentWithin = 12 * time.Second

// Send has packets sent from a pod to an address, and follows them.
func (e Examiner) Send(ctx context.Context, namespace, name string, o inspection.Order) (diagnosis.Path, error) {
	r, t, err := e.wayOf(ctx, namespace, name, o.To)
	if err != nil {
		return diagnosis.Path{}, err
	}
	s := diagnosis.SendFacts{TraceFacts: t, NotSent: "it isn't known how they would go"}
	if t.Answer == nil || len(t.Answer.Hops) == 0 {
		return diagnosis.Send(s), nil
	}
	asked, cancel := context.WithTimeout(ctx, sentWithin)
	defer cancel()
	answer, err := e.Ask(asked, running(r.facts.Coilds), append([]string{"send", namespace + "/" + name}, o.Words()...)...)
	switch {
	case err != nil:
		s.NotSent = err.Error()
	case answer.Sending == nil:
		s.NotSent = "coild is of a version that sends none"
	default:
		s.Sending = answer.Sending
		s.After = e.flowsOf(ctx, t.Routers, o, *answer.Sending)
	}
	return diagnosis.Send(s), nil
}

// flowsOf asks routers for the flows of packets that were sent.
func (e Examiner) flowsOf(ctx context.Context, routers []diagnosis.AskedRouter, o inspection.Order, s inspection.Sending) []diagnosis.AskedRouter {
	from, err := netip.ParseAddr(s.From)
	ids := s.IDs()
	if err != nil || len(ids) == 0 {
		return nil // nothing has left the pod
	}
	words := append([]string{"flows"}, inspection.Flows{Client: from, Protocol: o.Protocol, To: o.To, IDs: ids}.Words()...)
	return e.askRouters(ctx, routers, words...)
}
