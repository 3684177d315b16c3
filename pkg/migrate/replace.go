package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// Replace exchanges the pods that Coil v1 wired for pods with addresses of this Coil, and removes the reserved blocks.
type Replace struct {
	Cluster
	// Namespace and DaemonSet are those of coild.
	Namespace, DaemonSet string
	// Interval is the pause between two evictions.
	Interval time.Duration
	// Grace is how long a pod may take to end after its own grace period, before the next one is evicted.
	Grace time.Duration
	// Force also evicts pods without a controller, which don't come back.
	Force bool
	// DryRun only says what would be done.
	DryRun bool

	replaced replaced
}

// replaced is what a run of Replace has done so far.
type replaced struct {
	evicted, deleted int  // pods and blocks
	pending          bool // the restart of coild is noted
	restarting       bool
}

// String says it in an error; it is empty if nothing was changed.
func (d replaced) String() string {
	var all []string
	if d.evicted > 0 {
		all = append(all, plan.Count(d.evicted, "pod was evicted", "pods were evicted"))
	}
	if d.deleted > 0 {
		all = append(all, plan.Count(d.deleted, "reserved block was deleted", "reserved blocks were deleted"))
	}
	if d.restarting {
		all = append(all, "the restart of coild was begun")
	} else if d.pending {
		all = append(all, "the restart of coild is pending")
	}
	return strings.Join(all, ", ")
}

// annotationPending on the DaemonSet of coild says that reserved blocks were deleted, or are about to be, and that coild
// wasn't restarted since then: a run that was killed in between leaves no other trace.
const annotationPending = "coil.cybozu.com/restart-pending"

// Run evicts the pods that have an address of a reserved block, one after the other, as PodDisruptionBudgets allow it.
// When none is left it deletes the reserved blocks, and restarts coild. An error says what was changed.
func (r *Replace) Run(ctx context.Context) error {
	r.replaced = replaced{}
	err := r.run(ctx)
	if err == nil {
		return nil
	}
	if did := r.replaced.String(); did != "" {
		return fmt.Errorf("%w; until then, %s: run replace again", caused(ctx, err), did)
	}
	return fmt.Errorf("nothing was changed: %w", caused(ctx, err))
}

func (r *Replace) run(ctx context.Context) error {
	blocks, err := r.reserved(ctx)
	if err != nil {
		return err
	}
	pods, err := r.pods(ctx, blocks)
	if err != nil {
		return err
	}
	if err := r.refuseUnmanaged(pods); err != nil {
		return err
	}
	ds, err := r.daemonSet(ctx)
	if err != nil {
		return err
	}
	restart := len(blocks) > 0 || ds.Annotations[annotationPending] != ""
	r.say("%s of Coil v1 in %s", plan.Count(len(pods), "pod", "pods"), plan.Count(len(blocks), "reserved block", "reserved blocks"))
	if r.DryRun {
		r.preview(pods, blocks, restart)
		return nil
	}
	if err := r.awaitRollout(ctx); err != nil {
		return err
	}
	if !restart {
		r.say("Nothing is to be done. If pods of Coil v1 are left, apply the file that dump wrote first")
		return nil
	}
	if err := r.evictAll(ctx, blocks); err != nil {
		return err
	}
	if err := r.deleteBlocks(ctx, blocks); err != nil {
		return err
	}
	return r.restart(ctx)
}

// preview tells what Run would do.
func (r *Replace) preview(pods []corev1.Pod, blocks []v2.AddressBlock, restart bool) {
	for _, p := range pods {
		r.say("Would evict %s", describe(&p))
	}
	for _, b := range blocks {
		r.say("Would delete AddressBlock %s", b.Name)
	}
	if restart {
		r.say("Would restart DaemonSet %s", r.DaemonSet)
	} else {
		r.say("Nothing is to be done. If pods of Coil v1 are left, apply the file that dump wrote first")
	}
}

// reserved returns the blocks that Dump has asked for.
func (r *Replace) reserved(ctx context.Context) ([]v2.AddressBlock, error) {
	list, err := r.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{
		LabelSelector: fmt.Sprintf("%s=%s,%s,!%s", v2.LabelReserved, v2.ReservedValue, v2.LabelNode, v2.LabelFloating),
	})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("AddressBlocks aren't defined: apply the definitions, the file that dump wrote, and Coil first (%w)", err)
	} else if err != nil {
		return nil, fmt.Errorf("list reserved AddressBlocks: %w", err)
	}
	return list.Items, nil
}

