package egress

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
)

// Each write of a status is sent to each coild: one that only counts clients waits, all others don't.
func TestStatusIsWritten(t *testing.T) {
	f := newFixture(t)
	now := metav1.Now()
	f.now = func() metav1.Time { return now }
	clients := func(n int) func() {
		return func() {
			s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
				Namespace: nat.Namespace, Name: "s", Labels: map[string]string{v2.LabelEgress: nat.Name},
			}}
			for i := range n {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{TargetRef: &corev1.ObjectReference{UID: types.UID(fmt.Sprint(i))}})
			}
			f.put(t, f.slices, s)
		}
	}
	deployment := func(status appsv1.DeploymentStatus) func() {
		return func() {
			d, err := egress.RouterDeployment(f.egress(t), f.cfg.Image)
			if err != nil {
				t.Fatal(err)
			}
			d.Status = status
			f.put(t, f.cfg.Routers.Apps().V1().Deployments().Informer().GetIndexer(), d)
		}
	}
	for _, step := range []struct {
		what    string
		after   time.Duration
		change  func()
		writes  int
		clients int32
		again   time.Duration
	}{
		{"it is new", 0, func() {}, 1, 0, 0},
		{"nothing", time.Hour, func() {}, 0, 0, 0},
		{"the first client", time.Second, clients(1), 1, 1, 0},
		{"a second", time.Second, clients(2), 0, 1, 29 * time.Second},
		{"a third", 20 * time.Second, clients(3), 0, 1, 9 * time.Second},
		{"the time has come", 9 * time.Second, func() {}, 1, 3, 0},
		{"a fourth", time.Second, clients(4), 0, 3, 29 * time.Second},
		{"a router", time.Second, deployment(appsv1.DeploymentStatus{Replicas: 1}), 1, 4, 0},
		{"a fifth client", time.Second, clients(5), 0, 4, 29 * time.Second},
		{"a fifth client has left", time.Second, clients(4), 0, 4, 0},
		{"a router is ready", time.Second, deployment(appsv1.DeploymentStatus{Replicas: 1, ReadyReplicas: 1}), 1, 4, 0},
		{"a range of the cluster", time.Second, func() {
			f.put(t, f.cfg.Cluster.Networking().V1().ServiceCIDRs().Informer().GetIndexer(),
				&networkingv1.ServiceCIDR{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"198.51.100.0/24"}}})
			f.expireRanges()
		}, 1, 4, 0},
		{"another spec", time.Second, func() {
			e := f.egress(t).DeepCopy()
			e.Generation++
			f.put(t, f.egresses, e)
		}, 1, 4, 0},
		{"all have left", time.Hour, clients(0), 1, 0, 0},
	} {
		now = metav1.NewTime(now.Add(step.after))
		step.change()
		f.written = 0
		err := f.syncObjects(t.Context(), nat)
		if want := reconcile.Later(step.again); step.again > 0 && (err == nil || err.Error() != want.Error()) || step.again == 0 && err != nil {
			t.Errorf("%s: %v, want it again after %v", step.what, err, step.again)
		}
		if got := f.egress(t).Status.Clients; f.written != step.writes || got != step.clients {
			t.Errorf("%s: %d writes, %d clients; want %d, %d", step.what, f.written, got, step.writes, step.clients)
		}
	}
	if !meta.IsStatusConditionTrue(f.egress(t).Status.Conditions, v2.EgressAvailable) {
		t.Error("it isn't available")
	}
}

// A setting that breaks connections is told of once.
func TestUnstableFlowsAreTold(t *testing.T) {
	f := newFixture(t)
	e := f.egress(t).DeepCopy()
	e.Spec.FouSourcePortAuto, e.Spec.SessionAffinity = true, corev1.ServiceAffinityNone
	f.put(t, f.egresses, e)
	for range 2 {
		if got := f.condition(t, v2.EgressUnstableFlows); !strings.HasPrefix(got, "True SourcePortWithoutAffinity: ") {
			t.Errorf("the condition is %q", got)
		}
	}
	if told := f.told(); len(told) != 1 || !strings.HasPrefix(told[0], "Warning SourcePortWithoutAffinity ") {
		t.Errorf("Events %q", told)
	}
}
