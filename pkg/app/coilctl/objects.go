package coilctl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/pkg/plan/inventory"
)

// coildPods selects the pods of coild.
const coildPods = "app.kubernetes.io/name=coil,app.kubernetes.io/component=coild"

// cached asks for a list from the API server's cache: one answer, however long.
func cached() metav1.ListOptions { return metav1.ListOptions{ResourceVersion: "0"} }

// listed keeps the objects of a list.
func listed[T any](into *[]*T, l runtime.Object, err error) error {
	if err != nil {
		return err
	}
	return meta.EachListItem(l, func(o runtime.Object) error {
		item, ok := any(o).(*T)
		if !ok {
			return fmt.Errorf("a list has a %T", o)
		}
		*into = append(*into, item)
		return nil
	})
}

// objects reads those of a cluster, with one list of each kind. What can't be listed is in the error, and the others are in the result all the same.
func objects(ctx context.Context, core kubernetes.Interface, client versioned.Interface, now time.Time) (inventory.Objects, error) {
	f := inventory.Objects{Now: now}
	coil, all := client.CoilV2(), metav1.NamespaceAll
	reads := []struct {
		what string
		do   func() error
	}{
		{"AddressPools", func() error { l, err := coil.AddressPools().List(ctx, cached()); return listed(&f.Pools, l, err) }},
		{"AddressBlocks", func() error { l, err := coil.AddressBlocks().List(ctx, cached()); return listed(&f.Blocks, l, err) }},
		{"BlockRequests", func() error { l, err := coil.BlockRequests().List(ctx, cached()); return listed(&f.Requests, l, err) }},
		{"AddressClaims", func() error { l, err := coil.AddressClaims(all).List(ctx, cached()); return listed(&f.Claims, l, err) }},
		{"Egresses", func() error { l, err := coil.Egresses(all).List(ctx, cached()); return listed(&f.Egresses, l, err) }},
		{"EgressPolicies", func() error {
			l, err := coil.EgressPolicies(all).List(ctx, cached())
			return listed(&f.Policies, l, err)
		}},
		{"EgressClusterPolicies", func() error {
			l, err := coil.EgressClusterPolicies().List(ctx, cached())
			return listed(&f.ClusterPolicies, l, err)
		}},
		{"LoadBalancerGateways", func() error {
			l, err := coil.LoadBalancerGateways().List(ctx, cached())
			return listed(&f.Gateways, l, err)
		}},
		{"Services", func() error {
			l, err := core.CoreV1().Services(all).List(ctx, cached())
			return listed(&f.Services, l, err)
		}},
		{"Nodes", func() error { l, err := core.CoreV1().Nodes().List(ctx, cached()); return listed(&f.Nodes, l, err) }},
		{"pods of coild", func() error {
			o := cached()
			o.LabelSelector = coildPods
			l, err := core.CoreV1().Pods(all).List(ctx, o)
			return listed(&f.Coilds, l, err)
		}},
	}
	errs := make([]error, len(reads))
	var wait sync.WaitGroup
	for i, r := range reads {
		wait.Go(func() {
			if err := r.do(); err != nil {
				errs[i] = fmt.Errorf("list %s: %w", r.what, err)
			}
		})
	}
	wait.Wait()
	return f, errors.Join(errs...)
}
