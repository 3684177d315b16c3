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
		asked := make([]diagnosis.AskedRouter, min(len(pods), mostRouters))
		var work sync.WaitGroup
		for i := range asked {
			work.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, answerWithin)
				defer cancel()
				asked[i] = diagnosis.AskedRouter{Egress: name, Pod: pods[i]}
				answer, err := r.AskRouter(ctx, pods[i], words...)
				if err != nil {
					asked[i].Unanswered = err.Error()
					return
				}
				asked[i].Answer = answer
			})
		}
		work.Wait()
		f.Routers = append(f.Routers, asked...)
	}
}
