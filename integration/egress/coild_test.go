package egress

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/testkit"
)

// within is for how long a change may take until pods have it.
const within = 20 * time.Second

// lab is a real API server, with coild on a node.
type lab struct {
	*testing.T
	*rig.Rig
	node *rig.Node
}

func newLab(t *testing.T, o rig.Options) *lab {
	r := rigtest.NewWith(t, o)
	if err := r.AddPool(t.Context(), "default", 5, rig.Dual("10.64.0.0/16", "fd64::/112")); err != nil {
		t.Fatal(err)
	}
	return &lab{t, r, testkit.Must(r.AddNode(t.Context(), rig.NodeOptions{}))(t)}
}

func (l *lab) must(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

// egress makes or changes an Egress of the namespace default.
func (l *lab) egress(name string, change func(*v2.Egress)) {
	l.Helper()
	egresses := l.Coil.CoilV2().Egresses(metav1.NamespaceDefault)
	e, err := egresses.Get(l.Context(), name, metav1.GetOptions{})
	if err != nil {
		e = &v2.Egress{ObjectMeta: metav1.ObjectMeta{Name: name}}
		change(e)
		e, err = egresses.Create(l.Context(), e, metav1.CreateOptions{})
	} else {
		change(e)
		e, err = egresses.Update(l.Context(), e, metav1.UpdateOptions{})
	}
	l.must(err)
	if want := e.DeepCopy(); true {
		change(want)
		if fmt.Sprint(want.Status.InClusterCIDRs) != fmt.Sprint(e.Status.InClusterCIDRs) {
			e.Status.InClusterCIDRs = want.Status.InClusterCIDRs
			_, err = egresses.UpdateStatus(l.Context(), e, metav1.UpdateOptions{})
			l.must(err)
		}
	}
}

func (l *lab) deleteEgress(name string) {
	l.Helper()
	l.must(l.Coil.CoilV2().Egresses(metav1.NamespaceDefault).Delete(l.Context(), name, metav1.DeleteOptions{}))
}

// asks is the annotation for Egresses of the namespace default.
func asks(names string) map[string]string {
	return map[string]string{v2.AnnotationEgressPrefix + metav1.NamespaceDefault: names}
}

// annotate changes the pod's annotation; an empty one is removed.
func (l *lab) annotate(s *rig.Sandbox, egresses string) {
	l.Helper()
	value := any(egresses)
	if egresses == "" {
		value = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{v2.AnnotationEgressPrefix + metav1.NamespaceDefault: value}}})
	l.must(err)
	_, err = l.Core.CoreV1().Pods(s.Namespace).Patch(l.Context(), s.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	l.must(err)
}

func (l *lab) sandbox(o rig.SandboxOptions) *rig.Sandbox {
	l.Helper()
	return testkit.Must(l.node.NewSandbox(l.Context(), o))(l.T)
}

// await waits until packets go the ways, "destination way" each.
func (l *lab) await(what string, s *rig.Sandbox, ways ...string) {
	l.Helper()
	testkit.Eventually(l.T, within, what, func() error {
		for _, w := range ways {
			dst, want, _ := strings.Cut(w, " ")
			if got := s.Way(l.Context(), dst); got != want {
				return fmt.Errorf("%s goes by %s, want %s", dst, got, want)
			}
		}
		return nil
	})
}

// event waits for an Event about an object.
func (l *lab) event(kind, name, reason, text string) {
	l.Helper()
	testkit.Eventually(l.T, within, "Event "+reason, func() error {
		events, err := l.Core.CoreV1().Events(metav1.NamespaceAll).List(l.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=" + kind + ",involvedObject.name=" + name + ",reason=" + reason,
		})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if strings.Contains(e.Message, text) {
				return nil
			}
		}
		return fmt.Errorf("%d Events, none with %q", len(events.Items), text)
	})
}

// awaitMetric waits until a metric of coild, which follows what it counts, is as it should be.
func (l *lab) awaitMetric(name string, fits func(string) bool) {
	l.Helper()
	testkit.Eventually(l.T, within, name, func() error {
		if n := l.metric(name); !fits(n) {
			return fmt.Errorf("it is %q", n)
		}
		return nil
	})
}

