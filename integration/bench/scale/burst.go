package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/informers/externalversions"
	"github.com/coil-net/coil/integration/bench/figures"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// answerTimeout is how long all answers together may take.
const answerTimeout = 3 * time.Minute

// bareRate is how many requests a client per second answers that does nothing but the
// three writes that an answer is: create the request, create the block, write the status.
// No controller may run.
func (f *fleet) bareRate(ctx context.Context, n int) (float64, error) {
	prefix := fmt.Sprintf("bare-%d", f.made.Load())
	began := time.Now()
	err := each(ctx, n, func(ctx context.Context, i int) error {
		r, err := f.request(ctx, fmt.Sprintf("%s-%d", prefix, i), i)
		if err != nil {
			return err
		}
		b, err := f.block(ctx, f.nodes[i%len(f.nodes)], r.UID)
		if err != nil {
			return err
		}
		now := metav1.Now()
		r.Status.AddressBlockName = b.Name
		r.Status.Conditions = []v2.BlockRequestCondition{{
			Type: v2.BlockRequestComplete, Status: corev1.ConditionTrue, Reason: "BlockAssigned", Message: "The node has the block",
			LastProbeTime: now, LastTransitionTime: now,
		}}
		_, err = f.rig.Coil.CoilV2().BlockRequests().UpdateStatus(ctx, r, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("bare client: %w", err)
	}
	rate := float64(n) / time.Since(began).Seconds()
	return rate, f.rig.Coil.CoilV2().BlockRequests().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
}

// request makes a BlockRequest as coild does.
func (f *fleet) request(ctx context.Context, name string, i int) (*v2.BlockRequest, error) {
	n := f.nodes[i%len(f.nodes)]
	return f.rig.Coil.CoilV2().BlockRequests().Create(ctx, &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{v2.LabelNode: n.name},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.name, UID: n.uid}},
		},
		Spec: v2.BlockRequestSpec{NodeName: n.name, PoolName: f.pools[i%poolCount].Name},
	}, metav1.CreateOptions{})
}

// watcher notes when requests are answered.
type watcher struct {
	close func()

	mu      sync.Mutex
	waiting map[string]func(*v2.BlockRequest, time.Time)
}

func (f *fleet) watch(ctx context.Context) (*watcher, error) {
	w := &watcher{waiting: map[string]func(*v2.BlockRequest, time.Time){}}
	informers := externalversions.NewSharedInformerFactory(f.rig.Coil, 0)
	if _, err := informers.Coil().V2().BlockRequests().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) {
			if r, ok := obj.(*v2.BlockRequest); ok && len(r.Status.Conditions) > 0 {
				w.answered(r, time.Now())
			}
		},
	}); err != nil {
		return nil, err
	}
	end := make(chan struct{})
	w.close = sync.OnceFunc(func() { close(end); informers.Shutdown() })
	informers.Start(end)
	for kind, ok := range informers.WaitForCacheSync(ctx.Done()) {
		if !ok {
			w.close()
			return nil, fmt.Errorf("watch %s: %w", kind, ctx.Err())
		}
	}
	return w, nil
}

func (w *watcher) answered(r *v2.BlockRequest, at time.Time) {
	w.mu.Lock()
	tell := w.waiting[r.Name]
	delete(w.waiting, r.Name)
	w.mu.Unlock()
	if tell != nil {
		tell(r, at)
	}
}

func (w *watcher) expect(name string, tell func(*v2.BlockRequest, time.Time)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waiting[name] = tell
}

// answer is one answered request.
type answer struct {
	request *v2.BlockRequest
	began   time.Time
	at      time.Time
}

// ask makes one request and returns after what time a watch showed the answer.
func (f *fleet) ask(ctx context.Context, w *watcher, name string, i int) (time.Duration, error) {
	answers := make(chan answer, 1)
	f.expect(w, name, answers)
	if _, err := f.request(ctx, name, i); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(answerTimeout))
	defer cancel()
	a, err := next(ctx, answers)
	return a.at.Sub(a.began), err
}

func (f *fleet) expect(w *watcher, name string, answers chan<- answer) {
	began := time.Now()
	w.expect(name, func(r *v2.BlockRequest, at time.Time) { answers <- answer{r, began, at} })
}

func next(ctx context.Context, answers <-chan answer) (answer, error) {
	select {
	case a := <-answers:
		if a.request.Status.AddressBlockName == "" {
			return a, fmt.Errorf("BlockRequest %s was refused: %v", a.request.Name, a.request.Status.Conditions)
		}
		return a, nil
	case <-ctx.Done():
		return answer{}, fmt.Errorf("wait for an answer: %w", ctx.Err())
	}
}

// served are the figures of many requests at once: the time to make them, p50 and p99 of the answers' delays, in
// seconds, and how many are answered per second.
type served struct{ making, p50, p99, rate float64 }

// serve lets the controller answer many requests that come at once. It holds that no block answers two of them.
func (f *fleet) serve(ctx context.Context, w *watcher, name string, n int) (served, error) {
	var s served
	answers := make(chan answer, n)
	began := time.Now()
	err := each(ctx, n, func(ctx context.Context, i int) error {
		name := fmt.Sprintf("%s-%d", name, i)
		f.expect(w, name, answers)
		_, err := f.request(ctx, name, i)
		return err
	})
	if err != nil {
		return s, fmt.Errorf("make requests: %w", err)
	}
	s.making = time.Since(began).Seconds()
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(answerTimeout))
	defer cancel()
	last := began
	blocks := map[string]string{}
	var took []time.Duration
	for range n {
		a, err := next(ctx, answers)
		if err != nil {
			return s, fmt.Errorf("%d of %d requests: %w", len(took), n, err)
		}
		if other, ok := blocks[a.request.Status.AddressBlockName]; ok {
			return s, fmt.Errorf("AddressBlock %s answers %s and %s", a.request.Status.AddressBlockName, other, a.request.Name)
		}
		blocks[a.request.Status.AddressBlockName] = a.request.Name
		took = append(took, a.at.Sub(a.began))
		if a.at.After(last) {
			last = a.at
		}
	}
	s.p50, s.p99 = figures.Quantile(took, 0.5)/1000, figures.Quantile(took, 0.99)/1000
	s.rate = float64(n) / last.Sub(began).Seconds()
	return s, nil
}
