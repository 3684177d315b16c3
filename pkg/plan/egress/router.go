// Package egress derives the objects that belong to an Egress, those of its routers and the lists of its clients,
// and the status of the Egress.
//
// It must not know what is done on nodes, by clients or by routers.
package egress

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// Defaults of the API server. An owner has to apply them, too: a field without an owner
// stays when the choice that it belongs to changes, and the API server refuses both.
const (
	defaultAffinitySeconds = 10800
	defaultRollingShare    = "25%"
)

// RouterAccount is the name of the ServiceAccount of routers in each namespace that has an
// Egress, of the ClusterRole with their rights, and of the RoleBinding of the two there. The
// ClusterRoleBinding of the name is that of former versions.
const RouterAccount = "coil-egress"

var egressKind = schema.GroupVersionKind{Group: v2.GroupVersion.Group, Version: v2.GroupVersion.Version, Kind: "Egress"}

// controlledBy is the reference by which an Egress owns an object.
func controlledBy(e *v2.Egress) metav1.OwnerReference {
	return *metav1.NewControllerRef(e, egressKind)
}

// RouterImage is how router containers are started.
type RouterImage struct {
	Name       string
	PullPolicy corev1.PullPolicy
	// Port is the UDP port of FoU.
	Port uint16
}

// RouterDeployment returns the Deployment of the routers of an Egress. The error, a
// *TemplateError, says what is wrong with the template.
func RouterDeployment(e *v2.Egress, image RouterImage) (*appsv1.Deployment, error) {
	spec, err := routerPodSpec(e, image)
	if err != nil {
		return nil, err
	}
	template := corev1.PodTemplateSpec{Spec: spec}
	user := cmp.Or(e.Spec.Template, &v2.EgressPodTemplate{}).Metadata
	template.Annotations = maps.Clone(user.Annotations)
	template.Labels = map[string]string{}
	maps.Copy(template.Labels, user.Labels)
	maps.Copy(template.Labels, plan.RouterLabels(e.Name))
	return &appsv1.Deployment{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"},
		ObjectMeta: routerMeta(e),
		Spec: appsv1.DeploymentSpec{
			Replicas: new(e.Spec.Replicas),
			Selector: &metav1.LabelSelector{MatchLabels: plan.RouterLabels(e.Name)},
			Strategy: routerStrategy(e.Spec.Strategy),
			Template: template,
		},
	}, nil
}

func routerMeta(e *v2.Egress) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: e.Namespace, Name: e.Name, Labels: plan.RouterLabels(e.Name),
		OwnerReferences: []metav1.OwnerReference{controlledBy(e)},
	}
}

func routerStrategy(s *appsv1.DeploymentStrategy) appsv1.DeploymentStrategy {
	out := *cmp.Or(s, &appsv1.DeploymentStrategy{}).DeepCopy()
	out.Type = cmp.Or(out.Type, appsv1.RollingUpdateDeploymentStrategyType)
	if out.Type != appsv1.RollingUpdateDeploymentStrategyType {
		return out
	}
	out.RollingUpdate = cmp.Or(out.RollingUpdate, &appsv1.RollingUpdateDeployment{})
	out.RollingUpdate.MaxUnavailable = cmp.Or(out.RollingUpdate.MaxUnavailable, new(intstr.FromString(defaultRollingShare)))
	out.RollingUpdate.MaxSurge = cmp.Or(out.RollingUpdate.MaxSurge, new(intstr.FromString(defaultRollingShare)))
	return out
}

// MostRouters is how many pods the Deployment of an Egress has at most, also while it is rolled out.
func MostRouters(e *v2.Egress) int {
	most := int(e.Spec.Replicas)
	if r := routerStrategy(e.Spec.Strategy).RollingUpdate; r != nil {
		// One that isn't valid is refused with the Deployment.
		if surge, err := intstr.GetScaledValueFromIntOrPercent(r.MaxSurge, most, true); err == nil {
			most += min(max(surge, 0), math.MaxInt32)
		}
	}
	return most
}

// RouterService returns the Service to whose addresses clients send.
func RouterService(e *v2.Egress, port uint16) *corev1.Service {
	s := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: routerMeta(e),
		Spec: corev1.ServiceSpec{
			Type:                  corev1.ServiceTypeClusterIP,
			Selector:              plan.RouterLabels(e.Name),
			IPFamilyPolicy:        new(corev1.IPFamilyPolicyPreferDualStack),
			InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster),
			Ports: []corev1.ServicePort{{
				Protocol: corev1.ProtocolUDP, Port: int32(port), TargetPort: intstr.FromInt32(int32(port)),
			}},
			SessionAffinity: cmp.Or(e.Spec.SessionAffinity, corev1.ServiceAffinityClientIP), // the default, which objects from before it lack
		},
	}
	if s.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return s
	}
	s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(defaultAffinitySeconds))}}
	if c := e.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		*s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds = *c.ClientIP.TimeoutSeconds
	}
	return s
}

