package selftest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestQuestions(t *testing.T) {
	for word, ok := range map[string]bool{
		"tcp:10.0.0.1:9380": true, "udp:[fd00::1]:9380": true, "mtu:10.0.0.1:1": true,
		"": false, "tcp": false, "icmp:10.0.0.1:1": false, "tcp:10.0.0.1": false, "tcp:10.0.0.1:0": false, "tcp:[fe80::1%eth0]:1": false, "tcp:n1:9380": false,
	} {
		q, err := Parse(word)
		if (err == nil) != ok || ok && q.String() != word {
			t.Errorf("%q: %s, %v", word, q, err)
		}
	}
	if q := testkit.Must(Parse("tcp:[::ffff:10.0.0.1]:9380"))(t); q.String() != "tcp:10.0.0.1:9380" {
		t.Errorf("an IPv4 address in IPv6 is %s", q)
	}
	for text, ok := range map[string]bool{"[]": true, "null": false, "{}": false, "": false, `[{"question":"tcp:10.0.0.1:1","reached":true,"source":"10.0.0.2:5"}]`: true} {
		if _, err := ParseAnswers([]byte(text)); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// Each pod asks and is asked once in the ring; others are few, and none is there twice or asks itself.
func TestPairs(t *testing.T) {
	for n := range 60 {
		pairs := Pairs(n, rand.New(rand.NewPCG(1, uint64(n))))
		asks, asked, seen := map[int]int{}, map[int]int{}, map[[2]int]bool{}
		for _, p := range pairs {
			if p.From == p.To || seen[[2]int{p.From, p.To}] || p.From >= n || p.To >= n {
				t.Errorf("%d pods: %+v", n, pairs)
			}
			seen[[2]int{p.From, p.To}] = true
			if p.Ring {
				asks[p.From]++
				asked[p.To]++
			}
		}
		for i := range n {
			if n > 1 && (asks[i] != 1 || asked[i] != 1) {
				t.Errorf("%d pods: %d asks %d and is asked by %d", n, i, asks[i], asked[i])
			}
		}
		if want := []int{0, 0, 2, 5, 6}; n < len(want) && len(pairs) != want[n] || len(pairs) > n+max(2, n/4) {
			t.Errorf("%d pods have %d pairs", n, len(pairs))
		}
	}
}

func TestBatches(t *testing.T) {
	for _, tt := range []struct {
		nodes, most int
		want        string
	}{
		{1, 2, "0"}, {2, 2, "01"}, {3, 2, "01 12"}, {5, 2, "01 12 23 34"}, {5, 3, "012 234"}, {6, 3, "012 234 45"}, {3, 50, "012"},
	} {
		var nodes, texts []string
		for i := range tt.nodes {
			nodes = append(nodes, fmt.Sprint(i))
		}
		for _, b := range Batches(nodes, tt.most) {
			texts = append(texts, strings.Join(b, ""))
		}
		if got := strings.Join(texts, " "); got != tt.want {
			t.Errorf("%d nodes, %d at once: %q, want %q", tt.nodes, tt.most, got, tt.want)
		}
	}
}

// node is one, with coild or without.
func node(name string, ready corev1.ConditionStatus, taints ...corev1.Taint) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Taints: taints}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	return n
}

func TestChoose(t *testing.T) {
	c := Choice{Tolerate: true, Nodes: []*corev1.Node{
		node("n3", corev1.ConditionTrue, corev1.Taint{Key: "k", Effect: corev1.TaintEffectNoSchedule}), node("n1", corev1.ConditionTrue, corev1.Taint{Key: "k", Effect: corev1.TaintEffectPreferNoSchedule}),
		node("n2", corev1.ConditionUnknown), node("n4", corev1.ConditionTrue),
	}}
	for _, name := range []string{"n1", "n2", "n3"} {
		c.Coilds = append(c.Coilds, &corev1.Pod{Spec: corev1.PodSpec{NodeName: name}})
	}
	for _, tt := range []struct {
		tolerate bool
		names    []string
		want     string
		left     []string
	}{
		{true, nil, "n1 n3", []string{"skipped n2: the Node isn't ready", "skipped n4: no coild is on the node"}},
		{false, nil, "n1", []string{"skipped n2: the Node isn't ready", "skipped n3: the Node has the taint k:NoSchedule", "skipped n4: no coild is on the node"}},
		{true, []string{"n3", "n2", "n9"}, "n3", []string{"wrong n9: there is no such Node", "wrong n2: the Node isn't ready"}},
		{false, []string{"n3"}, "", []string{"wrong n3: the Node has the taint k:NoSchedule"}},
	} {
		c.Tolerate, c.Names = tt.tolerate, tt.names
		names, left := c.Choose()
		var texts []string
		for _, l := range left {
			texts = append(texts, fmt.Sprintf("%s %s: %s", l.State, l.Subject, l.Seen))
		}
		if got := strings.Join(names, " "); got != tt.want || !slices.Equal(texts, tt.left) {
			t.Errorf("%+v: %q and %q", tt, got, texts)
		}
	}
}

