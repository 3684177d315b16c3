// Package apiserver tests what depends on a real API server: the definitions of
// the API with their rules, and the controllers against them.
//
// One API server per release of Kubernetes serves all tests of the package, so
// each test makes objects of its own names; a test that breaks its server, or
// that looks at all objects, starts its own. There are no nodes, and no
// controllers but those that a test runs.
package apiserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// The resources of the API and of their definitions.
var (
	crds          = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	addressPools  = schema.GroupVersionResource{Group: "coil.cybozu.com", Version: "v2", Resource: "addresspools"}
	addressBlocks = addressPools.GroupVersion().WithResource("addressblocks")
	blockRequests = addressPools.GroupVersion().WithResource("blockrequests")
	egresses      = addressPools.GroupVersion().WithResource("egresses")
	addressClaims = addressPools.GroupVersion().WithResource("addressclaims")

	egressPolicies        = addressPools.GroupVersion().WithResource("egresspolicies")
	loadBalancerGateways  = addressPools.GroupVersion().WithResource("loadbalancergateways")
	egressClusterPolicies = addressPools.GroupVersion().WithResource("egressclusterpolicies")
)

// servers are the API servers that tests share, by release of Kubernetes.
var servers struct {
	mu    sync.Mutex
	start map[string]func() (*controlplane.API, error)
	all   []*controlplane.API
}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, api := range servers.all {
		if err := api.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// shared returns the API server that the tests share, of a release of
// Kubernetes; empty is the newest one. It has the definitions of manifests/crd.
func shared(t *testing.T, version string) *controlplane.API {
	t.Helper()
	testkit.Need(t, testkit.APIServer)
	servers.mu.Lock()
	if servers.start == nil {
		servers.start = map[string]func() (*controlplane.API, error){}
	}
	start := servers.start[version]
	if start == nil {
		start = sync.OnceValues(func() (*controlplane.API, error) {
			// It outlives the test that asks for it first.
			api, err := controlplane.StartAPI(context.Background(), controlplane.Options{KubernetesVersion: version, Log: os.Stderr})
			if err != nil {
				return nil, err
			}
			servers.mu.Lock()
			servers.all = append(servers.all, api)
			servers.mu.Unlock()
			return api, installCRDs(context.Background(), api.RESTConfig(), readCRDs)
		})
		servers.start[version] = start
	}
	servers.mu.Unlock()
	api, err := start()
	if err != nil {
		t.Fatalf("start the shared API server: %v", err)
	}
	return api
}

// own starts an API server for one test, without the definitions of manifests/crd.
func own(t *testing.T, opts controlplane.Options) *controlplane.API {
	t.Helper()
	testkit.Need(t, testkit.APIServer)
	opts.Log = os.Stderr
	api, err := controlplane.StartAPI(t.Context(), opts)
	if err != nil {
		t.Fatalf("start an API server: %v", err)
	}
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	return api
}

// eachVersion runs a test against every release of Kubernetes that the lab pins.
func eachVersion(t *testing.T, test func(t *testing.T, version string)) {
	t.Helper()
	testkit.Need(t, testkit.APIServer)
	versions, err := build.KubernetesVersions()
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range versions {
		if i == 0 {
			v = "" // shared with the tests that don't name one
		}
		t.Run(versions[i], func(t *testing.T) { test(t, v) })
	}
}

var names atomic.Int64

// fresh returns a name that no other test has; it is the name of a Service, a
// Node and everything else as well.
func fresh(prefix string) string {
	return fmt.Sprintf("%s-%d", prefix, names.Add(1))
}

// crdFiles returns the paths of the definitions.
func crdFiles() ([]string, error) {
	root, err := build.Root()
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(root, "manifests/crd/coil.cybozu.com_*.yaml"))
	if err == nil && len(files) != 8 {
		err = fmt.Errorf("manifests/crd has %d definitions, not 8", len(files))
	}
	return files, err
}

// readCRDs returns the definitions of manifests/crd.
func readCRDs() ([]*unstructured.Unstructured, error) {
	files, err := crdFiles()
	if err != nil {
		return nil, err
	}
	var out []*unstructured.Unstructured
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		crd := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(text, &crd.Object); err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		out = append(out, crd)
	}
	return out, nil
}

// installCRDs creates or replaces definitions and returns when the API server
// serves them.
func installCRDs(ctx context.Context, cfg *rest.Config, read func() ([]*unstructured.Unstructured, error)) error {
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return err
	}
	definitions, err := read()
	if err != nil {
		return err
	}
	for _, crd := range definitions {
		if old, err := client.Resource(crds).Get(ctx, crd.GetName(), metav1.GetOptions{}); err == nil {
			crd.SetResourceVersion(old.GetResourceVersion())
			_, err = client.Resource(crds).Update(ctx, crd, metav1.UpdateOptions{})
			if err != nil {
				return err
			}
		} else if !apierrors.IsNotFound(err) {
			return err
		} else if _, err := client.Resource(crds).Create(ctx, crd, metav1.CreateOptions{}); err != nil {
			return err
		}
		if err := waitForCRD(ctx, client, crd); err != nil {
			return fmt.Errorf("wait for %s: %w", crd.GetName(), err)
		}
	}
	return nil
}

// waitForCRD returns when a definition is established and its list is answered.
func waitForCRD(ctx context.Context, client dynamic.Interface, crd *unstructured.Unstructured) error {
	plural, group, _ := strings.Cut(crd.GetName(), ".")
	resource := schema.GroupVersionResource{Group: group, Version: "v2", Resource: plural}
	var last error
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, testkit.Timeout(30*time.Second), true, func(ctx context.Context) (bool, error) {
		var now *unstructured.Unstructured
		if now, last = client.Resource(crds).Get(ctx, crd.GetName(), metav1.GetOptions{}); last != nil {
			return false, nil
		}
		// At first the conditions are null.
		conditions, _, _ := unstructured.NestedSlice(now.Object, "status", "conditions")
		if !slices.ContainsFunc(conditions, func(c any) bool {
			m, ok := c.(map[string]any)
			return ok && m["type"] == "Established" && m["status"] == "True"
		}) {
			last = errors.New("not established")
			return false, nil
		}
		_, last = client.Resource(resource).List(ctx, metav1.ListOptions{Limit: 1})
		return last == nil, nil
	})
	if err != nil {
		return errors.Join(err, last)
	}
	return nil
}
