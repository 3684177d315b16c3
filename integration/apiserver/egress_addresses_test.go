package apiserver

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/testkit"
)

// newAddressesCluster returns a cluster with both controllers, and pools of floating addresses: partners has pairs, and v4 doesn't.
func newAddressesCluster(t *testing.T) *egressCluster {
	t.Helper()
	c := newEgressCluster(t)
	c.clean(t)
	c.pool(t, "partners", 0, dual("198.51.100.0/29", "2001:db8::/125"))
	c.pool(t, "v4", 0, v4("192.0.2.0/29"))
	c.run(t, c.serviceAccount(t), options())
	c.start(t)
	return c
}

// routerOn makes a ready router of the Egress nat on a node.
func (c *egressCluster) routerOn(t testing.TB, node string) *corev1.Pod {
	t.Helper()
	p := testkit.Must(c.core.CoreV1().Pods(c.ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "nat-" + node, Labels: plan.RouterLabels("nat")},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "egress", Image: "i"}}},
	}, metav1.CreateOptions{}))(t)
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return testkit.Must(c.setStatus(t.Context(), p, corev1.PodRunning, "10.8.0.1"))(t)
}

// placed waits until the blocks of the Egress nat say that their addresses are to be on some nodes first, each once, and returns them by node.
func (c *egressCluster) placed(t testing.TB, nodes ...string) map[string]v2.AddressBlock {
	t.Helper()
	var by map[string]v2.AddressBlock
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("addresses are to be on %s", nodes), func() error {
		by = map[string]v2.AddressBlock{}
		for _, b := range c.blocksOf(t, "partners") {
			if f := b.Floating; f != nil && f.ReleasedAt == nil && f.Owner.Name == "nat" && len(f.Successors) > 0 {
				by[f.Successors[0].Node] = b
			}
		}
		return same(slices.Sorted(slices.Values(nodes)), slices.Sorted(maps.Keys(by)))
	})
	return by
}

// hold writes, as coild does, that a node has the address of a block.
func (c *egressCluster) hold(t testing.TB, block, node string, router types.UID) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata": {"labels": {%q: %q}}, "floating": {"holding": {"holder": %[2]q, "podUID": %q, "since": "2026-01-01T00:00:00Z"}}}`,
		v2.LabelFloatingHolder, node, router)
	testkit.Must(c.coil.CoilV2().AddressBlocks().Patch(t.Context(), block, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
}

// requireLeaves waits until a policy has an address of the Egress nat at a node, and returns it.
func (c *egressCluster) requireLeaves(t testing.TB, ns, name, node string) (status v2.EgressPolicyStatus) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%s/%s leaves by node %s", ns, name, node), func() error {
		p, err := c.coil.CoilV2().EgressPolicies(ns).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		status = p.Status
		if r := status.Resolved; r == nil || r.Address == nil || status.Node != node || status.Router != "nat-"+node || status.Summary.Address != r.Address.String() {
			return fmt.Errorf("%+v", status)
		}
		return nil
	})
	return status
}

// leaving returns by which address each client of the Egress nat leaves, as "namespace/policy pod".
func (c *egressCluster) leaving(t testing.TB) map[string]string {
	t.Helper()
	got := map[string]string{}
	for _, s := range append(c.chosen(t, "nat"), c.slices(t, "nat")...) {
		var origin struct{ Namespace, Name string }
		testkit.Check(t, yaml.Unmarshal([]byte(s.Annotations[v2.AnnotationPolicy]), &origin))
		for _, ep := range s.Endpoints {
			got[origin.Namespace+"/"+origin.Name+" "+ep.TargetRef.Name] = s.Annotations[v2.AnnotationAddress]
		}
	}
	return got
}

