package egress

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/store"
)

// unattended is for how long a pod may have no sandbox before it is asked why: its ADD may be on its way.
const unattended = 10 * time.Second

// tellIgnored tells of a pod without a sandbox whose annotations name Egresses, once, if it has the network
// of its node: there is no ADD of such a pod, and its packets leave as the node's do.
func (m *Manager) tellIgnored(ctx context.Context, pod types.NamespacedName) error {
	meta, err := m.cluster.Pod(ctx, store.Pod{Namespace: pod.Namespace, Name: pod.Name}, false)
	if notFound(err) {
		m.looked(pod, "")
		return nil
	}
	if err != nil {
		return err
	}
	refs := plan.EgressRefs(meta.Annotations)
	if len(refs) == 0 || m.lookedAt(pod) == meta.UID {
		return nil
	}
	host, err := m.cluster.HostNetwork(ctx, pod)
	if err != nil && !notFound(err) {
		return err
	}
	m.looked(pod, meta.UID)
	if err != nil || !host {
		return nil
	}
	m.tell(meta, nil, ignoredBy(refs, "the pod has the network of its node (hostNetwork)"))
	return nil
}

// ignoredBy is what the owner of a pod should know that names Egresses, and is a pod whose packets take none.
func ignoredBy(refs []types.NamespacedName, pod string) []problem {
	if len(refs) == 0 {
		return nil
	}
	names := make([]string, 0, len(refs))
	for _, ref := range refs {
		names = append(names, shown(ref.String()))
	}
	return []problem{{EgressIgnored, fmt.Sprintf("%s, whose packets take no Egress: to name %s has no effect", pod, few(names, ", ")), false}}
}

// lookedAt returns the UID of the pod of a name that was looked at last.
func (m *Manager) lookedAt(pod types.NamespacedName) types.UID {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.strangers[pod]
}

// looked notes it, or that there is none.
func (m *Manager) looked(pod types.NamespacedName, uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.strangers[pod] = uid; uid == "" {
		delete(m.strangers, pod)
	}
}
