package blocks

import (
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/syncmap"
)

// release gives an empty block back: the record forgets it, so that no address
// can be taken any more, then its routes go, then the object.
func (m *Manager) release(ctx context.Context, name string) error {
	b := m.blocks.Find(name)
	if b == nil {
		return nil // gone already
	}
	if err := m.record.ForgetBlock(ctx, name); err != nil {
		if errors.Is(err, store.ErrInUse) {
			return nil // an ADD was faster
		}
		return err
	}
	faultpoint.At(faultpoint.BlockForgotten)
	m.gone.Set(b.UID, true)
	m.forget(name)
	err := m.deleteBlock(ctx, b)
	switch {
	case errors.Is(err, errUnknownOutcome):
		m.unsure.Set(b.UID, b)
		return err
	case err != nil:
		// The block is still the node's: it is recorded again and released later.
		m.gone.Delete(b.UID)
		return err
	}
	klog.FromContext(ctx).Info("Released a block", "block", name)
	return nil
}

// forget forgets a block that isn't recorded any more.
func (m *Manager) forget(name string) {
	m.asked.gaveBack(name)
	m.since.Delete(name)
	m.offered.Delete(name)
	m.disputed.Delete(name)
	m.reported.Delete(name)
	m.lost.Delete(name)
}

// errUnknownOutcome says that the node may have lost a block, or not.
var errUnknownOutcome = errors.New("whether that happened is unknown")

// makeSure goes on with the releases of a pool whose outcome is unknown. The blocks are deleted, and
// the removal of a finalizer that was asked for may still happen: whatever the cache says, none of
// them is used again.
func (m *Manager) makeSure(ctx context.Context, pool string) error {
	var errs []error
	for _, b := range m.unsure.Copy() {
		if b.Labels[v2.LabelPool] != pool {
			continue
		}
		if err := m.deleteBlock(ctx, b); err != nil {
			errs = append(errs, err)
			continue
		}
		m.unsure.Delete(b.UID)
		klog.FromContext(ctx).Info("Released a block", "block", b.Name)
	}
	return errors.Join(errs...)
}

// forgetGone forgets the blocks that the cache doesn't have any more, and those of a pool that are the node's again: a backup of etcd brought them
// back before the cache knew that they were gone.
func (m *Manager) forgetGone(ctx context.Context, pool string) error {
	cached := map[types.UID]bool{}
	var errs []error
	for _, b := range m.blocks.All() {
		cached[b.UID] = true
		if b.Labels[v2.LabelPool] != pool || !m.gone.Get(b.UID) || m.unsure.Get(b.UID) != nil || m.disowned(b) {
			continue
		}
		live, err := m.live(ctx, b)
		if err != nil {
			errs = append(errs, err)
		} else if live != nil && live.DeletionTimestamp == nil && live.Labels[v2.LabelNode] == m.cfg.NodeName {
			m.takeBack(live)
		}
	}
	for _, uids := range []*syncmap.Map[types.UID, bool]{&m.gone, &m.claimed} {
		uids.DeleteFunc(func(uid types.UID, _ bool) bool { return !cached[uid] })
	}
	return errors.Join(errs...)
}

// heldNow returns a block of the cache, which may be of an earlier time, as it is now; nil if it
// isn't the node's any more, and it is never used then.
func (m *Manager) heldNow(ctx context.Context, b *v2.AddressBlock) (*v2.AddressBlock, error) {
	live, err := m.live(ctx, b)
	if err != nil {
		return nil, err
	}
	if live != nil && live.Labels[v2.LabelNode] == m.cfg.NodeName {
		return live, nil
	}
	m.gone.Set(b.UID, true)
	return nil, nil
}

