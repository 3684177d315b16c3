package kube

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/informers/externalversions"
)

// Factory starts informers and waits for their end, as all generated factories do.
type Factory interface {
	Start(stop <-chan struct{})
	Shutdown()
}

// Strip drops what no program of Coil reads from an object before it is cached.
func Strip(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

// CoilInformers returns a factory of informers of Coil's own resources, with
// the labels that the server selects by; an empty selector selects all.
func CoilInformers(c Clients, labelSelector string) externalversions.SharedInformerFactory {
	return externalversions.NewSharedInformerFactoryWithOptions(c.Coil, 0,
		externalversions.WithTransform(Strip),
		externalversions.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = labelSelector }))
}

// WaitForSync waits until all caches are filled; the error is that of ctx.
func WaitForSync(ctx context.Context, synced ...cache.InformerSynced) error {
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return ctx.Err()
	}
	return nil
}
