package coilctl

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Examiner reads what a diagnosis needs. What can't be read makes its steps unknown.
type Examiner struct {
	Core kubernetes.Interface
	Coil versioned.Interface
	// Ask asks the coild that is in a pod; see package inspection.
	Ask func(ctx context.Context, coild *corev1.Pod, words ...string) (*inspection.Answer, error)
	// Record asks the coild that is in a pod for its whole record.
	Record func(ctx context.Context, coild *corev1.Pod) (*inspection.Database, error)
	// AskRouter asks the router that is in a pod; nil asks none.
	AskRouter func(ctx context.Context, router *corev1.Pod, words ...string) (*inspection.RouterAnswer, error)
	// Within is for how long each of them is waited for; 0 is 4 s. A coild answers within 2 s, unless it hangs.
	Within time.Duration
	// Now is the time; nil is time.Now.
	Now func() time.Time
	// Ahead is how far the clock of the API server is ahead of that, as far as answers have told; nil is not at all.
	Ahead func() time.Duration
}

// answering bounds the wait for one program.
func (e Examiner) answering(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, cmp.Or(e.Within, 4*time.Second))
}

// Pod walks through all that gives a pod its network.
func (e Examiner) Pod(ctx context.Context, namespace, name string) (diagnosis.Diagnosis, error) {
	pod, err := e.Core.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return diagnosis.Diagnosis{}, fmt.Errorf("read Pod %s/%s: %w", namespace, name, err)
	}
	f := diagnosis.PodFacts{Pod: pod}
	r := e.reading(&f.Facts)
	r.ofNode(ctx, pod.Spec.NodeName, "pod", namespace+"/"+name)
	r.pools(ctx)
	r.egresses(ctx, namespace)
	r.do(diagnosis.KindNamespace, func() (err error) {
		f.Namespace, err = found(e.Core.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{}))
		return err
	})
	r.do(diagnosis.KindEvents, func() (err error) { f.Events, err = e.events(ctx, pod); return err })
	r.wait()
	r.blockOfPod(ctx, pod)
	r.routers(ctx, diagnosis.EgressesOf(f), "pod", namespace+"/"+name)
	return diagnosis.Pod(f), nil
}

// Node walks through what the pods of a node depend on.
func (e Examiner) Node(ctx context.Context, name string) diagnosis.Diagnosis {
	var f diagnosis.Facts
	r := e.reading(&f)
	r.ofNode(ctx, name, "node")
	r.wait()
	return diagnosis.Node(name, f)
}

// Address walks from an address to who has it.
func (e Examiner) Address(ctx context.Context, a netip.Addr) diagnosis.Diagnosis {
	var f diagnosis.Facts
	r := e.reading(&f)
	r.pools(ctx)
	r.do(diagnosis.KindBlocks, func() error { return r.allBlocks(ctx) })
	r.wait()
	at := a
	if diagnosis.PoolOf(f.Pools, a) == nil {
		var claims []*v2.AddressClaim
		r.claims(ctx, &claims)
		r.wait()
		f.FloatingIP, at = diagnosis.BehindFloatingIP(claims, a)
	}
	b := diagnosis.BlockOf(f.Blocks, at)
	f.Blocks = nil
	if b != nil {
		f.Blocks = []*v2.AddressBlock{b}
		if node := b.Labels[v2.LabelNode]; node != "" {
			r.node(ctx, node, "address", at.String())
			r.wait()
		}
		f.Services = e.servicesAt(ctx, b)
	}
	return diagnosis.Address(a, f)
}

// reading reads facts, several at once.
type reading struct {
	Examiner
	facts *diagnosis.Facts
	began time.Time
	work  sync.WaitGroup
	mu    sync.Mutex // guards facts.Unread
}

func (e Examiner) reading(f *diagnosis.Facts) *reading {
	f.Now, f.Unread = time.Now(), map[string]string{}
	if e.Now != nil {
		f.Now = e.Now()
	}
	return &reading{Examiner: e, facts: f, began: f.Now}
}

// wait waits for all that was begun. It is judged by when reading began, so that nothing is late because of an API server that is slow.
func (r *reading) wait() {
	r.work.Wait()
	if r.Ahead != nil {
		r.facts.Now = r.began.Add(r.Ahead())
	}
}

// do reads a kind of objects in the background. Each kind has a field of the facts to itself.
func (r *reading) do(kind string, read func() error) {
	r.work.Go(func() {
		// A kind that isn't installed has no objects: a variant without it is one of Coil's.
		if err := read(); err != nil && !apierrors.IsNotFound(err) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.facts.Unread[kind] = err.Error()
		}
	})
}

// found leaves out that an object doesn't exist.
func found[T any](o *T, err error) (*T, error) {
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return o, nil
}

// node reads a Node and its coild, and asks that.
func (r *reading) node(ctx context.Context, name string, words ...string) {
	f := r.facts
	r.do(diagnosis.KindNode, func() (err error) {
		f.Node, err = found(r.Core.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{}))
		return err
	})
	r.do(diagnosis.KindCoilds, func() error {
		l, err := coildsOf(ctx, r.Core, name)
		if f.Coilds = l; err != nil {
			return err
		}
		coild := running(l)
		if coild == nil {
			return nil
		}
		ctx, cancel := r.answering(ctx)
		defer cancel()
		if f.Answer, err = r.Ask(ctx, coild, words...); err != nil {
			f.Answer, f.Unanswered = nil, err.Error()
		}
		return nil
	})
}

