package apiserver

import (
	"github.com/coil-net/coil/pkg/testkit"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// attempt is a write that the API server accepts, or rejects with the name of
// the field and a reason.
type attempt struct {
	name string
	// object is the name of the object; a fresh one if empty.
	object string
	// old is what exists before; if empty, new is created, else old becomes new.
	// Both are YAML without apiVersion, kind and metadata.
	old, new string
	// field and reason are of the rejection; both are empty if new is accepted.
	field, reason string
	// also is a field that is then rejected, too.
	also string
}

// kind is a kind of the API in these tests.
type kind struct {
	name     string
	resource schema.GroupVersionResource
	scoped   bool // in a namespace
}

var (
	poolKind    = kind{"AddressPool", addressPools, false}
	blockKind   = kind{"AddressBlock", addressBlocks, false}
	requestKind = kind{"BlockRequest", blockRequests, false}
	egressKind  = kind{"Egress", egresses, true}
	claimKind   = kind{"AddressClaim", addressClaims, true}
	gatewayKind = kind{"LoadBalancerGateway", loadBalancerGateways, false}

	policyKind        = kind{"EgressPolicy", egressPolicies, true}
	clusterPolicyKind = kind{"EgressClusterPolicy", egressClusterPolicies, false}
)

// client returns the client for objects of the kind.
func (k kind) client(c dynamic.Interface) dynamic.ResourceInterface {
	if k.scoped {
		return c.Resource(k.resource).Namespace(metav1.NamespaceDefault)
	}
	return c.Resource(k.resource)
}

// object returns an object of the kind.
func (k kind) object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	obj := &unstructured.Unstructured{}
	if err := yaml.UnmarshalStrict([]byte(text), &obj.Object); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	obj.SetGroupVersionKind(k.resource.GroupVersion().WithKind(k.name))
	return obj
}

// named returns an object of the kind that has a name.
func (k kind) named(t *testing.T, name, text string) *unstructured.Unstructured {
	t.Helper()
	obj := k.object(t, text)
	obj.SetName(name)
	return obj
}

// write makes the attempt; what the API server says of it is the error.
func (k kind) write(t *testing.T, client dynamic.ResourceInterface, a attempt) error {
	t.Helper()
	name := a.object
	if name == "" {
		name = fresh("o")
	}
	strict := metav1.FieldValidationStrict
	if a.old == "" {
		_, err := client.Create(t.Context(), k.named(t, name, a.new), metav1.CreateOptions{FieldValidation: strict})
		return err
	}
	old, err := client.Create(t.Context(), k.named(t, name, a.old), metav1.CreateOptions{FieldValidation: strict})
	if err != nil {
		t.Fatalf("the object that is to be changed: %v", err)
	}
	obj := k.named(t, name, a.new)
	obj.SetResourceVersion(old.GetResourceVersion())
	_, err = client.Update(t.Context(), obj, metav1.UpdateOptions{FieldValidation: strict})
	return err
}

// check compares what the API server said with what the attempt expects.
func (a attempt) check(t *testing.T, err error) {
	t.Helper()
	if a.field == "" {
		if err != nil {
			t.Errorf("rejected: %v", err)
		}
		return
	}
	if err == nil {
		t.Fatalf("accepted; want a rejection of %s: %s", a.field, a.reason)
	}
	if !apierrors.IsInvalid(err) {
		t.Fatalf("reason is %s, not Invalid: %v", apierrors.ReasonForError(err), err)
	}
	causes := causesOf(err)
	if !slices.ContainsFunc(causes, func(c metav1.StatusCause) bool {
		return c.Field == a.field && strings.Contains(c.Message, a.reason)
	}) {
		t.Errorf("no cause names the field %q and the reason %q: %v", a.field, a.reason, err)
	}
	// Other causes must be about the same field, or the test tests less
	// than it says.
	for _, c := range causes {
		if !strings.HasPrefix(c.Field, a.field) && c.Field != a.also && !strings.Contains(c.Message, "were not checked") {
			t.Errorf("%s is rejected too: %s", c.Field, c.Message)
		}
	}
}

// causesOf returns what the API server found wrong.
func causesOf(err error) []metav1.StatusCause {
	status, ok := err.(apierrors.APIStatus)
	if !ok || status.Status().Details == nil {
		return nil
	}
	return status.Status().Details.Causes
}

func TestValidation(t *testing.T) {
	eachVersion(t, func(t *testing.T, version string) {
		client := testkit.Must(dynamic.NewForConfig(shared(t, version).RESTConfig()))(t)
		for _, table := range []struct {
			kind     kind
			attempts []attempt
		}{
			{poolKind, append(poolAttempts(), gatewayPoolAttempts()...)},
			{gatewayKind, gatewayAttempts()},
			{poolKind, poolChanges()},
			{blockKind, blockAttempts()},
			{requestKind, requestAttempts()},
			{egressKind, egressAttempts()},
			{claimKind, claimAttempts()},
			{policyKind, policyAttempts()},
			{clusterPolicyKind, clusterPolicyAttempts()},
		} {
			objects := table.kind.client(client)
			for _, a := range table.attempts {
				t.Run(table.kind.name+"/"+a.name, func(t *testing.T) {
					a.check(t, table.kind.write(t, objects, a))
				})
			}
		}
	})
}
