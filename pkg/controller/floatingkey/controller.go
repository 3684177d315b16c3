// Package floatingkey keeps the keys by which nodes know each other's messages about floating addresses.
//
// It owns the data of the Secret coil-floating. The Secret is installed with the program: who may make Secrets in a namespace may make tokens
// of its ServiceAccounts. It must not know which keys there are, nor who reads them.
package floatingkey

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/plan/keys"
	"github.com/coil-net/coil/pkg/reconcile"
)

// look is the time between two looks at the Secret, and await that while it isn't there: an update may have started the program first.
const look, await = time.Minute, 5 * time.Second

// Controller keeps the Secret.
type Controller struct {
	core kubernetes.Interface
	loop *reconcile.Loop[struct{}]
	now  func() time.Time
	// missing says that the log says so.
	missing bool
}

// New returns a controller that isn't running. Nil metrics are not exported.
func New(core kubernetes.Interface, metrics *reconcile.Metrics) *Controller {
	c := &Controller{core: core, now: time.Now}
	c.loop = reconcile.New("floatingkey", func(ctx context.Context, _ struct{}) error { return c.sync(ctx) }, metrics)
	return c
}

// Run keeps the Secret until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	c.loop.Add(struct{}{})
	return c.loop.Run(ctx, 1)
}

func (c *Controller) sync(ctx context.Context) error {
	secrets := c.core.CoreV1().Secrets(keys.Namespace)
	have, err := secrets.Get(ctx, keys.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		if !c.missing {
			klog.FromContext(ctx).Info("Nodes can't hold floating addresses, since their keys have no place: apply the manifests again", "secret", klog.KRef(keys.Namespace, keys.Name))
		}
		c.missing = true
		return reconcile.Later(await)
	}
	c.missing = c.missing && err != nil
	if err != nil {
		return fmt.Errorf("read Secret %s/%s: %w", keys.Namespace, keys.Name, err)
	}
	if want := keys.Rotate(have, c.now(), random); want != nil {
		// Of two leaders the second one finds that it has changed, and looks again.
		if _, err := secrets.Update(ctx, want, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("write Secret %s/%s: %w", keys.Namespace, keys.Name, err)
		}
		klog.FromContext(ctx).Info("The keys of messages about floating addresses were changed")
	}
	return reconcile.Later(look)
}

func random() []byte {
	key := make([]byte, keys.Size)
	_, _ = rand.Read(key) // never fails
	return key
}
