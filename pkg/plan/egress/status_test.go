package egress

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/plantest"
)

func TestEgressStatus(t *testing.T) {
	deployment := func(ready int32, conditions ...appsv1.DeploymentCondition) *appsv1.Deployment {
		return &appsv1.Deployment{Status: appsv1.DeploymentStatus{Replicas: 2, ReadyReplicas: ready, Conditions: conditions}}
	}
	router := func(name string, status corev1.PodStatus) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: status}
	}
	waiting := func(reason, message string) corev1.PodStatus {
		return corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "egress", State: corev1.ContainerState{
			Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}}
	}
	unscheduled := corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no node"}}}
	failure := appsv1.DeploymentCondition{Type: appsv1.DeploymentReplicaFailure, Status: corev1.ConditionTrue, Message: "quota"}
	service, changed := Refusal{"Service", "nat", true, "quota"}, Refusal{"Service", "nat", false, "policy"}
	budget := Refusal{"PodDisruptionBudget", "nat", true, "quota"}
	for _, tt := range []struct {
		name   string
		facts  Facts
		status metav1.ConditionStatus
		reason string
		words  string
	}{
		{"nothing is there", Facts{}, "False", ReasonNoRouterReady, "No router is ready"},
		{"routers are ready", Facts{Deployment: deployment(1)}, "True", ReasonRoutersReady, "1 of 2 routers are ready"},
		{"refused", Facts{Deployment: deployment(0, failure)}, "False", ReasonRouterNotCreated, "quota"},
		{"refused, but one is ready", Facts{Deployment: deployment(1, failure)}, "True", ReasonRoutersReady, ""},
		{"not scheduled", Facts{Deployment: deployment(0), Routers: []*corev1.Pod{router("b", unscheduled), router("a", unscheduled)}}, "False", ReasonRouterNotScheduled, "Pod a: no node"},
		{"no image", Facts{Deployment: deployment(0), Routers: []*corev1.Pod{router("a", waiting("ErrImagePull", "no such image"))}}, "False", ReasonRouterNotStarted, "Pod a, container egress: ErrImagePull: no such image"},
		{"a reason alone", Facts{Routers: []*corev1.Pod{router("a", waiting("CrashLoopBackOff", ""))}}, "False", ReasonRouterNotStarted, "container egress: CrashLoopBackOff"},
		{"starting", Facts{Routers: []*corev1.Pod{router("a", waiting("ContainerCreating", ""))}}, "False", ReasonNoRouterReady, ""},
		{"a bad template", Facts{Template: errors.New("unknown field")}, "False", ReasonInvalidTemplate, "unknown field"},
		{"a bad template after a good one", Facts{Deployment: deployment(2), Template: errors.New("unknown field")}, "True", ReasonRoutersReady, ""},
		{"an object of somebody else", Facts{Deployment: deployment(2), Conflicts: []string{"Service nat"}}, "False", ReasonConflict, "Service nat"},
		{"a Service is refused", Facts{Deployment: deployment(2), Refused: []Refusal{service}}, "False", ReasonRefused, "2 of 2 routers are ready. The API server refuses Service nat: quota"},
		{"a change of a Service is refused", Facts{Deployment: deployment(2), Refused: []Refusal{changed}}, "True", ReasonRefused, "2 of 2 routers are ready. The API server refuses Service nat: policy"},
		{"two are refused", Facts{Deployment: deployment(2), Refused: []Refusal{service, budget}}, "False", ReasonRefused, "Service nat: quota. The API server refuses PodDisruptionBudget nat: quota"},
		{"a budget is refused, and no node takes a router", Facts{Routers: []*corev1.Pod{router("a", unscheduled)}, Refused: []Refusal{budget}}, "False", ReasonRouterNotScheduled, "Pod a: no node. The API server refuses PodDisruptionBudget nat: quota"},
		{"one is refused, another is somebody else's", Facts{Deployment: deployment(2), Conflicts: []string{"Deployment nat"}, Refused: []Refusal{budget}}, "False", ReasonConflict, "PodDisruptionBudget nat: quota"},
		{"a bad selector", Facts{Deployment: deployment(2), Selector: errors.New("operator Like")}, "False", ReasonInvalidSelector, "operator Like"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := tt.facts
			f.Egress, f.Clients, f.InCluster, f.Now = testEgress(""), 3, plantest.Prefixes("10.0.0.0/8 fd00::/64"), metav1.NewTime(time.Unix(1000, 0))
			st := Status(f)
			c := meta.FindStatusCondition(st.Conditions, v2.EgressAvailable)
			if c == nil || c.Status != tt.status || c.Reason != tt.reason || !strings.Contains(c.Message, tt.words) || c.ObservedGeneration != 4 {
				t.Errorf("Available is %+v, want %s for %s: %s", c, tt.status, tt.reason, tt.words)
			}
			invalid := meta.FindStatusCondition(st.Conditions, v2.EgressInvalidTemplate)
			if (invalid != nil) != (f.Template != nil) || invalid != nil && !strings.Contains(invalid.Message, "unknown field") {
				t.Errorf("InvalidTemplate is %+v", invalid)
			}
			if st.ObservedGeneration != 4 || st.Clients != 3 || len(st.InClusterCIDRs) != 2 || st.Selector != "app.kubernetes.io/component=egress,app.kubernetes.io/instance=nat,app.kubernetes.io/name=coil" {
				t.Errorf("status %+v", st)
			}
			if f.Deployment != nil && st.Replicas != 2 {
				t.Errorf("%d replicas", st.Replicas)
			}

			// It is the same at another time, and follows what has changed.
			f.Egress.Status, f.Now = st, metav1.NewTime(time.Unix(2000, 0))
			if diff := cmp.Diff(st, Status(f)); diff != "" {
				t.Errorf("computed again (-first +second):\n%s", diff)
			}
			f.Template = nil
			if meta.FindStatusCondition(Status(f).Conditions, v2.EgressInvalidTemplate) != nil {
				t.Error("InvalidTemplate stays")
			}
		})
	}
	t.Run("no router is wanted", func(t *testing.T) {
		e := testEgress("")
		e.Spec.Replicas = 0
		if c := Status(Facts{Egress: e}).Conditions[0]; c.Reason != ReasonNoRouterWanted {
			t.Errorf("%+v", c)
		}
	})
	t.Run("a long message", func(t *testing.T) {
		c := Status(Facts{Egress: testEgress(""), Template: errors.New(strings.Repeat("ä\n", 20000))}).Conditions[0]
		if len(c.Message) > 32768 || strings.Contains(c.Message, "\n") || strings.Contains(c.Message, "\ufffd") {
			t.Errorf("%d bytes", len(c.Message))
		}
	})
}

