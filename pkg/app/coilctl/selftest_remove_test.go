package coilctl

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/pkg/plan/selftest"
	"github.com/coil-net/coil/pkg/testkit"
)

// apiServer answers a request, such as "GET /api/v1/nodes", with a code and an object. It needs no network, so that its time may be a test's.
type apiServer func(request string) (code int, object any)

// RoundTrip implements http.RoundTripper.
func (a apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	code, object := a(r.Method + " " + r.URL.Path)
	text, err := json.Marshal(object)
	return &http.Response{StatusCode: code, Request: r, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(string(text)))}, err
}

// clients are those of the API server.
func (a apiServer) clients(t *testing.T) clients {
	t.Helper()
	c := &rest.Config{Host: "http://api", Transport: a, QPS: 1000, Burst: 1000, ContentConfig: rest.ContentConfig{ContentType: "application/json", AcceptContentTypes: "application/json"}}
	return clients{core: testkit.Must(kubernetes.NewForConfig(c))(t), coil: testkit.Must(versioned.NewForConfig(c))(t)}
}

// A pod that never goes ends the wait, and its namespace is deleted nevertheless. A namespace that only has the labels of one isn't touched.
func TestSelftestRemoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var deleted []string
		now := metav1.Now()
		stuck := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "coil-selftest-1", Name: "node-0", UID: "u", DeletionTimestamp: &now, Finalizers: []string{"example.com/held"}}}
		s, out := newTester(nil)
		s.clients = apiServer(func(request string) (int, any) {
			switch method, path, _ := strings.Cut(request, " "); {
			case method == http.MethodDelete:
				if !strings.Contains(path, "/pods/") {
					deleted = append(deleted, path)
				}
				return http.StatusOK, metav1.Status{Status: metav1.StatusSuccess}
			case strings.HasSuffix(path, "/pods"):
				return http.StatusOK, corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: []corev1.Pod{stuck}}
			}
			going := corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "coil-selftest-0", DeletionTimestamp: &now}}
			others := corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a-shop", Labels: selftest.Labels()}}
			left := corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "coil-selftest-1", Labels: selftest.Labels()}}
			return http.StatusOK, corev1.NamespaceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NamespaceList"}, Items: []corev1.Namespace{going, others, left}}
		}).clients(t)
		began := time.Now()
		err := s.removeLeftovers(t.Context())
		if err == nil || !strings.Contains(err.Error(), "wait until Pod coil-selftest-1/node-0 is gone: ") || time.Since(began) > 2*removeWithin {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		if !slices.Equal(deleted, []string{"/api/v1/namespaces/coil-selftest-1"}) {
			t.Errorf("it deletes %q", deleted)
		}
		if out.String() != "Namespace coil-selftest-1 of an earlier selftest is removed\n" {
			t.Errorf("it says %s", out)
		}

		deleted, s.made, s.template.Namespace = nil, true, "coil-selftest-1"
		if err := s.end(t.Context()); err == nil || !strings.Contains(err.Error(), "remove the rest by kubectl delete namespace coil-selftest-1") || len(deleted) != 1 {
			t.Errorf("at the end: %v, it deletes %q", err, deleted)
		}
	})
}
