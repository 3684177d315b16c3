package diagnosis

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// find returns a step of a walk; the zero Step if it has none of the name.
func find(d Diagnosis, step string) Step {
	if i := slices.IndexFunc(d.Steps, func(s Step) bool { return s.Step == step }); i >= 0 {
		return d.Steps[i]
	}
	return Step{}
}

// A variant without AddressPools doesn't lack one, whether or not its coild may be asked. An Egress that was just made isn't known to serve.
func TestNoVerdict(t *testing.T) {
	f := world()
	f.Pools, f.Blocks, f.NoPools, f.Answer, f.Unanswered = nil, nil, true, nil, "no right"
	d := Pod(*f)
	if wrong := d.Wrong(); len(wrong) > 0 || find(d, StepPool) != (Step{}) || find(d, StepRecord).State != Unknown {
		t.Errorf("without AddressPools: %+v", d.Steps)
	}
	f = world()
	f.use()
	f.Egresses[0].Status, f.Egresses[0].CreationTimestamp = v2.EgressStatus{}, ago(time.Second)
	if s := find(Pod(*f), StepRouter); s.State != Unknown {
		t.Errorf("of an Egress that is new: %+v", s)
	}
}

// Behind another plugin a pod that is older than coil in the network configuration needs nothing, unless it is to use an Egress.
func TestUnattended(t *testing.T) {
	for _, uses := range []bool{false, true} {
		f := world()
		if uses {
			f.use()
		}
		f.Answer.Node.IPAM, f.Answer.Attachments = false, nil
		d := Pod(*f)
		want, wrong := Right, []string(nil)
		if uses {
			want, wrong = Wrong, []string{StepRecord}
		}
		if s := find(d, StepRecord); s.State != want || uses != strings.Contains(s.Do, "delete pod") || !slices.Equal(d.Wrong(), wrong) || find(d, StepAddress).State != Right {
			t.Errorf("uses an Egress: %t, %+v", uses, d.Steps)
		}
	}
}

