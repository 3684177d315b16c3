package apiserver

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// maxCRDSize is what leaves room for the annotation of client-side apply, which
// holds the whole definition in at most 256 KiB.
const maxCRDSize = 150 << 10

func TestClientSideApplyOfTheDefinitions(t *testing.T) {
	t.Parallel() // it has API servers of its own
	eachVersion(t, func(t *testing.T, version string) {
		api := own(t, controlplane.Options{KubernetesVersion: version})
		files := testkit.Must(crdFiles())(t)
		args := []string{"apply"}
		for _, file := range files {
			if info := testkit.Must(os.Stat(file))(t); info.Size() >= maxCRDSize {
				t.Errorf("%s has %d bytes, not less than %d", file, info.Size(), maxCRDSize)
			}
			args = append(args, "--filename="+file)
		}
		for _, want := range []string{"created", "unchanged"} {
			out := string(testkit.Must(api.Kubectl(t.Context(), args...))(t))
			if n := strings.Count(out, want); n != len(files) {
				t.Errorf("%d of %d definitions are %s:\n%s", n, len(files), want, out)
			}
		}
		client := testkit.Must(dynamic.NewForConfig(api.RESTConfig()))(t)
		for _, crd := range testkit.Must(readCRDs())(t) {
			if err := waitForCRD(t.Context(), client, crd); err != nil {
				t.Errorf("%s: %v", crd.GetName(), err)
			}
			got := testkit.Must(client.Resource(crds).Get(t.Context(), crd.GetName(), metav1.GetOptions{}))(t)
			if got.GetAnnotations()["kubectl.kubernetes.io/last-applied-configuration"] == "" {
				t.Errorf("%s wasn't applied by the client", crd.GetName())
			}
		}
		// Files that users of Coil 2.x have still apply.
		for _, want := range []string{"created", "unchanged"} {
			out := string(testkit.Must(api.Kubectl(t.Context(), "apply", "--validate=strict", "--filename=testdata/objects-2.x.yaml"))(t))
			if n := strings.Count(out, want); n != 7 {
				t.Errorf("%d of 7 objects are %s:\n%s", n, want, out)
			}
		}
	})
}

// withoutRules returns the definitions as they would be if they accepted every
// object of the right shape, as those of Coil 2.x did of many.
func withoutRules() ([]*unstructured.Unstructured, error) {
	definitions, err := readCRDs()
	for _, crd := range definitions {
		dropRules(crd.Object["spec"])
	}
	return definitions, err
}

// dropRules removes all that limits values from a schema.
func dropRules(node any) {
	switch n := node.(type) {
	case map[string]any:
		for _, limit := range []string{"x-kubernetes-validations", "maxItems", "minItems", "maxLength", "minLength", "maximum", "minimum", "enum"} {
			delete(n, limit)
		}
		for _, child := range n {
			dropRules(child)
		}
	case []any:
		for _, child := range n {
			dropRules(child)
		}
	}
}

// TestObjectsThatBreakNewRules holds that objects from before the rules can be
// changed where they don't break them further, and deleted.
func TestObjectsThatBreakNewRules(t *testing.T) {
	t.Parallel() // it has API servers of its own
	eachVersion(t, func(t *testing.T, version string) {
		api := own(t, controlplane.Options{KubernetesVersion: version})
		cfg := api.RESTConfig()
		cfg.WarningHandler = rest.NoWarnings{} // that old objects break rules
		client := testkit.Must(dynamic.NewForConfig(cfg))(t)
		if err := installCRDs(t.Context(), cfg, withoutRules); err != nil {
			t.Fatal(err)
		}
		objects := oldObjects()
		for _, o := range objects {
			obj := o.kind.named(t, o.object, o.text)
			obj.SetFinalizers([]string{"coil.cybozu.com/test"})
			if _, err := o.kind.client(client).Create(t.Context(), obj, metav1.CreateOptions{}); err != nil {
				t.Fatalf("%s before the rules: %v", o.name, err)
			}
		}
		if err := installCRDs(t.Context(), cfg, readCRDs); err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			waitUntilRejected(t, o, client)
			t.Run(o.kind.name+"/"+o.name, func(t *testing.T) { o.use(t, o.kind.client(client)) })
		}
	})
}

// oldObject is an object that is no longer accepted.
type oldObject struct {
	name   string
	kind   kind
	object string
	text   string
	// more are changes, as merge patches, that its owner still has to make.
	more []string
	// broken is a change that breaks a rule anew.
	broken string
}