// An Egress gets its addresses and places for them; each policy gets one of them, and its clients are listed with it. Statuses follow when an
// address moves.
func TestEgressAddresses(t *testing.T) {
	c := newAddressesCluster(t)
	c.nodeWith(t, "floating-a", nil, "10.9.0.1", "fd09::1")
	c.nodeWith(t, "floating-b", nil, "10.9.0.2", "fd09::2")
	c.egress(t, "nat", `{destinations: [0.0.0.0/0], replicas: 2, peering: Direct, addresses: {use: Client, pool: partners, count: 2}}`)
	requireMessage(t, c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionFalse, "NoHolder"), "No node has 198.51.100.0, 198.51.100.1")
	routers := map[string]*corev1.Pod{}
	for _, n := range []string{"floating-a", "floating-b"} {
		routers[n] = c.routerOn(t, n)
	}
	blocks := c.placed(t, "floating-a", "floating-b")
	for n, b := range blocks {
		want := v2.FloatingNode{Node: n, Addresses: []string{"10.9.0.1", "fd09::1"}, PodUID: routers[n].UID}
		if n == "floating-b" {
			want.Addresses = []string{"10.9.0.2", "fd09::2"}
		}
		testkit.Check(t, same(want, b.Floating.Successors[0]))
		c.hold(t, b.Name, n, routers[n].UID)
	}
	c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionTrue, "AddressesHeld")
	e := testkit.Must(c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "nat", metav1.GetOptions{}))(t)
	at := map[string]string{} // addresses by their node
	for _, a := range e.Status.Addresses {
		if b := blocks[a.Node]; a.Block != b.Name || *b.IPv4 != a.IPv4+"/32" || *b.IPv6 != a.IPv6+"/128" || a.Router != "nat-"+a.Node || a.Since == nil {
			t.Errorf("the status says %+v of %+v", a, b)
		}
		at[a.Node] = a.IPv4 + "," + a.IPv6
	}

	// Pods with the annotation have the first address, and policies the other one, then both.
	use := `{egress: {namespace: ` + c.ns + `, name: nat}, pods: {matchLabels: {app: front}}}`
	shop, bank := fresh("shop"), fresh("bank")
	for _, ns := range []string{shop, bank} {
		c.namespace(t, ns, map[string]string{"team": ns})
		c.policy(t, ns, "front", use)
	}
	c.worker(t, shop, "a", "front", "10.3.0.1")
	c.worker(t, bank, "b", "front", "10.3.0.2")
	inShop, inBank := c.requirePolicy(t, shop, "front", "Accepted"), c.requirePolicy(t, bank, "front", "Accepted")
	if inShop.Summary.Address == inBank.Summary.Address {
		t.Errorf("two policies leave by %s while another address is unused", inShop.Summary.Address)
	}
	c.client(t, c.ns, "annotated", "nat", "10.3.0.3")
	for ns, status := range map[string]v2.EgressPolicyStatus{shop: inShop, bank: inBank} {
		for node, pair := range at {
			if pair == strings.ReplaceAll(status.Summary.Address, " and ", ",") {
				c.requireLeaves(t, ns, "front", node)
			}
		}
	}
	first := e.Status.Addresses[0].IPv4 + "," + e.Status.Addresses[0].IPv6
	testkit.Eventually(t, 20*time.Second, "clients are listed with their addresses", func() error {
		return same(map[string]string{
			shop + "/front a": strings.ReplaceAll(inShop.Summary.Address, " and ", ","),
			bank + "/front b": strings.ReplaceAll(inBank.Summary.Address, " and ", ","),
			"/ annotated":     first,
		}, c.leaving(t))
	})

	t.Run("an address moves", func(t *testing.T) {
		from, to := inShop.Node, "floating-a"
		if from == "" {
			from = c.statusOf(t, shop, "front").Node
		}
		if from == to {
			to = "floating-b"
		}
		block := blocks[from].Name
		// The router there fails: the node is no place any more, and the address goes to the other one.
		routers[from].Status.Conditions[0].Status = corev1.ConditionFalse
		testkit.Must(c.core.CoreV1().Pods(c.ns).UpdateStatus(t.Context(), routers[from], metav1.UpdateOptions{}))(t)
		testkit.Eventually(t, 20*time.Second, "the other node is the only place", func() error {
			f := c.block(t, block).Floating
			if len(f.Successors) != 1 || f.Successors[0].Node != to {
				return fmt.Errorf("%+v", f)
			}
			return nil
		})
		c.hold(t, block, to, routers[to].UID)
		if st := c.requireLeaves(t, shop, "front", to); st.Summary.Address != inShop.Summary.Address {
			t.Errorf("the policy leaves by %s, and before by %s", st.Summary.Address, inShop.Summary.Address)
		}
	})
	t.Run("addresses that aren't for a policy", func(t *testing.T) { testAddressesNotForPolicies(t, c, e, shop, bank) })
	t.Run("no addresses any more", func(t *testing.T) {
		c.change(t, "nat", `spec: {addresses: null}`)
		testkit.Eventually(t, 20*time.Second, "the claim is gone", func() error {
			_, err := c.coil.CoilV2().AddressClaims(c.ns).Get(t.Context(), "nat.partners", metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(errors.New("it is there"), err)
		})
		testkit.Eventually(t, 20*time.Second, "clients leave by the routers' addresses", func() error {
			return same(map[string]string{shop + "/front a": "", bank + "/front b": "", "/ annotated": ""}, c.leaving(t))
		})
		if st := c.statusOf(t, shop, "front"); st.Node != "" || st.Router != "" || st.Summary.Address != "" || st.Resolved.Address != nil {
			t.Errorf("the policy still has %+v", st)
		}
		for _, b := range c.blocksOf(t, "partners") {
			if b.Floating.ReleasedAt == nil {
				t.Errorf("%s isn't released", b.Name)
			}
		}
	})
}

