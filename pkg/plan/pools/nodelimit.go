package pools

import corev1 "k8s.io/api/core/v1"

const (
	// unknownPods is how many pods a Node is taken to run that doesn't say it.
	unknownPods = 1024
	// maxPods bounds how many pods count. A kubelet's token, if stolen, lets its Node say any number and so
	// drain every pool; nodes that serve their pods run some hundred, at most a few thousand.
	maxPods = 4096
	// restAddresses is for addresses of deleted pods that cool down, beyond one per pod.
	restAddresses = 1024
)

// MostPods is how many pods a node may run, as far as they count.
func MostPods(n *corev1.Node) int64 {
	for _, l := range []corev1.ResourceList{n.Status.Allocatable, n.Status.Capacity} {
		if pods, ok := l[corev1.ResourcePods]; ok {
			return min(max(pods.Value(), 0), maxPods)
		}
	}
	return unknownPods
}

// NodeLimit is how many addresses of a pool the pods of a node can need: one for each pod, one for its
// predecessor that cools down, some more of those, a block that is asked for ahead of need and one that
// is about to be given back.
func NodeLimit(n *corev1.Node, blockSize int) int64 {
	return 2*MostPods(n) + restAddresses + 2*int64(blockSize)
}
