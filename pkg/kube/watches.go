package kube

import (
	"context"
	"errors"

	"k8s.io/client-go/tools/cache"
)

// Watches are informers that start and end together. The zero value has none.
type Watches struct {
	informers []*Informer
	synced    []cache.DoneChecker
	errs      []error
}

// Add makes an informer one of them, and passes its events to a handler; nil is none. Start says what is wrong.
func (w *Watches) Add(i *Informer, h cache.ResourceEventHandler) {
	w.informers = append(w.informers, i)
	if h == nil {
		return
	}
	reg, err := i.AddEventHandler(h)
	if err != nil {
		w.errs = append(w.errs, err)
		return
	}
	w.synced = append(w.synced, reg.HasSyncedChecker())
}

// Start starts the informers, which work until ctx ends.
func (w *Watches) Start(ctx context.Context) error {
	if len(w.errs) > 0 {
		return errors.Join(w.errs...)
	}
	for _, i := range w.informers {
		i.Start(ctx.Done())
	}
	return nil
}

// Shutdown waits until the informers have ended.
func (w *Watches) Shutdown() {
	for _, i := range w.informers {
		i.Shutdown()
	}
}

// Synced are the functions that say whether the caches are filled, and the handlers know it.
func (w *Watches) Synced() []cache.DoneChecker { return w.synced }
