package cluster

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

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
		testFound(t, s, by[tenant])
	}
	if testkit.EgressForm.Long() { // integration/routes has it where processors aren't emulated
		t.Run("routed", func(t *testing.T) { testAddressesRouted(t, s, out, by) })
	}
}

// testAddressesRouted announces the addresses by routes. Hosts of the link find them no more; the host outside routes them to the nodes whose
// table for routing daemons has them. An address may move meanwhile: where processors are emulated, nodes lose sight of each other now and then.
func testAddressesRouted(t *testing.T, s *site, out *outside, by map[string]v2.EgressPolicyStatus) {
	announce := func(how v2.PoolAnnounce) {
		t.Helper()
		patch := fmt.Sprintf(`{"spec": {"announce": %q}}`, how)
		testkit.Must(s.coil.CoilV2().AddressPools().Patch(t.Context(), "partners", types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
		for _, tenant := range tenants {
			testkit.Eventually(t, 60*time.Second, fmt.Sprintf("addresses of %s are announced by %s", tenant, how), func() error { return s.announced(t, by[tenant], how) })
		}
	}
	announce(v2.AnnounceRoute)
	out.forget()
	for _, tenant := range tenants {
		testkit.Eventually(t, 120*time.Second, tenant+" leaves by addresses with routes", func() error { return s.routed(t, out, tenant, by[tenant]) })
		for _, a := range addressesOf(by[tenant]) {
			testkit.Must(s.Exec(t.Context(), lab.Fabric, "ip", "route", "del", a))(t)
		}
	}
	announce(v2.AnnounceNeighbor)
}

// announced returns an error unless the node that has the addresses of a policy announces them so.
func (s *site) announced(t *testing.T, policy v2.EgressPolicyStatus, how v2.PoolAnnounce) error {
	b, err := s.coil.CoilV2().AddressBlocks().Get(t.Context(), policy.Resolved.Address.Block, metav1.GetOptions{})
	if err != nil {
		return err
	}
	node := b.Floating.Holding.Holder
	for _, a := range addressesOf(policy) {
		proxied, err := s.Exec(t.Context(), node, "ip", "neighbour", "show", "proxy", a)
		if err == nil && strings.Contains(string(proxied), a) != (how == v2.AnnounceNeighbor) {
			err = fmt.Errorf("neighbours of %s find %q", node, proxied)
		}
		if err != nil {
			return err
		}
		routes, err := s.Exec(t.Context(), node, "ip", familyOf(a), "route", "show", "table", "119", a)
		if err == nil && !strings.Contains(string(routes), a) {
			err = fmt.Errorf("%s isn't in table 119 of %s: %q", a, node, routes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// routed has the host outside send to the node that has the addresses of a policy, and returns an error until the tenant came by them and they
// answer pings.
func (s *site) routed(t *testing.T, out *outside, tenant string, policy v2.EgressPolicyStatus) error {
	b, err := s.coil.CoilV2().AddressBlocks().Get(t.Context(), policy.Resolved.Address.Block, metav1.GetOptions{})
	if err != nil {
		return err
	}
	via, err := s.Addrs(b.Floating.Holding.Holder)
	if err != nil {
		return err
	}
	for _, a := range addressesOf(policy) {
		gateway := via[slices.IndexFunc(via, func(v netip.Addr) bool { return v.Is6() == (familyOf(a) == "-6") })].String()
		if _, err := s.Exec(t.Context(), lab.Fabric, "ip", "route", "replace", a, "via", gateway); err != nil {
			return err
		}
		if _, err := s.Exec(t.Context(), lab.Fabric, "ip", "neighbour", "flush", "to", a); err != nil {
			return err
		}
		if _, err := s.Exec(t.Context(), lab.Fabric, "ping", "-c", "1", "-W", "5", a); err != nil {
			return err
		}
	}
	return out.came(t, tenant, addressesOf(policy))
}

// familyOf is the option of ip for the family of an address.
func familyOf(a string) string {
	return map[bool]string{false: "-4", true: "-6"}[strings.Contains(a, ":")]
}

// testAddressesMoved wants that no address is at a node that is dead, and that tenants leave by the same ones as before. The policies say so when
// coil-egress-controller runs, which may have been on that node.
func testAddressesMoved(t *testing.T, s *site, out *outside, dead string) {
	for _, tenant := range tenants {
		policy := testkit.Must(s.coil.CoilV2().EgressPolicies(tenant).Get(t.Context(), "partners", metav1.GetOptions{}))(t).Status
		testkit.Eventually(t, 120*time.Second, fmt.Sprintf("another node than %s has the address of %s", dead, tenant), func() error {
			b, err := s.coil.CoilV2().AddressBlocks().Get(t.Context(), policy.Resolved.Address.Block, metav1.GetOptions{})
			if err != nil {
				return err
			}
			policy.Node = b.Floating.Holding.Holder
			if policy.Node == dead || !slices.Contains(s.Nodes(), policy.Node) {
				return fmt.Errorf("%+v", b.Floating.Holding)
			}
			return nil
		})
		pod := testkit.Must(s.core.CoreV1().Pods(tenant).Get(t.Context(), tenant, metav1.GetOptions{}))(t)
		if pod.Spec.NodeName != dead {
			testLeaves(t, s, out, tenant, policy)
			testFound(t, s, policy)
		}
	}
	// A dead node is noticed after 10 minutes here, and its pods are replaced then.
	testkit.Check(t, s.core.CoreV1().Pods(metav1.NamespaceSystem).DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))},
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + dead, LabelSelector: "app.kubernetes.io/component=coil-egress-controller"}))
	for _, tenant := range tenants {
		testkit.Eventually(t, 120*time.Second, tenant+" doesn't leave by the node that is dead", func() error {
			p, err := s.coil.CoilV2().EgressPolicies(tenant).Get(t.Context(), "partners", metav1.GetOptions{})
			if err == nil && p.Status.Node == dead {
				err = fmt.Errorf("%+v", p.Status)
			}
			return err
		})
	}
}

// testLeaves wants that a tenant leaves by the addresses of its policy, and by no others, and that these answer pings.
func testLeaves(t *testing.T, s *site, out *outside, tenant string, policy v2.EgressPolicyStatus) {
	out.forget()
	out.await(t, tenant, addressesOf(policy))
	for _, a := range addressesOf(policy) {
		testkit.Eventually(t, 30*time.Second, a+" answers pings", func() error {
			_, err := s.Exec(t.Context(), lab.Fabric, "ping", "-c", "1", "-W", "5", a)
			return err
		})
	}
}

// testFound wants that the host outside has found the addresses of a policy at the node that this says.
func testFound(t *testing.T, s *site, policy v2.EgressPolicyStatus) {
	mac := strings.TrimSpace(string(testkit.Must(s.Exec(t.Context(), policy.Node, "cat", "/sys/class/net/eth0/address"))(t)))
	for _, a := range addressesOf(policy) {
		if found := string(testkit.Must(s.Exec(t.Context(), lab.Fabric, "ip", "neighbour", "show", a))(t)); !strings.Contains(found, mac) {
			t.Errorf("%s is at %s, and %s is there: %s", a, policy.Node, mac, found)
		}
	}
}

// addressesOf are those by which the pods of a policy leave.
func addressesOf(policy v2.EgressPolicyStatus) []string {
	return []string{policy.Resolved.Address.IPv4, policy.Resolved.Address.IPv6}
}

// awaitHeld waits until each address of the Egress is on a node, and on the one where it is to stay: the router that is ready first has
// all addresses until there is another.
func (s *site) awaitHeld(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, 120*time.Second, "each address is on a node", func() error {
		e, err := s.coil.CoilV2().Egresses(namespace).Get(t.Context(), "partners", metav1.GetOptions{})
		if err == nil && !meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressAddressesReady) {
			err = fmt.Errorf("%+v", e.Status)
		}
		if err != nil {
			return err
		}
		blocks, err := s.coil.CoilV2().AddressBlocks().List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelPool + "=partners"})
		if err != nil {
			return err
		}
		holders := map[string]bool{}
		for i := range blocks.Items {
			holder, err := settled(&blocks.Items[i])
			if err != nil {
				return err
			}
			holders[holder] = true
		}
		if want := min(nodes(), len(blocks.Items), 2); len(holders) != want || want == 0 {
			return fmt.Errorf("addresses are on %v, want %d nodes", holders, want)
		}
		return nil
	})
}

// settled is the node of an address that isn't about to move.
func settled(b *v2.AddressBlock) (string, error) {
	f := b.Floating
	if f == nil || len(f.Successors) == 0 || f.MovingTo != "" || f.Holding.Holder != f.Successors[0].Node {
		return "", fmt.Errorf("%s: %+v", b.Name, f)
	}
	return f.Holding.Holder, nil
}

// awaitLeaves waits until the policy of a tenant has a pod, and an address that is at a router and stays there.
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
		b, err := s.coil.CoilV2().AddressBlocks().Get(t.Context(), status.Resolved.Address.Block, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if holder, err := settled(b); err != nil || holder != status.Node {
			return fmt.Errorf("the policy is at %s, its address at %q, %w", status.Node, holder, err)
		}
		return nil
	})
	return status
}
