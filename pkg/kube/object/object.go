// Package object makes objects of the API what they should be.
//
// It owns how an object is applied, taken over from former versions and removed without touching
// somebody else's, and how its status is written. It must not know what objects are for.
package object

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/csaupgrade"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Object is an object of the API.
type Object interface {
	comparable
	metav1.Object
	runtime.Object
}

// Client writes objects of one kind in one namespace.
type Client[T Object] interface {
	Get(context.Context, string, metav1.GetOptions) (T, error)
	Patch(context.Context, string, types.PatchType, []byte, metav1.PatchOptions, ...string) (T, error)
	Delete(context.Context, string, metav1.DeleteOptions) error
}

// Writer keeps objects of one kind in one namespace.
type Writer[T Object] struct {
	Client Client[T]
	// Manager is the field manager that applies.
	Manager string
	// Former are the managers of earlier versions, which wrote by Update.
	Former sets.Set[string]
	// Owned says of an object whether it may be written.
	Owned func(T) bool
}

// ForeignError says that an object is somebody else's. It goes away by itself only if the
// garbage collector is about to delete the object.
type ForeignError struct{ Object string }

func (e *ForeignError) Error() string { return e.Object + " is somebody else's" }

// AbsentError says that an object wasn't there, and couldn't be made.
type AbsentError struct{ error }

func (e *AbsentError) Unwrap() error { return e.error }

// Ensure makes an object what it should be, by server-side apply. have is the cache's
// object. If that is nil, the API server is asked, because an object without Coil's
// labels isn't in the cache. An object that isn't owned is left alone: the error is a *ForeignError.
// It is an *AbsentError if the object couldn't be made.
func (w Writer[T]) Ensure(ctx context.Context, have, want T) error {
	var none T
	kind, name := want.GetObjectKind().GroupVersionKind().Kind, want.GetName()
	if have == none {
		live, err := w.Client.Get(ctx, name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("get %s %s: %w", kind, klog.KObj(want), err)
		}
		if err == nil {
			have = live
		}
	}
	config, err := newConfiguration(want)
	if err != nil {
		return fmt.Errorf("%s %s: %w", kind, klog.KObj(want), err)
	}
	if have != none {
		switch {
		case !w.Owned(have):
			return &ForeignError{kind + " " + name}
		case have.GetDeletionTimestamp() != nil:
			return nil // its end is an event
		}
		took, err := w.takeOver(ctx, have)
		if err != nil {
			return err
		}
		if done, err := config.done(have); !took && (done || err != nil) {
			return err
		}
		config.content.SetUID(have.GetUID()) // not the one that follows it
	}
	body, err := json.Marshal(config.content.Object)
	if err != nil {
		return err
	}
	if _, err := w.Client.Patch(ctx, name, types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: w.Manager, Force: new(true)}); err != nil {
		err = fmt.Errorf("apply %s %s: %w", kind, klog.KObj(want), err)
		if have == none {
			err = &AbsentError{err}
		}
		return err
	}
	klog.FromContext(ctx).V(2).Info("Applied", "kind", kind, "object", klog.KObj(want), "new", have == none)
	return nil
}

// takeOver makes the fields that former versions wrote to an object the manager's own, so that applying
// removes those that aren't wanted any more. It says whether it wrote.
func (w Writer[T]) takeOver(ctx context.Context, have T) (bool, error) {
	former := func(m metav1.ManagedFieldsEntry) bool {
		return m.Operation == metav1.ManagedFieldsOperationUpdate && m.Subresource == "" && w.Former.Has(m.Manager)
	}
	if !slices.ContainsFunc(have.GetManagedFields(), former) {
		return false, nil
	}
	// The function writes into its argument, and this object is a cache's.
	patch, err := csaupgrade.UpgradeManagedFieldsPatch(have.DeepCopyObject(), w.Former, w.Manager)
	if err != nil {
		return false, fmt.Errorf("take over %T %s: %w", have, klog.KObj(have), err)
	}
	if patch == nil {
		return false, nil
	}
	if _, err := w.Client.Patch(ctx, have.GetName(), types.JSONPatchType, patch, metav1.PatchOptions{}); err != nil {
		return false, fmt.Errorf("take over %T %s: %w", have, klog.KObj(have), err)
	}
	return true, nil
}

// Remove deletes an object of the cache that is owned; nil is done.
func (w Writer[T]) Remove(ctx context.Context, have T) error {
	var none T
	if have == none || !w.Owned(have) || have.GetDeletionTimestamp() != nil {
		return nil
	}
	err := w.Client.Delete(ctx, have.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: new(have.GetUID())}})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %T %s: %w", have, klog.KObj(have), err)
	}
	return nil
}

