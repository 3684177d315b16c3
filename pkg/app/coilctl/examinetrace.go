package coilctl

import (
	"context"
	"fmt"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Trace follows the packets of a pod to an address.
func (e Examiner) Trace(ctx context.Context, namespace, name string, to netip.AddrPort) (diagnosis.Path, error) {
	pod, err := e.Core.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return diagnosis.Path{}, fmt.Errorf("read Pod %s/%s: %w", namespace, name, err)
	}
	switch {
	case pod.Spec.HostNetwork:
		return diagnosis.Path{}, fmt.Errorf("Pod %s/%s has the network of its node: ask there with \"ip route get %s\"", namespace, name, to.Addr())
	case pod.Spec.NodeName == "":
		return diagnosis.Path{}, fmt.Errorf("Pod %s/%s isn't bound to a node", namespace, name)
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
	return diagnosis.Trace(t), nil
}

// clientOf is the address with which a pod's packets come to routers; empty if they go to none.
func clientOf(a *inspection.Answer) string {
	if a == nil || len(a.Hops) == 0 || len(a.Hops[0].Tunnels) == 0 {
		return ""
	}
	return a.Hops[0].From
}
