package plan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
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

// RouterLabels select the router pods of an Egress in its namespace.
func RouterLabels(egress string) map[string]string {
	return map[string]string{labelName: nameCoil, labelInstance: egress, labelComponent: componentEgress}
}

// CommonLabels are those of RouterLabels that all Egresses have in common.
func CommonLabels() map[string]string {
	return map[string]string{labelName: nameCoil, labelComponent: componentEgress}
}

// RouterSelector selects, as text, the objects and router pods of all Egresses.
func RouterSelector() string {
	return labels.Set(CommonLabels()).String()
}

// RouterOf returns the name of the Egress, in its namespace, of an object with these
// labels, and false if they aren't those of a router.
func RouterOf(l map[string]string) (egress string, ok bool) {
	egress = l[labelInstance]
	return egress, egress != "" && l[labelName] == nameCoil && l[labelComponent] == componentEgress
}

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

// AllowedNamespaces selects the namespaces whose pods may be clients, by their labels. On an error,
// the selector can't be understood, it selects none.
func AllowedNamespaces(e *v2.Egress) (labels.Selector, error) {
	if e.Spec.AllowedNamespaces == nil {
		return labels.Everything(), nil
	}
	selector, err := metav1.LabelSelectorAsSelector(e.Spec.AllowedNamespaces)
	if err != nil {
		return labels.Nothing(), fmt.Errorf("spec.allowedNamespaces: %w", err)
	}
	return selector, nil
}

// AllowsNamespace says whether pods of a namespace with these labels may be clients.
func AllowsNamespace(e *v2.Egress, namespaceLabels map[string]string) (bool, error) {
	selector, err := AllowedNamespaces(e)
	return selector.Matches(labels.Set(namespaceLabels)), err
}

// DefaultEgresses returns those that are the default of the cluster, unless they are being deleted. The first one, which is the
// oldest, is it.
func DefaultEgresses(all []*v2.Egress) []*v2.Egress {
	var defaults []*v2.Egress
	for _, e := range all {
		if e.Spec.Default && e.DeletionTimestamp == nil {
			defaults = append(defaults, e)
		}
	}
	slices.SortFunc(defaults, func(a, b *v2.Egress) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return defaults
}

// SameEgress says whether two states of an Egress are one to its clients and routers: metadata.generation
// counts changes of its spec and its deletion (Kubernetes API conventions), and of the status they use the
// ranges of the cluster, which floating addresses there are and, if these are the routers', which router has which. The rest of the status
// counts: each client that comes or goes changes it.
func SameEgress(a, b *v2.Egress) bool {
	return a.Generation == b.Generation && (a.Status.ObservedGeneration == 0) == (b.Status.ObservedGeneration == 0) &&
		slices.Equal(a.Status.InClusterCIDRs, b.Status.InClusterCIDRs) && SameAddresses(a, b) && (!b.Spec.Addresses.For(v2.EgressAddressOfRouter) || sameRouters(a, b))
}

// sameRouters says whether the same routers have the same floating addresses in two states of an Egress with as many.
func sameRouters(a, b *v2.Egress) bool {
	return slices.EqualFunc(a.Status.Addresses, b.Status.Addresses, func(x, y v2.EgressAddressStatus) bool { return x.Router == y.Router })
}

// SameAddresses says whether two states of an Egress have the same floating addresses, wherever these are.
func SameAddresses(a, b *v2.Egress) bool {
	return slices.EqualFunc(a.Status.Addresses, b.Status.Addresses, func(x, y v2.EgressAddressStatus) bool {
		return x.Block == y.Block && x.EgressAddress == y.EgressAddress
	})
}

// AddressOf returns the floating address of an Egress by which clients leave that is in a block, or the first one for pods that name the Egress
// themselves, with an empty block; nil if there is none.
func AddressOf(e *v2.Egress, block string) *v2.EgressAddressStatus {
	if !e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		return nil
	}
	for i := range e.Status.Addresses {
		if a := &e.Status.Addresses[i]; block == "" || a.Block == block {
			return a
		}
	}
	return nil
}

// RouterWith returns the UID of the router pod to which packets for the floating address of an AddressBlock go, empty if no node has the
// address.
func RouterWith(b *v2.AddressBlock) types.UID {
	if b.Floating == nil || b.Floating.Holding.Holder == "" {
		return ""
	}
	h := b.Floating.Holding
	for _, n := range b.Floating.Successors {
		if n.Node == h.Holder {
			return n.PodUID // another pod may have taken its place since the node got the address
		}
	}
	return h.PodUID
}

// Settled says whether the node that has the floating address of an AddressBlock answers for the router with it, and not for another one from which
// the address is about to be taken.
func Settled(b *v2.AddressBlock) bool {
	return b.Floating != nil && b.Floating.Holding.PodUID == RouterWith(b)
}
