// Package survey reads a cluster before Coil is installed or updated on it, for coil-migrator preflight.
//
// It owns the pods that run coild probe, one on each node for some seconds, and removes them in any case. It changes
// nothing else. It must not know what follows from what it reads.
package survey

import (
	"context"
	"errors"
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// Clients are what a cluster is read with.
type Clients struct {
	Kube kubernetes.Interface
	Coil versioned.Interface
	// Dynamic reads definitions of kinds.
	Dynamic dynamic.Interface
}

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// Read returns the cluster without what only nodes know. Kinds that the API server doesn't have yet have no objects. An
// error names all that couldn't be read.
func Read(ctx context.Context, c Clients) (preflight.Cluster, error) {
	var out preflight.Cluster
	version, err := c.Kube.Discovery().ServerVersion()
	if err != nil {
		return out, fmt.Errorf("ask the API server for its version: %w", err)
	}
	out.Kubernetes = version.GitVersion

	apps, core, admission := c.Kube.AppsV1(), c.Kube.CoreV1(), c.Kube.AdmissionregistrationV1()
	var validating []*admissionv1.ValidatingWebhookConfiguration
	var mutating []*admissionv1.MutatingWebhookConfiguration
	var crds []*unstructured.Unstructured
	err = errors.Join(
		list(ctx, "ValidatingWebhookConfigurations", admission.ValidatingWebhookConfigurations().List, &validating),
		list(ctx, "MutatingWebhookConfigurations", admission.MutatingWebhookConfigurations().List, &mutating),
		list(ctx, "CustomResourceDefinitions", c.Dynamic.Resource(definitions).List, &crds),
		list(ctx, "DaemonSets", apps.DaemonSets(preflight.Namespace).List, &out.DaemonSets),
		list(ctx, "Deployments", apps.Deployments(preflight.Namespace).List, &out.Deployments),
		list(ctx, "ConfigMaps", core.ConfigMaps(preflight.Namespace).List, &out.ConfigMaps),
		list(ctx, "Nodes", core.Nodes().List, &out.Nodes),
		list(ctx, "Pods", core.Pods(metav1.NamespaceAll).List, &out.Pods),
		list(ctx, "ServiceCIDRs", c.Kube.NetworkingV1().ServiceCIDRs().List, &out.Services),
		list(ctx, "AddressPools", c.Coil.CoilV2().AddressPools().List, &out.Pools),
		list(ctx, "AddressBlocks", c.Coil.CoilV2().AddressBlocks().List, &out.Blocks),
		list(ctx, "Egresses", c.Coil.CoilV2().Egresses(metav1.NamespaceAll).List, &out.Egresses),
	)
	for _, w := range validating {
		var rules []admissionv1.RuleWithOperations
		for _, h := range w.Webhooks {
			rules = append(rules, h.Rules...)
		}
		out.Webhooks = append(out.Webhooks, webhook("ValidatingWebhookConfiguration", w.Name, rules))
	}
	for _, w := range mutating {
		var rules []admissionv1.RuleWithOperations
		for _, h := range w.Webhooks {
			rules = append(rules, h.Rules...)
		}
		out.Webhooks = append(out.Webhooks, webhook("MutatingWebhookConfiguration", w.Name, rules))
	}
	for _, d := range crds {
		if group, _, _ := unstructured.NestedString(d.Object, "spec", "group"); group == v2.GroupVersion.Group {
			stored, _, _ := unstructured.NestedStringSlice(d.Object, "status", "storedVersions") // a shape that the API server vouches for
			out.CRDs = append(out.CRDs, preflight.CRD{Name: d.GetName(), Stored: stored})
		}
	}
	return out, err
}

func webhook(kind, name string, rules []admissionv1.RuleWithOperations) preflight.Webhook {
	w := preflight.Webhook{Kind: kind, Name: name}
	for _, r := range rules {
		w.Groups = append(w.Groups, r.APIGroups...)
	}
	return w
}

// list appends all objects of a kind, which it reads in pages. A kind that isn't defined has none.
func list[L runtime.Object, T any](ctx context.Context, kind string, get func(context.Context, metav1.ListOptions) (L, error), into *[]T) error {
	page := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return get(ctx, o) }
	err := pager.New(page).EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
		item, ok := o.(T)
		if !ok {
			return fmt.Errorf("an object is a %T", o)
		}
		*into = append(*into, item)
		return nil
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("list %s: %w", kind, err)
	}
	return nil
}
