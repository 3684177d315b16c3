package selftest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// Judge has what verdicts need besides what was seen.
type Judge struct {
	// Namespace is that of the pods.
	Namespace string
	// Kept says that the pods of checks that fail stay.
	Kept bool
	// PullSecrets are those of the pods of coild, "namespace/name", and Pulling says that the pods of the selftest have some.
	PullSecrets []string
	Pulling     bool
}

// unpulled are the reasons of kubelets that have not got an image.
var unpulled = []string{"ErrImagePull", "ImagePullBackOff"}

// pull says what to do if the image can't be pulled. Newer kubelets ask for credentials also for an image that the node has already.
func (j Judge) pull() string {
	switch {
	case j.Pulling:
		return "see whether the image exists, and whether the Secrets of --image-pull-secret are for its registry"
	case len(j.PullSecrets) > 0:
		return "the pods of coild have credentials for registries: use --image-pull-secret=" + strings.Join(j.PullSecrets, ",")
	}
	return "see whether the image exists; if its registry needs credentials, name the Secret that has them: --image-pull-secret=NAMESPACE/NAME"
}

// explain has the commands that explain what is wrong with pods. Those about a pod need it, so without --keep-failed they are about its node.
func (j Judge) explain(pods ...Pod) string {
	var all []string
	for _, p := range pods {
		c := "coilctl why node " + p.Node
		if j.Kept {
			c = fmt.Sprintf("coilctl why pod %s/%s", j.Namespace, p.Name)
		}
		if !slices.Contains(all, c) {
			all = append(all, c)
		}
	}
	return strings.Join(all, "; ")
}

// trace adds the command that follows packets to an address.
func (j Judge) trace(from Pod, to netip.AddrPort) string {
	if j.Kept {
		return fmt.Sprintf("; coilctl trace %s/%s %s", j.Namespace, from.Name, to)
	}
	return fmt.Sprintf("; with --keep-failed the pod stays, for coilctl trace NAMESPACE/%s %s", from.Name, to)
}

// Started says whether a pod runs, and whether it won't any more.
func Started(p *corev1.Pod) (runs, ended bool) {
	runs = slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
	ended = p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
	return runs && !ended, ended
}

// Unstarted is the verdict on a pod that doesn't run. None is one that isn't there any more.
func (j Judge) Unstarted(w Wish, p *corev1.Pod) Check {
	c := Check{Check: CheckPods, Subject: w.Node, State: Wrong, Do: j.explain(Pod{Name: w.Name, Node: w.Node}), Pods: []string{w.Name}}
	switch {
	case p == nil:
		c.Seen = "somebody has deleted the pod"
		return c
	case p.DeletionTimestamp != nil:
		c.Seen = "somebody is deleting the pod"
		return c
	}
	c.Seen = fmt.Sprintf("the pod doesn't run: it is %s", p.Status.Phase)
	if p.Status.StartTime == nil {
		c.Seen += ", and kubelet hasn't seen it"
	}
	for _, s := range p.Status.ContainerStatuses {
		switch {
		case s.State.Waiting != nil:
			c.Seen += ": " + joined(s.State.Waiting.Reason, s.State.Waiting.Message)
			if slices.Contains(unpulled, s.State.Waiting.Reason) {
				c.Do = j.pull()
			}
		case s.State.Terminated != nil:
			c.Seen += fmt.Sprintf(": the container has ended with exit code %d (%s)", s.State.Terminated.ExitCode, joined(s.State.Terminated.Reason, s.State.Terminated.Message))
			if s.State.Terminated.ExitCode == 2 {
				c.Do = "the image may be of a version that has no selftest: name another one with --image"
			}
		}
	}
	if text := joined(p.Status.Reason, p.Status.Message); text != "" {
		c.Seen += ": " + text
	}
	return c
}

// joined is a reason and a message, as far as they are there.
func joined(reason, message string) string {
	if reason == "" || message == "" {
		return reason + plan.Message(message)
	}
	return reason + ", " + plan.Message(message)
}

