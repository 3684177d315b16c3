package coilctl

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
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
		if !slices.Equal(s.leftovers, []string{"coil-selftest-1"}) {
			t.Errorf("there is still %q", s.leftovers)
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

// What isn't allowed is skipped. What the API server can't do for another reason, as when a webhook doesn't answer, has failed.
func TestSelftestUntried(t *testing.T) {
	now := metav1.NowMicro()
	lease := coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: plan.LBLease}, Spec: coordinationv1.LeaseSpec{HolderIdentity: new("x"), RenewTime: &now}}
	for _, tt := range []struct {
		code   int
		reason metav1.StatusReason
		want   string
	}{
		{http.StatusForbidden, metav1.StatusReasonForbidden, "-     "}, {http.StatusInternalServerError, metav1.StatusReasonInternalError, "FAILED"},
	} {
		pods := []selftest.Pod{{Name: "a", Node: "n1"}}
		refuses := func(refused string) (*tester, *bytes.Buffer) {
			s, out := newTester(nil)
			s.walked["coilctl why service s/selftest"] = nil
			s.clients = apiServer(func(request string) (int, any) {
				switch {
				case request == refused:
					return tt.code, metav1.Status{Status: metav1.StatusFailure, Reason: tt.reason, Message: "no", Code: int32(tt.code)}
				case strings.HasSuffix(request, "/leases/"+plan.LBLease):
					return http.StatusOK, lease
				}
				return http.StatusOK, selftest.Template{Namespace: "s"}.ServiceObject("", "a")
			}).clients(t)
			return s, out
		}
		for refused, want := range map[string]string{
			"GET /apis/coordination.k8s.io/v1/namespaces/kube-system/leases/" + plan.LBLease: "whether coil-lb-controller runs isn't known: ",
			"POST /api/v1/namespaces/s/services":                                             "it can't be made: ",
			"GET /api/v1/namespaces/s/services/selftest":                                     "it can't be read: ",
		} {
			s, out := refuses(refused)
			if err := s.tryService(t.Context(), pods); err != nil || !strings.HasPrefix(out.String(), tt.want+"  services   the Service: "+want) {
				t.Errorf("%s is refused with %d: %v, %s", refused, tt.code, err, out)
			}
		}
		s, out := refuses("POST /apis/coil.cybozu.com/v2/namespaces/s/egresspolicies")
		s.ways = []selftest.Way{{Egress: &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"}}}}
		if all, _, err := s.clientsOf(t.Context(), pods); err != nil || len(all) != 1 || !strings.HasPrefix(out.String(), tt.want+"  policies   internet/nat: an EgressPolicy can't be made: ") {
			t.Errorf("a policy is refused with %d: %v, %v, %s", tt.code, all, err, out)
		}
		s, _ = refuses("GET /apis/coil.cybozu.com/v2/egresses")
		if err := s.findWays(t.Context(), nil); err != nil || len(s.waysLeft) != 1 || (s.waysLeft[0].State == selftest.Wrong) != (tt.code == http.StatusInternalServerError) {
			t.Errorf("a list of Egresses is refused with %d: %v, %+v", tt.code, err, s.waysLeft)
		}
	}
}
