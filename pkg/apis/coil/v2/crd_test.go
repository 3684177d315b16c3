package v2_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// definition returns the only version of a definition of manifests/crd.
func definition(t *testing.T, plural string) map[string]any {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../../manifests/crd", "coil.cybozu.com_"+plural+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	crd := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(text, &crd.Object); err != nil {
		t.Fatal(err)
	}
	versions, _, err := unstructured.NestedSlice(crd.Object, "spec", "versions")
	if err != nil || len(versions) != 1 {
		t.Fatalf("%s has the versions %v, error %v; want one: there is no conversion", plural, versions, err)
	}
	version, ok := versions[0].(map[string]any)
	if !ok || version["name"] != "v2" {
		t.Fatalf("%s has the version %v", plural, version["name"])
	}
	return version
}

// Markers can't refer to constants, so that both say the same is tested.
func TestConstantsAgreeWithTheSchema(t *testing.T) {
	bits, _, err := unstructured.NestedMap(definition(t, "addresspools"),
		"schema", "openAPIV3Schema", "properties", "spec", "properties", "blockSizeBits")
	if err != nil {
		t.Fatal(err)
	}
	if bits["default"] != float64(v2.DefaultBlockSizeBits) && bits["default"] != int64(v2.DefaultBlockSizeBits) {
		t.Errorf("the default of blockSizeBits is %v, not %d", bits["default"], v2.DefaultBlockSizeBits)
	}
	if bits["maximum"] != float64(v2.MaxBlockSizeBits) && bits["maximum"] != int64(v2.MaxBlockSizeBits) {
		t.Errorf("the maximum of blockSizeBits is %v, not %d", bits["maximum"], v2.MaxBlockSizeBits)
	}
}

func TestColumnsShowConditionsThatExist(t *testing.T) {
	for plural, conditions := range map[string][]string{
		"addresspools": {v2.PoolExhausted, v2.PoolOverlapping, v2.PoolTerminating, v2.PoolDrained},
		"egresses":     {v2.EgressAvailable, v2.EgressAddressesReady},
	} {
		columns, _, err := unstructured.NestedSlice(definition(t, plural), "additionalPrinterColumns")
		if err != nil {
			t.Fatal(err)
		}
		shown := map[string]bool{}
		for _, c := range columns {
			column, ok := c.(map[string]any)
			if !ok {
				t.Fatalf("column %v", c)
			}
			path, _ := column["jsonPath"].(string)
			if _, rest, ok := strings.Cut(path, `@.type=="`); ok {
				condition, _, _ := strings.Cut(rest, `"`)
				shown[condition] = true
			}
		}
		for _, condition := range conditions {
			if !shown[condition] {
				t.Errorf("no column of %s shows the condition %s", plural, condition)
			}
			delete(shown, condition)
		}
		for condition := range shown {
			t.Errorf("a column of %s shows the condition %s, which doesn't exist", plural, condition)
		}
	}
}

func TestSubresources(t *testing.T) {
	for plural, want := range map[string][]string{
		"addresspools": {"status"}, "addressblocks": {"status"}, "blockrequests": {"status"}, "egresses": {"status", "scale"},
	} {
		have, _, err := unstructured.NestedMap(definition(t, plural), "subresources")
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range want {
			if _, ok := have[s]; !ok {
				t.Errorf("%s has no subresource %s", plural, s)
			}
		}
		if len(have) != len(want) {
			t.Errorf("%s has the subresources %v, want %v", plural, have, want)
		}
	}
}
