package object

import (
	"context"
	"fmt"
	"reflect"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// StatusClient writes the status of objects of one kind.
type StatusClient[T Object] interface {
	UpdateStatus(context.Context, T, metav1.UpdateOptions) (T, error)
}

// WriteStatus writes the status of an object, and says whether it did: one that is gone has none.
func WriteStatus[T Object](ctx context.Context, c StatusClient[T], after T, o metav1.UpdateOptions) (bool, error) {
	_, err := c.UpdateStatus(ctx, after, o)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("write the status of %s %s: %w", reflect.TypeFor[T]().Elem().Name(), klog.KObj(after), err)
	}
	return true, nil
}

// Warning is a condition that should not be True, and the reason of the Event about that.
type Warning struct{ Condition, Reason string }

// BecameTrue returns the conditions that are True and weren't before, with the reasons of
// their Events.
func BecameTrue(before, after []metav1.Condition, warnings ...Warning) []metav1.Condition {
	var all []metav1.Condition
	for _, w := range warnings {
		is := meta.FindStatusCondition(after, w.Condition)
		if is != nil && is.Status == metav1.ConditionTrue && !meta.IsStatusConditionTrue(before, w.Condition) {
			told := *is
			told.Reason = w.Reason
			all = append(all, told)
		}
	}
	return all
}
