package kube

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/pkg/testkit"
)

// Handlers get the objects that exist at the start, and informers end with their context.
func TestWatches(t *testing.T) {
	client := metadatafake.NewSimpleMetadataClient(metadatafake.NewTestScheme())
	var watches atomic.Int32
	client.PrependWatchReactor("namespaces", func(clienttesting.Action) (bool, watch.Interface, error) {
		watches.Add(1)
		w := watch.NewFakeWithChanSize(2, false)
		w.Add(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "default", ResourceVersion: "1"}})
		w.Action(watch.Bookmark, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: "1", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
		return true, w, nil
	})
	namespaces := corev1.SchemeGroupVersion.WithResource("namespaces")
	var w Watches
	var told [2]atomic.Int32
	for i := range told {
		w.Add(MetadataInformer(client, namespaces, ""), cache.ResourceEventHandlerFuncs{AddFunc: func(any) { told[i].Add(1) }})
	}
	silent := MetadataInformer(client, namespaces, "")
	w.Add(silent, nil)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(20*time.Second))
	defer cancel()
	w.Start(ctx)
	if err := WaitForSync(ctx, silent.HasSyncedChecker()); err != nil {
		t.Error(err)
	}
	if err := w.Register(); err != nil {
		t.Fatal(err)
	}
	if err := WaitForSync(ctx, w.Synced()...); err != nil {
		t.Error(err)
	}
	if one, another := told[0].Load(), told[1].Load(); one != 1 || another != 1 {
		t.Errorf("told %d times and %d times of one object", one, another)
	}
	cancel()
	w.Shutdown()
	if n := watches.Load(); n != 3 {
		t.Errorf("%d watches", n)
	}
}
