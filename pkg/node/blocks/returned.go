package blocks

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/store"
)

// requested says whether a block was made for a BlockRequest of this process, or for none. The cache may show one that
// came back with the block.
func (m *Manager) requested(b *v2.AddressBlock) bool {
	uid := types.UID(b.Labels[v2.LabelRequest])
	return uid == "" || m.asked.isOwn(uid)
}

// findAttempt looks for the BlockRequest that a block was made for among those whose creation had no clear answer: the
// block may be seen before it.
func (m *Manager) findAttempt(ctx context.Context, b *v2.AddressBlock) error {
	pool := b.Labels[v2.LabelPool]
	if _, ok := m.asked.attempts.Find(pool); !ok {
		return nil
	}
	r, err := m.client.BlockRequests().Get(ctx, m.nextRequest(pool), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the BlockRequest that AddressBlock %s may be made for: %w", b.Name, err)
	}
	if string(r.UID) == b.Labels[v2.LabelRequest] && m.attempted(r) {
		m.asked.created(pool, r.UID)
	}
	return nil
}

// returned says whether a block came to the node without a request of it, and isn't in use here, as when
// etcd was restored from a backup: the node had it at that time and gave it back since. Another node may
// have it now, and claims it as soon as this one has given it back again.
func (m *Manager) returned(ctx context.Context, b *v2.AddressBlock) (bool, error) {
	if _, held := m.since.Find(b.Name); held || reserved(b) || m.requested(b) {
		return false, nil
	}
	if err := m.findAttempt(ctx, b); err != nil {
		return false, err
	}
	if m.requested(b) {
		return false, nil
	}
	usage, err := m.record.Usage(ctx)
	if err != nil {
		return false, err
	}
	if slices.ContainsFunc(usage, func(u store.Usage) bool { return u.Name == b.Name }) {
		return false, nil
	}
	used, err := m.cfg.Uses(ctx, b)
	if err != nil {
		return false, fmt.Errorf("find out whether AddressBlock %s is in use: %w", b.Name, err)
	}
	if !used {
		klog.FromContext(ctx).Info("A block came that this node didn't ask for, as after etcd was restored from a backup: it is given back", "block", b.Name)
	}
	return !used, nil
}
