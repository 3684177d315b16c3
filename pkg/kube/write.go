package kube

import (
	"context"
	"encoding/json"
	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Deleter deletes objects of one kind.
type Deleter interface {
	Delete(context.Context, string, metav1.DeleteOptions) error
}

// DeleteAsRead deletes an object if it is as it was read; the error is a conflict otherwise. An object that is gone
// is no error.
func DeleteAsRead(ctx context.Context, c Deleter, read metav1.Object) error {
	err := c.Delete(ctx, read.GetName(), metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: new(read.GetUID()), ResourceVersion: new(read.GetResourceVersion())},
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Patcher patches objects of one kind.
type Patcher[T any] interface {
	Patch(context.Context, string, types.PatchType, []byte, metav1.PatchOptions, ...string) (*T, error)
}

// PatchMetadata replaces fields of the metadata of an object if it is as it was read; the error is a conflict
// otherwise. It returns the object as it is then, nil if it is gone. Nothing else of it is sent: an old object may
// break a rule that came later.
func PatchMetadata[T any](ctx context.Context, c Patcher[T], read metav1.Object, fields map[string]any) (*T, error) {
	return PatchAsRead(ctx, c, read, map[string]any{"metadata": fields})
}

// PatchAsRead replaces fields of an object, or of a subresource of it such as "status", as PatchMetadata does, by a JSON merge patch (RFC 7386).
func PatchAsRead[T any](ctx context.Context, c Patcher[T], read metav1.Object, fields map[string]any, subresources ...string) (*T, error) {
	fields = maps.Clone(fields)
	metadata, _ := fields["metadata"].(map[string]any)
	metadata = maps.Clone(metadata)
	if metadata == nil {
		metadata = map[string]any{}
	}
	metadata["uid"], metadata["resourceVersion"] = read.GetUID(), read.GetResourceVersion()
	fields["metadata"] = metadata
	patch, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	after, err := c.Patch(ctx, read.GetName(), types.MergePatchType, patch, metav1.PatchOptions{}, subresources...)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return after, err
}
