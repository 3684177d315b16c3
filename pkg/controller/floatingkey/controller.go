// Package floatingkey keeps the keys by which nodes know each other's messages about floating addresses.
//
// It owns the Secret coil-floating. It must not know which keys there are, nor who reads them.
package floatingkey

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/plan/keys"
	"github.com/coil-net/coil/pkg/reconcile"
)

// look is the time between two looks at the Secret. Nodes that start without it can't hold floating addresses until then.
const look = time.Minute

// Controller keeps the Secret.
type Controller struct {
	core kubernetes.Interface
	loop *reconcile.Loop[struct{}]
	now  func() time.Time
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
		have, err = nil, nil
	}
	if err != nil {
		return fmt.Errorf("read Secret %s/%s: %w", keys.Namespace, keys.Name, err)
	}
	if want := keys.Rotate(have, c.now(), random); want != nil {
		if err := c.write(ctx, have, want); err != nil {
			return fmt.Errorf("write Secret %s/%s: %w", keys.Namespace, keys.Name, err)
		}
		klog.FromContext(ctx).Info("The keys of messages about floating addresses were changed")
	}
	return reconcile.Later(look)
}

// write makes the Secret, or replaces it if it is as it was read: of two leaders the second one looks again.
func (c *Controller) write(ctx context.Context, have, want *corev1.Secret) error {
	secrets := c.core.CoreV1().Secrets(keys.Namespace)
	var err error
	if have == nil {
		_, err = secrets.Create(ctx, want, metav1.CreateOptions{})
	} else {
		_, err = secrets.Update(ctx, want, metav1.UpdateOptions{})
	}
	return err
}

func random() []byte {
	key := make([]byte, keys.Size)
	_, _ = rand.Read(key) // never fails
	return key
}
