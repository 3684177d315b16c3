package view

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/pkg/reconcile"
)

// newPods are pods that have come to the node while it was watched.
type newPods struct {
	// asking finds out the policies of their namespaces.
	asking *reconcile.Loop[newPod]

	mu sync.Mutex
	// came are their resource versions when they came, by UID: those of their bindings, or later ones, since the watch has the pods of the
	// node only. kubelet changes a pod before it adds it.
	came map[types.UID]string
}

// newPod is a pod's namespace, and the version of the pod when it came.
type newPod struct{ namespace, version string }

// since returns the version of a pod when it came to the node, or that of now. Neither is older than the pod's binding.
func (n *newPods) since(pod *metav1.PartialObjectMetadata) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if v, known := n.came[pod.UID]; known {
		return v
	}
	return pod.ResourceVersion
}

// come notes a pod that has come.
func (n *newPods) come(pod *metav1.PartialObjectMetadata) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.came == nil {
		n.came = map[types.UID]string{}
	}
	if _, known := n.came[pod.UID]; !known {
		n.came[pod.UID] = pod.ResourceVersion
		n.asking.Add(newPod{pod.Namespace, pod.ResourceVersion})
	}
}

// gone forgets a pod.
func (n *newPods) gone(pod *metav1.PartialObjectMetadata) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.came, pod.UID)
}

// handler returns an event handler that follows the pods of the node, and passes each that changes on.
func (n *newPods) handler(changed func(*metav1.PartialObjectMetadata)) cache.ResourceEventHandler {
	all := reconcile.Handler(changed)
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(obj any, initially bool) {
			if p, ok := obj.(*metav1.PartialObjectMetadata); ok && !initially {
				n.come(p)
			}
			all.OnAdd(obj, initially)
		},
		UpdateFunc: func(before, after any) {
			was, _ := before.(*metav1.PartialObjectMetadata)
			if is, ok := after.(*metav1.PartialObjectMetadata); ok && was != nil && was.UID != is.UID { // the watch was away when the first one went
				n.gone(was)
				n.come(is)
			}
			all.OnUpdate(before, after)
		},
		DeleteFunc: func(obj any) {
			if t, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = t.Obj
			}
			if p, ok := obj.(*metav1.PartialObjectMetadata); ok {
				n.gone(p)
			}
			all.OnDelete(obj)
		},
	}
}

// askedAtOnce is for how many new pods policies are asked for at once.
const askedAtOnce = 8

// Run asks for the policies of pods that come to the node until ctx ends.
func (e *Egresses) Run(ctx context.Context) error {
	return e.policies.pods.asking.Run(ctx, askedAtOnce)
}

// ask finds out the policies of a new pod. Without an answer they are asked for when the pod is added.
func (e *Egresses) ask(ctx context.Context, pod newPod) error {
	_, _, _ = e.policiesAsOf(ctx, pod.namespace, pod.version)
	return nil
}
