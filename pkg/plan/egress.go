package plan

import (
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Labels of router pods and of what belongs to an Egress. The contract fixes them: they
// select the routers of a Deployment, which is immutable.
const (
	labelName      = "app.kubernetes.io/name"
	labelInstance  = "app.kubernetes.io/instance"
	labelComponent = "app.kubernetes.io/component"

	nameCoil        = "coil"
	componentEgress = "egress"
)

// RouterAccount is the name of the ServiceAccount of routers in each namespace that has an
// Egress, of the ClusterRole with their rights, and of the RoleBinding of the two there. The
// ClusterRoleBinding of the name is that of former versions.
const RouterAccount = "coil-egress"

// RouterLabels select the router pods of an Egress in its namespace.
func RouterLabels(egress string) map[string]string {
	return map[string]string{labelName: nameCoil, labelInstance: egress, labelComponent: componentEgress}
}

// RouterSelector selects, as text, the objects and router pods of all Egresses.
func RouterSelector() string {
	return labels.Set{labelName: nameCoil, labelComponent: componentEgress}.String()
}

// RouterOf returns the name of the Egress, in its namespace, of an object with these
// labels, and false if they aren't those of a router.
func RouterOf(l map[string]string) (egress string, ok bool) {
	egress = l[labelInstance]
	return egress, egress != "" && l[labelName] == nameCoil && l[labelComponent] == componentEgress
}

// RouterLabelKeys are the keys of RouterLabels.
func RouterLabelKeys() []string { return []string{labelName, labelInstance, labelComponent} }

// MostEgresses is how many Egresses a pod may use.
const MostEgresses = 64

// EgressRefs returns the Egresses that the annotations of a pod name, each once, by namespace, and in a namespace in
// the order of the annotation. There are at most MostEgresses, and one more if others are named. Spaces around
// names, and empty names, are as if they weren't there.
//
// A tenant who may edit a pod writes as many names into its annotations as 256 KiB hold, again and again.
func EgressRefs(annotations map[string]string) []types.NamespacedName {
	var refs []types.NamespacedName
	known := map[types.NamespacedName]bool{}
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		ns, ok := strings.CutPrefix(key, v2.AnnotationEgressPrefix)
		if !ok {
			continue
		}
		for name := range strings.SplitSeq(annotations[key], ",") {
			ref := types.NamespacedName{Namespace: ns, Name: strings.TrimSpace(name)}
			if ref.Name == "" || known[ref] {
				continue
			}
			known[ref] = true
			if refs = append(refs, ref); len(refs) > MostEgresses {
				return refs
			}
		}
	}
	return refs
}

var egressKind = schema.GroupVersionKind{Group: v2.GroupVersion.Group, Version: v2.GroupVersion.Version, Kind: "Egress"}

// controlledBy is the reference by which an Egress owns an object.
func controlledBy(e *v2.Egress) metav1.OwnerReference {
	return *metav1.NewControllerRef(e, egressKind)
}