// Addressing is what says which addresses pods are to have.
type Addressing struct {
	// Pool is the pods' AddressPool; nil if Coil gives no addresses.
	Pool *v2.AddressPool
	// Blocks are those of the nodes.
	Blocks []*v2.AddressBlock
}

// Addresses is the verdict on the addresses of a pod that runs: one of each family of its pool, in a block of its node.
func (j Judge) Addresses(a Addressing, p Pod) Check {
	var texts []string
	for _, addr := range p.Addrs {
		texts = append(texts, addr.String())
	}
	has := strings.Join(texts, " and ")
	c := Check{Check: CheckAddresses, Subject: p.Node, State: Right, Seen: has, Pods: []string{p.Name}}
	wrong := func(format string, args ...any) Check {
		c.State, c.Seen, c.Do = Wrong, fmt.Sprintf(format, args...), j.explain(p)
		return c
	}
	if len(p.Addrs) == 0 {
		return wrong("the pod runs, and has no address")
	}
	if a.Pool == nil {
		c.Seen += ", which Coil doesn't give"
		return c
	}
	has4, has6 := families(p.Addrs)
	want4, want6 := false, false
	within := 0
	for _, s := range a.Pool.Spec.Subnets {
		subnet, err := ipam.ParseSubnet(s.IPv4, s.IPv6)
		if err != nil {
			continue
		}
		for _, prefix := range []netip.Prefix{subnet.IPv4, subnet.IPv6} {
			if !prefix.IsValid() {
				continue
			}
			want4, want6 = want4 || prefix.Addr().Is4(), want6 || prefix.Addr().Is6()
			within += len(slices.DeleteFunc(slices.Clone(p.Addrs), func(addr netip.Addr) bool { return !prefix.Contains(addr) }))
		}
	}
	switch {
	case within < len(p.Addrs):
		return wrong("the pod has %s, which isn't of AddressPool %s", has, a.Pool.Name)
	case want4 && !has4 || want6 && !has6:
		return wrong("the pod has %s, and AddressPool %s has both families", has, a.Pool.Name)
	}
	for _, addr := range p.Addrs {
		i := slices.IndexFunc(a.Blocks, func(b *v2.AddressBlock) bool {
			block, err := ipam.ParseBlock(b.IPv4, b.IPv6)
			return err == nil && slices.ContainsFunc(block.Prefixes(), func(q netip.Prefix) bool { return q.Contains(addr) })
		})
		if i < 0 || a.Blocks[i].Labels[v2.LabelNode] != p.Node {
			return wrong("the pod has %s, and no AddressBlock of the node has %s", has, addr)
		}
	}
	c.Seen += " of AddressPool " + a.Pool.Name
	return c
}

func families(addrs []netip.Addr) (has4, has6 bool) {
	for _, a := range addrs {
		has4, has6 = has4 || a.Is4(), has6 || a.Is6()
	}
	return has4, has6
}

// Asked is what has become of the questions of one pod to another.
type Asked struct {
	From, To Pod
	Port     uint16
	Answers  []Answer
	// Err is why no command ran in the pod.
	Err error
}

// subject names the two nodes.
func (a Asked) subject() string { return a.From.Node + " -> " + a.To.Node }

// answers finds the answer to a question.
func (a Asked) answer(q Question) (Answer, bool) {
	i := slices.IndexFunc(a.Answers, func(o Answer) bool { return o.Question == q.String() })
	if i < 0 {
		return Answer{}, false
	}
	return a.Answers[i], true
}

// check begins a verdict.
func (a Asked) check(name string) Check {
	return Check{Check: name, Subject: a.subject(), State: Right, Pods: []string{a.From.Name, a.To.Name}}
}

// unasked is the verdict if no command ran in the pod that was to ask.
func (j Judge) unasked(c Check, err error, from Pod) Check {
	c.State, c.Seen, c.Do = Wrong, fmt.Sprintf("the pod %s couldn't ask: %v", from.Name, err), j.explain(from)
	return c
}

