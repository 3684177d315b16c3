package loadbalancer

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An object that was read before a write is known as old, also when the event of the write has come since, and the event of what was read only now. After some
// minutes it isn't: an etcd that was restored has it again.
func TestWritten(t *testing.T) {
	at := func(version string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{UID: "u", ResourceVersion: version}}
	}
	synctest.Test(t, func(t *testing.T) {
		var w written
		wants := func(when, version string, want bool) {
			t.Helper()
			if got := w.has(at(version)); got != want {
				t.Errorf("%s: version %s was written into: %t, want %t", when, version, got, want)
			}
		}
		wants("at first", "1", false)
		w.add(at("1"), at("1"))
		wants("after a write that changed nothing", "1", false)
		w.add(at("1"), at("2"))
		for range 2 {
			wants("after a write", "1", true)
			wants("after a write", "2", false)
			time.Sleep(eventTime - time.Second)
		}
		w.add(at("2"), at("3"))
		wants("after another", "1", false)
		wants("after another", "2", true)
		time.Sleep(2 * eventTime)
		wants("minutes later", "2", false)
		if len(w.recent)+len(w.earlier) > 0 {
			t.Errorf("it goes on knowing %v and %v", w.recent, w.earlier)
		}
	})
}
