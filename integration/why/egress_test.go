package why

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestEgress breaks what pods have for an Egress, and the Egress.
func TestEgress(t *testing.T) {
	t.Parallel()
	f, ctx := newFixture(t), t.Context()
	f.showCoild(corev1.ConditionTrue)
	controller := testkit.Must(f.NewEgressController(ctx))(t)
	testkit.Check(t, controller.Start())
	t.Cleanup(func() {
		controller.Kill()
		testkit.Check(t, f.TakeLease(context.WithoutCancel(ctx), rig.EgressLease))
	})
	const egresses = "ways-out"
	testkit.Check(t, f.AddNamespace(ctx, egresses, f.pool))
	egress := testkit.Must(f.NewEgress(ctx, egresses, "nat", v2.EgressSpec{Replicas: 1, Destinations: []string{"203.0.113.0/24"}, Peering: v2.EgressPeeringDirect}))(t)
	t.Cleanup(func() { testkit.Check(t, egress.Close()) })
	router := testkit.Must(egress.AddRouter(ctx, f.Node))(t)
	f.available(egress, egresses, true)

	// client makes a pod that uses the Egress by its annotation, or that a policy selects by its label.
	client := func(o rig.SandboxOptions) *rig.Sandbox {
		t.Helper()
		o.Namespace = f.pool
		s := testkit.Must(f.NewSandbox(ctx, o))(t)
		testkit.Eventually(t, 20*time.Second, "the pod is added", func() error { _, err := s.Add(ctx); return err })
		f.report(s)
		f.awaitHealthy(s)
		return s
	}
	annotated := client(rig.SandboxOptions{Annotations: map[string]string{v2.AnnotationEgressPrefix + egresses: "nat"}})
	policies := f.Coil.CoilV2().EgressPolicies(f.pool)
	policy := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Name: "out"}}
	policy.Spec.Egress = &v2.EgressReference{Namespace: egresses, Name: "nat"}
	policy.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "out"}}
	testkit.Must(policies.Create(ctx, policy, metav1.CreateOptions{}))(t)
	selected := client(rig.SandboxOptions{Labels: map[string]string{"app": "out"}})
	for _, s := range []*rig.Sandbox{annotated, selected, router.Sandbox, f.pod} {
		f.report(s)
		healthy(t, f.walk(s.Namespace, s.Name, 0))
	}
	if c := f.ask(selected).Attachments[0].Client; c == nil || len(c.Tunnels) == 0 || c.Egresses[0].Policy == "" || c.Egresses[0].Name != egresses+"/nat" {
		t.Errorf("the answer about a client has %+v", c)
	}

	for _, c := range []struct{ name, spoil, says string }{
		{"tunnel", "ip -o link show type vxlan | sed 's/^[0-9]*: \\([^:@]*\\).*/\\1/' | xargs -rn1 ip link del", "network of the client"},
		{"routes", "ip route del 203.0.113.0/24 table 118", "is missing, or differs"},
		{"rule", "ip rule del priority 2100", "rule 2100"},
		{"table of nftables", "nft delete table inet coil", "table coil of nftables is missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			testkit.Check(t, f.HoldRepairs(true))
			testkit.Must(selected.Run(ctx, "sh", "-ec", c.spoil))(t)
			wants(t, f.walk(f.pool, selected.Name, 0), "tunnels", c.says, "service mesh")
			testkit.Check(t, f.HoldRepairs(false))
			testkit.Eventually(t, 30*time.Second, "the client is repaired", func() error {
				d, err := f.examiner(0).Pod(ctx, f.pool, selected.Name)
				if wrong := d.Wrong(); err == nil && len(wrong) > 0 {
					err = fmt.Errorf("wrong are %q:\n%s", wrong, text(d))
				}
				return err
			})
		})
	}

	patch := func(spec string) {
		t.Helper()
		testkit.Must(f.Coil.CoilV2().Egresses(egresses).Patch(ctx, "nat", types.MergePatchType, []byte(`{"spec":`+spec+`}`), metav1.PatchOptions{}))(t)
	}
	patch(`{"allowedNamespaces":{"matchLabels":{"way":"out"}}}`)
	wants(t, f.walk(f.pool, annotated.Name, 0), "router", "doesn't allow pods of namespace "+f.pool)
	patch(`{"allowedNamespaces":null}`)
	f.awaitHealthy(annotated)

	router.SetUnready(true)
	f.available(egress, egresses, false)
	wants(t, f.walk(f.pool, annotated.Name, 0), "router", "has no router that serves", "describe egress nat")
	router.SetUnready(false)
	f.available(egress, egresses, true)

	// The same policy, for an Egress that isn't there.
	testkit.Must(policies.Patch(ctx, "out", types.MergePatchType, []byte(`{"spec":{"egress":{"name":"typo"}}}`), metav1.PatchOptions{}))(t)
	testkit.Eventually(t, 20*time.Second, "the policy says that its Egress isn't there", func() error {
		p, err := policies.Get(ctx, "out", metav1.GetOptions{})
		if err == nil && !meta.IsStatusConditionFalse(p.Status.Conditions, v2.PolicyAccepted) {
			err = fmt.Errorf("%+v", p.Status)
		}
		return err
	})
	wants(t, f.walk(f.pool, selected.Name, 0), "policies router", "EgressPolicy "+f.pool+"/out selects the pod, and isn't followed")
}

// available waits until the status of an Egress nat says whether it has a router.
func (f *fixture) available(egress *rig.Egress, namespace string, want bool) {
	f.t.Helper()
	ctx := f.t.Context()
	testkit.Eventually(f.t, 30*time.Second, "the Egress says whether it has a router", func() error {
		e, err := f.Coil.CoilV2().Egresses(namespace).Get(ctx, "nat", metav1.GetOptions{})
		if err == nil && meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressAvailable) != want {
			err = errors.Join(fmt.Errorf("%+v", e.Status), egress.Trouble())
		}
		return err
	})
}
