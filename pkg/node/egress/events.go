package egress

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

// Reasons of Events on pods.
const (
	// EgressMissing: an Egress that the pod's annotations or a policy name doesn't exist, or can't by its name; or a policy names none, and
	// there is no default.
	EgressMissing = "EgressMissing"
	// EgressNotAllowed: an Egress isn't for the pod's namespace; its destinations are unreachable.
	EgressNotAllowed = "EgressNotAllowed"
	// EgressConflict: two Egresses of the pod have the same destination, of which the first is used, that of the older policy; or a router of one is
	// a destination of the other, and isn't used.
	EgressConflict = "EgressConflict"
	// EgressTooMany: the pod names more Egresses, or has more destinations or routers, than one pod may have.
	EgressTooMany = "EgressTooMany"
	// EgressIgnored: the pod has the network of its node, or is a router; its annotations mean nothing.
	EgressIgnored = "EgressIgnored"
	// EgressUnguarded: the node's end of the pod's link isn't found, so that only the pod's own rules keep packets in.
	EgressUnguarded = "EgressUnguarded"
	// EgressUnavailable: the node's kernel can't make tunnels; the destinations of the pod's Egresses are unreachable.
	EgressUnavailable = "EgressUnavailable"
)

// problem is a fact that the owner of a pod should know.
type problem struct {
	reason, text string
	// again says that it may pass while the pod is as it is: others change policies.
	again bool
}

// conflict returns the problem of two Egresses of a pod.
func conflict(c client.Conflict) problem {
	text := fmt.Sprintf("Egress %s and Egress %s both have the destination %s: the first is used", c.Winner, c.Loser, c.Dst)
	if c.Router {
		text = fmt.Sprintf("router %s of Egress %s isn't used: it is outside of the cluster, and a destination of Egress %s", c.Dst.Addr(), c.Loser, c.Winner)
	}
	return problem{reason: EgressConflict, text: text}
}

// tell records an Event for the problems of each reason if it wasn't told yet; without a sandbox, for all.
func (m *Manager) tell(pod *metav1.PartialObjectMetadata, s *sandbox, problems []problem) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	var reasons []string
	texts := map[string][]string{}
	for _, p := range problems {
		if texts[p.reason] == nil {
			reasons = append(reasons, p.reason)
		}
		texts[p.reason] = append(texts[p.reason], p.text)
	}
	said := map[string]bool{}
	for _, reason := range reasons {
		text := few(texts[reason], "; ")
		said[text] = true
		if s == nil || !s.told[text] {
			m.recorder.Eventf(ref, nil, corev1.EventTypeWarning, reason, reason, "%s", text)
		}
	}
	if s != nil {
		s.told = said
	}
}

// unattended is for how long a pod may have no sandbox before it is asked why: its ADD may be on its way.
const unattended = 10 * time.Second

// tellIgnored tells of a pod without a sandbox whose annotations name Egresses, once, if it has the network
// of its node: there is no ADD of such a pod, and its packets leave as the node's do.
func (m *Manager) tellIgnored(ctx context.Context, pod types.NamespacedName) error {
	meta, err := ifAny(m.cluster.Pod(ctx, store.Pod{Namespace: pod.Namespace, Name: pod.Name}, false))
	if err != nil {
		return err
	}
	if meta == nil {
		delete(m.strangers, pod)
		return nil
	}
	refs := plan.EgressRefs(meta.Annotations)
	if len(refs) == 0 || m.strangers[pod] == meta.UID {
		return nil
	}
	host, err := ifAny(m.cluster.HostNetwork(ctx, pod))
	if err != nil {
		return err
	}
	m.strangers[pod] = meta.UID
	if host {
		m.tell(meta, nil, ignoredBy(refs, "the pod has the network of its node (hostNetwork)"))
	}
	return nil
}

// ignoredBy returns the problem of a pod whose annotations name Egresses, and whose packets take none.
func ignoredBy(refs []types.NamespacedName, pod string) []problem {
	if len(refs) == 0 {
		return nil
	}
	names := make([]string, 0, len(refs))
	for _, ref := range refs {
		names = append(names, shown(ref.String()))
	}
	return []problem{{reason: EgressIgnored, text: fmt.Sprintf("%s, whose packets take no Egress: to name %s has no effect", pod, few(names, ", "))}}
}

const (
	// mostNamed is how many things of a kind an Event names, and mostSaid how many bytes
	// it has: the API server refuses more than 1024.
	mostNamed = 3
	mostSaid  = 1000
	// mostShown is how many bytes of a name that no object can have are shown.
	mostShown = 64
)

// shown returns the part of a name that is shown.
func shown(name string) string {
	if len(name) <= mostShown {
		return name
	}
	return strings.ToValidUTF8(name[:mostShown], "") + "..."
}

// few names the first of some things, and counts the others.
func few(all []string, separator string) string {
	text := strings.Join(all[:min(mostNamed, len(all))], separator)
	if len(text) > mostSaid {
		text = strings.ToValidUTF8(text[:mostSaid], "")
	}
	if n := len(all) - mostNamed; n > 0 {
		text += fmt.Sprintf("%sand %d more", separator, n)
	}
	return text
}
