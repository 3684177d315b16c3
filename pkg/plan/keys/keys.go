// Package keys derives the Secret by which nodes know that a message about floating addresses is of a node.
//
// It owns which keys there are, and when they change. It must not know what is sealed by a key.
//
//	next       nobody seals with it yet: a node that is cut off from the API server when the keys change knows it already
//	current    nodes seal with it
//	previous   was current before: some node may not have seen the change yet
package keys

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Namespace and Name are those of the Secret.
const (
	Namespace = "kube-system"
	Name      = "coil-floating"
)

// Period is for how long a key is current.
const Period = 24 * time.Hour

// Size is that of a key in bytes.
const Size = 32

const next, current, previous = "next", "current", "previous"

// Of returns the keys of a Secret, the current one first; nil of one that isn't there, or has no current one.
func Of(s *corev1.Secret) [][]byte {
	if s == nil || len(s.Data[current]) != Size {
		return nil
	}
	var all [][]byte
	for _, name := range []string{current, next, previous} {
		if key := s.Data[name]; len(key) == Size {
			all = append(all, key)
		}
	}
	return all
}

// Rotate returns what the Secret should be, nil if it is so. random returns a new key.
func Rotate(have *corev1.Secret, now time.Time, random func() []byte) *corev1.Secret {
	want := have.DeepCopy()
	at, err := time.Parse(time.RFC3339, have.Annotations[v2.AnnotationRotated])
	whole := len(have.Data[current]) == Size && len(have.Data[next]) == Size
	age := now.Sub(at)
	switch {
	case err == nil && whole && age < Period && age > -Period:
		return nil
	case whole:
		want.Data = map[string][]byte{previous: have.Data[current], current: have.Data[next], next: random()}
	default:
		// It is new, or somebody has changed it. What nodes may seal with is kept.
		want.Data = map[string][]byte{current: random(), next: random()}
		for _, name := range []string{previous, next, current} {
			if len(have.Data[name]) == Size {
				want.Data[name] = have.Data[name]
			}
		}
	}
	if want.Annotations == nil {
		want.Annotations = map[string]string{}
	}
	want.Annotations[v2.AnnotationRotated] = now.UTC().Format(time.RFC3339)
	return want
}
