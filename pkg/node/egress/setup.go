package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/store"
)

// undoTimeout bounds the undoing of a failed setup.
const undoTimeout = 10 * time.Second

// policiesWait is how long the pod may wait for an answer which policies there are.
const policiesWait = 2 * time.Second

// Begin looks up the Egresses of a pod that is being added. An Egress that doesn't exist, or
// isn't for the pod's namespace, is an error that names it. The function that is returned
// completes the pod's sandbox: nothing runs there yet. On its error nothing is left.
//
// Caches may lack a policy that is older than the pod's binding, and its addresses aren't known yet. So the demand is looked up twice: as
// the caches have it, since a pod that can't have what it asks for should take no address, and when the pod has its addresses
// by policies as new as the binding. These are asked for meanwhile.
func (m *Manager) Begin(ctx context.Context, pod store.Pod) (func(context.Context, node.Sandbox) error, error) {
	meta, err := m.cluster.Pod(ctx, pod, true)
	if err != nil {
		return nil, fmt.Errorf("look up the annotations of the pod: %w: %w", node.ErrUnavailable, err)
	}
	refs := plan.EgressRefs(meta.Annotations)
	router, err := m.isRouter(ctx, meta)
	switch {
	case err != nil:
		return nil, fmt.Errorf("look up the Egress of a router: %w: %w", node.ErrUnavailable, err)
	case router && len(refs) > 0:
		return nil, fmt.Errorf("the pod asks for Egress %s, and is a router of an Egress itself", refs[0])
	case router: // which no policy selects
		return func(ctx context.Context, s node.Sandbox) error {
			return m.setUp(ctx, completed(s, meta), &wanted{client: true}, true)
		}, nil
	}
	now := m.askPolicies(ctx, meta)
	d := annotated(refs)
	policies, labels, err := m.cluster.Policies(ctx, meta, false)
	if err == nil {
		err = d.add(selecting(policies, meta, labels, node.Sandbox{}))
	}
	if err != nil && !apierrors.IsNotFound(err) { // of a Namespace that the cache lacks
		return nil, fmt.Errorf("look up the policies of the pod: %w: %w", node.ErrUnavailable, err)
	}
	w, err := m.admit(ctx, meta, d)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, s node.Sandbox) error {
		current := annotated(refs)
		policies, labels, err := now(ctx)
		if err == nil {
			err = current.add(selecting(policies, meta, labels, s))
		}
		if err != nil {
			return fmt.Errorf("look up the policies of the pod: %w: %w", node.ErrUnavailable, err)
		}
		if !current.same(d) {
			if w, err = m.admit(ctx, meta, current); err != nil {
				return err
			}
		}
		return m.setUp(ctx, completed(s, meta), w, false)
	}, nil
}

// completed returns the sandbox of a pod with its UID, which the runtime may not tell.
func completed(s node.Sandbox, meta *metav1.PartialObjectMetadata) node.Sandbox {
	s.UID = cmp.Or(s.UID, plan.PodUID(meta))
	return s
}

// askPolicies begins to find out which policies there are, at least as new as a pod's binding, and returns the function that waits for the
// answer. It ends with ctx, that of the whole ADD.
func (m *Manager) askPolicies(ctx context.Context, meta *metav1.PartialObjectMetadata) func(context.Context) ([]policy.Policy, map[string]string, error) {
	var policies []policy.Policy
	var labels map[string]string
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(ctx, policiesWait)
		defer cancel()
		policies, labels, err = m.cluster.Policies(ctx, meta, true)
	}()
	return func(ctx context.Context) ([]policy.Policy, map[string]string, error) {
		select {
		case <-done:
			return policies, labels, err
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// admit finds out how a pod that is being added is to use Egresses, and whether it can.
func (m *Manager) admit(ctx context.Context, meta *metav1.PartialObjectMetadata, d demand) (*wanted, error) {
	w, err := m.look(ctx, meta.Namespace, d, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("look up Egresses: %w: %w", node.ErrUnavailable, err)
	}
	m.fit(&w)
	problems := append(w.tooMany(), w.problems...)
	m.tell(meta, nil, problems)
	switch {
	case len(problems) > 0 && problems[0].again:
		return nil, fmt.Errorf("%w: %s", node.ErrUnavailable, problems[0].text)
	case len(problems) > 0:
		return nil, errors.New(problems[0].text)
	}
	if len(d.uses) > 0 {
		if err := m.cfg.Available(); err != nil {
			return nil, fmt.Errorf("the pod asks for Egress %s: %w", d.uses[0], err)
		}
	}
	return &w, nil
}

// isRouter says whether a pod that is being added is a router of an Egress of its namespace. Anybody may give labels.
func (m *Manager) isRouter(ctx context.Context, pod *metav1.PartialObjectMetadata) (bool, error) {
	if _, labelled := plan.RouterOf(pod.Labels); !labelled {
		return false, nil
	}
	e, err := ifAny(m.cluster.Egress(ctx, routed(pod), true))
	return e != nil, err
}

// routed returns the Egress of a pod that has the labels of a router.
func routed(pod *metav1.PartialObjectMetadata) types.NamespacedName {
	name, _ := plan.RouterOf(pod.Labels)
	return types.NamespacedName{Namespace: pod.Namespace, Name: name}
}

// setUp completes a sandbox. An object that it undoes may have been there before only if the
// runtime repeats an ADD, and then ADD as a whole is undone, too.
func (m *Manager) setUp(ctx context.Context, at node.Sandbox, w *wanted, router bool) error {
	s, err := m.enter(ctx, at)
	if err != nil {
		return fmt.Errorf("set up egress: %w", err)
	}
	defer s.work.Release(1)
	if len(w.known) > 0 {
		err = s.decide(func() error { return m.aim(ctx, s, w) })
	}
	err = errors.Join(err, m.apply(ctx, s, w))
	if err == nil && router {
		err = m.syncRouter(ctx, s, false) // what more it needs may be set when it runs
	}
	if err == nil {
		// The annotations may have changed since they were read.
		m.loop.Add(podName(s))
		return nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	var undone error
	if len(w.egresses) > 0 {
		none := &wanted{client: true}
		undone = s.decide(func() error { return m.aim(undo, s, none) })
		_, cleared := m.net.Client(undo, s.Netns, m.client(s, none))
		undone = errors.Join(undone, here(cleared))
	}
	return fmt.Errorf("set up egress: %w", errors.Join(err, undone, m.drop(undo, s)))
}

// ifAny returns the object that a Cluster has returned, or the zero value if there is no such object.
func ifAny[T any](known T, err error) (T, error) {
	if apierrors.IsNotFound(err) {
		var none T
		return none, nil
	}
	return known, err
}

// logged is the logger with the names of a sandbox.
func logged(ctx context.Context, s *sandbox) klog.Logger {
	return klog.FromContext(ctx).WithValues("pod", klog.KRef(s.Namespace, s.Name), "containerID", s.ContainerID)
}
