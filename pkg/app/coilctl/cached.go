package coilctl

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
