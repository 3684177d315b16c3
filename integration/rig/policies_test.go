package rig_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// However short before a pod is bound to its node a policy was made, the pod isn't added without it: with an Egress that isn't there it isn't
// added at all, and takes no address. Other pods don't mind, nor does the same one when the policy is gone.
func TestPolicyThatIsOlderThanTheBinding(t *testing.T) {
	r := rigtest.New(t)
	testkit.Check(t, r.AddPool(t.Context(), "default", 2, rig.Dual("10.1.0.0/24", "fd00:1::/120")))
	n := testkit.Must(r.AddNode(t.Context(), rig.NodeOptions{}))(t)
	policies := r.Coil.CoilV2().EgressPolicies(metav1.NamespaceDefault)
	for i := range 10 {
		app := fmt.Sprint("web-", i)
		p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Name: app}}
		p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
		p.Spec.Egress = &v2.EgressReference{Namespace: "internet", Name: "nat"}
		o := rig.SandboxOptions{Labels: map[string]string{"app": app}, Unbound: i%4 < 2}
		var s *rig.Sandbox
		if o.Unbound { // the pod is older than the policy
			s = testkit.Must(n.NewSandbox(t.Context(), o))(t)
		}
		testkit.Must(policies.Create(t.Context(), p, metav1.CreateOptions{}))(t)
		if o.Unbound {
			testkit.Check(t, s.Bind(t.Context()))
		} else {
			s = testkit.Must(n.NewSandbox(t.Context(), o))(t)
		}
		_, err := s.Add(t.Context())
		var e *cnitypes.Error
		says := "Egress internet/nat of EgressPolicy default/" + app + " doesn't exist"
		if !errors.As(err, &e) || e.Code != cnitypes.ErrTryAgainLater || !strings.Contains(e.Error(), says) {
			t.Fatalf("ADD of a pod that was bound after its policy was made (pod first: %t): %v", o.Unbound, err)
		}
		if i%2 == 0 {
			other := testkit.Must(n.NewSandbox(t.Context(), rig.SandboxOptions{Labels: map[string]string{"app": "other"}}))(t)
			testkit.Must(other.Add(t.Context()))(t)
			continue
		}
		testkit.Check(t, policies.Delete(t.Context(), app, metav1.DeleteOptions{}))
		testkit.Eventually(t, 20*time.Second, "the policy is gone for the pod that it selected", func() error {
			_, err := s.Add(t.Context())
			return err
		})
	}
	testkit.Check(t, r.AwaitClean(t.Context(), 20*time.Second))
}