// metric is the value of a metric of coild, as text.
func (l *lab) metric(name string) string {
	l.Helper()
	for line := range strings.Lines(testkit.Must(l.node.Get(l.Context(), "/metrics"))(l.T)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Whatever the kernel can, and as long as there is no router: what an Egress is for is
// unreachable for its clients, and follows every change.
func TestClosedWithoutRouters(t *testing.T) {
	l := newLab(t, rig.Options{})
	ctx := t.Context()
	l.egress("gw", func(e *v2.Egress) { e.Spec.Destinations = []string{"192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16"} })

	// ADD names the Egress that isn't there, and nothing is left of it.
	lost := l.sandbox(rig.SandboxOptions{Name: "lost", Annotations: asks("nope")})
	if _, err := lost.Add(ctx); err == nil || !strings.Contains(err.Error(), "Egress default/nope doesn't exist") {
		t.Errorf("ADD with an Egress that isn't there: %v", err)
	}
	l.event("Pod", "lost", "EgressMissing", "default/nope")
	if out, err := lost.Run(ctx, "ip", "-o", "link"); err != nil || strings.Contains(out, "eth0") {
		t.Errorf("links after a failed ADD: %s, %v", out, err)
	}
	client := l.sandbox(rig.SandboxOptions{Name: "client", Annotations: asks("gw")})
	_, err := client.Add(ctx)
	if l.metric("coil_egress_fou_available") == "1" {
		l.must(err)
		l.await("destinations from the first moment", client, "192.0.2.1 nowhere")
	} else {
		if err == nil || !strings.Contains(err.Error(), "no FoU") || !strings.Contains(err.Error(), "default/gw") {
			t.Errorf("ADD without FoU: %v", err)
		}
		l.event("Node", l.node.Name, "FoUUnavailable", "no FoU")
	}

	s := l.sandbox(rig.SandboxOptions{Name: "running"})
	if _, err := s.Add(ctx); err != nil {
		t.Fatal(err)
	}
	open := []string{"192.0.2.1 eth0", "2001:db8::1 eth0", "172.20.0.1 eth0", "198.51.100.1 eth0"}
	l.await("a pod without annotation", s, open...)
	l.annotate(s, "gw")
	l.await("annotation added", s, "192.0.2.1 nowhere", "2001:db8::1 nowhere", "172.20.0.1 nowhere", "198.51.100.1 eth0", "10.64.0.1 eth0")
	l.egress("gw", func(e *v2.Egress) {
		e.Spec.Destinations = []string{"0.0.0.0/0", "::/0"}
		e.Status.InClusterCIDRs = []string{"100.64.0.0/16", "2001:db8:5::/48"}
	})
	l.await("destinations and in-cluster ranges", s, "198.51.100.1 nowhere", "192.0.2.1 nowhere", "2001:db8::1 nowhere",
		"172.20.0.1 eth0", "100.64.0.1 eth0", "2001:db8:5::1 eth0", "10.64.0.1 eth0", "fd64::1 eth0")
	l.egress("gw", func(e *v2.Egress) { e.Status.InClusterCIDRs = []string{"100.64.0.0/16", "100.65.0.0/16"} })
	l.await("a pool was added", s, "100.65.0.1 eth0", "2001:db8:5::1 nowhere")

	l.deleteEgress("gw")
	l.event("Pod", "running", "EgressMissing", "default/gw")
	l.await("deleted", s, "198.51.100.1 nowhere", "2001:db8::1 nowhere", "100.64.0.1 eth0")
	l.node.Coild.Kill()
	if _, err := s.Run(ctx, "ip", "route", "flush", "table", "118"); err != nil {
		t.Fatal(err)
	}
	l.await("while coild is down somebody opens it", s, "198.51.100.1 eth0")
	l.must(l.node.Start(ctx))
	l.await("still deleted, after kill -9", s, "198.51.100.1 nowhere", "2001:db8::1 nowhere", "100.64.0.1 eth0")
	l.must(s.Check(ctx))
	deleted := 0
	testkit.Eventually(t, within, "CHECK without a rule", func() error {
		// Again, for coild may have repaired it already.
		if _, err := s.Run(ctx, "ip", "rule", "del", "priority", "2100"); err == nil {
			deleted++
		}
		if err := s.Check(ctx); err == nil || !strings.Contains(err.Error(), "egress: rule 2100: from all lookup 118") {
			return fmt.Errorf("it says: %w", err)
		}
		return nil
	})
	l.await("restored", s, "198.51.100.1 nowhere")
	l.must(s.Check(ctx))
	l.awaitMetric(`coil_repairs_total{kind="egress_rule"}`, func(n string) bool { return n == fmt.Sprint(deleted) })

	l.must(l.AddNamespace(ctx, "red", ""))
	l.egress("gw", func(e *v2.Egress) { e.Spec.Destinations = []string{"198.51.100.0/24"} })
	l.egress("other", func(e *v2.Egress) { e.Spec.Destinations = []string{"203.0.113.0/24", "198.51.100.0/24"} })
	l.annotate(s, "gw,other")
	l.await("made again, and another", s, "198.51.100.1 nowhere", "203.0.113.1 nowhere", "192.0.2.1 eth0")
	l.event("Pod", "running", "EgressConflict", "198.51.100.0/24")
	l.awaitMetric(`coil_egress_node_client_pods{egress="other",namespace="default"}`, func(n string) bool { return n == "1" })
	l.egress("other", func(e *v2.Egress) {
		e.Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": "red"}}
	})
	l.event("Pod", "running", "EgressNotAllowed", "default/other")
	refused := l.sandbox(rig.SandboxOptions{Name: "refused", Annotations: asks("other")})
	if _, err := refused.Add(ctx); err == nil || !strings.Contains(err.Error(), "isn't for pods of namespace default") {
		t.Errorf("ADD with an Egress for others: %v", err)
	}
	l.annotate(s, "other")
	l.await("annotation changed", s, "198.51.100.1 nowhere", "203.0.113.1 nowhere")
	l.annotate(s, "")
	l.await("annotation removed", s, open...)
	for _, args := range []string{"rule", "-6 rule", "route show table all", "-o link"} {
		out, err := s.Run(ctx, "ip", strings.Fields(args)...)
		if err != nil || strings.Contains(out, "proto 30") || strings.Contains(out, "117") || strings.Contains(out, "fou") || strings.Contains(out, "coil") {
			t.Errorf("left is, in ip %s, %v:\n%s", args, err, out)
		}
	}
	l.must(s.Del(ctx))
	l.must(l.AwaitClean(ctx, within))

	// A pod of a router gets what it has no right to set.
	router := l.sandbox(rig.SandboxOptions{Name: "router", Labels: map[string]string{
		"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": "gw",
	}})
	if _, err := router.Add(ctx); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1", "net.ipv4.conf.all.rp_filter": "0", "net.ipv4.fib_multipath_hash_policy": "1"} {
		if out, err := router.Run(ctx, "sysctl", "-n", key); err != nil || strings.TrimSpace(out) != want {
			t.Errorf("%s of a router is %q, %v", key, out, err)
		}
	}
	l.must(router.Del(ctx))
}

// service makes the Service of an Egress of the namespace default.
func (l *lab) service(name string, ips ...string) {
	l.Helper()
	services := l.Core.CoreV1().Services(metav1.NamespaceDefault)
	policy := corev1.IPFamilyPolicyPreferDualStack
	_, err := services.Create(l.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": name,
		}},
		Spec: corev1.ServiceSpec{
			ClusterIP: ips[0], ClusterIPs: ips, IPFamilyPolicy: &policy,
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 5555}},
		},
	}, metav1.CreateOptions{})
	l.must(err)
}

// endpoints makes the EndpointSlices of the Service of an Egress, with one router.
func (l *lab) endpoints(name string, router ipam.Address) {
	l.Helper()
	for _, a := range router.Addrs() {
		family := map[bool]discoveryv1.AddressType{true: discoveryv1.AddressTypeIPv4, false: discoveryv1.AddressTypeIPv6}[a.Is4()]
		_, err := l.Core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(l.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: name + "-" + strings.ToLower(string(family)), Labels: map[string]string{
				"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": name,
				discoveryv1.LabelServiceName: name,
			}},
			AddressType: family,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{a.String()}}},
		}, metav1.CreateOptions{})
		l.must(err)
	}
}