func (c *egressCluster) statusOf(t testing.TB, ns, name string) v2.EgressPolicyStatus {
	t.Helper()
	return testkit.Must(c.coil.CoilV2().EgressPolicies(ns).Get(t.Context(), name, metav1.GetOptions{}))(t).Status
}

// testAddressesNotForPolicies lets a policy name addresses that it can't have. The policy gets none, and its condition says what to do.
func testAddressesNotForPolicies(t *testing.T, c *egressCluster, e *v2.Egress, shop, bank string) {
	has, others := c.statusOf(t, bank, "front").Resolved.Address, c.statusOf(t, shop, "front").Resolved.Address
	for _, tt := range []struct{ address, reason, advice string }{
		{`{ipv4: 203.0.113.1}`, "NoSuchAddress", "doesn't have 203.0.113.1 as one address (status.addresses): name one that it has"},
		{`{ipv4: ` + has.IPv4 + `, ipv6: "` + others.IPv6 + `"}`, "NoSuchAddress", "doesn't have " + has.IPv4 + " and " + others.IPv6 + " as one address"},
		{`{ipv4: ` + others.IPv4 + `}`, "AddressTaken", others.IPv4 + " belongs to another namespace: name another one, or have it added to spec.addresses.shared"},
	} {
		c.changePolicy(t, bank, "front", `spec: {address: `+tt.address+`}`)
		st := c.requirePolicy(t, bank, "front", tt.reason)
		requireMessage(t, *meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted), tt.advice)
		if st.Resolved.Address != nil || st.Node != "" || st.Summary.Address != "" {
			t.Errorf("%s: the policy has %+v", tt.address, st)
		}
		testkit.Eventually(t, 20*time.Second, "its pod leaves by no address, not even by that of another policy", func() error {
			if by, listed := c.leaving(t)[bank+"/front b"]; !listed || by != "" {
				return fmt.Errorf("it leaves by %q, and routers know it: %t", by, listed)
			}
			return nil
		})
		c.changePolicy(t, bank, "front", `spec: {address: null}`)
		c.requirePolicy(t, bank, "front", "Accepted")
	}
	t.Run("shared", func(t *testing.T) {
		c.change(t, "nat", `spec: {addresses: {shared: ["`+others.IPv6+`"]}}`)
		c.changePolicy(t, bank, "front", `spec: {address: {ipv4: `+others.IPv4+`}}`)
		if st := c.requirePolicy(t, bank, "front", "Accepted"); st.Resolved.Address.Block != others.Block {
			t.Errorf("the policy has %+v", st.Resolved.Address)
		}
		c.changePolicy(t, bank, "front", `spec: {address: null}`)
		c.change(t, "nat", `spec: {addresses: {shared: [198.51.100.7]}}`)
		requireMessage(t, c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionFalse, "SharedOutside"), "doesn't have 198.51.100.7 of spec.addresses.shared: take it out there")
		c.change(t, "nat", `spec: {addresses: {shared: null}}`)
	})
	t.Run("full", func(t *testing.T) {
		c.change(t, "nat", `spec: {addresses: {assignment: {maxPolicies: 1, whenFull: Refuse}}}`)
		c.policy(t, bank, "more", `{egress: {namespace: `+c.ns+`, name: nat}, pods: {matchLabels: {app: back}}}`)
		st := c.requirePolicy(t, bank, "more", "NoAddress")
		requireMessage(t, *meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted), "has no address left for this namespace: give it more (spec.addresses)")
		c.change(t, "nat", `spec: {addresses: {assignment: null}}`)
		c.requirePolicy(t, bank, "more", "Accepted")
	})
	t.Run("a namespace that isn't allowed", func(t *testing.T) {
		c.change(t, "nat", `spec: {allowedNamespaces: {matchLabels: {team: `+shop+`}}}`)
		st := c.requirePolicy(t, bank, "front", "NamespaceNotAllowed")
		requireMessage(t, *meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted), "label the Namespace as it asks, or use another Egress")
		testkit.Eventually(t, 20*time.Second, "it has no address", func() error {
			if st := c.statusOf(t, bank, "front"); st.Resolved.Address != nil || st.Summary.Address != "" {
				return fmt.Errorf("%+v", st)
			}
			return nil
		})
		c.change(t, "nat", `spec: {allowedNamespaces: null}`)
		c.requirePolicy(t, bank, "front", "Accepted")
	})
	t.Run("destinations outside", func(t *testing.T) {
		c.changePolicy(t, bank, "front", `spec: {destinations: ["2001:db8:9::/48"]}`)
		st := c.requirePolicy(t, bank, "front", "DestinationOutside")
		requireMessage(t, *meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted), "add it there, or take it out here")
		c.changePolicy(t, bank, "front", `spec: {destinations: null}`)
		c.requirePolicy(t, bank, "front", "Accepted")
	})
	t.Run("an Egress without addresses", func(t *testing.T) {
		c.egress(t, "plain", `destinations: [0.0.0.0/0]`)
		c.policy(t, bank, "plain", `{egress: {namespace: `+c.ns+`, name: plain}, pods: {matchLabels: {app: none}}, address: {ipv4: `+has.IPv4+`}}`)
		st := c.requirePolicy(t, bank, "plain", "NoAddresses")
		requireMessage(t, *meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted), "has no addresses for policies (spec.addresses with use: Client): give it some, or take spec.address out")
	})
	c.condition(t, e.Name, v2.EgressAddressesReady, metav1.ConditionTrue, "AddressesHeld")
}