func TestContainerOf(t *testing.T) {
	set := func(nodes int32, name, image string, args ...string) *appsv1.DaemonSet {
		d := &appsv1.DaemonSet{Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: nodes}}
		d.Spec.Template.Spec.Containers = []corev1.Container{{Name: "other", Image: "x"}, {Name: name, Image: image, Args: args}}
		return d
	}
	c, found := ContainerOf([]*appsv1.DaemonSet{set(0, "coild", "old"), set(9, "helper", "h"), set(3, "coild", "new", "--mtu=1400")})
	if !found || c.Image != "new" || !GivesAddresses(c) {
		t.Errorf("it is %+v, %t", c, found)
	}
	if c, _ = ContainerOf([]*appsv1.DaemonSet{set(1, "coild", "chained", "--enable-ipam=false")}); GivesAddresses(c) {
		t.Errorf("%+v gives addresses", c)
	}
	if _, found = ContainerOf([]*appsv1.DaemonSet{set(9, "helper", "h")}); found {
		t.Error("a container of another name is coild")
	}
}

// Pods are let in where Pod Security allows nothing (https://kubernetes.io/docs/concepts/security/pod-security-standards/).
func TestPodIsRestricted(t *testing.T) {
	template := Template{Namespace: "coil-selftest-1", Pool: "blue", Image: "i", Port: Port}
	p := template.PodObject(Wish{Name: "node-0", Node: "n1"})
	s, c := p.Spec.SecurityContext, p.Spec.Containers[0].SecurityContext
	if !*s.RunAsNonRoot || *s.RunAsUser == 0 || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || *c.AllowPrivilegeEscalation || !*c.ReadOnlyRootFilesystem ||
		!slices.Equal(c.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(c.Capabilities.Add) > 0 || p.Spec.HostNetwork || len(p.Spec.Volumes) > 0 || *p.Spec.AutomountServiceAccountToken {
		t.Errorf("the pod is %+v", p.Spec)
	}
	if n := template.NamespaceObject(); n.Labels[enforce] != "restricted" || n.Annotations[v2.AnnotationPool] != "blue" {
		t.Errorf("the namespace is %+v", n)
	}
	template.HostNetwork, template.Pool = true, ""
	if n := template.NamespaceObject(); n.Labels[enforce] != "privileged" || n.Annotations != nil {
		t.Errorf("with pods in the network of nodes the namespace is %+v", n)
	}
}

var judge = Judge{Namespace: "s", Kept: true}

func pod(name, node string, addrs ...string) Pod {
	p := Pod{Name: name, Node: node}
	for _, a := range addrs {
		p.Addrs = append(p.Addrs, netip.MustParseAddr(a))
	}
	return p
}

func TestAddresses(t *testing.T) {
	block := func(node, four, six string) *v2.AddressBlock {
		return &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{v2.LabelNode: node}}, IPv4: &four, IPv6: &six}
	}
	dual := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "blue"}, Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{
		{IPv4: new("10.0.0.0/24"), IPv6: new("fd00::/120")}, {IPv4: new("10.0.9.0/24"), IPv6: new("fd00:9::/120")},
	}}}
	a := Addressing{Pool: dual, Blocks: []*v2.AddressBlock{block("n1", "10.0.0.0/30", "fd00::/126"), block("n2", "10.0.9.0/30", "fd00:9::/126")}}
	for _, tt := range []struct {
		pod  Pod
		want string
	}{
		{pod("a", "n1", "10.0.0.1", "fd00::1"), "right: 10.0.0.1 and fd00::1 of AddressPool blue"},
		{pod("a", "n1"), "wrong: the pod runs, and has no address"},
		{pod("a", "n1", "10.0.0.1"), "wrong: the pod has 10.0.0.1, and AddressPool blue has both families"},
		{pod("a", "n1", "10.0.0.1", "fd01::1"), "wrong: the pod has 10.0.0.1 and fd01::1, which isn't of AddressPool blue"},
		{pod("a", "n1", "10.0.9.1", "fd00:9::1"), "wrong: the pod has 10.0.9.1 and fd00:9::1, and no AddressBlock of the node has 10.0.9.1"},
		{pod("a", "n1", "10.0.0.9", "fd00::9"), "wrong: the pod has 10.0.0.9 and fd00::9, and no AddressBlock of the node has 10.0.0.9"},
	} {
		c := judge.Addresses(a, tt.pod)
		if got := fmt.Sprintf("%s: %s", c.State, c.Seen); got != tt.want || c.Subject != "n1" || (c.Do == "coilctl why pod s/a") != (c.State == Wrong) {
			t.Errorf("%v: %+v, want %s", tt.pod.Addrs, c, tt.want)
		}
	}
	dual.Spec.Subnets = []v2.SubnetSet{{IPv4: new("10.0.0.0/24")}}
	if c := judge.Addresses(a, pod("a", "n1", "10.0.0.1")); c.State != Right {
		t.Errorf("a pool of one family: %+v", c)
	}
	if c := judge.Addresses(Addressing{}, pod("a", "n1", "192.168.0.9")); c.State != Right || c.Seen != "192.168.0.9, which Coil doesn't give" {
		t.Errorf("behind another plugin: %+v", c)
	}
}

