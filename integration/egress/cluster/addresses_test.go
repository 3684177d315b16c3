package cluster

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	lab "github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// tenants are the namespaces in testdata/addresses.yaml that have an EgressPolicy, and a visitor of their name.
var tenants = []string{"shop", "bank"}

// testAddresses has tenants leave by floating addresses of their own, which a host outside reaches at the nodes that have them.
func testAddresses(t *testing.T, s *site, out *outside) {
	s.apply(t, string(testkit.Must(os.ReadFile("testdata/addresses.yaml"))(t)))
	s.awaitHeld(t)
	by := map[string]v2.EgressPolicyStatus{}
	for _, tenant := range tenants {
		by[tenant] = s.awaitLeaves(t, tenant)
	}
	if a, b := by["shop"], by["bank"]; a.Resolved.Address.Block == b.Resolved.Address.Block {
		t.Errorf("both tenants leave by %s", a.Summary.Address)
	} else if nodes() > 1 && a.Node == b.Node {
		t.Errorf("both addresses are at %s, and there are routers on two nodes", a.Node)
	}
	for _, tenant := range tenants {
		address := by[tenant].Resolved.Address
		router := testkit.Must(s.core.CoreV1().Pods(namespace).Get(t.Context(), by[tenant].Router, metav1.GetOptions{}))(t)
		if router.Spec.NodeName != by[tenant].Node {
			t.Errorf("the policy of %s names router %s, which isn't on its node %s", tenant, router.Name, by[tenant].Node)
		}
		out.forget()
		out.await(t, tenant, []string{address.IPv4, address.IPv6})
		for _, a := range []string{address.IPv4, address.IPv6} {
			testkit.Eventually(t, 30*time.Second, a+" answers pings", func() error {
				_, err := s.Exec(t.Context(), lab.Fabric, "ping", "-c", "1", "-W", "5", a)
				return err
			})
		}
	}
}

// awaitHeld waits until each address of the Egress is on a node.
func (s *site) awaitHeld(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, 120*time.Second, "each address is on a node", func() error {
		e, err := s.coil.CoilV2().Egresses(namespace).Get(t.Context(), "partners", metav1.GetOptions{})
		if err == nil && !meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressAddressesReady) {
			err = fmt.Errorf("%+v", e.Status)
		}
		return err
	})
}

// awaitLeaves waits until the policy of a tenant has a pod, and an address that is at a router.
func (s *site) awaitLeaves(t *testing.T, tenant string) (status v2.EgressPolicyStatus) {
	t.Helper()
	testkit.Eventually(t, 120*time.Second, tenant+" has an address", func() error {
		p, err := s.coil.CoilV2().EgressPolicies(tenant).Get(t.Context(), "partners", metav1.GetOptions{})
		if err != nil {
			return err
		}
		status = p.Status
		if !meta.IsStatusConditionTrue(status.Conditions, v2.PolicyAccepted) || status.Resolved.Address == nil || status.Router == "" || !slices.Contains(s.Nodes(), status.Node) {
			return fmt.Errorf("%+v", status)
		}
		return nil
	})
	return status
}
