package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	// floatingPool is the pool of the Egress's addresses.
	floatingPool = "partners"
	// policiesPerTenant is the number of policies of a namespace. A policy selects the pods whose label labelPolicy is its name.
	policiesPerTenant = 10
	labelPolicy       = "policy"
)

// policies is a cluster with an Egress that has floating addresses, and with tenants whose policies select clients.
type policies struct {
	*gatewayCluster
	// slices is a watch of the lists of clients of policies.
	slices watch.Interface
}

// tenantOf is the namespace of policy i.
func tenantOf(i int) string { return fmt.Sprintf("tenant-%03d", i/policiesPerTenant) }

func policyName(i int) string { return fmt.Sprintf("policy-%04d", i) }

// policyOf is the policy that client i has at first.
func (o options) policyOf(i int) int { return i % o.policies }

// measurePolicies measures coil-egress-controller with many policies, clients and addresses of one Egress: how late the lists of clients are when
// a pod's label changes, whose lists it writes when policies change, and its memory.
func measurePolicies(ctx context.Context, o options, rep *report) (err error) {
	c, err := newGatewayCluster(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	p := &policies{gatewayCluster: c}
	if err := c.rig.Controller.Start(); err != nil {
		return err
	}
	if err := p.make(ctx, rep); err != nil {
		return err
	}
	if p.slices, err = c.rig.Core.DiscoveryV1().EndpointSlices(gateways).Watch(ctx, metav1.ListOptions{LabelSelector: v2.LabelPolicyEgress}); err != nil {
		return err
	}
	defer p.slices.Stop()
	if err := pass(o.quiet)(ctx); err != nil { // what follows the start isn't measured
		return err
	}
	if err := p.relabel(ctx, rep); err != nil {
		return err
	}
	if err := p.rewrite(ctx, rep); err != nil {
		return err
	}
	now, peak, err := memory(c.controller.PID())
	if err != nil {
		return err
	}
	rep.Figures.Note("policies: resident memory of coil-egress-controller at the end", "MiB", now)
	rep.Figures.AtMost("policies: resident memory of coil-egress-controller, most of the whole run", "MiB", peak, 200)
	return nil
}

// make makes everything, and waits until the lists of clients have all pods.
func (p *policies) make(ctx context.Context, rep *report) error {
	pool := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: floatingPool}, Spec: v2.AddressPoolSpec{
		Purpose: v2.PurposeFloating, Subnets: []v2.SubnetSet{rig.Dual("198.18.0.0/22", "2001:db8:ffff::/118")},
	}}
	if _, err := p.rig.Coil.CoilV2().AddressPools().Create(ctx, pool, metav1.CreateOptions{}); err != nil {
		return err
	}
	// All namespaces may have each address: those that have the first policies would have all otherwise.
	var shared []string
	for a := netip.MustParseAddr("198.18.0.0"); len(shared) < p.addresses; a = a.Next() {
		shared = append(shared, a.String())
	}
	list := []string{shared[0] + "-" + shared[len(shared)-1]}
	_, err := p.rig.Coil.CoilV2().Egresses(gateways).Create(ctx, &v2.Egress{
		ObjectMeta: metav1.ObjectMeta{Name: gateway},
		Spec: v2.EgressSpec{
			Destinations: []string{"0.0.0.0/0", "::/0"}, Replicas: 2, Peering: v2.EgressPeeringDirect,
			Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: floatingPool, List: list, Shared: shared},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	for i := 0; i < p.policies; i += policiesPerTenant {
		if err := p.rig.AddNamespace(ctx, tenantOf(i), ""); err != nil {
			return err
		}
	}
	began := time.Now()
	err = errors.Join(each(ctx, p.policies, p.policy), each(ctx, p.clients, p.pod))
	if err != nil {
		return err
	}
	fmt.Fprintf(p.log, "%d policies and %d pods in %s\n", p.policies, p.clients, time.Since(began).Round(time.Second))
	listed := map[discoveryv1.AddressType]int{}
	err = wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, testkit.Timeout(madeTimeout), true, func(ctx context.Context) (bool, error) {
		all, err := p.lists(ctx)
		if err != nil {
			return false, err
		}
		clear(listed)
		for _, s := range all {
			listed[s.AddressType] += len(s.Endpoints)
		}
		return listed[discoveryv1.AddressTypeIPv4] == p.clients && listed[discoveryv1.AddressTypeIPv6] == p.clients, nil
	})
	if err != nil {
		return fmt.Errorf("wait for %d clients of policies, there are addresses of %v: %w; the end of the controller's log:\n%s", p.clients, listed, err, p.controller.Logs(20))
	}
	rep.Figures.Note(fmt.Sprintf("policies: until %d policies of %d clients are resolved", p.policies, p.clients), "s", time.Since(began).Seconds())
	return p.used(ctx, rep)
}