// Route is the verdict on whether one pod reaches another by TCP and UDP, and is seen there as itself.
func (j Judge) Route(a Asked) Check {
	c := a.check(CheckRoutes)
	if a.Err != nil {
		return j.unasked(c, a.Err, a.From)
	}
	var reached, wrong []string
	var first netip.AddrPort
	for _, q := range Questions(a.From, a.To, a.Port, false) {
		what := fmt.Sprintf("%s to %s", strings.ToUpper(string(q.Kind)), q.To.Addr())
		answer, ok := a.answer(q)
		switch own := ownOf(a.From, q.To.Addr()); {
		case !ok:
			wrong = append(wrong, what+" wasn't tried")
		case !answer.Reached:
			wrong = append(wrong, what+": "+answer.Error)
		case answer.Name != a.To.Name:
			wrong = append(wrong, what+" is answered by something other than the pod")
		case answer.Source.Addr() != own:
			wrong = append(wrong, fmt.Sprintf("%s arrives with the source %s, and the pod has %s: something translates it", what, answer.Source.Addr(), own))
		default:
			if f := dataplane.FamilyOf(q.To.Addr()).String(); !slices.Contains(reached, f) {
				reached = append(reached, f)
			}
			continue
		}
		if !first.IsValid() {
			first = q.To
		}
	}
	switch {
	case len(wrong) > 0:
		c.State, c.Seen, c.Do = Wrong, strings.Join(wrong, "; "), j.explain(a.From, a.To)+j.trace(a.From, netip.AddrPortFrom(first.Addr(), a.Port))
	case len(reached) == 0:
		c.State, c.Seen, c.Do = Wrong, "the two pods have no family in common", j.explain(a.From, a.To)
	default:
		c.Seen = strings.Join(reached, " and ") + ", by TCP and UDP, with the pod's own source address"
	}
	return c
}

// ownOf is the pod's address of the family of another one.
func ownOf(p Pod, other netip.Addr) netip.Addr {
	for _, a := range p.Addrs {
		if a.Is4() == other.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// longestIPv4 is the most bytes of a packet of IPv4: the kernel knows no longer path, whatever a link takes.
const longestIPv4 = 1<<16 - 1

// MTU is the verdict on how long datagrams may be between two pods.
func (j Judge) MTU(a Asked) Check {
	c := a.check(CheckMTU)
	if a.Err != nil {
		return j.unasked(c, a.Err, a.From)
	}
	var passed, wrong []string
	for _, q := range Questions(a.From, a.To, a.Port, true) {
		if q.Kind != MTU {
			continue
		}
		family := dataplane.FamilyOf(q.To.Addr()).String()
		answer, ok := a.answer(q)
		l := answer.Link
		switch {
		case !ok:
			wrong = append(wrong, family+" wasn't tried")
		case l == nil:
			wrong = append(wrong, family+": "+answer.Error)
		case l.Path > 0 && l.Path < min(l.MTU, longestIPv4):
			wrong = append(wrong, fmt.Sprintf("%s: %s takes packets of %d bytes, and the path only of %d", family, l.Name, l.MTU, l.Path))
		case !answer.Reached:
			wrong = append(wrong, fmt.Sprintf("%s: a packet of %d bytes, which %s takes, gets lost on its way: %s", family, l.MTU, l.Name, answer.Error))
		case l.Longer:
			wrong = append(wrong, fmt.Sprintf("%s: %s takes a packet of %d bytes, although its MTU is %d", family, l.Name, l.MTU+1, l.MTU))
		case answer.Error != "":
			wrong = append(wrong, fmt.Sprintf("%s: a packet of %d bytes, longer than the MTU: %s", family, l.MTU+1, answer.Error))
		default:
			passed = append(passed, fmt.Sprintf("%s packets of %d bytes", family, l.MTU))
		}
	}
	switch {
	case len(wrong) > 0:
		c.State, c.Seen = Wrong, strings.Join(wrong, "; ")
		c.Do = fmt.Sprintf("compare the MTU of the links between the nodes %s and %s with that of pods (--mtu of coild); %s", a.From.Node, a.To.Node, j.explain(a.From, a.To))
	case len(passed) == 0:
		c.State, c.Seen = Skipped, "the two pods have no family in common"
	default:
		c.Seen = strings.Join(passed, " and ") + " pass whole, and longer ones aren't sent"
	}
	return c
}
