package coilctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/selftest"
)

const (
	// removeWithin is for how long the removal of pods may take, and stopWithin how much of that kubelets have to stop them.
	removeWithin = time.Minute
	stopWithin   = 20 * time.Second
	// deleteWithin is for how long the API server may take to delete a namespace.
	deleteWithin = 10 * time.Second
)

// removeLeftovers removes what earlier selftests have left. A namespace of another name isn't theirs, whatever labels it has.
func (s *tester) removeLeftovers(ctx context.Context) error {
	l, err := s.core.CoreV1().Namespaces().List(ctx, metav1.ListOptions{LabelSelector: selftest.Selector()})
	if err != nil {
		return fmt.Errorf("list Namespaces: %w", err)
	}
	for _, n := range l.Items {
		if n.DeletionTimestamp == nil && strings.HasPrefix(n.Name, selftest.Prefix) {
			s.leftovers = append(s.leftovers, n.Name)
		}
	}
	for len(s.leftovers) > 0 {
		s.tell("Namespace %s of an earlier selftest is removed\n", s.leftovers[0])
		if err := s.remove(ctx, s.leftovers[0]); err != nil {
			return fmt.Errorf("remove what an earlier selftest has left: %w", err)
		}
		s.leftovers = s.leftovers[1:]
	}
	return nil
}

// finish ends a selftest, also after an interrupt: it goes on, and says what is left to do if there is another one.
func (s *tester) finish(ctx context.Context) error {
	tell := sync.OnceFunc(func() {
		if s.made {
			printf(s.ErrOut, "Interrupted: the pods of Namespace %s are being removed, which takes a minute at most. Another Ctrl-C ends that at once; then kubectl delete namespace %s removes the rest\n",
				s.template.Namespace, s.template.Namespace)
		}
	})
	if ctx.Err() != nil {
		tell()
	}
	stop := context.AfterFunc(ctx, tell)
	err := s.end(context.WithoutCancel(ctx))
	if !stop() {
		tell() // it waits for the other one
	}
	return err
}

// end removes what the selftest has made, or keeps the pods of checks that have failed.
func (s *tester) end(ctx context.Context) error {
	if !s.made {
		return nil
	}
	namespace := s.template.Namespace
	failed := s.report.Failed()
	if !s.keepFailed || len(failed) == 0 {
		if err := s.remove(ctx, namespace); err != nil {
			return fmt.Errorf("%w; remove the rest by kubectl delete namespace %s", err, namespace)
		}
		return nil
	}
	s.tell("Namespace %s keeps %s: the next selftest removes it, or kubectl delete namespace %s\n",
		namespace, plan.Count(len(failed), "pod", "pods"), namespace)
	return s.removePods(ctx, namespace, func(p *corev1.Pod) bool { return !slices.Contains(failed, p.Name) })
}

// keepOne removes the pods of a batch, but for the one on a node, and those that are kept.
func (s *tester) keepOne(ctx context.Context, pods []selftest.Pod, node string) (left []selftest.Pod, err error) {
	for _, p := range pods {
		if p.Node == node {
			left = append(left, p)
		}
	}
	var kept []string
	if s.keepFailed {
		kept = s.report.Failed()
	}
	return left, s.removePods(ctx, s.template.Namespace, func(p *corev1.Pod) bool { return p.Spec.NodeName != node && !slices.Contains(kept, p.Name) })
}

// remove removes a namespace of a selftest. Its pods go first, so that none of them holds it; Kubernetes does the rest, also of pods that don't go in time.
func (s *tester) remove(ctx context.Context, namespace string) error {
	err := s.removePods(ctx, namespace, func(*corev1.Pod) bool { return true })
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteWithin)
	defer cancel()
	if e := s.core.CoreV1().Namespaces().Delete(ctx, namespace, metav1.DeleteOptions{}); e != nil && !apierrors.IsNotFound(e) && !apierrors.IsConflict(e) {
		return errors.Join(err, fmt.Errorf("delete Namespace %s: %w", namespace, e))
	}
	return err
}

// removePods removes pods of a namespace, and waits until they are gone. Those that no kubelet stops in time go without it. One with a finalizer may never go: then it is an error.
func (s *tester) removePods(ctx context.Context, namespace string, chosen func(*corev1.Pod) bool) error {
	ctx, cancel := context.WithTimeout(ctx, removeWithin)
	defer cancel()
	last := ""
	waited := func(err error) error {
		if ctx.Err() != nil && last != "" { // whatever was done when the time was over
			return fmt.Errorf("wait until Pod %s/%s is gone: %w", namespace, last, ctx.Err())
		}
		return err
	}
	for deadline := time.Now().Add(stopWithin); ; {
		pods, err := podsOf(ctx, s.clients, namespace)
		if err != nil {
			return waited(fmt.Errorf("list the pods of Namespace %s: %w", namespace, err))
		}
		pods = slices.DeleteFunc(pods, func(p *corev1.Pod) bool { return !chosen(p) })
		if len(pods) == 0 {
			return nil
		}
		last = pods[0].Name
		late := time.Now().After(deadline)
		errs := make([]error, len(pods))
		each(len(pods), func(i int) {
			p := pods[i]
			o := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(p.UID))}
			if late || p.Status.StartTime == nil { // its kubelet doesn't work, or hasn't seen it
				o.GracePeriodSeconds = new(int64)
			} else if p.DeletionTimestamp != nil {
				return
			}
			if err := s.core.CoreV1().Pods(namespace).Delete(ctx, p.Name, o); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
				errs[i] = fmt.Errorf("delete Pod %s/%s: %w", namespace, p.Name, err)
			}
		})
		if err := errors.Join(errs...); err != nil {
			return waited(err)
		}
		if err := pause(ctx, selftestPause); err != nil {
			return waited(err)
		}
	}
}
