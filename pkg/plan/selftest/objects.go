package selftest

import (
	"fmt"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

const (
	// Prefix begins the names of namespaces of selftests.
	Prefix = "coil-selftest-"
	// Container is the container of their pods.
	Container = "selftest"
	// Program is the program of that.
	Program = "/coild"
	// Account is the ServiceAccount of the pods, which has no right and no token.
	Account = "selftest"
	// LabelPod on a pod of a selftest is its name, by which policies and Services choose it.
	LabelPod = "coil.cybozu.com/selftest-pod"
	// enforce is the label by which Pod Security says what it lets in.
	enforce = "pod-security.kubernetes.io/enforce"
	// user is one that no image has.
	user = 65532
)

// Labels are those of all that selftests make.
func Labels() map[string]string {
	return map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "selftest"}
}

// Selector selects, as text, what selftests have made.
func Selector() string { return labels.Set(Labels()).String() }

// Template is what the pods of a selftest have in common.
type Template struct {
	Namespace string
	// Pool is the AddressPool of the pods; empty is the default one.
	Pool  string
	Image string
	Port  uint16
	// HostNetwork says that some pods have the network of their node.
	HostNetwork bool
	// PullSecrets are Secrets with the credentials of the image's registry, wherever they are. The namespace gets copies, since kubelets read those of the pod's own namespace only.
	PullSecrets []*corev1.Secret
}

// NamespaceObject is the namespace. Pod Security lets pods in that have no right, unless one needs the network of its node.
func (t Template) NamespaceObject() *corev1.Namespace {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: t.Namespace, Labels: Labels()}}
	if n.Labels[enforce] = "restricted"; t.HostNetwork {
		n.Labels[enforce] = "privileged"
	}
	if t.Pool != "" {
		n.Annotations = map[string]string{v2.AnnotationPool: t.Pool}
	}
	return n
}

// AccountObject is the ServiceAccount: that of a namespace's own comes a moment after the namespace.
func (t Template) AccountObject() *corev1.ServiceAccount {
	return &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: Account, Labels: Labels()}, AutomountServiceAccountToken: new(false),
	}
}

// SecretObjects are the copies of the Secrets by which the image is pulled.
func (t Template) SecretObjects() (all []*corev1.Secret) {
	for i, s := range t.PullSecrets {
		all = append(all, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: fmt.Sprint("pull-", i), Labels: Labels()}, Type: s.Type, Data: s.Data})
	}
	return all
}

// Pulls says whether kubelets take credentials of registries from a Secret.
func Pulls(s *corev1.Secret) bool {
	return s.Type == corev1.SecretTypeDockerConfigJson || s.Type == corev1.SecretTypeDockercfg
}

// PullSecretsOf are the Secrets by which the image of pods is pulled, "namespace/name", sorted.
func PullSecretsOf(pods []*corev1.Pod) (all []string) {
	for _, p := range pods {
		for _, s := range p.Spec.ImagePullSecrets {
			all = append(all, p.Namespace+"/"+s.Name)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Wish is a pod that is to be made.
type Wish struct {
	Name, Node  string
	HostNetwork bool
	// Annotations may name Egresses.
	Annotations map[string]string
}

// Wishes are the pods on nodes, one on each, with numbers from the first one on.
func Wishes(nodes []string, first int) (all []Wish) {
	for i, node := range nodes {
		all = append(all, Wish{Name: fmt.Sprint("node-", first+i), Node: node})
	}
	return all
}

// PodObject is a pod. It has no right, and is bound to its node already: no scheduler has to run.
func (t Template) PodObject(w Wish) *corev1.Pod {
	l := Labels()
	l[LabelPod] = w.Name
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: w.Name, Labels: l, Annotations: w.Annotations},
		Spec: corev1.PodSpec{
			NodeName: w.Node, HostNetwork: w.HostNetwork, ServiceAccountName: Account, AutomountServiceAccountToken: new(false), EnableServiceLinks: new(false),
			RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: new(int64(2)), DNSPolicy: corev1.DNSDefault,
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: new(true), RunAsUser: new(int64(user)), RunAsGroup: new(int64(user)), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: Container, Image: t.Image, ImagePullPolicy: corev1.PullIfNotPresent,
				Command: []string{Program, "selftest", "serve", "--name=" + w.Name, "--port=" + strconv.Itoa(int(t.Port))},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
					corev1.ResourceCPU: resource.MustParse("5m"), corev1.ResourceMemory: resource.MustParse("32Mi"),
				}},
			}},
		},
	}
	for _, s := range t.SecretObjects() {
		p.Spec.ImagePullSecrets = append(p.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: s.Name})
	}
	return p
}

// Asking is the command by which a pod asks.
func Asking(questions []Question, seconds int) []string {
	command := []string{Program, "selftest", "ask"}
	for _, q := range questions {
		command = append(command, q.String())
	}
	return append(command, fmt.Sprintf("--timeout=%ds", seconds))
}
