package diagnosis

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// AskedRouter is a router of an Egress, and what it says of a pod.
type AskedRouter struct {
	Egress types.NamespacedName
	Pod    *corev1.Pod
	// Answer is nil if the router doesn't answer, and Unanswered says why.
	Answer     *inspection.RouterAnswer
	Unanswered string
}

// EgressesOf are the Egresses that a pod is to use, each once.
func EgressesOf(f PodFacts) (all []types.NamespacedName) {
	if _, is := plan.RouterOf(f.Pod.Labels); is || f.Pod.Spec.HostNetwork {
		return nil
	}
	w := &podWalk{walk: walk{Facts: f.Facts}, Pod: f.Pod, Namespace: f.Namespace}
	uses, _ := w.uses()
	for _, u := range uses {
		if !slices.Contains(all, u.egress) {
			all = append(all, u.egress)
		}
	}
	return all
}

// peers judges what the routers of the pod's Egresses have for it.
func (w *podWalk) peers() {
	if w.unread(StepPeers, KindRouters) || len(w.Routers) == 0 {
		return
	}
	var wrong, silent []string
	do := ""
	note := func(r AskedRouter, advice, format string, args ...any) {
		wrong = append(wrong, fmt.Sprintf("router %s/%s: %s", r.Pod.Namespace, r.Pod.Name, fmt.Sprintf(format, args...)))
		if do == "" {
			do = advice
		}
	}
	for _, r := range w.Routers {
		logs := fmt.Sprintf("see kubectl -n %s logs %s", r.Pod.Namespace, r.Pod.Name)
		a := r.Answer
		if a == nil {
			silent = append(silent, fmt.Sprintf("router %s/%s: %s", r.Pod.Namespace, r.Pod.Name, r.Unanswered))
			continue
		}
		var lacks []inspection.Comparison
		for _, c := range a.Clients {
			lacks = append(lacks, inspection.Wrong(c.Objects)...)
		}
		over := slices.ContainsFunc(a.Clients, func(c inspection.RouterClient) bool { return slices.Contains(a.Router.Over, c.Address) })
		switch shared := inspection.Wrong(a.Shared); {
		case a.Router.NotReady != "":
			note(r, logs, "it isn't ready: %s", a.Router.NotReady)
		case len(shared) > 0:
			note(r, logs+"; it restores that within a second, unless something else in the pod takes it away again", "%s", shown(shared))
		case len(a.Clients) == 0 && !w.waiting():
			note(r, fmt.Sprintf("see that coil-egress-controller leads, and kubectl -n %s get endpointslices -l coil.cybozu.com/egress=%s", r.Egress.Namespace, r.Egress.Name),
				"it doesn't know the pod as a client, and drops its packets")
		case len(lacks) > 0:
			note(r, logs+"; it restores that within a second, unless something else in the pod takes it away again", "%s", shown(lacks))
		case over:
			note(r, "find what in the pod opens so many connections, or raise spec.maxConnectionsPerClient of the Egress", "the pod has more than the %d connections that a client may have", a.Router.MaxPerClient)
		}
	}
	switch n := len(w.Routers); {
	case len(wrong) > 0 && w.faulty(StepPolicies, StepRouter, StepTunnels):
		w.unknown(StepPeers, "", "first put the %s right; %s", w.firstWrong(), strings.Join(wrong, "; "))
	case len(wrong) > 0:
		w.wrong(StepPeers, do, "%s", strings.Join(wrong, "; "))
	case len(silent) > 0:
		w.unknown(StepPeers, "run it again with the right to make pods/exec in the namespace of the Egress", "%s", plan.Enumerate(silent))
	default:
		w.right(StepPeers, "%s the tunnel and the route to the pod, and lets it in", plan.Count(n, "router has", "routers have"))
	}
}

// conntrack judges whether the node of the pod, and the routers that it uses, can track more connections.
func (w *podWalk) conntrack() {
	var full, texts []string
	see := func(who string, c inspection.Conntrack) {
		texts = append(texts, who+": "+c.String())
		if c.Nearly() {
			full = append(full, fmt.Sprintf("%s: %s", who, c))
		}
	}
	if w.Answer != nil && w.Answer.Node.Conntrack != nil {
		see("node "+w.Answer.Node.Name, *w.Answer.Node.Conntrack)
	}
	for _, r := range w.Routers {
		if r.Answer != nil {
			see("router "+r.Pod.Namespace+"/"+r.Pod.Name, r.Answer.Router.Conntrack)
		}
	}
	switch {
	case len(full) > 0:
		w.wrong(StepConntrack, "raise net.netfilter.nf_conntrack_max of the node, whose value routers have, too, or find the pods that open so many connections: new ones are dropped when it is full",
			"hardly any more connections can be tracked; %s", strings.Join(full, "; "))
	case len(texts) > 0:
		w.right(StepConntrack, "%s", plan.Enumerate(texts))
	}
}
