package listing_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/pkg/kube/listing"
	"github.com/coil-net/coil/pkg/testkit"
)

// nodes is a list whose objects are larger than what is read at once.
func nodes(n int) *corev1.NodeList {
	list := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	for i := range n {
		list.Items = append(list.Items, corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i), Annotations: map[string]string{"long": strings.Repeat("x", i*40000)}, CreationTimestamp: metav1.Unix(1000, 0)},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		})
	}
	return list
}

// encoded is a list in a form of the API.
func encoded(t *testing.T, contentType string, list runtime.Object) []byte {
	t.Helper()
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), contentType)
	if !ok {
		t.Fatalf("there is no %s", contentType)
	}
	var b bytes.Buffer
	testkit.Check(t, scheme.Codecs.EncoderForVersion(info.Serializer, corev1.SchemeGroupVersion).Encode(list, &b))
	return b.Bytes()
}

// serve returns a client of a server that answers as told.
func serve(t *testing.T, answer http.HandlerFunc) rest.Interface {
	t.Helper()
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	return testkit.Must(kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1}))(t).CoreV1().RESTClient()
}

// Both forms of a list are read, whatever its length. One that is cut off is an error, never a shorter list.
func TestEach(t *testing.T) {
	for _, contentType := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		for _, n := range []int{0, 1, 4} {
			list := nodes(n)
			whole := encoded(t, contentType, list)
			var query string
			body := whole
			s := listing.Source[corev1.Node]{Selector: "a=b", Resource: "nodes", Client: serve(t, func(w http.ResponseWriter, r *http.Request) {
				query = r.URL.String()
				w.Header().Set("Content-Type", contentType)
				_, _ = w.Write(body)
			})}
			var got []corev1.Node
			read := func() error {
				got = nil
				return listing.Each(t.Context(), s, func(n *corev1.Node) { got = append(got, *n) })
			}
			testkit.Check(t, read())
			if diff := cmp.Diff(list.Items, got); diff != "" || query != "/api/v1/nodes?labelSelector=a%3Db&resourceVersion=0" {
				t.Errorf("%s: asked for %s, -want +got:\n%s", contentType, query, diff)
			}
			s.Trim = func(n *corev1.Node) { n.Status = corev1.NodeStatus{} }
			testkit.Check(t, read())
			if len(got) != n || n > 0 && got[0].Status.Conditions != nil {
				t.Errorf("%s: nothing was taken off %d", contentType, len(got))
			}
			// The newline, and two empty fields after the list, may be missing.
			whole = bytes.TrimSuffix(bytes.TrimRight(whole, "\n"), []byte("\x1a\x00\x22\x00"))
			for cut := 1; cut < len(whole); cut += 1 + len(whole)/97 {
				if body = whole[:cut]; read() == nil {
					t.Errorf("%s: no error after %d of %d bytes, and %d nodes", contentType, cut, len(whole), len(got))
				}
			}
		}
	}
}

// What isn't a list is an error, and what the API server refuses is its error.
func TestRefused(t *testing.T) {
	for body, want := range map[string]string{
		"":                    "EOF",
		"[]":                  "instead of {",
		`{"items":{}}`:        "items of a list are {",
		`{"items":[{}}`:       "invalid character",
		`{"items":[1]}`:       "cannot unmarshal number",
		"k8s\x00":             "unexpected EOF",
		"k8s\x00\x12\x05\x12": "unexpected EOF",
		"k8s\x00\x0b":         "wire type 3",
	} {
		s := listing.Source[corev1.Node]{Resource: "nodes", Client: serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })}
		if err := listing.Each(t.Context(), s, func(*corev1.Node) {}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %s", body, err, want)
		}
	}
	s := listing.Source[corev1.Node]{Resource: "nodes", Client: serve(t, forbid)}
	if err := listing.Each(t.Context(), s, func(*corev1.Node) {}); !apierrors.IsForbidden(err) {
		t.Errorf("error %v", err)
	}
}

func forbid(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	w.WriteHeader(http.StatusForbidden)
	_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
}

// Who follows hears when all is there, and of each change. Errors are told.
func TestFollow(t *testing.T) {
	for _, contentType := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		t.Run(contentType, func(t *testing.T) { follow(t, contentType) })
	}
}

func follow(t *testing.T, contentType string) {
	first := nodes(1)
	first.Items[0].Labels = map[string]string{"drop": "it"}
	list := encoded(t, contentType, first)
	node := func(event, name, version string) string {
		return fmt.Sprintf(`{"type":%q,"object":{"kind":"Node","apiVersion":"v1","metadata":{"name":%q,"resourceVersion":%q,"labels":{"drop":"it"}}}}`, event, name, version)
	}
	later := make(chan string)
	var refuses atomic.Bool
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if refuses.Load() {
			forbid(w, r)
			return
		}
		q := r.URL.Query()
		if q.Get("watch") == "" {
			w.Header().Set("Content-Type", contentType)
			_, _ = w.Write(list)
			return
		}
		if q.Get("resourceVersion") != "7" {
			t.Errorf("the watch begins at %q", q.Get("resourceVersion"))
		}
		w.Header().Set("Content-Type", runtime.ContentTypeJSON)
		w.(http.Flusher).Flush()
		for {
			select {
			case <-r.Context().Done():
				return
			case event := <-later:
				fmt.Fprintln(w, event)
				w.(http.Flusher).Flush()
			}
		}
	})
	synced, changed, failed := make(chan struct{}, 1), make(chan struct{}, 10), make(chan error, 10)
	var done sync.WaitGroup
	s := listing.Source[corev1.Node]{Resource: "nodes", Client: client, Trim: func(n *corev1.Node) { n.Labels = nil }}
	all := listing.Follow[corev1.Node](t.Context(), &done, s, listing.Follower{
		Synced: func() { synced <- struct{}{} }, Changed: func() { changed <- struct{}{} }, Failed: func(err error) { failed <- err },
	})
	t.Cleanup(done.Wait) // the context ends before
	wait := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(testkit.Timeout(20 * time.Second)):
			t.Fatalf("not %s", what)
		}
	}
	wait("synced", synced)
	wait("told of the first node", changed)
	if got := all(); len(got) != 1 || got[0].Name != "n0" || got[0].Labels != nil {
		t.Errorf("there are %+v", got)
	}
	later <- node("ADDED", "b", "8")
	wait("told of another node", changed)
	later <- node("DELETED", "n0", "9")
	wait("told of a node that goes", changed)
	if got := all(); len(got) != 1 || got[0].Name != "b" {
		t.Errorf("there are %+v", got)
	}
	refuses.Store(true)
	refused := listing.Follow[corev1.Node](t.Context(), &done, s, listing.Follower{
		Synced: func() { t.Error("it is synced") }, Changed: func() { t.Error("something has changed") }, Failed: func(err error) { failed <- err },
	})
	select {
	case err := <-failed:
		if !apierrors.IsForbidden(err) || len(refused()) > 0 {
			t.Errorf("error %v", err)
		}
	case <-time.After(testkit.Timeout(20 * time.Second)):
		t.Error("no error")
	}
}
