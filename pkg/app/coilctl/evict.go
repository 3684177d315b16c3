package coilctl

import (
	"context"
	"errors"
	"io"
	"net/url"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/drain"
)

const (
	// firstRetry is the pause after an eviction that a PodDisruptionBudget refuses. It doubles up to lastRetry.
	firstRetry = time.Second
	lastRetry  = 15 * time.Second
	// podPause is how often the command looks whether a pod is gone.
	podPause = 500 * time.Millisecond
	// noController is for how long no coil-ipam-controller may say anything before that is told.
	noController = 20 * time.Second
)

// errLeft says that something of the pool is left, which was printed.
var errLeft = errors.New("the pool isn't drained")

// mover moves the pods of a pool.
type mover struct {
	*drainOptions
	free chan struct{} // of pods that may be on their way out

	mu     sync.Mutex // guards all below, and the output
	moved  int
	failed map[types.UID]string // why the API server refuses to evict a pod for good
}

// say prints a line.
func (m *mover) say(format string, args ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	printf(m.says(), format+"\n", args...)
}

// move evicts pods of a pool until nothing is left that it can move.
func (o *drainOptions) move(ctx context.Context, name string, p drain.Plan) error {
	m := &mover{drainOptions: o, free: make(chan struct{}, o.parallel), failed: map[types.UID]string{}}
	began, told := time.Now(), ""
	for {
		m.evictAll(ctx, m.todo(p))
		if err := ctx.Err(); err != nil {
			return err
		}
		var drained *metav1.Condition
		err := m.answered(ctx, func() (err error) { drained, err = o.isDrained(ctx, name); return err })
		if err != nil {
			return err
		}
		if drained != nil && drained.Status == metav1.ConditionTrue {
			m.say("AddressPool %s is drained; %s", name, plan.Count(m.moved, "pod was moved", "pods were moved"))
			return nil
		}
		if err = m.answered(ctx, func() (err error) { p, err = o.look(ctx, name); return err }); err != nil {
			return err
		}
		if len(m.todo(p)) > 0 {
			continue
		}
		stay := len(p.Pods) - len(p.Ending())
		if len(p.Ending()) == 0 && (stay > 0 || p.Blocks == 0 && len(p.Owners)+len(p.Reserved) > 0) {
			return m.left(name, p)
		}
		says := "coil-ipam-controller hasn't said yet what is left: see that one runs and leads, and is as new as coilctl"
		if drained != nil {
			says = drained.Message
		}
		if says != told && (drained != nil || time.Since(began) > noController) {
			m.say("Waits: %s", says)
			told = says
		}
		if err := pause(ctx, 2*time.Second); err != nil {
			return err
		}
	}
}

// answered asks until the API server answers: moving many pods takes longer than an update of one.
func (m *mover) answered(ctx context.Context, ask func() error) error {
	told := ""
	for {
		err := ask()
		if err == nil || ctx.Err() != nil || !unanswered(err) {
			return err
		}
		if says := err.Error(); says != told {
			m.say("Waits: %s", says)
			told = says
		}
		if err := pause(ctx, firstRetry); err != nil {
			return err
		}
	}
}

// unanswered says that an API server hasn't answered, or only that it can't now.
func unanswered(err error) bool {
	return errors.As(err, new(*url.Error)) || errors.Is(err, io.ErrUnexpectedEOF) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsServiceUnavailable(err)
}

// todo are the pods to be evicted that the API server doesn't refuse for good.
func (m *mover) todo(p drain.Plan) (pods []drain.Pod) {
	for _, pod := range p.Moves() {
		if m.failed[pod.UID] == "" {
			pods = append(pods, pod)
		}
	}
	return pods
}

// left says what the command can't move.
func (m *mover) left(name string, p drain.Plan) error {
	for _, pod := range p.Pods {
		why := pod.Stays
		if why == "" {
			why = m.failed[pod.UID]
		}
		m.say("Pod %s of node %s stays: %s", pod, pod.Node, why)
	}
	for _, line := range unmoved(p) {
		m.say("%s", line)
	}
	m.say("AddressPool %s isn't drained; %s", name, plan.Count(m.moved, "pod was moved", "pods were moved"))
	return errLeft
}

// evictAll evicts pods, as many at a time as may be, and waits until they are gone.
func (m *mover) evictAll(ctx context.Context, pods []drain.Pod) {
	done := 0
	var wait sync.WaitGroup
	for _, pod := range pods {
		// The next one begins when there is room: pods of a node go one after the other.
		select {
		case m.free <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		wait.Go(func() {
			if m.evict(ctx, pod) {
				m.mu.Lock()
				m.moved++
				done++
				printf(m.says(), "Moved %s from node %s, %d of %d\n", pod, pod.Node, done, len(pods))
				m.mu.Unlock()
			}
		})
	}
	wait.Wait()
}

// evict evicts a pod and says whether it is gone. The caller has taken a place of free, which others have while a budget refuses the eviction.
func (m *mover) evict(ctx context.Context, pod drain.Pod) bool {
	told := ""
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		err := m.tryEvict(ctx, pod)
		switch {
		case apierrors.IsConflict(err):
			if there, e := m.there(ctx, pod); e == nil && !there {
				err = nil // another one has its name
			}
		case err == nil, apierrors.IsNotFound(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
			err = m.waitGone(ctx, pod)
		}
		<-m.free
		switch {
		case err == nil:
			return true
		case ctx.Err() != nil:
			return false
		case !apierrors.IsTooManyRequests(err) && !apierrors.IsConflict(err) && !unanswered(err):
			m.say("Pod %s can't be evicted: %v", pod, err)
			m.mu.Lock()
			m.failed[pod.UID] = err.Error()
			m.mu.Unlock()
			return false
		}
		if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
			retry = max(retry, time.Duration(seconds)*time.Second)
		}
		if says := err.Error(); says != told {
			m.say("Pod %s of node %s waits: %s", pod, pod.Node, says)
			told = says
		}
		if pause(ctx, retry) != nil {
			return false
		}
		select {
		case m.free <- struct{}{}:
		case <-ctx.Done():
			return false
		}
	}
}

// tryEvict asks once: the client doesn't try again by itself what a budget refuses, without a word.
func (m *mover) tryEvict(ctx context.Context, pod drain.Pod) error {
	return m.core.PolicyV1().RESTClient().Post().AbsPath("/api/v1").Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("eviction").
		MaxRetries(0).
		Body(&policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))},
		}).Do(ctx).Error()
}

// there says whether a pod is still there; another one may have its name.
func (m *mover) there(ctx context.Context, pod drain.Pod) (bool, error) {
	live, err := m.core.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err != nil || live.UID == pod.UID, err
}

// waitGone waits until a pod isn't there any more.
func (m *mover) waitGone(ctx context.Context, pod drain.Pod) error {
	for {
		there, err := m.there(ctx, pod)
		if err == nil && !there {
			return nil
		}
		if err != nil && !apierrors.IsTooManyRequests(err) && !apierrors.IsInternalError(err) && !unanswered(err) {
			return err
		}
		if err := pause(ctx, podPause); err != nil {
			return err
		}
	}
}
