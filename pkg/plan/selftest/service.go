package selftest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// ServiceName is that of the Service of a selftest.
const ServiceName = "selftest"

// ServiceObject is a Service of the type LoadBalancer for a pod. It names no pool if that is empty.
func (t Template) ServiceObject(pool, pod string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: ServiceName, Labels: Labels()}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(string), Selector: map[string]string{LabelPod: pod}, IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack),
		Ports: []corev1.ServicePort{{Port: int32(t.Port), TargetPort: intstr.FromInt32(int32(t.Port))}},
	}}
	*s.Spec.LoadBalancerClass = loadbalancer.Class
	if pool != "" {
		s.Annotations = map[string]string{v2.AnnotationPool: pool}
	}
	return s
}

// ServiceAddrs are the addresses by which a Service is reached.
func ServiceAddrs(s *corev1.Service) (all []netip.Addr) {
	for _, in := range s.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			all = append(all, a.Unmap())
		}
	}
	return all
}

// Unassigned is the verdict on a Service that has got no address. It names the pod of the Service, since the namespace stays with the pods of checks that have failed.
func (j Judge) Unassigned(s *corev1.Service, pool string) Check {
	c := Check{Check: CheckServices, Subject: "the Service", State: Wrong, Seen: "it has got no address", Do: j.explainService(), Pods: []string{s.Spec.Selector[LabelPod]}}
	if a := meta.FindStatusCondition(s.Status.Conditions, loadbalancer.ConditionAssigned); a != nil {
		c.Seen += ": " + plan.Message(a.Message)
		if pool == "" && a.Reason == string(loadbalancer.PoolNotFound) {
			c.State, c.Do, c.Pods = Skipped, "", nil
			c.Seen = "Services have no pool of their own: name one with --service-pool"
		}
	}
	return c
}

func (j Judge) explainService() string {
	if j.Kept {
		return fmt.Sprintf("coilctl why service %s/%s", j.Namespace, ServiceName)
	}
	return "with --keep-failed the Service stays, for coilctl why service NAMESPACE/" + ServiceName
}

// Served is what has become of the questions of a pod to a Service.
type Served struct {
	From, Endpoint Pod
	Addrs          []netip.Addr
	Port           uint16
	Answers        []Answer
	Err            error
}

// Questions are what the pod asks.
func (s Served) Questions() []Question {
	return slices.DeleteFunc(Questions(s.From, Pod{Addrs: s.Addrs}, s.Port, false), func(q Question) bool { return q.Kind != TCP })
}

// Service is the verdict on whether a Service with an address is reached. Its Service proxy may translate the source.
func (j Judge) Service(s Served) Check {
	c := Check{Check: CheckServices, Subject: fmt.Sprintf("%s -> Service -> %s", s.From.Node, s.Endpoint.Node), State: Right, Pods: []string{s.From.Name, s.Endpoint.Name}}
	if s.Err != nil {
		return j.unasked(c, s.Err, s.From)
	}
	var reached, wrong []string
	for i, q := range s.Questions() {
		switch to := q.To.Addr().String(); {
		case i >= len(s.Answers) || s.Answers[i].Question != q.String():
			wrong = append(wrong, to+" wasn't tried")
		case !s.Answers[i].Reached:
			wrong = append(wrong, to+": "+s.Answers[i].Error)
		case s.Answers[i].Name != s.Endpoint.Name:
			wrong = append(wrong, to+" is answered by something other than the Service's pod")
		default:
			reached = append(reached, to)
		}
	}
	switch {
	case len(wrong) > 0:
		c.State, c.Seen, c.Do = Wrong, strings.Join(wrong, "; "), j.explainService()
	case len(reached) == 0:
		c.State, c.Seen = Skipped, "the pod has no address of the Service's families"
	default:
		c.Seen = "it has " + strings.Join(reached, " and ") + ", and is reached from inside of the cluster"
	}
	return c
}
