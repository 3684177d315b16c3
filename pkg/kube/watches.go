package kube

import (
	"context"

	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/pkg/reconcile"
)

// Watches are informers that start and end together. The zero value has none.
type Watches struct {
	informers []*Informer
	handlers  []reconcile.Source
	synced    []cache.DoneChecker
}

// Add makes an informer one of them, and passes its events to a handler once Register is called; nil is none.
func (w *Watches) Add(i *Informer, h cache.ResourceEventHandler) {
	w.informers = append(w.informers, i)
	if h != nil {
		w.handlers = append(w.handlers, reconcile.On(i, h))
	}
}

// Start starts the informers, which fill their caches and work until ctx ends.
func (w *Watches) Start(ctx context.Context) {
	for _, i := range w.informers {
		i.Start(ctx.Done())
	}
}

// Register adds the handlers. They learn of the objects that the caches have by then.
func (w *Watches) Register() (err error) {
	w.synced, err = reconcile.Register(w.handlers...)
	return err
}

// Shutdown waits until the informers have ended.
func (w *Watches) Shutdown() {
	for _, i := range w.informers {
		i.Shutdown()
	}
}

// Synced are the functions that say whether the caches are filled, and the handlers know it. There are none before Register.
func (w *Watches) Synced() []cache.DoneChecker { return w.synced }
