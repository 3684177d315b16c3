package coilctl

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
)

// cached asks for a list from the API server's cache: one answer, however long.
func cached() metav1.ListOptions { return metav1.ListOptions{ResourceVersion: "0"} }

// listed keeps the objects of a list that is short. Package listing reads long ones.
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

// eachPod tells of all pods as they are now, not of an older state that the API server may have cached: what is changed next depends on them.
func eachPod(ctx context.Context, core kubernetes.Interface, tell func(*corev1.Pod)) error {
	pods := pager.New(func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
		return core.CoreV1().Pods(metav1.NamespaceAll).List(ctx, opts)
	})
	err := pods.EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
		if p, ok := o.(*corev1.Pod); ok {
			tell(p)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list Pods: %w", err)
	}
	return nil
}