// deleteBlock withdraws a block and gives it back. After errUnknownOutcome the API server may
// have done it.
func (m *Manager) deleteBlock(ctx context.Context, b *v2.AddressBlock) error {
	if err := m.Export(ctx); err != nil {
		return fmt.Errorf("withdraw AddressBlock %s: %w", b.Name, err)
	}
	faultpoint.At(faultpoint.BlockWithdrawn)
	live, err := m.live(ctx, b)
	if live == nil || err != nil {
		return err
	}
	client := m.client.AddressBlocks()
	if live.DeletionTimestamp == nil {
		if reserved(live) {
			return fmt.Errorf("AddressBlock %s was reserved meanwhile", b.Name)
		}
		if err := kube.DeleteAsRead(ctx, client, live); err != nil {
			return fmt.Errorf("delete AddressBlock %s: %w", b.Name, err)
		}
		faultpoint.At(faultpoint.BlockDeleted)
		if live, err = m.live(ctx, b); live == nil || err != nil {
			return err
		}
	}
	live.Finalizers = slices.DeleteFunc(live.Finalizers, func(f string) bool { return f == v2.Finalizer })
	if _, err := client.Update(ctx, live, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove the finalizer of AddressBlock %s: %w: %w", b.Name, errUnknownOutcome, err)
	}
	faultpoint.At(faultpoint.BlockReleased)
	return nil
}

// live reads a block from the API server; nil if it is gone, though another may
// have its name.
func (m *Manager) live(ctx context.Context, b *v2.AddressBlock) (*v2.AddressBlock, error) {
	live, err := m.client.AddressBlocks().Get(ctx, b.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && live.UID != b.UID {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read AddressBlock %s: %w", b.Name, err)
	}
	return live, nil
}

// Export announces the blocks that the node holds, and no others.
func (m *Manager) Export(ctx context.Context) error {
	m.exportMu.Lock()
	defer m.exportMu.Unlock()
	held, err := m.ToExport(ctx)
	if err != nil {
		return err
	}
	return m.exporter.Export(ctx, held)
}

// ToExport are the blocks that Export announces: none while they are withdrawn.
func (m *Manager) ToExport(ctx context.Context) ([]routes.HeldBlock, error) {
	if m.withdrawn.Load() {
		return nil, nil
	}
	return m.allHeld(ctx)
}

// allHeld are the recorded blocks of the cache, and blocks that only the record has as long as pods have
// addresses of them: without any, such a block may be another node's. Of a block with two ranges it is the
// recorded one that pods have addresses of.
func (m *Manager) allHeld(ctx context.Context) ([]routes.HeldBlock, error) {
	usage, err := m.record.Usage(ctx)
	if err != nil {
		return nil, err
	}
	cached := map[string]routes.HeldBlock{}
	for _, b := range m.list() {
		if rec, err := Recorded(b); err == nil && !m.foreign(b) { // else reported, or settled, by intake
			cached[b.Name] = routes.HeldBlock{Name: b.Name, Block: rec.Block, Reserved: reserved(b)}
		}
	}
	var held []routes.HeldBlock
	for _, u := range usage {
		h, ok := cached[u.Name]
		if u.Allocated > 0 {
			h.Name, h.Block = u.Name, u.Block.Block
		}
		if ok || u.Allocated > 0 {
			held = append(held, h)
		}
	}
	return held, nil
}

// Exported are the recorded blocks as an earlier process exported them, as far as that is known.
func (m *Manager) Exported(usage []store.Usage) []routes.HeldBlock {
	var held []routes.HeldBlock
	for _, u := range usage {
		b := m.blocks.Find(u.Name)
		held = append(held, routes.HeldBlock{Name: u.Name, Block: u.Block.Block, Reserved: b != nil && reserved(b)})
	}
	return held
}

// Withdraw stops announcing anything and giving blocks back, because the Node is gone or another
// machine's, or starts again. It exports nothing if neither is news, unless the last export failed: before coild has
// read the record it can't tell what it repairs by that.
func (m *Manager) Withdraw(ctx context.Context, withdraw bool) error {
	again := m.failed.Swap(false)
	if m.withdrawn.Swap(withdraw) == withdraw && !again {
		return nil
	}
	err := m.Export(ctx)
	if err != nil {
		m.failed.Store(true)
	}
	return err
}
