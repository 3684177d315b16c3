package coilctl

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube/listing"
	"github.com/coil-net/coil/pkg/plan/selftest"
)

const (
	// selftestRequests is how many requests of a selftest are made at a time.
	selftestRequests = 16
	// selftestPause is between two looks.
	selftestPause = 500 * time.Millisecond
	// retryPause is after answers of which one wasn't right, unless a check may take only a moment.
	retryPause = 2 * time.Second
	// answerSeconds is for how long pods wait for an answer.
	answerSeconds = 3
)

// tell prints a line while the selftest runs. If that fails, nobody reads it any more, and the selftest ends.
func (s *tester) tell(format string, args ...any) {
	out := s.ErrOut
	if s.format == formatTable {
		out = s.Out
	}
	if err := printf(out, format, args...); err != nil && s.lost == nil {
		s.lost = err
		s.cancel()
	}
}

// prepare reads what the cluster has, and returns the nodes to test.
func (s *tester) prepare(ctx context.Context) ([]string, error) {
	choice := selftest.Choice{Names: s.nodes, Tolerate: s.tolerate}
	err := listing.Each(ctx, listing.Source[corev1.Node]{Client: s.core.CoreV1().RESTClient(), Resource: "nodes", Trim: func(n *corev1.Node) {
		taints := n.Spec.Taints
		trimNode(n)
		n.Spec.Taints = taints
	}}, func(n *corev1.Node) { choice.Nodes = append(choice.Nodes, n) })
	if err != nil {
		return nil, fmt.Errorf("list Nodes: %w", err)
	}
	err = listing.Each(ctx, listing.Source[corev1.Pod]{Client: s.core.CoreV1().RESTClient(), Resource: "pods", Selector: coildPods, Trim: func(p *corev1.Pod) {
		secrets := p.Spec.ImagePullSecrets
		trimPod(p)
		p.Spec.ImagePullSecrets = secrets
	}},
		func(p *corev1.Pod) { choice.Coilds = append(choice.Coilds, p) })
	if err != nil {
		return nil, fmt.Errorf("list the pods of coild: %w", err)
	}
	var sets []*appsv1.DaemonSet
	o := cached()
	o.LabelSelector = coildPods
	l, err := s.core.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, o)
	if err := listed(&sets, l, err); err != nil {
		return nil, fmt.Errorf("list the DaemonSets of coild: %w", err)
	}
	coild, found := selftest.ContainerOf(sets)
	if !found {
		return nil, errors.New("there is no DaemonSet of coild (" + coildPods + "): is Coil installed?")
	}
	if s.image == "" {
		s.image = coild.Image
	}
	s.coildPulls = selftest.PullSecretsOf(choice.Coilds)
	if err := s.readPullSecrets(ctx); err != nil {
		return nil, err
	}
	if selftest.GivesAddresses(coild) {
		name := s.pool
		if name == "" {
			name = v2.DefaultPool
		}
		s.addressing.Pool, err = s.coil.CoilV2().AddressPools().Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("there is no AddressPool %s, of which the pods would get addresses: choose one with --pool", name)
		}
		if err != nil {
			return nil, fmt.Errorf("read AddressPool %s: %w", name, err)
		}
	}
	nodes, left := choice.Choose()
	for _, c := range left {
		s.say(ctx, c)
	}
	if len(nodes) == 0 {
		return nil, errors.New("there is no node to test")
	}
	choice.Nodes = slices.DeleteFunc(choice.Nodes, func(n *corev1.Node) bool { return !slices.Contains(nodes, n.Name) })
	return nodes, s.findWays(ctx, choice.Nodes)
}

// readPullSecrets reads those that flags name.
func (s *tester) readPullSecrets(ctx context.Context) error {
	for _, of := range s.pullSecrets {
		namespace, name, _ := strings.Cut(of, "/")
		secret, err := s.core.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("--image-pull-secret: read Secret %s: %w", of, err)
		}
		if !selftest.Pulls(secret) {
			return fmt.Errorf("--image-pull-secret: Secret %s is of the type %s, which has no credentials of registries: it must be %s", of, secret.Type, corev1.SecretTypeDockerConfigJson)
		}
		s.template.PullSecrets = append(s.template.PullSecrets, secret)
	}
	return nil
}