func TestEgressUnstableFlows(t *testing.T) {
	for _, tt := range []struct {
		auto     bool
		affinity corev1.ServiceAffinity
		peering  v2.EgressPeering
		warns    bool
	}{
		{true, corev1.ServiceAffinityNone, v2.EgressPeeringService, true},
		{true, corev1.ServiceAffinityNone, "", true}, // from before there was peering
		{true, corev1.ServiceAffinityNone, v2.EgressPeeringDirect, false},
		{true, corev1.ServiceAffinityClientIP, v2.EgressPeeringService, false},
		{true, "", "", false},
		{false, corev1.ServiceAffinityNone, v2.EgressPeeringService, false},
	} {
		e := testEgress("")
		e.Spec.FouSourcePortAuto, e.Spec.SessionAffinity, e.Spec.Peering = tt.auto, tt.affinity, tt.peering
		st := Status(Facts{Egress: e})
		c := meta.FindStatusCondition(st.Conditions, v2.EgressUnstableFlows)
		if (c != nil) != tt.warns || c != nil && (c.Status != metav1.ConditionTrue || !strings.Contains(c.Message, "peering: Direct")) {
			t.Errorf("%+v: UnstableFlows is %+v", tt, c)
		}
		e.Status, e.Spec.Peering = st, v2.EgressPeeringDirect
		if c := meta.FindStatusCondition(Status(Facts{Egress: e}).Conditions, v2.EgressUnstableFlows); c != nil {
			t.Errorf("%+v: it stays", tt)
		}
	}
}

func TestSeveralDefaults(t *testing.T) {
	e, other := testEgress(""), testEgress("")
	other.Namespace, other.Name, other.UID = "a", "other", "other"
	for _, tt := range []struct {
		name     string
		defaults []*v2.Egress
		says     string
	}{
		{"none", nil, ""}, {"the only one", []*v2.Egress{e}, ""}, {"another", []*v2.Egress{other}, ""},
		{"the oldest", []*v2.Egress{e, other}, "Egress a/other has spec.default, too. This one is the default"},
		{"a younger one", []*v2.Egress{other, e}, "Egress a/other is the default of the cluster"},
		{"the only one again", []*v2.Egress{e}, ""},
	} {
		e.Status = Status(Facts{Egress: e, Defaults: tt.defaults})
		c := meta.FindStatusCondition(e.Status.Conditions, v2.EgressConflicting)
		if (c != nil) != (tt.says != "") || c != nil && (c.Status != metav1.ConditionTrue || !strings.Contains(c.Message, tt.says)) {
			t.Errorf("%s: %+v", tt.name, c)
		}
	}
}
