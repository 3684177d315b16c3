package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// lagPause is how long to wait for the cache to show what was written.
	lagPause = 20 * time.Millisecond
	// lagPatience is after which time it is believed all the same: what was made may have
	// been deleted before it could be seen.
	lagPatience = 5 * time.Second
	// collect is for how long clients are collected once some were written, since each one that comes
	// or goes writes a whole slice anew. The first is written at once.
	collect = 500 * time.Millisecond
)

// syncClients makes the EndpointSlices of an Egress those of its clients.
func (c *Controller) syncClients(ctx context.Context, key types.NamespacedName) error {
	e, err := c.cfg.Egresses.Lister().Egresses(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.refusals.tell(key, nil)
		c.writes.forget(key)
		c.wrote.forget(key)
		return nil
	}
	if err != nil || e.DeletionTimestamp != nil {
		return err
	}
	if wait := collect - time.Since(c.wrote.get(key)); wait > 0 {
		return reconcile.Later(wait)
	}
	have, err := c.slicesOf(key)
	if err != nil {
		return err
	}
	if c.writes.pending(key, have) {
		return reconcile.Later(lagPause)
	}
	pods, err := c.podsOf(key)
	if err != nil {
		return err
	}
	// A selector that can't be used is told by the status.
	clients, refused, _ := egress.Clients(egress.ClientFacts{Egress: e, Pods: pods, Namespaces: c.namespaceLabels})
	for _, p := range c.refusals.tell(key, refused) {
		c.cfg.Recorder.Eventf(podReference(p), nil, corev1.EventTypeWarning, "EgressNotAllowed", "Reconcile",
			"Egress %s doesn't allow this namespace (spec.allowedNamespaces): what the pod sends to its destinations is dropped", key)
	}
	changes := egress.ClientSlices(e, have, clients, cmp.Or(c.cfg.EndpointsPerSlice, egress.EndpointsPerSlice))
	if len(changes.Create)+len(changes.Update)+len(changes.Delete) == 0 {
		return nil
	}
	c.wrote.set(key, time.Now())
	return c.writeSlices(ctx, key, changes)
}

// podReference is an object that Events can be about: pods of the cache lack their kind.
func podReference(p *corev1.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: p.Namespace, Name: p.Name, UID: p.UID}
}

func (c *Controller) namespaceLabels(name string) labels.Set {
	obj, ok, err := c.cfg.Namespaces.GetIndexer().GetByKey(name)
	if ns, isNS := obj.(*metav1.PartialObjectMetadata); err == nil && ok && isNS {
		return ns.Labels
	}
	return nil
}

// writeSlices does the writes, each whether or not another one fails. Clients are added
// before others are removed: one that moves is never missing.
func (c *Controller) writeSlices(ctx context.Context, key types.NamespacedName, changes egress.SliceChanges) error {
	api := c.cfg.Core.DiscoveryV1().EndpointSlices(key.Namespace)
	var errs []error
	done := func(s *discoveryv1.EndpointSlice, w write, what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s EndpointSlice %s: %w", what, klog.KObj(s), err))
			return
		}
		c.writes.note(key, s.Name, w)
		klog.FromContext(ctx).V(4).Info("Wrote clients", "egress", key, "slice", s.Name, "change", what, "clients", len(s.Endpoints))
	}
	for _, s := range changes.Create {
		_, err := api.Create(ctx, s, metav1.CreateOptions{FieldManager: egress.ControllerName})
		if apierrors.IsAlreadyExists(err) {
			err = c.replaceSlice(ctx, s)
		}
		done(s, write{made: true}, "create", err)
	}
	for _, s := range changes.Update {
		_, err := api.Update(ctx, s, metav1.UpdateOptions{FieldManager: egress.ControllerName})
		if apierrors.IsNotFound(err) {
			err = nil // its end is an event
		}
		done(s, write{before: s.ResourceVersion}, "update", err)
	}
	for _, s := range changes.Delete {
		err := api.Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion}})
		if apierrors.IsNotFound(err) {
			err = nil
		}
		done(s, write{before: s.ResourceVersion}, "delete", err)
	}
	return errors.Join(errs...)
}

// replaceSlice takes a slice back whose labels somebody has changed, so that the cache
// doesn't have it.
func (c *Controller) replaceSlice(ctx context.Context, want *discoveryv1.EndpointSlice) error {
	api := c.cfg.Core.DiscoveryV1().EndpointSlices(want.Namespace)
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

// write is one of which the cache may not know yet.
type write struct {
	// made is a new slice, which the cache shows, or one that was changed or deleted, whose
	// version from before the cache doesn't show any more.
	made   bool
	before string
	at     time.Time
}

// writes are those of slices, by Egress and name of slice. To plan on a cache that doesn't
// show them would be to write in vain.
type writes struct {
	mu  sync.Mutex
	all map[types.NamespacedName]map[string]write
}

func (w *writes) note(egress types.NamespacedName, slice string, entry write) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[types.NamespacedName]map[string]write{}
	}
	if w.all[egress] == nil {
		w.all[egress] = map[string]write{}
	}
	entry.at = time.Now()
	w.all[egress][slice] = entry
}

func (w *writes) forget(egress types.NamespacedName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.all, egress)
}

// pending says whether the cache, which has these slices, doesn't show all writes yet.
func (w *writes) pending(egress types.NamespacedName, have []*discoveryv1.EndpointSlice) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	versions := map[string]string{}
	for _, s := range have {
		versions[s.Name] = s.ResourceVersion
	}
	for slice, entry := range w.all[egress] {
		version, shown := versions[slice]
		behind := shown && version == entry.before
		if entry.made {
			behind = !shown
		}
		if behind && time.Since(entry.at) < lagPatience {
			return true
		}
		delete(w.all[egress], slice)
	}
	delete(w.all, egress)
	return false
}