// pods returns the pods that run with an address of one of the blocks, sorted by node, namespace and name.
func (r *Replace) pods(ctx context.Context, blocks []v2.AddressBlock) ([]corev1.Pod, error) {
	var ranges []netip.Prefix
	for _, b := range blocks {
		ranges = append(ranges, ipam.Prefixes(b.IPv4, b.IPv6)...)
	}
	list, err := r.Kube.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	var pods []corev1.Pod
	for _, p := range list.Items {
		if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		if slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool {
			a, err := netip.ParseAddr(ip.IP)
			return err == nil && slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
		}) {
			pods = append(pods, p)
		}
	}
	slices.SortFunc(pods, func(a, b corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Spec.NodeName, b.Spec.NodeName), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return pods, nil
}

// refuseUnmanaged returns an error if pods wouldn't come back.
func (r *Replace) refuseUnmanaged(pods []corev1.Pod) error {
	var errs []error
	for _, p := range pods {
		switch {
		case p.Annotations[corev1.MirrorPodAnnotationKey] != "":
			errs = append(errs, fmt.Errorf("pod %s is made from a file of its kubelet: only the kubelet can restart it; take the file away and put it back", describe(&p)))
		case metav1.GetControllerOf(&p) == nil && !r.Force:
			errs = append(errs, fmt.Errorf("pod %s has no controller, so nobody makes it again: delete it yourself, or give --force", describe(&p)))
		}
	}
	return errors.Join(errs...)
}

func describe(p *corev1.Pod) string {
	return fmt.Sprintf("%s/%s (%s) on %s", p.Namespace, p.Name, p.Status.PodIP, p.Spec.NodeName)
}

// evictAll returns when no pod has an address of the blocks. Coil v1 gives none any more, so the pods of the cluster are listed
// again only when no pod of the last list may be evicted, or is left.
func (r *Replace) evictAll(ctx context.Context, blocks []v2.AddressBlock) error {
	var left []corev1.Pod
	said := ""
	for {
		if len(left) == 0 {
			var err error
			if left, err = r.pods(ctx, blocks); err != nil || len(left) == 0 {
				return err
			}
			if err := r.refuseUnmanaged(left); err != nil {
				return err
			}
		}
		evicted, rest, refused, err := r.evictOne(ctx, left)
		if err != nil {
			return err
		}
		left = rest
		switch {
		case evicted != nil:
			said = ""
			r.replaced.evicted++
			r.say("Evicted %s; %s", describe(evicted), plan.Count(len(left), "is left", "are left"))
			if err := r.awaitEnd(ctx, evicted); err != nil {
				return err
			}
		case said != refused:
			said = refused
			r.say("Waiting: %s", refused)
		}
		if err := sleep(ctx, r.Interval); err != nil {
			return err
		}
	}
}

// evictOne evicts the first of the pods that may be. rest are the other pods that are there. If none may be evicted, refused
// says why, and rest is empty.
func (r *Replace) evictOne(ctx context.Context, pods []corev1.Pod) (evicted *corev1.Pod, rest []corev1.Pod, refused string, err error) {
	var why []string
	for i, p := range pods {
		if p.DeletionTimestamp != nil {
			why = append(why, describe(&p)+" is ending")
			rest = append(rest, p)
			continue
		}
		err := r.Kube.CoreV1().Pods(p.Namespace).EvictV1(ctx, &policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}},
		})
		switch {
		case err == nil:
			return &p, append(rest, pods[i+1:]...), "", nil
		case apierrors.IsNotFound(err), apierrors.IsConflict(err):
			// It has gone, or another pod has its name.
		case apierrors.IsTooManyRequests(err):
			why = append(why, fmt.Sprintf("%s: %v", describe(&p), err))
			rest = append(rest, p)
		default:
			return nil, nil, "", fmt.Errorf("evict %s: %w", describe(&p), err)
		}
	}
	return nil, nil, strings.Join(why, "; "), nil
}

