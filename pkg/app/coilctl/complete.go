package coilctl

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// completionTimeout is for how long a shell waits for names.
const completionTimeout = 3 * time.Second

// named are objects whose names a shell completes.
type named struct {
	schema.GroupVersionResource
	selector   string
	namespaced bool
}

// coils is a resource of Coil.
func coils(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: v2.GroupVersion.Group, Version: v2.GroupVersion.Version, Resource: resource}
}

var (
	resourceNamespaces = named{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}}
	resourceNodes      = named{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "nodes"}}
	resourceServices   = named{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "services"}, namespaced: true}
	resourcePools      = named{GroupVersionResource: coils("addresspools")}
	resourceBlocks     = named{GroupVersionResource: coils("addressblocks"), selector: heldBlocks}
	resourceFloating   = named{GroupVersionResource: coils("addressblocks"), selector: floatingBlocks}
	resourceEgresses   = named{GroupVersionResource: coils("egresses"), namespaced: true}
)

// metadataOf lists the metadata of objects of a namespace, or of all.
func (t *tool) metadataOf(ctx context.Context, kind named, namespace string) ([]metav1.PartialObjectMetadata, error) {
	cfg, err := t.config()
	if err != nil {
		return nil, err
	}
	client, err := metadata.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	l, err := client.Resource(kind.GroupVersionResource).Namespace(namespace).List(ctx, metav1.ListOptions{LabelSelector: kind.selector, ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	return l.Items, nil
}

// completeNames completes names of objects, without those that are there already. It needs the right to list them, and asks for nothing but their metadata.
func (t *tool) completeNames(kind named) cobra.CompletionFunc {
	return func(c *cobra.Command, there []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		namespace := ""
		if kind.namespaced {
			namespace = *t.flags.Namespace
		}
		all, err := t.metadataOf(c.Context(), kind, namespace)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var names []cobra.Completion
		for _, o := range all {
			if !slices.Contains(there, o.Name) && !slices.Contains(names, o.Name) {
				names = append(names, o.Name)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeMore completes the last of several names, which are separated by commas.
func (t *tool) completeMore(kind named) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
		before := prefix[:strings.LastIndex(prefix, ",")+1]
		names, directive := t.completeNames(kind)(c, strings.Split(before, ","), prefix)
		for i := range names {
			names[i] = before + names[i]
		}
		return names, directive
	}
}

// completeName completes the name of the one object that a command takes.
func (t *tool) completeName(kind named) cobra.CompletionFunc {
	return func(c *cobra.Command, there []string, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(there) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return t.completeNames(kind)(c, there, prefix)
	}
}

// completeService completes the name of a Service: with its namespace, unless one is chosen.
func (t *tool) completeService(c *cobra.Command, there []string, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(there) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	if *t.flags.Namespace != "" && !strings.Contains(prefix, "/") {
		return t.completeNames(resourceServices)(c, there, prefix)
	}
	all, err := t.metadataOf(c.Context(), resourceServices, "")
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []cobra.Completion
	for _, o := range all {
		names = append(names, o.Namespace+"/"+o.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeEgress completes the last of several names of Egresses, with their namespaces.
func (t *tool) completeEgress(c *cobra.Command, _ []string, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
	before := prefix[:strings.LastIndex(prefix, ",")+1]
	all, err := t.metadataOf(c.Context(), resourceEgresses, *t.flags.Namespace)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []cobra.Completion
	for _, o := range all {
		if name := o.Namespace + "/" + o.Name; !slices.Contains(strings.Split(before, ","), name) {
			names = append(names, before+name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// complete sets how a shell completes the values of a flag.
func complete(c *cobra.Command, flag string, with cobra.CompletionFunc) {
	_ = c.RegisterFlagCompletionFunc(flag, with) // the only error is about a flag that isn't there, and tests complete each
}

// fixed completes values that are known.
func fixed(values []string) cobra.CompletionFunc {
	return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
}