func TestRouteAndMTU(t *testing.T) {
	from, to := pod("a", "n1", "10.0.0.1", "fd00::1"), pod("b", "n2", "10.0.1.1", "fd00::1:1")
	type change func(q Question, a *Answer)
	asked := func(change change) Asked {
		all := Asked{From: from, To: to, Port: Port}
		for _, q := range Questions(from, to, Port, true) {
			a := Answer{Question: q.String(), Reached: true, Name: "b", Source: netip.AddrPortFrom(ownOf(from, q.To.Addr()), 5)}
			if q.Kind == MTU {
				a.Link = &Link{Name: "eth0", MTU: 1500, Path: 1500}
			}
			if change != nil {
				change(q, &a)
			}
			all.Answers = append(all.Answers, a)
		}
		return all
	}
	on := func(kind Kind, six bool, do func(*Answer)) change {
		return func(q Question, a *Answer) {
			if q.Kind == kind && q.To.Addr().Is6() == six {
				do(a)
			}
		}
	}
	silent := func(a *Answer) { a.Reached, a.Error, a.Name, a.Source = false, "no answer", "", netip.AddrPort{} }
	const good, whole = "right: IPv4 and IPv6, by TCP and UDP, with the pod's own source address", "right: IPv4 packets of 1500 bytes and IPv6 packets of 1500 bytes pass whole, and longer ones aren't sent"
	for _, tt := range []struct {
		name       string
		asked      Asked
		route, mtu string
	}{
		{"all is well", asked(nil), good, whole},
		{"a family is lost", asked(on(UDP, true, silent)), "wrong: UDP to fd00::1:1: no answer", whole},
		{"the source is translated", asked(on(TCP, false, func(a *Answer) { a.Source = netip.MustParseAddrPort("172.16.0.1:9") })),
			"wrong: TCP to 10.0.1.1 arrives with the source 172.16.0.1, and the pod has 10.0.0.1: something translates it", whole},
		{"another pod answers", asked(on(TCP, false, func(a *Answer) { a.Name = "c" })), "wrong: TCP to 10.0.1.1 is answered by something other than the pod", whole},
		{"large packets are lost", asked(on(MTU, false, silent)), good, "wrong: IPv4: a packet of 1500 bytes, which eth0 takes, gets lost on its way: no answer"},
		{"the path is narrower", asked(on(MTU, true, func(a *Answer) { silent(a); a.Link.Path = 1450 })), good, "wrong: IPv6: eth0 takes packets of 1500 bytes, and the path only of 1450"},
		{"longer packets are sent", asked(on(MTU, true, func(a *Answer) { a.Link.Longer = true })), good, "wrong: IPv6: eth0 takes a packet of 1501 bytes, although its MTU is 1500"},
		{"the link isn't found", asked(on(MTU, true, func(a *Answer) { silent(a); a.Link, a.Error = nil, "no link has fd00::1" })), good, "wrong: IPv6: no link has fd00::1"},
		{"nothing was asked", Asked{From: from, To: to, Port: Port, Err: errors.New("exec: forbidden")},
			"wrong: the pod a couldn't ask: exec: forbidden", "wrong: the pod a couldn't ask: exec: forbidden"},
		{"an answer lacks", Asked{From: pod("a", "n1", "10.0.0.1"), To: to, Port: Port}, "wrong: UDP to 10.0.1.1 wasn't tried; TCP to 10.0.1.1 wasn't tried", "wrong: IPv4 wasn't tried"},
		{"no common family", Asked{From: pod("a", "n1", "10.0.0.1"), To: pod("b", "n2", "fd00::1:1"), Port: Port}, "wrong: the two pods have no family in common", "skipped: the two pods have no family in common"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := func(c Check) string { return fmt.Sprintf("%s: %s", c.State, c.Seen) }
			route, mtu := judge.Route(tt.asked), judge.MTU(tt.asked)
			if diff := cmp.Diff([]string{tt.route, tt.mtu}, []string{text(route), text(mtu)}); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			for _, c := range []Check{route, mtu} {
				if c.Subject != "n1 -> n2" || (c.Do != "") != (c.State == Wrong) {
					t.Errorf("it is %+v", c)
				}
			}
		})
	}
	lost := asked(on(UDP, true, silent))
	if c := judge.Route(lost); c.Do != "coilctl why pod s/a; coilctl why pod s/b; coilctl trace s/a [fd00::1:1]:9380" {
		t.Errorf("pods that stay: %s", c.Do)
	}
	if c := (Judge{Namespace: "s"}).Route(lost); c.Do != "coilctl why node n1; coilctl why node n2; with --keep-failed the pod stays, for coilctl trace NAMESPACE/a [fd00::1:1]:9380" {
		t.Errorf("pods that go: %s", c.Do)
	}
}