// awaitEnd returns when the pod has gone, or takes longer than it should: then the others needn't wait.
func (r *Replace) awaitEnd(ctx context.Context, p *corev1.Pod) error {
	limit := r.Grace
	if s := p.Spec.TerminationGracePeriodSeconds; s != nil {
		limit += time.Duration(*s) * time.Second
	}
	short, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := until(short, func(ctx context.Context) (bool, error) {
		now, err := r.Kube.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return err == nil && now.UID != p.UID, err
	})
	if ctx.Err() == nil && short.Err() != nil {
		r.say("Pod %s hasn't ended within %v: is its node alive?", describe(p), limit)
		return nil
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// deleteBlocks deletes the blocks, which coild of their nodes lets go, after it has noted on coild that a restart follows.
func (r *Replace) deleteBlocks(ctx context.Context, blocks []v2.AddressBlock) error {
	if len(blocks) == 0 {
		return nil
	}
	if err := r.patch(ctx, fmt.Sprintf(`{"metadata":{"annotations":{%q:"true"}}}`, annotationPending)); err != nil {
		return fmt.Errorf("note on DaemonSet %s that its restart is pending: %w", r.DaemonSet, err)
	}
	r.replaced.pending = true
	for _, b := range blocks {
		err := r.Coil.CoilV2().AddressBlocks().Delete(ctx, b.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &b.UID}})
		switch {
		case err == nil:
			r.replaced.deleted++
			r.say("Deleted AddressBlock %s of %s", b.Name, b.Labels[v2.LabelNode])
		case !apierrors.IsNotFound(err) && !apierrors.IsConflict(err):
			return fmt.Errorf("delete AddressBlock %s: %w", b.Name, err)
		}
	}
	return nil
}

// restart restarts coild node by node, as kubectl rollout restart does. The same patch takes the note away.
func (r *Replace) restart(ctx context.Context) error {
	err := r.patch(ctx, fmt.Sprintf(`{"metadata":{"annotations":{%q:null}},"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`,
		annotationPending, time.Now().Format(time.RFC3339)))
	if err != nil {
		return fmt.Errorf("restart DaemonSet %s: %w", r.DaemonSet, err)
	}
	r.replaced.restarting = true
	r.say("Restarting DaemonSet %s", r.DaemonSet)
	if err := r.awaitRollout(ctx); err != nil {
		return err
	}
	r.say("All pods have addresses of this Coil")
	return nil
}

// patch changes the DaemonSet of coild.
func (r *Replace) patch(ctx context.Context, patch string) error {
	_, err := r.Kube.AppsV1().DaemonSets(r.Namespace).Patch(ctx, r.DaemonSet, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// daemonSet returns the DaemonSet of coild.
func (r *Replace) daemonSet(ctx context.Context) (*appsv1.DaemonSet, error) {
	ds, err := r.Kube.AppsV1().DaemonSets(r.Namespace).Get(ctx, r.DaemonSet, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get DaemonSet %s of namespace %s, which has to be installed before v1's pods are replaced: %w", r.DaemonSet, r.Namespace, err)
	}
	return ds, nil
}

// awaitRollout returns when all pods of coild are of its newest version, and ready.
func (r *Replace) awaitRollout(ctx context.Context) error {
	said := ""
	return until(ctx, func(ctx context.Context) (bool, error) {
		ds, err := r.daemonSet(ctx)
		if err != nil {
			return false, err
		}
		s := ds.Status
		now := fmt.Sprintf("%d of %d pods of DaemonSet %s are updated, %d are ready", s.UpdatedNumberScheduled, s.DesiredNumberScheduled, r.DaemonSet, s.NumberReady)
		switch {
		case s.ObservedGeneration < ds.Generation:
			// These numbers are of the time before the last change.
			now = fmt.Sprintf("Waiting until Kubernetes has seen the change of DaemonSet %s", r.DaemonSet)
		case s.UpdatedNumberScheduled == s.DesiredNumberScheduled && s.NumberReady == s.DesiredNumberScheduled:
			return true, nil
		}
		if now != said {
			said = now
			r.say("%s", now)
		}
		return false, nil
	})
}
