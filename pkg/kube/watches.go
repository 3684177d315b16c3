package kube

import (
	"context"
	"slices"

	"k8s.io/client-go/tools/cache"
)

// Watches are informers that start and end together. The zero value has none.
type Watches struct {
	informers []*Informer
	synced    []cache.DoneChecker
}

// Add makes an informer one of them, unless it is already, and passes its events to handlers.
func (w *Watches) Add(i *Informer, handlers ...cache.ResourceEventHandler) error {
	if !slices.Contains(w.informers, i) {
		w.informers = append(w.informers, i)
	}
	for _, h := range handlers {
		reg, err := i.AddEventHandler(h)
		if err != nil {
			return err
		}
		w.synced = append(w.synced, reg.HasSyncedChecker())
	}
	return nil
}

// Start starts the informers, which work until ctx ends.
func (w *Watches) Start(ctx context.Context) {
	for _, i := range w.informers {
		i.Start(ctx.Done())
	}
}

// Shutdown waits until the informers have ended.
func (w *Watches) Shutdown() {
	for _, i := range w.informers {
		i.Shutdown()
	}
}

// Synced are the functions that say whether the caches are filled, and the handlers know it.
func (w *Watches) Synced() []cache.DoneChecker { return w.synced }