// The condition of an Egress says why an address can't be had, and what to do. The Egress keeps the addresses that it can have.
func TestEgressAddressesNotToBeHad(t *testing.T) {
	c := newAddressesCluster(t)
	c.pool(t, "pods", 5, v4("10.77.0.0/16"))
	n := c.node(t, "floating-n")
	c.ask(t, "r", n, "partners")
	c.answer(t, "r") // the first block, 198.51.100.0
	pod := testkit.Must(c.core.CoreV1().Pods(c.ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "shop"}, Spec: corev1.PodSpec{NodeName: n.Name, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{}))(t)
	testkit.Must(c.setStatus(t.Context(), pod, corev1.PodRunning, "198.51.100.0"))(t)
	with := func(addresses string) string {
		return `{destinations: [0.0.0.0/0], peering: Direct, addresses: {use: Client, ` + addresses + `}}`
	}
	c.egress(t, "other", with(`pool: partners, list: [198.51.100.4]`))
	c.condition(t, "other", v2.EgressAddressesReady, metav1.ConditionFalse, "NoHolder")
	c.egress(t, "nat", with(`pool: nowhere, count: 1`))
	for _, tt := range []struct{ name, addresses, reason, advice string }{
		{"no pool", `pool: nowhere, count: 1, list: null`, "PoolNotFound", "There is no AddressPool nowhere. Make it, or name another one in spec.addresses.pool"},
		{"a pool of larger blocks", `pool: pods, count: 1, list: null`, "BlockSize", "need a pool with blockSizeBits: 0. Name another one in spec.addresses.pool"},
		{"an address outside of the pool", `pool: partners, count: null, list: [203.0.113.1]`, "AddressOutsidePool", "203.0.113.1 isn't an address of the pool. Take it out of spec.addresses.list, or append a subnet"},
		{"the other family's", `pool: v4, count: null, list: ["2001:db8::1"]`, "AddressOutsidePool", "2001:db8::1 isn't an address of the pool"},
		{"an address of a pod", `pool: partners, count: null, list: [198.51.100.0]`, "AddressInUse", "Node floating-n, where Pod " + c.ns + "/shop has it"},
		{"another Egress's", `pool: partners, count: null, list: [198.51.100.4]`, "AddressTaken", "Egress " + c.ns + "/other"},
		{"the other one of another Egress's pair", `pool: partners, count: null, list: ["2001:db8::4"]`, "AddressTaken", "Egress " + c.ns + "/other"},
		{"a range that ends before it begins", `pool: partners, count: null, list: [198.51.100.3-198.51.100.2]`, "AddressInvalid", "198.51.100.3 comes after 198.51.100.2. Correct spec.addresses.list"},
		{"more than there are", `pool: v4, count: 9, list: null`, "PoolExhausted", "AddressPool v4 has no address left for 1 more: all of its 8 blocks are taken; append a subnet to its spec.subnets"},
		{"some that can be had", `pool: partners, count: null, list: [198.51.100.2, 198.51.100.4]`, "AddressTaken", "198.51.100.4"},
		{"right", `pool: partners, count: null, list: [198.51.100.2], shared: ["2001:db8::2"]`, "NoHolder", "No node has 198.51.100.2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.change(t, "nat", `spec: {addresses: {`+tt.addresses+`}}`)
			got := c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionFalse, tt.reason)
			requireMessage(t, got, tt.advice)
		})
	}
}