// makeNamespace makes the namespace, and what pods need there.
func (s *tester) makeNamespace(ctx context.Context) error {
	s.template = selftest.Template{Namespace: fmt.Sprintf("%s%06x", selftest.Prefix, rand.IntN(1<<24)), Pool: s.pool, Image: s.image, Port: uint16(s.port), PullSecrets: s.template.PullSecrets,
		HostNetwork: slices.ContainsFunc(s.ways, func(w selftest.Way) bool { return w.Host != "" })}
	s.judge = selftest.Judge{Namespace: s.template.Namespace, Kept: s.keepFailed, PullSecrets: s.coildPulls, Pulling: len(s.pullSecrets) > 0}
	s.report.Namespace, s.report.Image = s.template.Namespace, s.image
	s.made = true
	if _, err := s.core.CoreV1().Namespaces().Create(ctx, s.template.NamespaceObject(), metav1.CreateOptions{}); err != nil {
		s.made = !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) && !apierrors.IsAlreadyExists(err) // otherwise it isn't known
		return fmt.Errorf("create Namespace %s: %w", s.template.Namespace, err)
	}
	if _, err := s.core.CoreV1().ServiceAccounts(s.template.Namespace).Create(ctx, s.template.AccountObject(), metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create ServiceAccount %s/%s: %w", s.template.Namespace, selftest.Account, err)
	}
	for _, o := range s.template.SecretObjects() {
		if _, err := s.core.CoreV1().Secrets(o.Namespace).Create(ctx, o, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create Secret %s/%s: %w", o.Namespace, o.Name, err)
		}
	}
	s.tell("Namespace %s has the pods of the selftest, of the image %s\n", s.template.Namespace, s.image)
	return nil
}

// start makes pods, and returns those that run in time. The others are checks that have failed.
func (s *tester) start(ctx context.Context, wishes []selftest.Wish) ([]selftest.Pod, error) {
	errs := make([]error, len(wishes))
	each(len(wishes), func(i int) {
		_, errs[i] = s.core.CoreV1().Pods(s.template.Namespace).Create(ctx, s.template.PodObject(wishes[i]), metav1.CreateOptions{})
	})
	var waits []selftest.Wish
	for i, w := range wishes {
		if errs[i] == nil {
			waits = append(waits, w)
		} else if ctx.Err() == nil {
			s.say(ctx, selftest.Check{Check: selftest.CheckPods, Subject: w.Node, State: selftest.Wrong, Seen: fmt.Sprintf("the pod can't be made: %v", errs[i])})
		}
	}
	var started []selftest.Pod
	for deadline := time.Now().Add(s.timeout); len(waits) > 0; {
		pods, err := s.pods(ctx)
		if err != nil && ctx.Err() != nil {
			return started, ctx.Err()
		}
		late := time.Now().After(deadline)
		if err != nil && !late {
			pods = nil // the next look may succeed
		} else if err != nil {
			return started, err
		}
		waits = slices.DeleteFunc(waits, func(w selftest.Wish) bool {
			i := slices.IndexFunc(pods, func(p *corev1.Pod) bool { return p.Name == w.Name })
			var p *corev1.Pod
			runs, ended := false, err == nil
			if i >= 0 {
				p = pods[i]
				runs, ended = selftest.Started(p)
			}
			if runs {
				started = append(started, selftest.PodOf(p))
			} else if ended || late {
				s.say(ctx, s.judge.Unstarted(w, p))
			}
			return runs || ended || late
		})
		if len(waits) > 0 {
			if err := pause(ctx, selftestPause); err != nil {
				return started, err
			}
		}
	}
	slices.SortFunc(started, func(a, b selftest.Pod) int { return strings.Compare(a.Node+" "+a.Name, b.Node+" "+b.Name) })
	return started, nil
}

