package audit

import (
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const lines = `
{"auditID":"1","stage":"ResponseStarted","verb":"watch","requestURI":"/api/v1/nodes?fieldSelector=metadata.name%3Da&watch=true","user":{"username":"system:serviceaccount:kube-system:coild"}}
{"auditID":"1","stage":"ResponseComplete","verb":"watch","requestURI":"/api/v1/nodes?fieldSelector=metadata.name%3Da&watch=true","user":{"username":"system:serviceaccount:kube-system:coild"}}
{"auditID":"2","verb":"list","requestURI":"/api/v1/pods","user":{"username":"system:serviceaccount:kube-system:coild"}}
{"auditID":"3","verb":"get","requestURI":"/api/v1/nodes/b","user":{"username":"system:serviceaccount:kube-system:coild"},"responseStatus":{"code":403}}
{"auditID":"4","verb":"list","requestURI":"/api/v1/secrets","user":{"username":"somebody"}}
{"auditID":"5","verb":"li`

func TestProblems(t *testing.T) {
	l, err := New(t.TempDir(), "coild")
	if err != nil {
		t.Fatal(err)
	}
	if rs, err := l.Requests("coild"); len(rs) != 0 || err != nil {
		t.Fatalf("before the API server runs: %v, %v", rs, err)
	}
	if err := os.WriteFile(l.file(), []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	rs, err := l.Requests("coild")
	if err != nil || len(rs) != 3 {
		t.Fatalf("requests %v (%v), want 3: each once, and only coild's", rs, err)
	}
	got, err := Problems("coild", rs, []string{"a", "b"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"get /api/v1/nodes/b was forbidden: a right is missing",
		"it does not watch /api/v1/namespaces",
		"it does not watch /api/v1/namespaces/NAMESPACE/secrets fieldSelector=metadata.name=coil-floating",
		"it does not watch /api/v1/pods fieldSelector=spec.nodeName=NODE",
		"it does not watch /api/v1/services labelSelector=app.kubernetes.io/component=egress,app.kubernetes.io/name=coil",
		"it does not watch /apis/coil.cybozu.com/v2/addressblocks labelSelector=coil.cybozu.com/floating=true",
		"it does not watch /apis/coil.cybozu.com/v2/addressblocks labelSelector=coil.cybozu.com/node=NODE",
		"it does not watch /apis/coil.cybozu.com/v2/blockrequests labelSelector=coil.cybozu.com/node=NODE",
		"it does not watch /apis/coil.cybozu.com/v2/egressclusterpolicies",
		"it does not watch /apis/coil.cybozu.com/v2/egresses",
		"it does not watch /apis/coil.cybozu.com/v2/egresspolicies",
		"it does not watch /apis/discovery.k8s.io/v1/endpointslices labelSelector=app.kubernetes.io/component=egress,app.kubernetes.io/name=coil",
		"it lists or watches /api/v1/pods",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	// The node of another is not NODE.
	if got, _ := Problems("coild", rs, []string{"b"}); !slices.Contains(got, "it lists or watches /api/v1/nodes fieldSelector=metadata.name=a") {
		t.Errorf("the watch of a Node that isn't of the nodes: %q", got)
	}
}
