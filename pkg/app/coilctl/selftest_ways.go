package coilctl

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/selftest"
)

// findWays finds which ways out are tried, on nodes that are tested.
func (s *tester) findWays(ctx context.Context, nodes []*corev1.Node) error {
	outside, err := s.outside()
	if err != nil {
		return err
	}
	o := selftest.Outward{Names: s.egresses, Nodes: nodes, Port: uint16(s.port), Destinations: outside}
	l, err := s.coil.CoilV2().Egresses(metav1.NamespaceAll).List(ctx, cached())
	if err := listed(&o.Egresses, l, err); err != nil && !apierrors.IsNotFound(err) { // a variant without Egresses has none
		if len(s.egresses) > 0 || ctx.Err() != nil {
			return fmt.Errorf("list Egresses: %w", err)
		}
		s.waysLeft = []selftest.Check{{Check: selftest.CheckEgress, Subject: "all", State: untried(err), Seen: fmt.Sprintf("Egresses can't be listed: %v", err)}}
		return nil
	}
	s.ways, s.waysLeft = o.Ways()
	return nil
}

// untried is the state of a check that isn't done because of an error: what isn't allowed, or isn't there, is skipped. All else, such as a webhook that doesn't answer, is wrong with the cluster.
func untried(err error) selftest.State {
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return selftest.Skipped
	}
	return selftest.Wrong
}

// client is a pod that is to use an Egress.
type client struct {
	check string
	way   selftest.Way
	wish  selftest.Wish
	// policy makes it a client; nil if its annotation does.
	policy *v2.EgressPolicy
}

// tryWays tries the ways out, from pods of their own.
func (s *tester) tryWays(ctx context.Context, pods []selftest.Pod) error {
	for _, c := range s.waysLeft {
		s.say(ctx, c)
	}
	if len(s.ways) == 0 || len(pods) == 0 {
		return ctx.Err()
	}
	all, hosts, err := s.clientsOf(ctx, pods)
	if err != nil {
		return err
	}
	wishes := hosts
	for _, c := range all {
		wishes = append(wishes, c.wish)
	}
	started, err := s.start(ctx, wishes)
	if err != nil {
		return err
	}
	named := func(name string) (p selftest.Pod) {
		if i := slices.IndexFunc(started, func(p selftest.Pod) bool { return p.Name == name }); i >= 0 {
			p = started[i]
		}
		return p
	}
	var tries []try
	for _, c := range all {
		l := selftest.Left{Way: c.way, Check: c.check, Client: named(c.wish.Name)}
		if l.Client.Name == "" {
			continue // it was said
		}
		if c.way.Host != "" {
			i := slices.IndexFunc(hosts, func(w selftest.Wish) bool { return w.Node == c.way.Host })
			if l.Host = named(hosts[i].Name); l.Host.Name == "" {
				continue
			}
		}
		tries = append(tries, try{from: l.Client, questions: l.Questions(), judge: func(answers []selftest.Answer, err error) []selftest.Check {
			l := l
			l.Answers, l.Err = answers, err
			if err == nil {
				l.Sources, l.Unread = s.sources(ctx, c)
				l.Unallowed = untried(l.Unread) == selftest.Skipped
			}
			return []selftest.Check{s.judge.Egress(l)}
		}})
	}
	return s.try(ctx, tries)
}

// clientsOf makes the policy of the first way, and returns the clients of all ways, and the pods that serve in the network of their nodes.
func (s *tester) clientsOf(ctx context.Context, pods []selftest.Pod) (all []client, hosts []selftest.Wish, err error) {
	for i, w := range s.ways {
		at := pods[0].Node
		if j := slices.IndexFunc(pods, func(p selftest.Pod) bool { return p.Node != w.Host }); j >= 0 {
			at = pods[j].Node
		}
		all = append(all, client{selftest.CheckEgress, w, selftest.Wish{Name: fmt.Sprint("egress-", i), Node: at, Annotations: w.Annotations()}, nil})
		if w.Host != "" && !slices.ContainsFunc(hosts, func(h selftest.Wish) bool { return h.Node == w.Host }) {
			hosts = append(hosts, selftest.Wish{Name: fmt.Sprint("host-", len(hosts)), Node: w.Host, HostNetwork: true})
		}
	}
	c := all[0]
	c.check, c.wish.Name, c.wish.Annotations = selftest.CheckPolicies, "policy-0", nil
	c.policy, err = s.coil.CoilV2().EgressPolicies(s.template.Namespace).Create(ctx, c.way.Policy(s.template.Namespace, c.wish.Name), metav1.CreateOptions{})
	switch {
	case ctx.Err() != nil:
		return nil, nil, ctx.Err()
	case err != nil:
		s.say(ctx, selftest.Check{Check: selftest.CheckPolicies, Subject: c.way.Name(), State: untried(err), Seen: fmt.Sprintf("an EgressPolicy can't be made: %v", err)})
	default:
		all = append(all, c)
	}
	return all, hosts, nil
}

// sources are the addresses by which a client leaves.
func (s *tester) sources(ctx context.Context, c client) ([]netip.Addr, error) {
	e, err := s.coil.CoilV2().Egresses(c.way.Egress.Namespace).Get(ctx, c.way.Egress.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read Egress %s: %w", c.way.Name(), err)
	}
	p := c.policy
	if p != nil {
		if p, err = s.coil.CoilV2().EgressPolicies(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{}); err != nil {
			return nil, fmt.Errorf("read EgressPolicy %s/%s: %w", c.policy.Namespace, c.policy.Name, err)
		}
	}
	var routers []*corev1.Pod
	l, err := s.core.CoreV1().Pods(e.Namespace).List(ctx, metav1.ListOptions{LabelSelector: labels.Set(plan.RouterLabels(e.Name)).String()})
	if err := listed(&routers, l, err); err != nil {
		return nil, fmt.Errorf("list the routers of Egress %s: %w", c.way.Name(), err)
	}
	return selftest.Sources(e, routers, p), nil
}
