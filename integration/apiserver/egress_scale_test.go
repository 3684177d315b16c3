package apiserver

import (
	"errors"
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestEgressWithControllers runs the program beside Kubernetes' own controllers.
func TestEgressWithControllers(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	api := testkit.Must(startEgressServer(t.Context()))(t)
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	testkit.Check(t, api.StartControllerManager(t.Context(), "--horizontal-pod-autoscaler-sync-period=1s"))
	c := egressClusterOf(t, api)
	c.start(t)
	routers := func(t *testing.T, egress string, n int) (all []corev1.Pod) {
		t.Helper()
		testkit.Eventually(t, 60*time.Second, fmt.Sprintf("%s has %d routers", egress, n), func() error {
			l, err := c.core.CoreV1().Pods(c.ns).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + egress})
			if err != nil {
				return err
			}
			all = l.Items
			return same(n, len(all))
		})
		return all
	}

	t.Run("an HPA scales an Egress", func(t *testing.T) {
		c.egress(t, "scaled", `{destinations: [0.0.0.0/0], replicas: 1}`)
		routers(t, "scaled", 1)
		_, err := c.core.AutoscalingV2().HorizontalPodAutoscalers(c.ns).Create(t.Context(), &autoscalingv2.HorizontalPodAutoscaler{
			ObjectMeta: metav1.ObjectMeta{Name: "scaled"},
			Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
				ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "coil.cybozu.com/v2", Kind: "Egress", Name: "scaled"},
				MinReplicas:    new(int32(2)), MaxReplicas: 4,
				Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.ResourceMetricSourceType, Resource: &autoscalingv2.ResourceMetricSource{
					Name: "cpu", Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: new(int32(50))},
				}}},
			},
		}, metav1.CreateOptions{})
		testkit.Check(t, err)
		testkit.Eventually(t, 90*time.Second, "it wants two routers", func() error {
			e, err := c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "scaled", metav1.GetOptions{})
			if err != nil {
				return err
			}
			return same([]int32{2, 2}, []int32{e.Spec.Replicas, e.Status.Replicas})
		})
		routers(t, "scaled", 2)
	})
	t.Run("why no router is ready", func(t *testing.T) {
		c.egress(t, "waiting", `{destinations: [0.0.0.0/0]}`)
		pod := routers(t, "waiting", 1)[0]
		status := func(change func(*corev1.PodStatus)) {
			t.Helper()
			testkit.Eventually(t, 10*time.Second, "status of the pod", func() error {
				p, err := c.core.CoreV1().Pods(c.ns).Get(t.Context(), pod.Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				change(&p.Status)
				_, err = c.core.CoreV1().Pods(c.ns).UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
				return err
			})
		}
		status(func(s *corev1.PodStatus) {
			s.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/3 nodes are available"}}
		})
		requireMessage(t, c.condition(t, "waiting", v2.EgressAvailable, metav1.ConditionFalse, "RouterNotScheduled"), "0/3 nodes")
		status(func(s *corev1.PodStatus) {
			s.Conditions = nil
			s.ContainerStatuses = []corev1.ContainerStatus{{Name: "egress", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}}}}
		})
		requireMessage(t, c.condition(t, "waiting", v2.EgressAvailable, metav1.ConditionFalse, "RouterNotStarted"), "ImagePullBackOff: no such image")
		status(func(s *corev1.PodStatus) {
			s.Phase, s.ContainerStatuses = corev1.PodRunning, nil
			s.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}
		})
		c.condition(t, "waiting", v2.EgressAvailable, metav1.ConditionTrue, "RoutersReady")
	})
	t.Run("an Egress that was made again", func(t *testing.T) {
		old := c.deployment(t, "waiting", "is there", exists)
		c.client(t, c.ns, "client", "waiting", "10.9.0.1")
		c.requireClients(t, "waiting", "client 10.9.0.1")
		testkit.Check(t, c.coil.CoilV2().Egresses(c.ns).Delete(t.Context(), "waiting", metav1.DeleteOptions{}))
		e := c.egress(t, "waiting", `{destinations: [0.0.0.0/0]}`)
		c.deployment(t, "waiting", "is the new Egress's", func(d *appsv1.Deployment) error {
			if d.UID == old.UID || !metav1.IsControlledBy(d, e) {
				return errors.New("it is the old one's")
			}
			return nil
		})
		testkit.Eventually(t, 60*time.Second, "the client is the new Egress's", func() error {
			all := c.slices(t, "waiting")
			if len(all) != 1 || !metav1.IsControlledBy(&all[0], e) {
				return fmt.Errorf("slices %v", all)
			}
			return nil
		})
		c.condition(t, "waiting", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
	})
	t.Run("everything goes with the last Egress", func(t *testing.T) {
		for _, name := range []string{"scaled", "waiting"} {
			testkit.Check(t, c.coil.CoilV2().Egresses(c.ns).Delete(t.Context(), name, metav1.DeleteOptions{}))
		}
		testkit.Eventually(t, 90*time.Second, "nothing is left", func() error {
			l, err := c.core.AppsV1().Deployments(c.ns).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				return err
			}
			_, accountErr := c.core.CoreV1().ServiceAccounts(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{})
			_, bindingErr := c.core.RbacV1().RoleBindings(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{})
			_, serviceErr := c.core.CoreV1().Services(c.ns).Get(t.Context(), "waiting", metav1.GetOptions{})
			return errors.Join(same(0, len(l.Items)), same(0, len(c.slices(t, "waiting"))), notFound(accountErr, "the account"), notFound(bindingErr, "its binding"), notFound(serviceErr, "the Service"))
		})
	})
	t.Run("a quota", func(t *testing.T) {
		testkit.Must(c.core.CoreV1().ResourceQuotas(c.ns).Create(t.Context(), &corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{corev1.ResourcePods: resource.MustParse("0")}},
		}, metav1.CreateOptions{}))(t)
		testkit.Eventually(t, 30*time.Second, "the quota is in force", func() error {
			q, err := c.core.CoreV1().ResourceQuotas(c.ns).Get(t.Context(), "none", metav1.GetOptions{})
			if err == nil && len(q.Status.Hard) == 0 {
				err = errors.New("no status")
			}
			return err
		})
		c.egress(t, "denied", `{destinations: [0.0.0.0/0]}`)
		requireMessage(t, c.condition(t, "denied", v2.EgressAvailable, metav1.ConditionFalse, "RouterNotCreated"), "exceeded quota")
	})
}
