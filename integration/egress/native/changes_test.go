package native

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// changes change a world at random, one thing after the other.
type changes struct {
	*world
	*rand.Rand
	oracle   *oracle
	tenants  []string // namespaces
	clients  []*client
	policies []types.NamespacedName
	made     int // policies
	done     map[string]int
}

// change is a kind of change. Its function says whether there was something to change.
type change struct {
	name string
	do   func() bool
}

// quiet are the kinds of changes that every program follows at once.
func (c *changes) quiet() []change {
	return []change{
		{"policy created", c.createPolicy},
		{"policy deleted", c.deletePolicy},
		{"policy's selector", func() bool { return c.patchPolicy(map[string]any{"pods": c.selector()}) }},
		{"policy's destinations", func() bool { return c.patchPolicy(map[string]any{"destinations": c.destinations()}) }},
		{"policy's address", func() bool { return c.patchPolicy(map[string]any{"address": c.address()}) }},
		{"pod's label", c.labelPod},
		{"pod replaced", c.replacePod},
	}
}

// faults are the kinds of changes that make programs late.
func (c *changes) faults() []change {
	return []change{
		{"router unready", c.unreadyRouter},
		{"router killed", c.killRouter},
		{"router replaced", c.replaceRouter},
		{"coild killed", c.killCoild},
		{"coil-ipam-controller killed", func() bool { return c.killController(c.Controller, rig.IPAMLease) }},
		{"coil-egress-controller killed", func() bool { return c.killController(c.controller, rig.EgressLease) }},
		{"power cut", c.powerCut},
	}
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// lasts lets a state last for some time.
func (c *changes) lasts(d time.Duration) {
	select {
	case <-time.After(d):
	case <-c.t.Context().Done():
	}
}

// allPods is the selector of all pods.
var allPods = map[string]any{"matchLabels": nil, "matchExpressions": []map[string]string{{"key": "no-egress", "operator": "DoesNotExist"}}}

// selector is that of a policy: of one of two labels, or of all pods.
func (c *changes) selector() map[string]any {
	only := func(app string) map[string]any {
		return map[string]any{"matchLabels": map[string]string{"app": app}, "matchExpressions": nil}
	}
	return pick(c.Rand, only("a"), only("b"), allPods)
}

// destinations are all of the Egress's as often as not.
func (c *changes) destinations() []string {
	four, six := server4.String()+"/32", "2001:db8:f::/64"
	return pick(c.Rand, nil, nil, nil, []string{"203.0.113.0/24", six}, []string{four}, []string{six})
}

// address is left to the Egress most of the time.
func (c *changes) address() *v2.EgressAddress {
	if c.IntN(3) > 0 {
		return nil
	}
	return &v2.EgressAddress{IPv4: pick(c.Rand, c.addresses...).IPv4}
}

func (c *changes) createPolicy() bool {
	tenant := pick(c.Rand, c.tenants...)
	if len(c.policies) >= 3*len(c.tenants) {
		return false
	}
	c.create(tenant, map[string]any{"pods": c.selector(), "destinations": c.destinations(), "address": c.address()})
	return true
}

// policyFor makes a policy for all pods of a namespace, with an address.
func (c *changes) policyFor(namespace string, a netip.Addr) {
	c.create(namespace, map[string]any{"pods": allPods, "address": map[string]string{"ipv4": a.String()}})
}

// create makes a policy.
func (c *changes) create(namespace string, spec map[string]any) {
	c.made++
	name := types.NamespacedName{Namespace: namespace, Name: fmt.Sprint("policy-", c.made)}
	spec["egress"] = map[string]string{"namespace": c.egress.Namespace, "name": c.egress.Name}
	object := map[string]any{"apiVersion": v2.GroupVersion.String(), "kind": "EgressPolicy", "metadata": map[string]any{"name": name.Name}, "spec": spec}
	p := &v2.EgressPolicy{}
	testkit.Check(c.t, json.Unmarshal(testkit.Must(json.Marshal(object))(c.t), p))
	testkit.Must(c.Coil.CoilV2().EgressPolicies(namespace).Create(c.t.Context(), p, metav1.CreateOptions{}))(c.t)
	c.policies = append(c.policies, name)
}

func (c *changes) deletePolicy() bool {
	if len(c.policies) < 2 {
		return false
	}
	i := c.IntN(len(c.policies))
	testkit.Check(c.t, c.Coil.CoilV2().EgressPolicies(c.policies[i].Namespace).Delete(c.t.Context(), c.policies[i].Name, metav1.DeleteOptions{}))
	c.policies = slices.Delete(c.policies, i, i+1)
	return true
}

func (c *changes) patchPolicy(spec map[string]any) bool {
	if len(c.policies) == 0 {
		return false
	}
	p := pick(c.Rand, c.policies...)
	patch := testkit.Must(json.Marshal(map[string]any{"spec": spec}))(c.t)
	testkit.Must(c.Coil.CoilV2().EgressPolicies(p.Namespace).Patch(c.t.Context(), p.Name, types.MergePatchType, patch, metav1.PatchOptions{}))(c.t)
	return true
}

// apps are the values of the label of pods.
var apps = []string{"a", "b", "c"}

func (c *changes) app() map[string]string {
	return map[string]string{"app": pick(c.Rand, apps...)}
}

func (c *changes) labelPod() bool {
	p := pick(c.Rand, c.clients...)
	others := slices.DeleteFunc(slices.Clone(apps), func(app string) bool { return app == p.labels["app"] })
	labels := map[string]string{"app": pick(c.Rand, others...)}
	patch := testkit.Must(json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}}))(c.t)
	testkit.Must(c.Core.CoreV1().Pods(p.Namespace).Patch(c.t.Context(), p.Sandbox.Name, types.MergePatchType, patch, metav1.PatchOptions{}))(c.t)
	c.oracle.change(func() { p.labels = labels })
	return true
}

