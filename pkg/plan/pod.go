package plan

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PodUID is the UID that a Pod has at the runtime: of a static Pod that of its manifest, which the
// mirror Pod at the API server, with a UID of its own, has in an annotation.
func PodUID(p metav1.Object) string {
	if uid := p.GetAnnotations()[corev1.MirrorPodAnnotationKey]; uid != "" {
		return uid
	}
	return string(p.GetUID())
}

// Ready says whether a Pod is ready.
func Ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