// used counts the addresses that policies have, all of which are to be used before one is used again.
func (p *policies) used(ctx context.Context, rep *report) error {
	users := map[string]int{}
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, testkit.Timeout(madeTimeout), true, func(ctx context.Context) (bool, error) {
		l, err := p.rig.Coil.CoilV2().EgressPolicies("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		clear(users)
		all := true
		for i := range l.Items {
			s := &l.Items[i].Status
			if s.Resolved == nil || s.Resolved.Address == nil {
				all = false
				continue
			}
			users[s.Resolved.Address.Block]++
		}
		return all, nil
	})
	if err != nil {
		return fmt.Errorf("wait until policies have addresses: %w", err)
	}
	rep.Figures.AtLeast(fmt.Sprintf("policies: of %d addresses are used", p.addresses), "", float64(len(users)), float64(min(p.addresses, p.policies)))
	rep.Figures.Note("policies: of an address, most", "", float64(slices.Max(slices.Collect(maps.Values(users)))))
	return nil
}

func (p *policies) policy(ctx context.Context, i int) error {
	_, err := p.rig.Coil.CoilV2().EgressPolicies(tenantOf(i)).Create(ctx, &v2.EgressPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: policyName(i)},
		Spec: v2.EgressPolicySpec{
			EgressUse: v2.EgressUse{Egress: &v2.EgressReference{Namespace: gateways, Name: gateway}},
			Pods:      &metav1.LabelSelector{MatchLabels: map[string]string{labelPolicy: policyName(i)}},
		},
	}, metav1.CreateOptions{})
	return err
}

func (p *policies) pod(ctx context.Context, i int) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: clientName(i), Labels: map[string]string{labelPolicy: policyName(p.policyOf(i))}},
		Spec: corev1.PodSpec{
			NodeName: fmt.Sprintf("worker-%05d.example.internal", i%p.nodes), Containers: []corev1.Container{{Name: "app", Image: "example.org/app"}},
		},
	}
	pods := p.rig.Core.CoreV1().Pods(tenantOf(p.policyOf(i)))
	pod, err := pods.Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	pod.Status = running(i)
	_, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

// relabel gives pods, one after another, the label of the next policy of their namespace, and measures how late the lists of both
// policies are.
func (p *policies) relabel(ctx context.Context, rep *report) error {
	var all []time.Duration
	for i := range p.changes {
		from := p.policyOf(i)
		to := from - from%policiesPerTenant + (from+1)%policiesPerTenant
		began := time.Now()
		if err := p.patch(ctx, i, fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, labelPolicy, policyName(to))); err != nil {
			return err
		}
		if err := p.await(ctx, i, from, to); err != nil {
			return err
		}
		all = append(all, time.Since(began))
	}
	what := fmt.Sprintf("policies: a pod's label changes, of %d clients: until the lists of both policies are written, ", p.clients)
	rep.Figures.AtMost(what+"median", "ms", figures.Quantile(all, 0.5), 1000)
	rep.Figures.AtMost(what+"p99", "ms", figures.Quantile(all, 0.99), 2000)
	return nil
}

