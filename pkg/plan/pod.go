package plan

import (
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