// pods are those of the selftest.
func (s *tester) pods(ctx context.Context) (all []*corev1.Pod, err error) {
	return podsOf(ctx, s.clients, s.template.Namespace)
}

func podsOf(ctx context.Context, c clients, namespace string) (all []*corev1.Pod, err error) {
	l, err := c.core.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selftest.Selector()})
	err = listed(&all, l, err)
	return all, err
}

// each does something n times, some at once.
func each(n int, do func(i int)) {
	free := make(chan struct{}, selftestRequests)
	var work sync.WaitGroup
	for i := range n {
		free <- struct{}{}
		work.Go(func() {
			defer func() { <-free }()
			do(i)
		})
	}
	work.Wait()
}

// addresses judges the addresses of pods that have started.
func (s *tester) addresses(ctx context.Context, pods []selftest.Pod) error {
	a := s.addressing
	if a.Pool != nil && len(pods) > 0 {
		var nodes []string
		for _, p := range pods {
			nodes = append(nodes, p.Node)
		}
		l, err := s.coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelNode + " in (" + strings.Join(nodes, ",") + ")"})
		if err := listed(&a.Blocks, l, err); err != nil {
			return fmt.Errorf("list AddressBlocks: %w", err)
		}
	}
	for _, p := range pods {
		s.say(ctx, s.judge.Addresses(a, p))
	}
	return ctx.Err()
}

// try is what one pod asks, and what becomes of the answers.
type try struct {
	from      selftest.Pod
	questions []selftest.Question
	judge     func([]selftest.Answer, error) []selftest.Check
}

// try has pods ask until all answers are right, or for as long as a check may take: routes to a new block come a moment after it.
func (s *tester) try(ctx context.Context, tries []try) error {
	for deadline := time.Now().Add(s.timeout); len(tries) > 0; {
		checks := s.once(ctx, tries)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		late := time.Now().After(deadline)
		var again []try
		for i, all := range checks {
			if !late && slices.ContainsFunc(all, func(c selftest.Check) bool { return c.State == selftest.Wrong }) {
				again = append(again, tries[i])
				continue
			}
			for _, c := range all {
				s.say(ctx, c)
			}
		}
		if tries = again; len(tries) > 0 {
			if err := pause(ctx, min(retryPause, s.timeout/10)); err != nil {
				return err
			}
		}
	}
	return nil
}

// once has pods ask, each all of its questions at once, and returns the checks of each try.
func (s *tester) once(ctx context.Context, tries []try) [][]selftest.Check {
	var names []string
	for _, t := range tries {
		if !slices.Contains(names, t.from.Name) {
			names = append(names, t.from.Name)
		}
	}
	checks := make([][]selftest.Check, len(tries))
	each(len(names), func(i int) {
		var questions []selftest.Question
		for _, t := range tries {
			if t.from.Name == names[i] {
				questions = append(questions, t.questions...)
			}
		}
		answers, err := s.ask(ctx, names[i], questions)
		if err == nil && len(answers) != len(questions) {
			err = fmt.Errorf("it was asked %d questions, and has answered %d", len(questions), len(answers))
		}
		for j, t := range tries {
			if t.from.Name != names[i] {
				continue
			}
			var own []selftest.Answer
			if err == nil {
				own, answers = answers[:len(t.questions)], answers[len(t.questions):]
			}
			checks[j] = t.judge(own, err)
		}
	})
	return checks
}

// answers has a pod ask.
func (s *tester) answers(ctx context.Context, name string, questions []selftest.Question) ([]selftest.Answer, error) {
	if len(questions) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout+answerSeconds*time.Second)
	defer cancel()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.template.Namespace, Name: name}}
	text, err := s.answer(ctx, pod, selftest.Container, selftest.AnswersLimit, selftest.Asking(questions, answerSeconds))
	if err != nil {
		return nil, err
	}
	return selftest.ParseAnswers(text)
}
