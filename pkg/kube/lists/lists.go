// Package lists keeps EndpointSlices in which routers of Egresses find their clients.
//
// It owns when they are written, and how. It must not know who is a client.
package lists

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	discovery "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/syncmap"
)

const (
	// lagPause is how long to wait for the cache to show the writes.
	lagPause = 20 * time.Millisecond
	// lagPatience is after which time the cache is believed all the same: a new slice may have
	// been deleted before the cache could show it.
	lagPatience = 5 * time.Second
	// Collect is for how long clients are collected once some were written, since each one that comes
	// or goes writes a whole slice anew. The first is written at once.
	Collect = 500 * time.Millisecond
)

// Keeper keeps lists of clients, each by the key of who chooses them.
type Keeper struct {
	client discovery.EndpointSlicesGetter
	limit  int
	// writes are the writes of slices that the cache may not show yet.
	writes syncmap.Map[types.NamespacedName, writes]
	// wrote is when a list was written last.
	wrote syncmap.Map[types.NamespacedName, time.Time]
}

// New returns a Keeper that has about limit clients in each slice; 0 is egress.EndpointsPerSlice.
func New(client discovery.EndpointSlicesGetter, limit int) *Keeper {
	return &Keeper{client: client, limit: cmp.Or(limit, egress.EndpointsPerSlice)}
}

// Forget forgets a key that nobody has any more.
func (k *Keeper) Forget(key types.NamespacedName) {
	k.writes.Delete(key)
	k.wrote.Delete(key)
}

// Ready returns an error, reconcile.Later, if the slices of a key, which are those of the cache, are not to be written now: because
// they were lately, or since the cache doesn't show that yet.
func (k *Keeper) Ready(key types.NamespacedName, have []*discoveryv1.EndpointSlice) error {
	if wait := Collect - time.Since(k.wrote.Get(key)); wait > 0 {
		return reconcile.Later(wait)
	}
	return k.shown(key, have)
}

func (k *Keeper) shown(key types.NamespacedName, have []*discoveryv1.EndpointSlice) error {
	if k.writes.Get(key).pending(have) {
		return reconcile.Later(lagPause)
	}
	return nil
}

// Write makes the slices of a key those of some lists. Call it after Ready.
func (k *Keeper) Write(ctx context.Context, key types.NamespacedName, have []*discoveryv1.EndpointSlice, want ...egress.Listed) error {
	return k.do(ctx, key, egress.ClientSlices(have, k.limit, want...))
}

// Clear deletes the slices of a key.
func (k *Keeper) Clear(ctx context.Context, key types.NamespacedName, have []*discoveryv1.EndpointSlice) error {
	if err := k.shown(key, have); err != nil {
		return err
	}
	return k.do(ctx, key, egress.SliceChanges{Delete: have})
}

// do does the writes, each whether or not another one fails. Clients are added
// before others are removed: one that moves is never missing.
func (k *Keeper) do(ctx context.Context, key types.NamespacedName, changes egress.SliceChanges) error {
	if changes.Empty() {
		return nil
	}
	k.wrote.Set(key, time.Now())
	noted := writes{}
	defer k.writes.Set(key, noted)
	var errs []error
	done := func(s *discoveryv1.EndpointSlice, w write, what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s EndpointSlice %s: %w", what, klog.KObj(s), err))
			return
		}
		w.at = time.Now()
		noted[keyOf(s)] = w
		klog.FromContext(ctx).V(4).Info("Wrote clients", "key", key, "slice", klog.KObj(s), "change", what, "clients", len(s.Endpoints))
	}
	for _, s := range changes.Create {
		_, err := k.client.EndpointSlices(s.Namespace).Create(ctx, s, metav1.CreateOptions{FieldManager: egress.ControllerName})
		if apierrors.IsAlreadyExists(err) {
			err = k.replace(ctx, s)
		}
		done(s, write{made: true}, "create", err)
	}
	for _, s := range changes.Update {
		_, err := k.client.EndpointSlices(s.Namespace).Update(ctx, s, metav1.UpdateOptions{FieldManager: egress.ControllerName})
		if apierrors.IsNotFound(err) {
			err = nil // its end is an event
		}
		done(s, write{before: s.ResourceVersion}, "update", err)
	}
	for _, s := range changes.Delete {
		done(s, write{before: s.ResourceVersion}, "delete", kube.DeleteAsRead(ctx, k.client.EndpointSlices(s.Namespace), s))
	}
	return errors.Join(errs...)
}

// replace takes a slice back of which somebody has changed what it is known by, so that the cache
// doesn't have it under its key.
func (k *Keeper) replace(ctx context.Context, want *discoveryv1.EndpointSlice) error {
	api := k.client.EndpointSlices(want.Namespace)
	have, err := api.Get(ctx, want.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	owner := metav1.GetControllerOf(have)
	if owner == nil || owner.UID != want.OwnerReferences[0].UID || have.AddressType != want.AddressType {
		return &object.ForeignError{Object: "EndpointSlice " + want.Name}
	}
	want = want.DeepCopy()
	want.UID, want.ResourceVersion = have.UID, have.ResourceVersion
	_, err = api.Update(ctx, want, metav1.UpdateOptions{FieldManager: egress.ControllerName})
	return err
}

func keyOf(s *discoveryv1.EndpointSlice) types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

// write is a write that the cache may not show yet.
type write struct {
	// made says that the slice is new: the cache shows the write when it has the slice. After a change or a deletion
	// the cache shows it when it doesn't have the version from before any more.
	made   bool
	before string
	at     time.Time
}

// writes are the writes of a list, by name of the slice. A plan from a cache that doesn't
// show them would write in vain.
type writes map[types.NamespacedName]write

// pending says whether the cache, which has these slices, doesn't show all writes yet. It forgets the writes that
// it shows.
func (w writes) pending(have []*discoveryv1.EndpointSlice) bool {
	versions := map[types.NamespacedName]string{}
	for _, s := range have {
		versions[keyOf(s)] = s.ResourceVersion
	}
	for slice, entry := range w {
		version, shown := versions[slice]
		behind := shown && version == entry.before
		if entry.made {
			behind = !shown
		}
		if behind && time.Since(entry.at) < lagPatience {
			return true
		}
		delete(w, slice)
	}
	return false
}
