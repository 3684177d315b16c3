package view

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestIsPod(t *testing.T) {
	pod := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: "8d2b"}}
	mirror := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		UID: "8d2b", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "0f3e6a"},
	}}
	for _, c := range []struct {
		what string
		of   *metav1.PartialObjectMetadata
		uid  string
		want bool
	}{
		{"the same", pod, "8d2b", true},
		{"made again under its name", pod, "77aa", false},
		{"not known", pod, "", true},
		{"static, as the runtime calls it", mirror, "0f3e6a", true},
		{"static, as the API server calls it", mirror, "8d2b", true},
		{"static, of another manifest", mirror, "11", false},
	} {
		if got := isPod(c.of, c.uid); got != c.want {
			t.Errorf("%s: %t", c.what, got)
		}
	}
}
