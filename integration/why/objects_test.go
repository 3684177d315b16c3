package why

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// long is longer than anything may be on its way.
const long = 2 * time.Minute

// make makes a pod that has no address yet.
func (f *fixture) make() *rig.Sandbox {
	f.t.Helper()
	return testkit.Must(f.NewSandbox(f.t.Context(), rig.SandboxOptions{Namespace: f.pool}))(f.t)
}

// annotate lets the fixture's namespace use a pool.
func (f *fixture) annotate(pool string) {
	f.t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, v2.AnnotationPool, pool)
	testkit.Must(f.Core.CoreV1().Namespaces().Patch(f.t.Context(), f.pool, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(f.t)
}

// fail lets an ADD fail, and tells why as kubelet does.
func (f *fixture) fail(s *rig.Sandbox) {
	f.t.Helper()
	_, err := s.Add(f.t.Context())
	if err == nil {
		f.t.Fatal("the pod got an address")
	}
	testkit.Must(f.Core.CoreV1().Events(s.Namespace).Create(f.t.Context(), &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: s.Name + "-"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: s.Namespace, Name: s.Name, UID: types.UID(s.UID)},
		Type:           corev1.EventTypeWarning, Reason: "FailedCreatePodSandBox", Message: err.Error(), LastTimestamp: metav1.Now(),
	}, metav1.CreateOptions{}))(f.t)
}

