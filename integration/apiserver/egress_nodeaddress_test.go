package apiserver

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// The statuses of an Egress with the addresses of nodes, and of its policies, say which these are. No AddressClaim is made; one of before goes.
func TestEgressNodeAddresses(t *testing.T) {
	c := newAddressesCluster(t)
	c.nodeWith(t, "floating-a", nil, "10.9.0.1", "fd09::1")
	c.nodeWith(t, "floating-b", nil, "10.9.0.2", "fd09::2")
	c.egress(t, "nat", `{destinations: [0.0.0.0/0], replicas: 2, peering: Direct, addresses: {use: Router, pool: partners, count: 2}}`)
	c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionFalse, "NoHolder")
	c.change(t, "nat", `spec: {peering: null, addresses: {use: Node, pool: null, count: null}}`)
	requireMessage(t, c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionFalse, "NoNodeReady"), "/readyz of the router")
	testkit.Eventually(t, 20*time.Second, "the claim of before is gone", func() error {
		claims, err := c.coil.CoilV2().AddressClaims(c.ns).List(t.Context(), metav1.ListOptions{})
		if err == nil && len(claims.Items) > 0 {
			err = fmt.Errorf("there is AddressClaim %s", claims.Items[0].Name)
		}
		return err
	})

	shop := fresh("shop")
	c.namespace(t, shop, nil)
	use := `egress: {namespace: ` + c.ns + `, name: nat}, pods: {matchLabels: {app: front}}`
	c.policy(t, shop, "front", `{`+use+`}`)
	c.policy(t, shop, "named", `{`+use+`, destinations: [192.0.2.0/24], address: {ipv4: 10.9.0.1}}`)
	st := c.requirePolicy(t, shop, "named", "NoAddresses")
	requireMessage(t, *meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted), "take spec.address out")
	requireAt := func(address, node, router string) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, "the policy's pods leave by "+address, func() error {
			st := c.statusOf(t, shop, "front")
			return same([]string{address, node, router}, []string{st.Summary.Address, st.Node, st.Router})
		})
	}
	requireAt("", "", "")
	at := func(node, ipv4 string) v2.EgressNodeAddress {
		return v2.EgressNodeAddress{Router: "nat-" + node, Node: node, EgressAddress: v2.EgressAddress{IPv4: ipv4}} // of the router's only family
	}
	a := c.routerOn(t, "floating-a")
	requireAt("10.9.0.1", "floating-a", "nat-floating-a")
	c.routerOn(t, "floating-b")
	requireAt("10.9.0.1, 10.9.0.2", "", "")
	c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionTrue, "NodeAddresses")
	e := testkit.Must(c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "nat", metav1.GetOptions{}))(t)
	testkit.Check(t, same([]v2.EgressNodeAddress{at("floating-a", "10.9.0.1"), at("floating-b", "10.9.0.2")}, e.Status.NodeAddresses))
	testkit.Check(t, c.core.CoreV1().Pods(c.ns).Delete(t.Context(), a.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	requireAt("10.9.0.2", "floating-b", "nat-floating-b")
	c.requirePolicy(t, shop, "front", "Accepted")
}
