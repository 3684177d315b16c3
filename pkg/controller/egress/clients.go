package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// lagPause is how long to wait for the cache to show the writes.
	lagPause = 20 * time.Millisecond
	// lagPatience is after which time the cache is believed all the same: a new slice may have
	// been deleted before the cache could show it.
	lagPatience = 5 * time.Second
	// collect is for how long clients are collected once some were written, since each one that comes
	// or goes writes a whole slice anew. The first is written at once.
	collect = 500 * time.Millisecond
)

// syncClients makes the EndpointSlices of an Egress those of its clients.
func (c *Controller) syncClients(ctx context.Context, key types.NamespacedName) error {
	e := c.egresses.Find(key.String())
	if e == nil {
		c.refused.Delete(key)
		c.writes.Delete(key)
		c.wrote.Delete(key)
		return nil
	}
	if e.DeletionTimestamp != nil {
		return nil
	}
	if wait := collect - time.Since(c.wrote.Get(key)); wait > 0 {
		return reconcile.Later(wait)
	}
	have := c.slices.Under(key.String())
	if c.writes.Get(key).pending(have) {
		return reconcile.Later(lagPause)
	}
	// A selector that can't be used is told by the status.
	clients, refused, _ := egress.Clients(egress.ClientFacts{Egress: e, Pods: c.naming.Under(key.String()), Namespaces: c.namespaceLabels})
	for _, p := range c.newlyRefused(key, refused) {
		c.cfg.Recorder.Eventf(podReference(p), nil, corev1.EventTypeWarning, "EgressNotAllowed", "Reconcile",
			"Egress %s doesn't allow this namespace (spec.allowedNamespaces): what the pod sends to its destinations is dropped", key)
	}
	changes := egress.ClientSlices(e, have, clients, cmp.Or(c.cfg.EndpointsPerSlice, egress.EndpointsPerSlice))
	if len(changes.Create)+len(changes.Update)+len(changes.Delete) == 0 {
		return nil
	}
	c.wrote.Set(key, time.Now())
	return c.writeSlices(ctx, key, changes)
}

// newlyRefused returns the pods that an Egress refuses now and didn't refuse before.
func (c *Controller) newlyRefused(key types.NamespacedName, refused []*corev1.Pod) []*corev1.Pod {
	before, now := c.refused.Get(key), sets.Set[types.UID]{}
	for _, p := range refused {
		now.Insert(p.UID)
	}
	c.refused.Set(key, now)
	return slices.DeleteFunc(refused, func(p *corev1.Pod) bool { return before.Has(p.UID) })
}

// podReference is an object that Events can be about: pods of the cache lack their kind.
func podReference(p *corev1.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: p.Namespace, Name: p.Name, UID: p.UID}
}

func (c *Controller) namespaceLabels(name string) labels.Set {
	if ns := kube.CacheOf[metav1.PartialObjectMetadata](c.cfg.Namespaces).Find(name); ns != nil {
		return ns.Labels
	}
	return nil
}

// writeSlices does the writes, each whether or not another one fails. Clients are added
// before others are removed: one that moves is never missing.
func (c *Controller) writeSlices(ctx context.Context, key types.NamespacedName, changes egress.SliceChanges) error {
	api := c.cfg.Core.DiscoveryV1().EndpointSlices(key.Namespace)
	noted := writes{}
	defer c.writes.Set(key, noted)
	var errs []error
	done := func(s *discoveryv1.EndpointSlice, w write, what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s EndpointSlice %s: %w", what, klog.KObj(s), err))
			return
		}
		w.at = time.Now()
		noted[s.Name] = w
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
		done(s, write{before: s.ResourceVersion}, "delete", kube.DeleteAsRead(ctx, api, s))
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

// write is a write that the cache may not show yet.
type write struct {
	// made says that the slice is new: the cache shows the write when it has the slice. After a change or a deletion
	// the cache shows it when it doesn't have the version from before any more.
	made   bool
	before string
	at     time.Time
}

// writes are the writes of an Egress's slices, by name of the slice. A plan from a cache that doesn't
// show them would write in vain.
type writes map[string]write

// pending says whether the cache, which has these slices, doesn't show all writes yet. It forgets the writes that
// it shows.
func (w writes) pending(have []*discoveryv1.EndpointSlice) bool {
	versions := map[string]string{}
	for _, s := range have {
		versions[s.Name] = s.ResourceVersion
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
