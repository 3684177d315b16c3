package apiserver

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// The API server accepts all objects that coilctl makes of those of other egress systems, as they are in the tests of the conversion, and completes
// them by its defaults.
func TestConvertedObjectsAreValid(t *testing.T) {
	api := own(t, controlplane.Options{})
	testkit.Check(t, installCRDs(t.Context(), api.RESTConfig(), readCRDs))
	core := testkit.Must(kubernetes.NewForConfig(api.RESTConfig()))(t)
	for _, ns := range []string{"egress", "shop", "a", "b", "blue", "grey", "plain"} {
		testkit.Must(core.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{}))(t)
	}
	files := testkit.Must(filepath.Glob("../../pkg/plan/convert/testdata/*.out.yaml"))(t)
	if len(files) < 12 {
		t.Fatalf("there are only %d conversions", len(files))
	}
	args := []string{"create", "--dry-run=server", "--validate=strict", "--output=json"}
	for _, f := range files {
		args = append(args, "--filename="+f)
	}
	out, err := api.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	seen := map[string]int{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var raw json.RawMessage
		testkit.Check(t, dec.Decode(&raw))
		var head metav1.TypeMeta
		testkit.Check(t, json.Unmarshal(raw, &head))
		seen[head.Kind]++
		if wrong := withoutDefaults(t, head.Kind, raw); wrong != "" {
			t.Errorf("%s: %s", wrong, raw)
		}
	}
	for _, kind := range []string{"AddressPool", "Egress", "EgressPolicy", "EgressClusterPolicy"} {
		if seen[kind] == 0 {
			t.Errorf("there is no object of kind %s among %v", kind, seen)
		}
	}
}

// withoutDefaults says what is wrong with an object as the API server would keep it.
func withoutDefaults(t *testing.T, kind string, raw []byte) string {
	t.Helper()
	switch kind {
	case "AddressPool":
		var p v2.AddressPool
		testkit.Check(t, json.Unmarshal(raw, &p))
		if p.Spec.BlockSizeBits != 0 || p.Spec.Purpose != v2.PurposeFloating || p.Spec.Announce != v2.AnnounceNeighbor {
			return "it isn't a pool of floating addresses"
		}
	case "Egress":
		var e v2.Egress
		testkit.Check(t, json.Unmarshal(raw, &e))
		if e.Spec.Peering != v2.EgressPeeringDirect || e.Spec.Replicas < 1 || e.Spec.SessionAffinity == "" {
			return "it has no routers that clients reach"
		}
		if a := e.Spec.Addresses.Assignment; a != nil && (a.Strategy == "" || a.WhenFull == "") {
			return "its assignment has no defaults"
		}
	case "EgressPolicy":
		var p v2.EgressPolicy
		testkit.Check(t, json.Unmarshal(raw, &p))
		if p.Spec.OnFailure != v2.EgressFailureClosed {
			return "it doesn't fail closed"
		}
	case "EgressClusterPolicy":
		var p v2.EgressClusterPolicy
		testkit.Check(t, json.Unmarshal(raw, &p))
		if p.Spec.OnFailure != v2.EgressFailureClosed {
			return "it doesn't fail closed"
		}
	default:
		return "it is none of the kinds that are made"
	}
	return ""
}
