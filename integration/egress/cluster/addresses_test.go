package cluster

import (
	"fmt"
	"os"
	"slices"
	"strings"
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
		router := testkit.Must(s.core.CoreV1().Pods(namespace).Get(t.Context(), by[tenant].Router, metav1.GetOptions{}))(t)
		if router.Spec.NodeName != by[tenant].Node {
			t.Errorf("the policy of %s names router %s, which isn't on its node %s", tenant, router.Name, by[tenant].Node)
		}
		testLeaves(t, s, out, tenant, by[tenant])
	}
}

// testAddressesMoved wants that no address is at a node that is dead, and that tenants leave by the same ones as before.
func testAddressesMoved(t *testing.T, s *site, out *outside, dead string) {
	for _, tenant := range tenants {
		testkit.Eventually(t, 120*time.Second, tenant+" doesn't leave by the node that is dead", func() error {
			if at := s.awaitLeaves(t, tenant); at.Node == dead {
				return fmt.Errorf("%+v", at)
			}
			return nil
		})
		pod := testkit.Must(s.core.CoreV1().Pods(tenant).Get(t.Context(), tenant, metav1.GetOptions{}))(t)
		if pod.Spec.NodeName != dead {
			testLeaves(t, s, out, tenant, s.awaitLeaves(t, tenant))
		}
	}
}

// testLeaves wants that a tenant leaves by the addresses of its policy, and by no others; that the host outside finds these at
// the node that the policy says; and that they answer pings.
func testLeaves(t *testing.T, s *site, out *outside, tenant string, policy v2.EgressPolicyStatus) {
	addresses := []string{policy.Resolved.Address.IPv4, policy.Resolved.Address.IPv6}
	out.forget()
	out.await(t, tenant, addresses)
	mac := strings.TrimSpace(string(testkit.Must(s.Exec(t.Context(), policy.Node, "cat", "/sys/class/net/eth0/address"))(t)))
	for _, a := range addresses {
		testkit.Eventually(t, 30*time.Second, a+" answers pings", func() error {
			_, err := s.Exec(t.Context(), lab.Fabric, "ping", "-c", "1", "-W", "5", a)
			return err
		})
		if neighbour := string(testkit.Must(s.Exec(t.Context(), lab.Fabric, "ip", "neighbour", "show", a))(t)); !strings.Contains(neighbour, mac) {
			t.Errorf("%s is at %s, and %s is there: %s", a, policy.Node, mac, neighbour)
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