// coildsOf are the pods of coild on a node.
func coildsOf(ctx context.Context, core kubernetes.Interface, node string) (all []*corev1.Pod, err error) {
	o := cached()
	o.LabelSelector, o.FieldSelector = coildPods, fields.OneTermEqualSelector("spec.nodeName", node).String()
	l, err := core.CoreV1().Pods(metav1.NamespaceAll).List(ctx, o)
	err = listed(&all, l, err)
	return all, err
}

// running is the pod that can be asked, nil if there is none.
func running(coilds []*corev1.Pod) *corev1.Pod {
	i := slices.IndexFunc(coilds, func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil })
	if i < 0 {
		return nil
	}
	return coilds[i]
}

// ofNode reads a Node, its coild, and what is labelled with its name.
func (r *reading) ofNode(ctx context.Context, name string, words ...string) {
	if name == "" {
		return
	}
	r.node(ctx, name, words...)
	f, labelled := r.facts, cached()
	labelled.LabelSelector = v2.LabelNode + "=" + name
	r.do(diagnosis.KindBlocks, func() error {
		l, err := r.Coil.CoilV2().AddressBlocks().List(ctx, labelled)
		return listed(&f.Blocks, l, err)
	})
	r.do(diagnosis.KindRequests, func() error {
		l, err := r.Coil.CoilV2().BlockRequests().List(ctx, labelled)
		return listed(&f.Requests, l, err)
	})
}

func (r *reading) pools(ctx context.Context) {
	r.do(diagnosis.KindPools, func() error {
		l, err := r.Coil.CoilV2().AddressPools().List(ctx, cached())
		r.facts.NoPools = apierrors.IsNotFound(err)
		return listed(&r.facts.Pools, l, err)
	})
}

// egresses reads Egresses, and the policies for pods of a namespace.
func (r *reading) egresses(ctx context.Context, namespace string) {
	f := r.facts
	r.do(diagnosis.KindEgresses, func() error {
		l, err := r.Coil.CoilV2().Egresses(metav1.NamespaceAll).List(ctx, cached())
		return listed(&f.Egresses, l, err)
	})
	r.do(diagnosis.KindPolicies, func() error {
		l, err := r.Coil.CoilV2().EgressPolicies(namespace).List(ctx, cached())
		return listed(&f.Policies, l, err)
	})
	r.do(diagnosis.KindClusterPolicies, func() error {
		l, err := r.Coil.CoilV2().EgressClusterPolicies().List(ctx, cached())
		return listed(&f.ClusterPolicies, l, err)
	})
}

func (r *reading) allBlocks(ctx context.Context) error {
	r.facts.Blocks = nil
	l, err := r.Coil.CoilV2().AddressBlocks().List(ctx, cached())
	return listed(&r.facts.Blocks, l, err)
}

// blockOfPod reads the block of the pod's address, unless it is the node's.
func (r *reading) blockOfPod(ctx context.Context, pod *corev1.Pod) {
	f := r.facts
	if f.Answer != nil {
		for _, a := range f.Answer.Attachments {
			known := slices.ContainsFunc(f.Blocks, func(b *v2.AddressBlock) bool { return b.Name == a.Block })
			if a.Block == "" || known || a.PodUID != "" && a.PodUID != plan.PodUID(pod) {
				continue
			}
			r.do(diagnosis.KindBlocks, func() error {
				b, err := found(r.Coil.CoilV2().AddressBlocks().Get(ctx, a.Block, metav1.GetOptions{}))
				if b != nil {
					f.Blocks = append(f.Blocks, b)
				}
				return err
			})
			r.wait()
		}
		return
	}
	for _, ip := range pod.Status.PodIPs {
		a, err := netip.ParseAddr(ip.IP)
		if err == nil && !pod.Spec.HostNetwork && diagnosis.BlockOf(f.Blocks, a) == nil {
			r.do(diagnosis.KindBlocks, func() error { return r.allBlocks(ctx) })
			r.wait()
			return
		}
	}
}

// events are the latest warnings about a pod's network, the newest first.
func (e Examiner) events(ctx context.Context, pod *corev1.Pod) ([]string, error) {
	if pod.Spec.HostNetwork || len(pod.Status.PodIPs) > 0 {
		return nil, nil
	}
	list, err := e.Core.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		"involvedObject.kind": "Pod", "involvedObject.name": pod.Name, "involvedObject.uid": string(pod.UID), "type": corev1.EventTypeWarning,
		"reason": "FailedCreatePodSandBox",
	}.String()})
	if err != nil {
		return nil, err
	}
	at := func(e corev1.Event) time.Time {
		if e.Series != nil {
			return e.Series.LastObservedTime.Time
		}
		if !e.LastTimestamp.IsZero() {
			return e.LastTimestamp.Time
		}
		return e.EventTime.Time
	}
	slices.SortStableFunc(list.Items, func(a, b corev1.Event) int { return at(b).Compare(at(a)) })
	var texts []string
	for _, e := range list.Items {
		texts = append(texts, plan.Message(e.Message))
	}
	return texts, nil
}