func oldObjects() []oldObject {
	return []oldObject{
		{name: "host bits", kind: poolKind, object: "host-bits", text: `spec: {subnets: [{ipv4: 10.0.0.1/16}]}`,
			more:   []string{`spec: {subnets: [{ipv4: 10.0.0.1/16}, {ipv4: 10.1.0.0/16}]}`},
			broken: `spec: {subnets: [{ipv4: 10.0.0.1/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.2.0.1/16}]}`},
		{name: "overlap", kind: poolKind, object: "overlap", text: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.0.0.0/16}]}`,
			more:   []string{`spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`},
			broken: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.1.0.0/16}]}`},
		{name: "large blocks", kind: poolKind, object: "large-blocks", text: `spec: {blockSizeBits: 20, subnets: [{ipv6: "fd00::/96"}]}`,
			more:   []string{`spec: {subnets: [{ipv6: "fd00::/96"}, {ipv6: "fd01::/96"}]}`},
			broken: `spec: {blockSizeBits: 21}`},
		{name: "long name", kind: poolKind, object: strings.Repeat("p", 64), text: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`,
			more:   []string{`spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`},
			broken: `spec: {subnets: []}`},
		{name: "odd block", kind: blockKind, object: "odd", text: `{index: 1, ipv4: 10.0.0.1/12, ipv6: "fd00::/64"}`,
			more:   []string{`metadata: {labels: {coil.cybozu.com/node: worker}}`},
			broken: `{ipv4: 10.0.0.0/12}`},
		{name: "no names", kind: requestKind, object: "no-names", text: `spec: {nodeName: "", poolName: ""}`,
			more:   []string{`metadata: {ownerReferences: [{apiVersion: v1, kind: Node, name: worker, uid: "1"}]}`},
			broken: `spec: {poolName: default}`},
		{name: "host bits in a destination", kind: egressKind, object: "host-bits", text: `spec: {destinations: [10.0.0.1/8]}`,
			more:   []string{`spec: {replicas: 3}`, `spec: {destinations: [10.0.0.0/8]}`},
			broken: `spec: {destinations: [10.0.0.2/8]}`},
		{name: "no destinations", kind: egressKind, object: "1.dot", text: `spec: {destinations: []}`,
			more:   []string{`spec: {replicas: 3}`, `spec: {destinations: [10.0.0.0/8]}`},
			broken: `spec: {replicas: -1}`},
		{name: "both bounds", kind: egressKind, object: "both-bounds",
			text:   `spec: {destinations: [10.0.0.0/8], podDisruptionBudget: {minAvailable: 1, maxUnavailable: 1}, sessionAffinity: None, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}, strategy: {type: Other}}`,
			more:   []string{`spec: {replicas: 3}`, `spec: {template: {spec: {priorityClassName: high}}}`},
			broken: `spec: {podDisruptionBudget: {maxUnavailable: x}}`},
	}
}

// waitUntilRejected returns when the API server applies the rules that an old
// object breaks: it takes a moment after a change of a definition.
func waitUntilRejected(t *testing.T, o oldObject, client dynamic.Interface) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, o.name+": the rules apply", func() error {
		obj := o.kind.named(t, o.object, o.text)
		obj.SetName(o.object + "x")
		_, err := o.kind.client(client).Create(t.Context(), obj, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if !apierrors.IsInvalid(err) {
			return errors.Join(errors.New("not rejected"), err)
		}
		return nil
	})
}

// use changes and deletes an object that breaks a rule.
func (o oldObject) use(t *testing.T, client dynamic.ResourceInterface) {
	t.Helper()
	ctx := t.Context()
	patch := func(text string, subresources ...string) error {
		json := testkit.Must(o.kind.named(t, o.object, text).MarshalJSON())(t)
		_, err := client.Patch(ctx, o.object, types.MergePatchType, json, metav1.PatchOptions{}, subresources...)
		return err
	}
	if err := patch(`metadata: {annotations: {touched: "yes"}}`); err != nil {
		t.Errorf("annotate: %v", err)
	}
	if err := patch(o.status(), "status"); err != nil {
		t.Errorf("write the status: %v", err)
	}
	for _, change := range o.more {
		if err := patch(change); err != nil {
			t.Errorf("change %s: %v", change, err)
		}
	}
	if err := patch(o.broken); !apierrors.IsInvalid(err) {
		t.Errorf("change %s: error %v; want it to be rejected", o.broken, err)
	}
	if err := client.Delete(ctx, o.object, metav1.DeleteOptions{}); err != nil {
		t.Errorf("delete: %v", err)
	}
	if err := patch(`metadata: {finalizers: null}`); err != nil {
		t.Errorf("remove the finalizer: %v", err)
	}
	if err := gone(ctx, client, o.object); err != nil {
		t.Error(err)
	}
}

// status is a change of the status of the kind.
func (o oldObject) status() string {
	return map[string]string{
		poolKind.name:    `status: {blocks: {used: 1, total: 2, summary: 1/2}}`,
		blockKind.name:   `status: {allocated: 3, cooling: 1}`,
		requestKind.name: `status: {conditions: [{type: Failed, status: "True", reason: PoolNotFound, message: no pool}]}`,
		egressKind.name:  `status: {replicas: 2, selector: a=b}`,
	}[o.kind.name]
}

// gone returns nil when the object doesn't exist.
func gone(ctx context.Context, client dynamic.ResourceInterface, name string) error {
	_, err := client.Get(ctx, name, metav1.GetOptions{})
	if err == nil {
		return errors.New(name + " still exists")
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