func TestUnstarted(t *testing.T) {
	w := Wish{Name: "node-0", Node: "n1"}
	status := func(s corev1.PodStatus) *corev1.Pod { return &corev1.Pod{Status: s} }
	now := metav1.Now()
	container := func(s corev1.ContainerState) []corev1.ContainerStatus { return []corev1.ContainerStatus{{State: s}} }
	for _, tt := range []struct {
		pod      *corev1.Pod
		seen, do string
	}{
		{nil, "somebody has deleted the pod", "coilctl why pod s/node-0"},
		{status(corev1.PodStatus{Phase: corev1.PodPending}), "the pod doesn't run: it is Pending, and kubelet hasn't seen it", "coilctl why pod s/node-0"},
		{status(corev1.PodStatus{Phase: corev1.PodPending, StartTime: &now, ContainerStatuses: container(corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no\nsuch image"}})}),
			"the pod doesn't run: it is Pending: ImagePullBackOff, no; such image", "see whether the image exists; if its registry needs credentials, name the Secret that has them: --image-pull-secret=NAMESPACE/NAME"},
		{status(corev1.PodStatus{Phase: corev1.PodFailed, StartTime: &now, ContainerStatuses: container(corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2, Reason: "Error"}})}),
			"the pod doesn't run: it is Failed: the container has ended with exit code 2 (Error)", "the image may be of a version that has no selftest: name another one with --image"},
		{status(corev1.PodStatus{Phase: corev1.PodFailed, StartTime: &now, Reason: "OutOfpods"}), "the pod doesn't run: it is Failed: OutOfpods", "coilctl why pod s/node-0"},
	} {
		if c := judge.Unstarted(w, tt.pod); c.Seen != tt.seen || c.Do != tt.do || c.State != Wrong || c.Subject != "n1" {
			t.Errorf("%+v, want %s -> %s", c, tt.seen, tt.do)
		}
	}
	unpulled := status(corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: container(corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull"}})})
	for _, tt := range []struct {
		judge Judge
		do    string
	}{
		{Judge{PullSecrets: []string{"kube-system/a", "kube-system/b"}}, "the pods of coild have credentials for registries: use --image-pull-secret=kube-system/a,kube-system/b"},
		{Judge{PullSecrets: []string{"kube-system/a"}, Pulling: true}, "see whether the image exists, and whether the Secrets of --image-pull-secret are for its registry"},
	} {
		if c := tt.judge.Unstarted(w, unpulled); c.Do != tt.do {
			t.Errorf("%+v: %s, want %s", tt.judge, c.Do, tt.do)
		}
	}
	r := Report{Checks: []Check{{State: Wrong, Pods: []string{"b", "a"}}, {State: Right, Pods: []string{"c"}}, {State: Wrong, Pods: []string{"a"}}}}
	if got := r.Failed(); !slices.Equal(got, []string{"a", "b"}) || r.Count(Wrong) != 2 || r.Count(Skipped) != 0 {
		t.Errorf("failed are %v", got)
	}
}
