package apiserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
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
	cfg := testkit.Must(s.api.UserConfig("system:serviceaccount:kube-system:coil-lb-controller", "system:serviceaccounts", "system:serviceaccounts:kube-system"))(s.t)
	cfg.WarningHandler = rest.NoWarnings{} // one about the name of the finalizer in each answer
	return testkit.Background(s.t.Context(), s.t, func(ctx context.Context) error {
		return lbcontroller.Run(ctx, cfg, &lbcontroller.Options{CloudResync: time.Minute, Options: election, Namespace: "kube-system", DefaultPool: "services"})
	})
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

// hold lets the first node that may have an address of some pools have it.
func (s *served) hold(pools ...string) error {
	var blocks []v2.AddressBlock
	for _, p := range pools {
		blocks = append(blocks, s.blocksOf(s.t, p)...)
	}
	for _, b := range blocks {
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
		if err := s.hold("services", "single"); err != nil {
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

// wants has a Service ask for an address.
func wants(address string) func(*corev1.Service) {
	return func(o *corev1.Service) { o.Annotations[loadbalancer.AnnotationWanted] = address }
}

// deletes deletes Services.
func (s *served) deletes(names ...string) {
	s.t.Helper()
	for _, name := range names {
		testkit.Check(s.t, s.core.CoreV1().Services(metav1.NamespaceDefault).Delete(s.t.Context(), name, metav1.DeleteOptions{}))
	}
}

// empty waits until no Service is left, and nothing that one had.
func (s *served) empty() {
	s.t.Helper()
	testkit.Eventually(s.t, 60*time.Second, "all is given back", func() error {
		all := testkit.Must(s.core.CoreV1().Services(metav1.NamespaceDefault).List(s.t.Context(), metav1.ListOptions{}))(s.t).Items
		all = slices.DeleteFunc(all, func(o corev1.Service) bool { return o.Name == "kubernetes" })
		claims := testkit.Must(s.coil.CoilV2().AddressClaims("kube-system").List(s.t.Context(), metav1.ListOptions{}))(s.t).Items
		if blocks := s.blocksOf(s.t, "services"); len(all)+len(claims)+len(blocks) > 0 {
			return fmt.Errorf("there are %d Services, %d claims, and %d blocks", len(all), len(claims), len(blocks))
		}
		return nil
	})
}

// Services get addresses, share them, keep them while the controller ends and starts, get others when they ask for these, and give them back. The numbers are those of
// the scenarios that a load balancer must pass.
func TestServicesGetAddresses(t *testing.T) {
	s := servicesCluster(t)
	stop := s.start()
	part := func(name string, do func()) { t.Run(name, func(*testing.T) { do() }) }
	part("1 new", func() {
		s.make("app", 80)
		s.tells("app", "192.0.2.0", "AddressAssigned")
	})
	part("2 shared", func() {
		s.make("tls", 443)
		s.tells("tls", "192.0.2.0", "AddressAssigned")
		s.make("dns", 80, func(o *corev1.Service) { o.Spec.Ports[0].Protocol = corev1.ProtocolUDP })
		s.tells("dns", "192.0.2.0", "AddressAssigned")
		s.make("other", 80)
		s.tells("other", "192.0.2.1", "AddressAssigned")
		b := s.block(t, "services-0")
		if got := fmt.Sprint(b.Floating.Ports); got != "[{TCP 80 default/app} {TCP 443 default/tls} {UDP 80 default/dns}]" || len(b.Floating.Successors) != 2 {
			t.Errorf("the block says %s, %+v", got, b.Floating.Successors)
		}
	})
	part("3 edited", func() {
		s.patch("other", `{"spec":{"ports":[{"name":"a","port":80},{"name":"b","port":8080}]}}`)
		s.tells("other", "192.0.2.1", "AddressAssigned")
		s.patch("tls", `{"spec":{"ports":[{"name":"a","port":443},{"name":"b","port":80}]}}`)
		s.tells("tls", "192.0.2.2", "AddressAssigned") // the older one keeps the port
		s.make("heir", 443, wants("192.0.2.0"))        // the port that it had is free
		s.tells("heir", "192.0.2.0", "AddressAssigned")
	})
	part("4 asks for one by name", func() {
		s.make("named", 80, func(o *corev1.Service) {
			o.Annotations[loadbalancer.AnnotationWanted], o.Annotations[loadbalancer.AnnotationSharing] = "192.0.2.6", loadbalancer.SharingNone
		})
		s.tells("named", "192.0.2.6", "AddressAssigned")
		s.make("late", 80, wants("192.0.2.6"))
		s.tells("late", "", "AddressInUse")
		s.make("lost", 80, wants("203.0.113.9"))
		s.tells("lost", "", "AddressOutsidePool")
		s.deletes("lost")
	})
	part("6 changes while the controller is away", func() {
		stop()
		s.patch("tls", `{"spec":{"type":"ClusterIP","loadBalancerClass":null}}`) // 5
		s.deletes("named", "heir", "dns")
		s.make("new", 443, wants("192.0.2.0"))
		stop = s.start()
		s.tells("tls", "", "")
		s.tells("late", "192.0.2.6", "AddressAssigned")
		s.tells("new", "192.0.2.0", "AddressAssigned")
		s.tells("app", "192.0.2.0", "AddressAssigned")
		s.tells("other", "192.0.2.1", "AddressAssigned")
		s.patch("other", `{"metadata":{"annotations":{"coil.cybozu.com/wanted-addresses":"192.0.2.5"}}}`)
		s.tells("other", "192.0.2.5", "AddressAssigned")
	})
	part("33 one port, in a family each", func() {
		s.pool(t, "pairs", 0, v2.SubnetSet{IPv4: ptr("198.51.100.0/30"), IPv6: ptr("2001:db8::/126")})
		of := func(family corev1.IPFamily) func(*corev1.Service) {
			return func(o *corev1.Service) {
				o.Annotations["coil.cybozu.com/pool"], o.Spec.IPFamilies = "pairs", []corev1.IPFamily{family}
			}
		}
		s.make("four", 80, of(corev1.IPv4Protocol))
		s.make("six", 80, of(corev1.IPv6Protocol))
		testkit.Eventually(t, 20*time.Second, "both share a pair", func() error {
			b, err := s.coil.CoilV2().AddressBlocks().Get(t.Context(), "pairs-0", metav1.GetOptions{})
			if err != nil || len(b.Floating.Ports) != 2 {
				return fmt.Errorf("the block is %+v, %w", b, err)
			}
			return nil
		})
		s.deletes("four", "six")
	})
	part("9 no address for ports that it lost", func() {
		s.pool(t, "single", 0, v2.SubnetSet{IPv4: ptr("203.0.113.8/32")})
		inSingle := func(o *corev1.Service) { o.Annotations["coil.cybozu.com/pool"] = "single" }
		s.make("first", 80, inSingle)
		s.tells("first", "203.0.113.8", "AddressAssigned")
		s.make("second", 443, inSingle)
		s.tells("second", "203.0.113.8", "AddressAssigned")
		s.patch("second", `{"spec":{"ports":[{"name":"a","port":80}]}}`) // there is no other address
		s.tells("second", "", "WaitsForAddress")
		if b := s.block(t, "single-0"); fmt.Sprint(b.Floating.Ports) != "[{TCP 80 default/first}]" {
			t.Errorf("the block says %v", b.Floating.Ports)
		}
		s.tells("first", "203.0.113.8", "AddressAssigned")
		s.patch("second", `{"spec":{"ports":[{"name":"a","port":8080}]}}`)
		s.tells("second", "203.0.113.8", "AddressAssigned")
		s.deletes("first", "second")
	})
	part("7 of another class", func() {
		s.make("theirs", 80, func(o *corev1.Service) { *o.Spec.LoadBalancerClass = "example.org/lb" })
		s.tells("theirs", "", "")
	})
	part("8 exhausted", func() {
		for i := range 8 {
			s.make(fmt.Sprint("alone", i), 9000, func(o *corev1.Service) { o.Annotations[loadbalancer.AnnotationSharing] = loadbalancer.SharingNone })
		}
		// Some have none, and get theirs when the others are gone.
		waits := func() (name string, waiting int) {
			testkit.Check(t, s.hold("services"))
			for i := range 8 {
				o := testkit.Must(s.core.CoreV1().Services(metav1.NamespaceDefault).Get(t.Context(), fmt.Sprint("alone", i), metav1.GetOptions{}))(t)
				if is := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionAssigned); is != nil && is.Reason == "WaitsForAddress" && strings.Contains(is.Message, v2.ReasonPoolExhausted) {
					name = o.Name
					waiting++
				}
			}
			return name, waiting
		}
		last := ""
		testkit.Eventually(t, 20*time.Second, "some say that the pool is exhausted", func() error {
			if last, _ = waits(); last == "" {
				return errors.New("none does")
			}
			return nil
		})
		for i := range 8 {
			if name := fmt.Sprint("alone", i); name != last {
				s.deletes(name)
			}
		}
		testkit.Eventually(t, 40*time.Second, "the last one has an address", func() error {
			testkit.Check(t, s.hold("services"))
			o, err := s.core.CoreV1().Services(metav1.NamespaceDefault).Get(t.Context(), last, metav1.GetOptions{})
			if err == nil && len(o.Status.LoadBalancer.Ingress) != 1 {
				err = fmt.Errorf("it says %+v", o.Status)
			}
			return err
		})
		s.deletes(last)
	})
	part("13 another replica takes over", func() {
		first := stop
		stop = s.start()
		first()
		s.make("after", 7000, wants("192.0.2.5"))
		s.tells("after", "192.0.2.5", "AddressAssigned")
	})
	s.deletes("app", "tls", "other", "late", "new", "theirs", "after")
	s.empty()
}

// TestServices11Restart starts the controller again beside 200 Services: nothing of them is written, and one that came meanwhile takes nothing away.
func TestServices11Restart(t *testing.T) {
	s := servicesCluster(t)
	s.pool(t, "many", 0, v4("198.51.100.0/24"))
	stop := s.start()
	for i := range 200 {
		s.make(fmt.Sprint("s", i), 80, func(o *corev1.Service) {
			o.Annotations["coil.cybozu.com/pool"], o.Annotations[loadbalancer.AnnotationSharing] = "many", loadbalancer.SharingNone
		})
	}
	versions := map[string]string{}
	told := func() error {
		if err := s.hold("many"); err != nil {
			return err
		}
		all, err := s.core.CoreV1().Services(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, o := range all.Items {
			versions[o.Name] = o.ResourceVersion
			served := meta.IsStatusConditionTrue(o.Status.Conditions, loadbalancer.ConditionServed)
			if o.Annotations["coil.cybozu.com/pool"] == "many" && o.Spec.Type == corev1.ServiceTypeLoadBalancer && (len(o.Status.LoadBalancer.Ingress) != 1 || !served) {
				return fmt.Errorf("%s says %+v", o.Name, o.Status)
			}
		}
		return nil
	}
	testkit.Eventually(t, 60*time.Second, "all have their addresses", told)
	before := maps.Clone(versions)
	stop()
	s.make("new", 80, func(o *corev1.Service) { o.Annotations["coil.cybozu.com/pool"] = "many" })
	s.start()
	testkit.Eventually(t, 30*time.Second, "the new one has an address", told)
	for name, version := range before {
		if versions[name] != version {
			t.Errorf("Service %s was written into", name)
		}
	}
	for name := range versions {
		if name != "kubernetes" {
			s.deletes(name)
		}
	}
	s.empty()
}