// RouterBudget returns the PodDisruptionBudget of an Egress, nil if it has none.
func RouterBudget(e *v2.Egress) *policyv1.PodDisruptionBudget {
	if e.Spec.PodDisruptionBudget == nil {
		return nil
	}
	return &policyv1.PodDisruptionBudget{
		TypeMeta:   metav1.TypeMeta{APIVersion: "policy/v1", Kind: "PodDisruptionBudget"},
		ObjectMeta: routerMeta(e),
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable:   e.Spec.PodDisruptionBudget.MinAvailable,
			MaxUnavailable: e.Spec.PodDisruptionBudget.MaxUnavailable,
			Selector:       &metav1.LabelSelector{MatchLabels: plan.RouterLabels(e.Name)},
			// A router that can't become ready must not keep its node from being drained.
			UnhealthyPodEvictionPolicy: new(policyv1.AlwaysAllow),
		},
	}
}

// RouterServiceAccount returns the account of the routers of a namespace, which goes when
// the last of its Egresses has gone; nil without Egresses.
func RouterServiceAccount(namespace string, egresses []*v2.Egress) *corev1.ServiceAccount {
	meta := accountMeta(namespace, egresses)
	if len(meta.OwnerReferences) == 0 {
		return nil
	}
	return &corev1.ServiceAccount{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: KindServiceAccount}, ObjectMeta: meta}
}

// RouterBinding returns the binding of that account, which goes with it: routers read what is in their
// own namespace.
func RouterBinding(namespace string, egresses []*v2.Egress) *rbacv1.RoleBinding {
	meta := accountMeta(namespace, egresses)
	if len(meta.OwnerReferences) == 0 {
		return nil
	}
	return &rbacv1.RoleBinding{
		TypeMeta: metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: KindRoleBinding}, ObjectMeta: meta,
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: RouterAccount},
		Subjects: []rbacv1.Subject{routerSubject(namespace)},
	}
}

// mostOwners is how many Egresses of a namespace own its account of routers: a namespace may have thousands. When an
// owner is deleted, another Egress takes its place. The account stays as long as one owner is there.
const mostOwners = 32

// accountMeta is the metadata of what the Egresses of a namespace own together. The order of UIDs, which are random,
// makes it unlikely that all owners are deleted at once and others stay: the account made anew would have another UID,
// with which the tokens of running routers are void.
func accountMeta(namespace string, egresses []*v2.Egress) metav1.ObjectMeta {
	all := slices.DeleteFunc(slices.Clone(egresses), func(e *v2.Egress) bool { return e.DeletionTimestamp != nil })
	slices.SortFunc(all, func(a, b *v2.Egress) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), strings.Compare(a.Name, b.Name))
	})
	var owners []metav1.OwnerReference
	for _, e := range all[:min(len(all), mostOwners)] {
		owners = append(owners, metav1.OwnerReference{
			APIVersion: egressKind.GroupVersion().String(), Kind: egressKind.Kind, Name: e.Name, UID: e.UID,
		})
	}
	return metav1.ObjectMeta{
		Namespace: namespace, Name: RouterAccount, OwnerReferences: owners,
		Labels: plan.CommonLabels(),
	}
}

func routerSubject(namespace string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: RouterAccount}
}

// BindsRouters says whether a binding gives the routers of its namespace their rights.
func BindsRouters(b *rbacv1.RoleBinding) bool {
	return b.RoleRef.Kind == "ClusterRole" && b.RoleRef.Name == RouterAccount && slices.Contains(b.Subjects, routerSubject(b.Namespace))
}

// WithoutRouters returns the subjects of the ClusterRoleBinding by which routers had their rights in all
// namespaces, less the accounts of routers in namespaces that don't need it.
func WithoutRouters(subjects []rbacv1.Subject, needs func(namespace string) bool) []rbacv1.Subject {
	return slices.DeleteFunc(slices.Clone(subjects), func(s rbacv1.Subject) bool {
		return s.Kind == rbacv1.ServiceAccountKind && s.Name == RouterAccount && !needs(s.Namespace)
	})
}

// TemplateError says what is wrong with the template of an Egress.
type TemplateError struct{ Reason string }

func (e *TemplateError) Error() string { return e.Reason }

func templateError(format string, args ...any) error {
	return &TemplateError{Reason: fmt.Sprintf(format, args...)}
}
