package kube

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/coil-net/coil/pkg/testkit"
)

// A cache is current as long as a watch is open, and not from its end until a while after the next
// one was opened.
func TestCurrent(t *testing.T) {
	client := metadatafake.NewSimpleMetadataClient(metadatafake.NewTestScheme())
	var away atomic.Bool
	opened := make(chan *watch.FakeWatcher, 10)
	client.PrependWatchReactor("namespaces", func(clienttesting.Action) (bool, watch.Interface, error) {
		if away.Load() {
			return true, nil, errors.New("no API server")
		}
		w := watch.NewFakeWithChanSize(1, false)
		opened <- w
		return true, w, nil
	})
	listed := func(w *watch.FakeWatcher) {
		w.Action(watch.Bookmark, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: "1", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	i := MetadataInformer(client, corev1.SchemeGroupVersion.WithResource("namespaces"), "")
	if i.Current() {
		t.Error("current before it runs")
	}
	stop := make(chan struct{})
	i.Start(stop)
	defer func() {
		close(stop)
		i.Shutdown()
	}()
	await := func(want bool) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, "the cache is current, or isn't", func() error {
			if i.Current() != want {
				return errors.New("not yet")
			}
			return nil
		})
	}
	for n := range 3 {
		w := <-opened
		for begin := time.Now(); n == 0 && time.Since(begin) < watchSettle+watchSettle/2; time.Sleep(watchSettle / 20) {
			if i.Current() {
				t.Fatal("current while the first list isn't complete")
			}
		}
		listed(w)
		if i.Current() {
			t.Error("current before the watch can have told what was missed")
		}
		await(true)
		if n == 2 {
			break
		}
		away.Store(true)
		w.Stop()
		await(false)
		away.Store(false)
	}
}
