package kube

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/informers/externalversions"
)

// Factory starts informers and waits for them, as the generated factories do.
type Factory interface {
	StartWithContext(ctx context.Context)
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

// WaitForSync waits until all caches are filled, or ctx ends, or timeout has
// passed; then it is an error that says what most likely is wrong.
func WaitForSync(ctx context.Context, timeout time.Duration, synced ...cache.InformerSynced) error {
	wait, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if !cache.WaitForCacheSync(wait.Done(), synced...) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("caches did not fill within %s: is the API server reachable, and are the CRDs and the RBAC rules installed?", timeout)
	}
	return nil
}