// configuration is an object as it is applied. Its hash is kept in an annotation of the object: a
// field that isn't wanted any more can be told only from the configuration before.
type configuration struct {
	content *unstructured.Unstructured
	hash    string
}

func newConfiguration(want runtime.Object) (configuration, error) {
	content, err := toMap(want)
	if err != nil {
		return configuration{}, err
	}
	u := &unstructured.Unstructured{Object: content}
	if field, ok := off[u.GetKind()]; ok {
		if err := unstructured.SetNestedField(content, false, "spec", field); err != nil {
			return configuration{}, err
		}
	}
	text, err := json.Marshal(content)
	if err != nil {
		return configuration{}, err
	}
	sum := sha256.Sum256(text)
	c := configuration{u, hex.EncodeToString(sum[:8])}
	return c, unstructured.SetNestedField(content, c.hash, "metadata", "annotations", v2.AnnotationApplied)
}

// done says whether an object has all that is wanted, and nothing from before.
func (c configuration) done(have runtime.Object) (bool, error) {
	content, err := toMap(have)
	if err != nil {
		return false, err
	}
	// Objects from a cache don't say what they are.
	content["apiVersion"], content["kind"] = c.content.GetAPIVersion(), c.content.GetKind()
	return covers(content, c.content.Object), nil
}

// structs are fields that Go writes although they are empty; applying one would own it.
var structs = []string{"metadata", "resources", "status", "strategy"}

// toMap returns an object as the API has it, without empty fields.
func toMap(obj runtime.Object) (map[string]any, error) {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, err
	}
	delete(m, "status")
	prune(m)
	return m, nil
}

func prune(v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, child := range v {
			prune(child)
			if child == nil {
				delete(v, k)
			}
		}
		for _, k := range structs {
			if m, ok := v[k].(map[string]any); ok && len(m) == 0 {
				delete(v, k)
			}
		}
	case []any:
		for _, child := range v {
			prune(child)
		}
	}
}

// Fields in which the API server compares other than element by element
// (x-kubernetes-list-type, x-kubernetes-map-type of its schema).
var (
	// keyed lists have elements of several owners, by the field that tells elements apart, the first one if there
	// are several. Users write lists of thousands of elements, which must not be compared each with each.
	keyed = map[string]string{
		"containers": "name", "initContainers": "name", "env": "name", "volumes": "name", "imagePullSecrets": "name",
		"resourceClaims": "name", "claims": "name", "schedulingGates": "name", "ownerReferences": "uid", "hostAliases": "ip",
		"volumeMounts": "mountPath", "volumeDevices": "devicePath", "topologySpreadConstraints": "topologyKey",
		"ports": "containerPort", // and "port" of a Service, which has one or two
	}
	// atomic maps have one owner.
	atomic = sets.New("selector", "nodeSelector", "matchLabels")
)

// off are fields that Go doesn't write when they are false. When somebody makes one true, the
// object isn't used as it should.
var off = map[string]string{"Deployment": "paused", "Service": "publishNotReadyAddresses"}

// covers says whether have has all of want. Fields that others have added don't matter.
func covers(have, want any) bool { return coversField("", have, want) }

func coversField(field string, have, want any) bool {
	switch w := want.(type) {
	case map[string]any:
		h, ok := have.(map[string]any)
		if !ok || atomic.Has(field) && len(h) != len(w) {
			return false
		}
		for k, v := range w {
			if !coversField(k, h[k], v) {
				return false
			}
		}
		return true
	case []any:
		h, ok := have.([]any)
		if !ok {
			return len(w) == 0 && have == nil
		}
		if key, ok := keyed[field]; ok {
			return containsAll(key, h, w)
		}
		return slices.EqualFunc(h, w, covers)
	case bool:
		return have == want || !w && have == nil // false is as good as not there
	}
	return reflect.DeepEqual(have, want)
}

// containsAll says whether a list has all elements that are wanted, in any order. Elements with
// different values of a key are different.
func containsAll(key string, have, want []any) bool {
	valueOf := func(element any) string {
		m, _ := element.(map[string]any)
		return fmt.Sprint(m[key])
	}
	byKey := map[string][]any{}
	for _, h := range have {
		byKey[valueOf(h)] = append(byKey[valueOf(h)], h)
	}
	for _, w := range want {
		if !slices.ContainsFunc(byKey[valueOf(w)], func(h any) bool { return covers(h, w) }) {
			return false
		}
	}
	return true
}