// Pods that get no address, or the wrong one, and what the API server, the record and kubelet tell of them.
func TestObjects(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, f *fixture) *rig.Sandbox // the pod to look at
		ahead time.Duration
		wrong string
		says  []string
	}{
		{"annotation names no pool", func(_ *testing.T, f *fixture) *rig.Sandbox {
			s := f.make()
			f.annotate("typo")
			f.fail(s)
			return s
		}, 0, "pool", []string{"there is no AddressPool typo", "kubectl annotate namespace"}},
		{"annotation can't be a pool", func(_ *testing.T, f *fixture) *rig.Sandbox {
			s := f.make()
			f.annotate("No Pool")
			f.fail(s)
			return s
		}, 0, "namespace", []string{"can't be the name of an AddressPool"}},
		{"exhausted pool", func(t *testing.T, f *fixture) *rig.Sandbox {
			for range 15 { // of 16
				f.add()
			}
			s := f.make()
			f.fail(s)
			testkit.Eventually(t, 10*time.Second, "the pool says that it is exhausted", func() error {
				p, err := f.Coil.CoilV2().AddressPools().Get(t.Context(), f.pool, metav1.GetOptions{})
				if err == nil && (len(p.Status.Conditions) == 0 || p.Status.Blocks.Summary != "4/4") {
					err = fmt.Errorf("status is %+v", p.Status)
				}
				return err
			})
			return s
		}, 0, "pool", []string{"gives no block", "append a subnet"}},
		{"deleted pool", func(t *testing.T, f *fixture) *rig.Sandbox {
			for range 3 { // the block is full
				f.add()
			}
			testkit.Check(t, f.Coil.CoilV2().AddressPools().Delete(t.Context(), f.pool, metav1.DeleteOptions{}))
			s := f.make()
			f.fail(s)
			return s
		}, 0, "pool", []string{"another pool"}},
		{"pool of floating addresses", func(t *testing.T, f *fixture) *rig.Sandbox {
			name := f.pool + "-floating"
			testkit.Must(f.Coil.CoilV2().AddressPools().Create(t.Context(), &v2.AddressPool{
				ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec:       v2.AddressPoolSpec{Purpose: v2.PurposeFloating, BlockSizeBits: 0, Subnets: []v2.SubnetSet{{IPv4: new("192.0.2.0/28")}}},
			}, metav1.CreateOptions{}))(t)
			f.annotate(name)
			s := f.make()
			f.fail(s)
			return s
		}, 0, "pool", []string{"no addresses for pods"}},
		{"nobody asks for an address", func(_ *testing.T, f *fixture) *rig.Sandbox { return f.make() }, long, "record", []string{"nobody has asked"}},
		{"pod that no node has", func(t *testing.T, f *fixture) *rig.Sandbox {
			return testkit.Must(f.NewSandbox(t.Context(), rig.SandboxOptions{Namespace: f.pool, Unbound: true}))(t)
		}, 0, "pod", []string{"isn't bound to a node"}},
		{"node without coild", func(t *testing.T, f *fixture) *rig.Sandbox {
			testkit.Check(t, f.hideCoild(t.Context()))
			return f.pod
		}, 0, "node", []string{"no pod of coild"}},
		{"coild that isn't ready", func(_ *testing.T, f *fixture) *rig.Sandbox {
			f.Coild.Kill()
			f.showCoild(corev1.ConditionFalse)
			return f.pod
		}, 0, "node", []string{"isn't ready"}},
		{"no Node", func(t *testing.T, f *fixture) *rig.Sandbox {
			testkit.Check(t, f.DeleteObject(t.Context()))
			return f.pod
		}, 0, "node", []string{"there is no Node"}},
		{"block of another node", func(t *testing.T, f *fixture) *rig.Sandbox {
			f.Coild.Kill() // which would make it its own again
			f.label(v2.LabelNode, "elsewhere")
			return f.pod
		}, 0, "block", []string{"is of node elsewhere"}},
		{"record is lost", func(t *testing.T, f *fixture) *rig.Sandbox {
			testkit.Check(t, f.HoldRepairs(true))
			out, err := exec.CommandContext(t.Context(), "sqlite3", "-cmd", ".timeout 5000", f.Database(),
				fmt.Sprintf("DELETE FROM addresses WHERE container_id = '%s'", f.pod.ContainerID)).CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			return f.pod
		}, 0, "record", []string{"doesn't know the pod", "delete pod"}},
		{"network namespace is gone", func(t *testing.T, f *fixture) *rig.Sandbox {
			testkit.Check(t, f.HoldRepairs(true), f.pod.RemoveNetns())
			return f.pod
		}, 0, "record", []string{"is gone"}},
		{"another pod of the name", func(t *testing.T, f *fixture) *rig.Sandbox {
			testkit.Check(t, f.Core.CoreV1().Pods(f.pool).Delete(t.Context(), f.pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
			return testkit.Must(f.NewSandbox(t.Context(), rig.SandboxOptions{Namespace: f.pool, Name: f.pod.Name}))(t)
		}, long, "record", []string{"nobody has asked"}},
		{"kubelet tells another address", func(_ *testing.T, f *fixture) *rig.Sandbox {
			f.tell(f.pod, f.Ledger.Live()[f.pod][0].Next())
			return f.pod
		}, 0, "address", []string{"kubelet tells"}},
		{"annotation names no Egress", func(t *testing.T, f *fixture) *rig.Sandbox {
			patch := fmt.Sprintf(`{"metadata":{"annotations":{"%sinternet":"typo"}}}`, v2.AnnotationEgressPrefix)
			testkit.Must(f.Core.CoreV1().Pods(f.pool).Patch(t.Context(), f.pod.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
			return f.pod
		}, 0, "router", []string{"there is no Egress internet/typo"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.showCoild(corev1.ConditionTrue)
			f.report(f.pod)
			healthy(t, f.walk(f.pool, f.pod.Name, 0))
			s := c.spoil(t, f)
			wants(t, f.walk(s.Namespace, s.Name, c.ahead), c.wrong, c.says...)
		})
	}
}

// Pods of all kinds with which nothing is wrong.
func TestHealthy(t *testing.T) {
	for _, c := range []struct {
		name    string
		make    func(t *testing.T, f *fixture) *rig.Sandbox
		unknown []string
	}{
		{"after coild was replaced", func(t *testing.T, f *fixture) *rig.Sandbox {
			testkit.Check(t, f.Restart(t.Context()))
			return f.pod
		}, nil},
		{"pool is exhausted by now", func(_ *testing.T, f *fixture) *rig.Sandbox {
			for range 15 {
				f.add()
			}
			f.fail(f.make())
			return f.pod
		}, nil},
		{"namespace has another pool by now", func(t *testing.T, f *fixture) *rig.Sandbox {
			other := f.pool + "-other"
			number := pools.Add(1)
			testkit.Check(t, f.AddPool(t.Context(), other, 2, v2.SubnetSet{IPv4: new(fmt.Sprintf("10.%d.0.0/28", number))}))
			f.annotate(other)
			return f.pod
		}, nil},
		{"pod of one family", func(t *testing.T, f *fixture) *rig.Sandbox {
			other := f.pool + "-ipv4"
			testkit.Check(t, f.AddPool(t.Context(), other, 2, v2.SubnetSet{IPv4: new(fmt.Sprintf("10.%d.0.0/28", pools.Add(1)))}))
			f.annotate(other)
			testkit.Eventually(t, 5*time.Second, "coild knows the pool", func() error {
				s := f.make()
				r, err := s.Add(t.Context())
				if err == nil && len(r.Addrs) != 1 {
					err = fmt.Errorf("it got %v", r.Addrs)
				}
				if err == nil {
					f.pod = s
				}
				return err
			})
			f.report(f.pod)
			return f.pod
		}, nil},
		{"pod with the network of its node", func(t *testing.T, f *fixture) *rig.Sandbox {
			testkit.Must(f.Core.CoreV1().Pods(f.pool).Create(t.Context(), &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "host"},
				Spec:       corev1.PodSpec{NodeName: f.Name, HostNetwork: true, Containers: []corev1.Container{{Name: "c", Image: "none"}}},
			}, metav1.CreateOptions{}))(t)
			return &rig.Sandbox{Namespace: f.pool, Name: "host"}
		}, nil},
		{"pod that was just made", func(_ *testing.T, f *fixture) *rig.Sandbox { return f.make() }, []string{"record", "address"}},
		{"second sandbox of a pod", func(t *testing.T, f *fixture) *rig.Sandbox {
			s := testkit.Must(f.NewSandbox(t.Context(), rig.SandboxOptions{Namespace: f.pool, Name: f.pod.Name}))(t)
			testkit.Must(s.Add(t.Context()))(t)
			f.report(s)
			return s
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.showCoild(corev1.ConditionTrue)
			f.report(f.pod)
			s := c.make(t, f)
			healthy(t, f.walk(s.Namespace, s.Name, 0), c.unknown...)
		})
	}
}

// label changes a label of the block of the fixture's pod.
func (f *fixture) label(name, value string) {
	f.t.Helper()
	list := testkit.Must(f.Coil.CoilV2().AddressBlocks().List(f.t.Context(), metav1.ListOptions{LabelSelector: v2.LabelPool + "=" + f.pool}))(f.t)
	for _, b := range list.Items {
		patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, name, value)
		testkit.Must(f.Coil.CoilV2().AddressBlocks().Patch(f.t.Context(), b.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(f.t)
	}
}