func (p *policies) patch(ctx context.Context, i int, patch string) error {
	_, err := p.rig.Core.CoreV1().Pods(tenantOf(p.policyOf(i))).Patch(ctx, clientName(i), types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// await reads the watch until client i is in the lists of one policy, and not in those of another, in both families.
func (p *policies) await(ctx context.Context, i, from, to int) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(30*time.Second))
	defer cancel()
	where := map[discoveryv1.AddressType]map[string]bool{discoveryv1.AddressTypeIPv4: {policyName(from): true}, discoveryv1.AddressTypeIPv6: {policyName(from): true}}
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s isn't in the lists of %s alone, but of %v: %w", clientName(i), policyName(to), where, ctx.Err())
		case e, ok := <-p.slices.ResultChan():
			s, is := e.Object.(*discoveryv1.EndpointSlice)
			if !ok || !is {
				return fmt.Errorf("the watch of EndpointSlices ended: %+v", e)
			}
			for _, n := range []int{from, to} {
				if policyOfList(s) == policyName(n) {
					where[s.AddressType][policyName(n)] = e.Type != watch.Deleted && slices.ContainsFunc(s.Endpoints, func(ep discoveryv1.Endpoint) bool {
						return ep.TargetRef != nil && ep.TargetRef.Name == clientName(i)
					})
				}
			}
		}
		if done := func(t discoveryv1.AddressType) bool { return !where[t][policyName(from)] && where[t][policyName(to)] }; done(discoveryv1.AddressTypeIPv4) && done(discoveryv1.AddressTypeIPv6) {
			return nil
		}
	}
}

// lists returns the lists of clients of all policies.
func (p *policies) lists(ctx context.Context) ([]discoveryv1.EndpointSlice, error) {
	l, err := p.rig.Core.DiscoveryV1().EndpointSlices(gateways).List(ctx, metav1.ListOptions{LabelSelector: v2.LabelPolicyEgress + "=" + gateway})
	if err != nil {
		return nil, err
	}
	return l.Items, nil
}

// policyOfList is the name of the policy whose clients a slice lists, empty if the slice doesn't say.
func policyOfList(s *discoveryv1.EndpointSlice) string {
	origin, err := policy.ParseOrigin(s.Annotations[v2.AnnotationPolicy])
	if err != nil {
		return ""
	}
	return origin.Name
}

// rewrite changes some policies, so that they select no pod, and counts whose lists are written: those of these policies alone.
func (p *policies) rewrite(ctx context.Context, rep *report) error {
	changed := map[string]bool{}
	last := p.policies - min(10, p.policies)
	for i := last; i < p.policies; i++ {
		changed[policyName(i)] = true
	}
	all, err := p.lists(ctx)
	if err != nil {
		return err
	}
	policies := map[string]string{} // by the name of the slice
	for i := range all {
		policies[all[i].Name] = policyOfList(&all[i])
	}
	const own, others = "own", "others"
	prefix := "endpointslices/" + gateways + "/"
	ledger, err := watchEtcd(ctx, p.rig.API, prefix, func(key string) string {
		if changed[policies[strings.TrimPrefix(key, registry+prefix)]] {
			return own
		}
		return others
	})
	if err != nil {
		return err
	}
	defer ledger.close()
	patch := fmt.Appendf(nil, `{"spec":{"pods":{"matchLabels":{%q:"none"}}}}`, labelPolicy)
	for i := last; i < p.policies; i++ {
		if _, err := p.rig.Coil.CoilV2().EgressPolicies(tenantOf(i)).Patch(ctx, policyName(i), types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return err
		}
	}
	err = wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, testkit.Timeout(madeTimeout), true, func(ctx context.Context) (bool, error) {
		all, err := p.lists(ctx)
		return !slices.ContainsFunc(all, func(s discoveryv1.EndpointSlice) bool { return len(s.Endpoints) > 0 && changed[policyOfList(&s)] }), err
	})
	if err != nil {
		return fmt.Errorf("wait until policies have no clients: %w", err)
	}
	if err := pass(2 * time.Second)(ctx); err != nil { // for what would be written later
		return err
	}
	counts, err := ledger.counts()
	if err != nil {
		return err
	}
	what := fmt.Sprintf("policies: %d of %d policies change: writes of lists of ", len(changed), p.policies)
	rep.Figures.AtLeast(what+"their own", "", float64(counts[own].Count), float64(2*len(changed)))
	rep.Figures.AtMost(what+"others", "", float64(counts[others].Count), 0)
	return nil
}
