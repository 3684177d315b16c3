package blocks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/reconcile"
)

// syncStatus reports the usage of the blocks whose usage has changed, of each at
// most once per StatusInterval.
func (m *Manager) syncStatus(ctx context.Context, _ struct{}) error {
	usage, err := m.record.Usage(ctx)
	if err != nil {
		return err
	}
	var errs []error
	var next time.Duration
	for _, u := range usage {
		b := m.blocks.Find(u.Name)
		want := v2.AddressBlockStatus{Allocated: int32(u.Allocated), Cooling: int32(u.Cooling)}
		if b == nil || b.Status.Allocated == want.Allocated && b.Status.Cooling == want.Cooling || m.gone.Get(b.UID) {
			continue
		}
		if wait := m.cfg.StatusInterval - time.Since(m.reported.Get(u.Name)); wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
			continue
		}
		errs = append(errs, m.report(ctx, b, want))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if next > 0 {
		return reconcile.Later(next)
	}
	return nil
}

func (m *Manager) report(ctx context.Context, b *v2.AddressBlock, s v2.AddressBlockStatus) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": b.UID}, "status": s})
	if err != nil {
		return err
	}
	_, err = m.client.AddressBlocks().Patch(ctx, b.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // or another block has its name
		return m.vanished(ctx, b)
	}
	if err != nil {
		return fmt.Errorf("report usage of AddressBlock %s: %w", b.Name, err)
	}
	m.reported.Set(b.Name, time.Now())
	return nil
}

// claim writes the UID of the Node into the blocks that carry its name only, as
// those made by Coil 2.x do, or another UID, as after the Node was re-created.
// The caller has made sure that this node is the one that uses them.
func (m *Manager) claim(ctx context.Context, b *v2.AddressBlock) error {
	if b.Annotations[v2.AnnotationNodeUID] == string(m.cfg.NodeUID) {
		return nil
	}
	if err := m.note(ctx, b, v2.AnnotationNodeUID); err != nil {
		return fmt.Errorf("claim AddressBlock %s: %w", b.Name, err)
	}
	m.claimed.Set(b.UID, true)
	return nil
}

// foreign says that a block was an earlier Node's of the name, on this machine or another. One
// of Coil 2.x names no Node, but none has a block that is older than itself.
func (m *Manager) foreign(b *v2.AddressBlock) bool {
	if m.claimed.Get(b.UID) {
		return false
	}
	if uid := b.Annotations[v2.AnnotationNodeUID]; uid != "" {
		return uid != string(m.cfg.NodeUID)
	}
	return b.CreationTimestamp.Before(&m.cfg.NodeCreated)
}

// settle claims or disowns a foreign block that came after the others were, because the first
// list was of an earlier time. A reserved one is where an admin says that it is.
func (m *Manager) settle(ctx context.Context, b *v2.AddressBlock) error {
	b, err := m.heldNow(ctx, b)
	if b == nil || err != nil || !m.foreign(b) {
		return err
	}
	if reserved(b) {
		return m.claim(ctx, b)
	}
	used, err := m.cfg.Uses(ctx, b)
	if err != nil {
		return fmt.Errorf("find out whose AddressBlock %s is: %w", b.Name, err)
	}
	if used {
		return m.claim(ctx, b)
	}
	return m.disown(ctx, b)
}

// disowned says whether this machine has said that it doesn't use a block.
func (m *Manager) disowned(b *v2.AddressBlock) bool {
	return b.Annotations[v2.AnnotationDisowned] == string(m.cfg.NodeUID)
}

// disown says that this machine doesn't use a foreign block. It never will, and
// coil-ipam-controller frees the block after the quarantine: the machine that uses it may
// still run.
func (m *Manager) disown(ctx context.Context, b *v2.AddressBlock) error {
	if !m.disowned(b) {
		if err := m.note(ctx, b, v2.AnnotationDisowned); err != nil {
			return fmt.Errorf("disown AddressBlock %s: %w", b.Name, err)
		}
		klog.FromContext(ctx).Info("A block was another machine's, it isn't used here", "block", b.Name)
	}
	m.gone.Set(b.UID, true) // not before: it wouldn't be looked at again
	return nil
}

// note writes the UID of the Node into an annotation of a block that is as it was read, unless
// it is gone.
func (m *Manager) note(ctx context.Context, b *v2.AddressBlock, annotation string) error {
	_, err := kube.PatchMetadata(ctx, m.client.AddressBlocks(), b, map[string]any{"annotations": map[string]string{annotation: string(m.cfg.NodeUID)}})
	return err
}