// Each set-up that is broken in one way has this one fault, and says what is seen and what to do.
func TestBrokenPods(t *testing.T) {
	const minute, hour = time.Minute, time.Hour
	for _, c := range []struct {
		name  string
		spoil func(f *PodFacts)
		wrong string   // the steps that are wrong
		says  []string // of the first of them, what is seen and what to do
	}{
		{"pod that no node has", func(f *PodFacts) { f.pend(hour); f.Pod.Spec.NodeName, f.Node, f.Answer = "", nil, nil }, "pod", []string{"isn't bound to a node", "kubectl -n shop describe pod cart-0"}},
		{"pod that hangs in its end", func(f *PodFacts) { f.Pod.DeletionTimestamp = new(ago(2 * minute)) }, "pod", []string{"hasn't ended in time"}},
		{"no Node", func(f *PodFacts) { f.Node = nil }, "node", []string{"no Node n1"}},
		{"Node isn't ready", func(f *PodFacts) {
			f.Node.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Message: "kubelet stopped"}
		}, "node", []string{"kubelet stopped", "kubectl describe node n1"}},
		{"node without coild", func(f *PodFacts) { f.Coilds, f.Answer = nil, nil }, "node", []string{"no pod of coild", "daemonset coild"}},
		{"coild that isn't ready", func(f *PodFacts) { f.Coilds[0].Status.Conditions, f.Answer = nil, nil }, "node", []string{"isn't ready", "logs coild-x"}},
		{"coild that says why", func(f *PodFacts) { f.Answer.Node.NotReady = "disk: no space left on device" }, "node", []string{"no space left"}},
		{"no Namespace", func(f *PodFacts) { f.Namespace = nil }, "namespace", []string{"no Namespace shop"}},
		{"annotation that can't be a pool", func(f *PodFacts) {
			f.pend(hour)
			f.Namespace.Annotations = map[string]string{v2.AnnotationPool: "No Pool"}
		}, "namespace",
			[]string{"can't be the name of an AddressPool", "kubectl annotate namespace shop"}},
		{"annotation names no pool", func(f *PodFacts) {
			f.pend(hour)
			f.Namespace.Annotations = map[string]string{v2.AnnotationPool: "typo"}
		}, "pool",
			[]string{"no AddressPool typo", "kubectl annotate namespace shop"}},
		{"no default pool", func(f *PodFacts) { f.pend(hour); f.Pools = f.Pools[1:] }, "pool", []string{"no AddressPool default"}},
		{"pool is exhausted", func(f *PodFacts) {
			f.pend(hour)
			f.condition(v2.PoolExhausted, "AllBlocksTaken")
			f.Answer.Blocks[0].Allocated = 4
		}, "pool", []string{"because of AllBlocksTaken", "append a subnet"}},
		{"pool is suspended", func(f *PodFacts) { f.pend(hour); f.condition(v2.PoolSuspended, "Claim") }, "pool", []string{"because of Claim", "what the message says"}},
		{"pool is deleted", func(f *PodFacts) { f.pend(hour); f.condition(v2.PoolTerminating, "BlocksInUse") }, "pool", []string{"BlocksInUse", "another pool"}},
		{"pool of floating addresses", func(f *PodFacts) { f.pend(hour); f.Pools[0].Spec.Purpose = v2.PurposeFloating }, "pool", []string{"no addresses for pods"}},
		{"BlockRequest failed because of the pool", func(f *PodFacts) {
			f.pend(hour)
			f.Pools = nil
			f.ask(minute, v2.BlockRequestFailed, v2.ReasonPoolNotFound)
		}, "pool", []string{"no AddressPool default"}},
		{"BlockRequest failed", func(f *PodFacts) { f.pend(hour); f.ask(minute, v2.BlockRequestFailed, v2.ReasonPoolPurpose) }, "request", []string{"req-1", v2.ReasonPoolPurpose}},
		{"BlockRequest without an answer", func(f *PodFacts) { f.pend(hour); f.ask(2*minute, "", "") }, "request", []string{"no coil-ipam-controller has answered", "component=coil-ipam-controller"}},
		{"block of another node", func(f *PodFacts) { f.Blocks[0] = block("default-0", "10.0.0.0/30", "n2") }, "block", []string{"of node n2", "delete pod cart-0"}},
		{"block of no node", func(f *PodFacts) { delete(f.Blocks[0].Labels, v2.LabelNode) }, "block", []string{"is no node's", "kubectl label addressblock default-0"}},
		{"block is gone", func(f *PodFacts) { f.Blocks = nil }, "block", []string{"default-0, which doesn't exist"}},
		{"block has another range", func(f *PodFacts) { f.Blocks[0] = block("default-0", "10.0.0.8/30", "n1") }, "block", []string{"hasn't 10.0.0.1"}},
		{"block of an earlier Node", func(f *PodFacts) { f.Blocks[0].Annotations[v2.AnnotationNodeUID] = "earlier" }, "block", []string{"earlier Node"}},
		{"no record", func(f *PodFacts) { f.Answer.Attachments = nil }, "record", []string{"record doesn't know the pod", "delete pod cart-0"}},
		{"record of an earlier pod of the name", func(f *PodFacts) { f.at().PodUID = "earlier" }, "record", []string{"record doesn't know the pod"}},
		{"ADD fails", func(f *PodFacts) { f.pend(hour); f.Events = []string{"plugin coil failed: no free address"} }, "record", []string{"no free address"}},
		{"nobody asks for an address", func(f *PodFacts) { f.pend(hour) }, "record", []string{"nobody has asked", "container runtime"}},
		{"network namespace is gone", func(f *PodFacts) { f.at().NetnsGone = true }, "record", []string{"/run/netns/c1", "is gone"}},
		{"attachment hangs", func(f *PodFacts) { f.at().State = "releasing" }, "record", []string{"releasing", "for too long"}},
		{"link", func(f *PodFacts) { f.spoil(inspection.Veth, inspection.Routes, inspection.Ways) }, "veth", []string{"MTU of veth1", "network manager"}},
		{"link in the pod", func(f *PodFacts) { f.spoil(inspection.Inside) }, "veth", []string{"address of eth0", "coild changes nothing in a running pod"}},
		{"rule", func(f *PodFacts) { f.spoil(inspection.Rules, inspection.Ways) }, "rules", []string{"rule 2000 (IPv4)", "ManageForeignRoutingPolicyRules=no"}},
		{"route", func(f *PodFacts) { f.spoil(inspection.Routes, inspection.Ways) }, "routes", []string{"route to 10.0.0.1", "ManageForeignRoutes=no"}},
		{"rule of another program", func(f *PodFacts) { f.spoil(inspection.Ways) }, "routes", []string{"way to 10.0.0.1", "ip rule"}},
		{"guard", func(f *PodFacts) { f.spoil(inspection.Guard) }, "guard", []string{"table inet coil", "flushes all of nftables"}},
		{"sysctl", func(f *PodFacts) { f.spoil(inspection.Sysctls) }, "sysctls", []string{"rp_filter", "/etc/sysctl.d"}},
		{"exported route", func(f *PodFacts) { f.spoil(inspection.Blocks) }, "export", []string{"exported route of 10.0.0.0/30", "routing daemon"}},
		{"policy that isn't followed", func(f *PodFacts) { f.selectPod(metav1.ConditionFalse) }, "policies", []string{"EgressPolicy shop/out", "says the controller"}},
		{"no Egress", func(f *PodFacts) { f.use(); f.Egresses = nil }, "router", []string{"no Egress internet/nat", "annotation"}},
		{"namespace isn't allowed", func(f *PodFacts) {
			f.use()
			f.Egresses[0].Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "bank"}}
		}, "router", []string{"doesn't allow pods of namespace shop", "allowedNamespaces"}},
		{"no router", func(f *PodFacts) {
			f.use()
			f.Egresses[0].Status.Conditions[0].Status, f.Egresses[0].Status.Conditions[0].Message = metav1.ConditionFalse, "0 of 2 are ready"
		}, "router", []string{"0 of 2 are ready", "describe egress nat"}},
		{"nobody looks at the Egress", func(f *PodFacts) {
			f.use()
			f.Egresses[0].Status, f.Egresses[0].CreationTimestamp = v2.EgressStatus{}, ago(2*minute)
		}, "router", []string{"no coil-egress-controller has looked at Egress internet/nat", "leads"}},
		{"Egresses are switched off", func(f *PodFacts) { f.use(); f.Answer.Node.Egress = false }, "tunnels", []string{"ignores", "--enable-egress=true"}},
		{"no FoU", func(f *PodFacts) { f.use(); f.Answer.Node.NoTunnels = "no module fou" }, "tunnels", []string{"no module fou"}},
		{"pod isn't set up", func(f *PodFacts) { f.use(); f.at().Client = nil }, "tunnels", []string{"hasn't set the pod up"}},
		{"pod can't be set up", func(f *PodFacts) { f.use(); f.at().Client.Trouble = "file exists" }, "tunnels", []string{"file exists"}},
		{"tunnel", func(f *PodFacts) { f.use(); f.spoil(inspection.Tunnels) }, "tunnels", []string{"network of the client", "service mesh"}},
		{"floating address", func(f *PodFacts) {
			f.use()
			f.at().Floating = []string{"192.0.2.7"}
			f.at().Objects = append(f.at().Objects, inspection.Comparison{Topic: inspection.Floating, Object: "way to floating address 192.0.2.7", Want: "dev 7"})
		}, "floating", []string{"192.0.2.7"}},
		{"kubelet tells another address", func(f *PodFacts) {
			f.Pod.Status.PodIPs[0].IP = "10.0.0.2"
		}, "address", []string{"tells 10.0.0.2", "10.0.0.1"}},
		{"kubelet tells none", func(f *PodFacts) { f.Pod.Status.PodIPs = nil }, "address", []string{"doesn't tell"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := world()
			c.spoil(f)
			d := Pod(*f)
			if got := strings.Join(d.Wrong(), " "); got != c.wrong {
				t.Fatalf("wrong are %q, want %q:\n%+v", got, c.wrong, d.Steps)
			}
			s := find(d, d.Wrong()[0])
			for _, text := range c.says {
				if !strings.Contains(s.Seen+" // "+s.Do, text) {
					t.Errorf("%q isn't said: %s // %s", text, s.Seen, s.Do)
				}
			}
			for _, s := range d.Steps {
				if s.Seen == "" || s.State == Wrong && s.Step != StepNamespace && s.Do == "" {
					t.Errorf("%+v says too little", s)
				}
			}
		})
	}
}

