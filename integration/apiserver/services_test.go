package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/pkg/app/lbcontroller"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// served is a cluster in which coil-lb-controller runs with its own rights, beside coil-ipam-controller. Nodes are played: the first one that may have an address
// has it.
type served struct {
	*cluster
	t *testing.T
}

func servicesCluster(t *testing.T) *served {
	s := &served{ipamCluster(t), t}
	testkit.Check(t, installRBAC(t.Context(), s.admin, "../services/rbac.yaml"))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		testkit.Check(t, s.core.CoreV1().ServiceAccounts("kube-system").Delete(ctx, "coil-lb-controller", metav1.DeleteOptions{}),
			s.core.RbacV1().ClusterRoles().Delete(ctx, "coil-lb-controller", metav1.DeleteOptions{}), s.core.RbacV1().ClusterRoleBindings().Delete(ctx, "coil-lb-controller", metav1.DeleteOptions{}),
			s.core.RbacV1().Roles("kube-system").Delete(ctx, "coil-lb-controller", metav1.DeleteOptions{}), s.core.RbacV1().RoleBindings("kube-system").Delete(ctx, "coil-lb-controller", metav1.DeleteOptions{}))
	})
	s.pool(t, "services", 0, v4("192.0.2.0/29"))
	for i, name := range []string{"n1", "n2"} {
		n := s.node(t, name)
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprint("10.0.0.", i+1)}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		testkit.Must(s.core.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}))(t)
	}
	s.run(t, s.serviceAccount(t), options())
	return s
}

// start runs coil-lb-controller until the returned function is called.
func (s *served) start() (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	done := make(chan error, 1)
	cfg := testkit.Must(s.api.UserConfig("system:serviceaccount:kube-system:coil-lb-controller", "system:serviceaccounts", "system:serviceaccounts:kube-system"))(s.t)
	cfg.WarningHandler = rest.NoWarnings{} // one about the name of the finalizer in each answer
	go func() {
		done <- lbcontroller.Run(ctx, cfg, &lbcontroller.Options{CloudResync: time.Minute, Options: election, Namespace: "kube-system", DefaultPool: "services"})
	}()
	var once bool
	stop = func() {
		if cancel(); once {
			return
		}
		once = true
		if err := <-done; err != nil {
			s.t.Errorf("coil-lb-controller ended with %v", err)
		}
	}
	s.t.Cleanup(stop)
	return stop
}

// make makes a Service of the class.
func (s *served) make(name string, port int32, change ...func(*corev1.Service)) {
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}}}
	o.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(string), Ports: []corev1.ServicePort{{Port: port}}}
	*o.Spec.LoadBalancerClass = loadbalancer.Class
	for _, c := range change {
		c(o)
	}
	testkit.Must(s.core.CoreV1().Services(metav1.NamespaceDefault).Create(s.t.Context(), o, metav1.CreateOptions{}))(s.t)
}

// patch changes a Service.
func (s *served) patch(name, patch string) {
	testkit.Must(s.core.CoreV1().Services(metav1.NamespaceDefault).Patch(s.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(s.t)
}

// hold lets the first node that may have an address have it.
func (s *served) hold() error {
	for _, b := range s.blocksOf(s.t, "services") {
		if f := b.Floating; f != nil && len(f.Successors) > 0 && f.Holding.Holder != f.Successors[0].Node {
			b.Floating.Holding.Holder = f.Successors[0].Node
			if _, err := s.coil.CoilV2().AddressBlocks().Update(s.t.Context(), &b, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
				return err
			}
		}
	}
	return nil
}

// tells waits until the status of a Service has some addresses, separated by commas, and its condition AddressAssigned a reason.
func (s *served) tells(name, addresses, reason string) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, fmt.Sprintf("%s tells %q (%s)", name, addresses, reason), func() error {
		if err := s.hold(); err != nil {
			return err
		}
		o, err := s.core.CoreV1().Services(metav1.NamespaceDefault).Get(s.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var told []string
		for _, i := range o.Status.LoadBalancer.Ingress {
			told = append(told, i.IP)
		}
		c := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionAssigned)
		if strings.Join(told, ",") != addresses || (c == nil) != (reason == "") || c != nil && (c.Reason != reason || c.ObservedGeneration != o.Generation) {
			return fmt.Errorf("it has %v, and says %+v", told, o.Status.Conditions)
		}
		return nil
	})
}

// Services get addresses, share them, keep them while the controller ends and starts, get others when they ask for these, and give them back.
func TestServicesGetAddresses(t *testing.T) {
	s := servicesCluster(t)
	stop := s.start()
	s.make("web", 80)
	s.tells("web", "192.0.2.0", "AddressAssigned")
	s.make("tls", 443)
	s.tells("tls", "192.0.2.0", "AddressAssigned")
	s.make("other", 80)
	s.tells("other", "192.0.2.1", "AddressAssigned")
	s.make("named", 80, func(o *corev1.Service) {
		o.Annotations[loadbalancer.AnnotationWanted], o.Annotations[loadbalancer.AnnotationSharing] = "192.0.2.6", loadbalancer.SharingNone
	})
	s.tells("named", "192.0.2.6", "AddressAssigned")
	s.make("late", 80, func(o *corev1.Service) { o.Annotations[loadbalancer.AnnotationWanted] = "192.0.2.6" })
	s.tells("late", "", "AddressInUse")
	b := s.block(t, "services-0")
	if got := fmt.Sprint(b.Floating.Ports); got != "[{TCP 80 default/web} {TCP 443 default/tls}]" || len(b.Floating.Successors) != 2 {
		t.Errorf("the block says %s, %+v", got, b.Floating.Successors)
	}
	stop()
	// Changes from before its start are found.
	s.patch("tls", `{"spec":{"type":"ClusterIP","loadBalancerClass":null}}`)
	testkit.Check(t, s.core.CoreV1().Services(metav1.NamespaceDefault).Delete(t.Context(), "named", metav1.DeleteOptions{}))
	s.make("new", 443)
	stop = s.start()
	s.tells("tls", "", "")
	s.tells("late", "192.0.2.6", "AddressAssigned")
	s.tells("new", "192.0.2.1", "AddressAssigned") // the port of the first address was another one's still
	s.tells("web", "192.0.2.0", "AddressAssigned")
	s.tells("other", "192.0.2.1", "AddressAssigned")
	s.patch("other", `{"metadata":{"annotations":{"coil.cybozu.com/wanted-addresses":"192.0.2.5"}}}`)
	s.tells("other", "192.0.2.5", "AddressAssigned")
	stop()
	s.start()
	for _, name := range []string{"web", "tls", "other", "late", "new"} {
		testkit.Check(t, s.core.CoreV1().Services(metav1.NamespaceDefault).Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	testkit.Eventually(t, 60*time.Second, "all is given back", func() error {
		all := testkit.Must(s.core.CoreV1().Services(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{}))(t).Items
		all = slices.DeleteFunc(all, func(o corev1.Service) bool { return o.Name == "kubernetes" })
		claims := testkit.Must(s.coil.CoilV2().AddressClaims("kube-system").List(t.Context(), metav1.ListOptions{}))(t).Items
		if blocks := s.blocksOf(t, "services"); len(all)+len(claims)+len(blocks) > 0 {
			return fmt.Errorf("there are %d Services, %d claims, and %d blocks", len(all), len(claims), len(blocks))
		}
		return nil
	})
}
