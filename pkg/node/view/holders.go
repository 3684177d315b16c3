package view

import (
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/reconcile"
)

// WatchHolders adds a watch of the floating addresses of the cluster. changed is called with the Egress of an address that another
// router has.
func (e *Egresses) WatchHolders(w *kube.Watches, changed func(types.NamespacedName)) {
	floating := kube.FloatingBlockInformer(e.clients.Coil)
	e.floating = kube.CacheOf[v2.AddressBlock](floating)
	w.Add(floating, reconcile.ChangeHandler(func(b *v2.AddressBlock) {
		if f := b.Floating; f != nil {
			changed(types.NamespacedName{Namespace: f.Owner.Namespace, Name: f.Owner.Name})
		}
	}, func(a, b *v2.AddressBlock) bool { return plan.RouterWith(a) == plan.RouterWith(b) }))
}

// Holder returns the UID of the router that has the floating address of an AddressBlock, empty if none has.
func (e *Egresses) Holder(block string) types.UID {
	if e.floating.Indexer == nil {
		return ""
	}
	if b := e.floating.Find(block); b != nil {
		return plan.RouterWith(b)
	}
	return ""
}