// Nothing is wrong with these, though they aren't all alike.
func TestHealthyPods(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(f *PodFacts)
		// right and unknown are steps that are so; the others are right or left out.
		right, unknown []string
	}{
		{"pod", func(*PodFacts) {}, []string{
			"pod", "node", "namespace", "pool", "request", "block", "record", "veth", "rules", "routes", "guard", "sysctls", "export", "policies", "address",
		}, nil},
		{"pool of an annotation", func(f *PodFacts) {
			f.Namespace.Annotations = map[string]string{v2.AnnotationPool: "other"}
			f.at().Pool = "other"
		}, []string{"namespace", "pool"}, nil},
		{"annotation has changed since", func(f *PodFacts) { f.Namespace.Annotations = map[string]string{v2.AnnotationPool: "other"} }, []string{"namespace", "pool", "block"}, nil},
		{"pod of the node's network", func(f *PodFacts) { f.Pod.Spec.HostNetwork, f.Answer = true, nil }, []string{"pod"}, nil},
		{"pod that has ended", func(f *PodFacts) { f.Pod.Status.Phase = corev1.PodSucceeded }, []string{"pod"}, nil},
		{"pool is exhausted, the pod has its address", func(f *PodFacts) { f.condition(v2.PoolExhausted, "AllBlocksTaken") }, []string{"pool"}, nil},
		{"pool is exhausted, the node has a free address", func(f *PodFacts) { f.pend(0); f.condition(v2.PoolExhausted, "AllBlocksTaken") }, []string{"pool", "block"}, []string{"record", "address"}},
		{"failed BlockRequest that the pod doesn't need", func(f *PodFacts) { f.ask(time.Minute, v2.BlockRequestFailed, v2.ReasonPoolExhausted) }, []string{"request"}, nil},
		{"pod that was just made", func(f *PodFacts) { f.pend(time.Second); f.Blocks = nil; f.ask(0, "", "") }, []string{"pool"}, []string{"request", "block", "record", "address"}},
		{"address that is just being given", func(f *PodFacts) {
			f.Pod.Status.PodIPs = nil
			f.at().State, f.at().Since = "pending", now
		}, []string{"block"}, []string{"record", "address"}},
		{"Egress by the annotation", func(f *PodFacts) { f.use() }, []string{"policies", "router", "tunnels"}, nil},
		{"Egress by a policy", func(f *PodFacts) { f.selectPod(metav1.ConditionTrue) }, []string{"policies", "router", "tunnels"}, nil},
		{"router that a policy would select", func(f *PodFacts) {
			f.selectPod(metav1.ConditionFalse).Spec.Pods.MatchLabels = nil
			f.Pod.Labels = plan.RouterLabels("nat")
			f.at().Client = nil
		}, []string{"policies"}, nil},
		{"policy for other pods isn't followed", func(f *PodFacts) {
			f.selectPod(metav1.ConditionFalse).Spec.Pods.MatchLabels["app"] = "other"
			f.at().Client = nil
		}, []string{"policies"}, nil},
		{"pod of another plugin", func(f *PodFacts) {
			f.Answer.Node.IPAM, f.Answer.Host, f.Blocks, f.Pools = false, nil, nil, nil
			f.at().State, f.at().Pool, f.at().Block = "", "", ""
			f.use()
		}, []string{"pod", "node", "record", "policies", "router", "tunnels", "address"}, nil},
		{"coild doesn't answer", func(f *PodFacts) { f.Answer, f.Unanswered = nil, "pods/exec is forbidden" }, []string{"node", "pool", "block"}, []string{"record", "address"}},
		{"some objects can't be read", func(f *PodFacts) {
			f.Unread = map[string]string{KindPools: "forbidden", KindBlocks: "forbidden", KindRequests: "forbidden", KindNode: "forbidden", KindEgresses: "forbidden"}
			f.use()
		}, []string{"record", "veth"}, []string{"node", "pool", "request", "block", "router"}},
		{"an object in the kernel can't be read", func(f *PodFacts) {
			f.at().Objects[0] = inspection.Comparison{Topic: inspection.Veth, Object: "MTU", Unknown: "no buffer space"}
		},
			[]string{"routes"}, []string{"veth"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := world()
			c.make(f)
			d := Pod(*f)
			if wrong := d.Wrong(); len(wrong) > 0 {
				t.Errorf("wrong are %q:\n%+v", wrong, d.Steps)
			}
			for state, steps := range map[State][]string{Right: c.right, Unknown: c.unknown} {
				for _, step := range steps {
					if s := find(d, step); s.State != state {
						t.Errorf("%s is %+v, want %s", step, s, state)
					}
				}
			}
			for _, s := range d.Steps {
				if s.State == Unknown && !slices.Contains(c.unknown, s.Step) {
					t.Errorf("%+v isn't known", s)
				}
			}
		})
	}
}

// What follows from an earlier fault isn't one of its own.
func TestPodThatWaitsSaysWhy(t *testing.T) {
	f := world()
	f.pend(time.Hour)
	f.Namespace.Annotations = map[string]string{v2.AnnotationPool: "typo"}
	f.Events = []string{"plugin coil failed: pool typo"}
	d := Pod(*f)
	want := Step{Step: StepRecord, State: Unknown, Seen: "the pod has no address yet: first put the pool right; kubelet's last word: plugin coil failed: pool typo"}
	if d := cmp.Diff(want, find(d, StepRecord)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