// forget takes a pod away whose network is gone.
func (c *changes) forget(p *client) {
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
	testkit.Check(c.t, c.Core.CoreV1().Pods(p.Namespace).Delete(c.t.Context(), p.Sandbox.Name, now), p.Close())
	c.clients = slices.DeleteFunc(c.clients, func(o *client) bool { return o == p })
}

func (c *changes) addPod(n *rig.Node, tenant string) {
	c.clients = append(c.clients, c.newClient(c.oracle, n, tenant, c.app()))
}

func (c *changes) replacePod() bool {
	p := pick(c.Rand, c.clients...)
	testkit.Check(c.t, p.silence(), p.Del(c.t.Context()))
	c.forget(p)
	c.addPod(pick(c.Rand, c.nodes...), p.Namespace)
	return true
}

func (c *changes) unreadyRouter() bool {
	r := pick(c.Rand, c.egress.Routers()...)
	defer c.oracle.disturb("router " + r.Name + " isn't ready")()
	r.SetUnready(true)
	c.lasts(time.Second)
	r.SetUnready(false)
	c.awaitReady()
	return true
}

// awaitReady waits until all routers are.
func (c *changes) awaitReady() {
	testkit.Eventually(c.t, 20*time.Second, "all routers are ready", func() error {
		for _, r := range c.egress.Routers() {
			if !r.Ready() {
				return errors.Join(fmt.Errorf("router %s isn't ready: %s", r.Name, r.Program.Logs(3)), c.egress.Trouble())
			}
		}
		return nil
	})
}

func (c *changes) killRouter() bool {
	r := pick(c.Rand, c.egress.Routers()...)
	defer c.oracle.disturb("router " + r.Name + " is killed")()
	r.Program.Kill()
	c.lasts(500 * time.Millisecond)
	testkit.Check(c.t, r.Program.Start())
	c.awaitReady()
	return true
}

func (c *changes) replaceRouter() bool {
	r := pick(c.Rand, c.egress.Routers()...)
	defer c.oracle.disturb("router " + r.Name + " is replaced")()
	if c.IntN(2) > 0 {
		testkit.Check(c.t, r.Delete(c.t.Context()))
	} else {
		testkit.Check(c.t, r.Remove(c.t.Context()))
	}
	testkit.Must(c.egress.AddRouter(c.t.Context(), r.Node))(c.t)
	c.awaitReady()
	return true
}

func (c *changes) killCoild() bool {
	n := pick(c.Rand, c.nodes...)
	defer c.oracle.disturb("coild of " + n.Name + " is killed")()
	n.Coild.Kill()
	c.lasts(500 * time.Millisecond)
	testkit.Check(c.t, n.Start(c.t.Context()))
	return true
}

func (c *changes) killController(p *rig.Program, lease string) bool {
	defer c.oracle.disturb(lease + " has none")()
	p.Kill()
	testkit.Check(c.t, c.TakeLease(c.t.Context(), lease))
	c.lasts(500 * time.Millisecond)
	testkit.Check(c.t, p.Start())
	c.awaitLease(lease)
	return true
}

// awaitLease waits until a controller leads.
func (c *changes) awaitLease(name string) {
	testkit.Eventually(c.t, 20*time.Second, "there is a leader of "+name, func() error {
		_, err := c.Core.CoordinationV1().Leases(metav1.NamespaceSystem).Get(c.t.Context(), name, metav1.GetOptions{})
		return err
	})
}

// powerCut ends a node, and boots it later: with a new router, and new pods in place of those that it had.
func (c *changes) powerCut() bool {
	n, ctx := pick(c.Rand, c.nodes...), c.t.Context()
	defer c.oracle.disturb("power cut of " + n.Name)()
	var gone []*client
	for _, p := range c.clients {
		if p.Node == n {
			gone = append(gone, p)
			testkit.Check(c.t, p.silence())
		}
	}
	var lost []*rig.Router
	for _, r := range c.egress.Routers() {
		if r.Node == n {
			lost = append(lost, r)
			testkit.Check(c.t, r.Lose())
		}
	}
	c.forwarding[n].Kill()
	testkit.Check(c.t, n.PowerCut(ctx))
	c.lasts(pick(c.Rand, 500*time.Millisecond, 3*time.Second))
	testkit.Check(c.t, n.PowerOn(ctx))
	c.forward(n)
	testkit.Check(c.t, n.Start(ctx))
	for _, r := range lost {
		testkit.Check(c.t, r.Remove(ctx))
		testkit.Must(c.egress.AddRouter(ctx, n))(c.t)
	}
	for _, p := range gone {
		c.forget(p)
		c.addPod(n, p.Namespace)
	}
	c.awaitReady()
	return true
}
