package coilctl

import (
	"context"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
)

// mostRouters is how many routers of an Egress are asked: each has all clients.
const mostRouters = 8

// routers asks the routers of Egresses that exist.
func (r *reading) routers(ctx context.Context, egresses []types.NamespacedName, words ...string) {
	if r.AskRouter == nil {
		return
	}
	f := r.facts
	for _, name := range egresses {
		if !slices.ContainsFunc(f.Egresses, func(e *v2.Egress) bool { return e.Namespace == name.Namespace && e.Name == name.Name }) {
			continue
		}
		var pods []*corev1.Pod
		r.do(diagnosis.KindRouters, func() error {
			o := cached()
			o.LabelSelector = labels.Set(plan.RouterLabels(name.Name)).String()
			l, err := r.Core.CoreV1().Pods(name.Namespace).List(ctx, o)
			return listed(&pods, l, err)
		})
		r.wait()
		pods = slices.DeleteFunc(pods, func(p *corev1.Pod) bool { return p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil })
		var found []diagnosis.AskedRouter
		for _, p := range pods[:min(len(pods), mostRouters)] {
			found = append(found, diagnosis.AskedRouter{Egress: name, Pod: p})
		}
		f.Routers = append(f.Routers, r.askRouters(ctx, found, words...)...)
	}
}

// askRouters asks routers, which may have answered another question, and returns them with their answers.
func (e Examiner) askRouters(ctx context.Context, routers []diagnosis.AskedRouter, words ...string) []diagnosis.AskedRouter {
	asked := make([]diagnosis.AskedRouter, len(routers))
	var work sync.WaitGroup
	for i, r := range routers {
		work.Go(func() {
			ctx, cancel := e.answering(ctx)
			defer cancel()
			asked[i] = diagnosis.AskedRouter{Egress: r.Egress, Pod: r.Pod}
			answer, err := e.AskRouter(ctx, r.Pod, words...)
			if err != nil {
				asked[i].Unanswered = err.Error()
				return
			}
			asked[i].Answer = answer
		})
	}
	work.Wait()
	return asked
}
