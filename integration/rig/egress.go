package rig

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/lab/build"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// StandInTunnels is the build tag of programs whose tunnels are VXLAN links in place of FoU, for Options.Tags: this machine's kernel may have no FoU.
// It works with the peering Direct.
const StandInTunnels = "coil_vxlan"

// Leases of coil-egress-controller, coil-ipam-controller and coil-lb-controller.
const (
	EgressLease = "coil-egress-leader"
	IPAMLease   = "coil-ipam-leader"
	LBLease     = "coil-lb-leader"
)

// NewEgressController prepares coil-egress-controller, with the pod whose image it gives routers. It isn't started yet.
func (r *Rig) NewEgressController(ctx context.Context) (*Program, error) {
	const name = "coil-egress-controller"
	path, err := (&build.Builder{Log: r.opts.Log}).Own(ctx, "cmd/"+name, r.opts.Tags...)
	if err != nil {
		return nil, err
	}
	own := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{{Name: name, Image: "own"}}}}
	if _, err := r.Core.CoreV1().Pods(metav1.NamespaceSystem).Create(ctx, own, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, err
	}
	kubeconfig, err := r.kubeconfig(name)
	if err != nil {
		return nil, err
	}
	return &Program{
		Path: path, Log: r.path(name + ".log"), Env: []string{"COIL_POD_NAMESPACE=" + metav1.NamespaceSystem, "COIL_POD_NAME=" + name},
		Args: []string{"--kubeconfig=" + kubeconfig, "--metrics-addr=", "--health-addr=", "--leader-election-retry-period=300ms", "-v=2"},
	}, nil
}

// TakeLease takes the Lease of a controller away that was killed, so that the next one need not wait for its end.
func (r *Rig) TakeLease(ctx context.Context, name string) error {
	err := r.Core.CoordinationV1().Leases(metav1.NamespaceSystem).Delete(ctx, name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Egress is an Egress whose routers are coil-egress in sandboxes. The rig plays the part of kubelet, which asks routers whether they are ready,
// and of kube-controller-manager, which lists them. coil-egress-controller is the caller's.
type Egress struct {
	Namespace, Name string
	// Flags are added to those of coil-egress.
	Flags []string
	// Patience is how long a router may take to answer a probe; 0 is a second.
	Patience time.Duration

	rig     *Rig
	program string // its path
	end     context.CancelFunc
	ended   chan struct{}

	// rounds is held while routers are asked.
	rounds  sync.Mutex
	mu      sync.Mutex
	routers []*Router
	trouble error // of the latest round
	listed  string
	made    int
}

// Router is a router of an Egress.
type Router struct {
	*Sandbox
	// Program is coil-egress.
	Program *Program
	// Addrs are those of the pod.
	Addrs []netip.Addr

	egress *Egress
	api    *netlab.Proxy
	// The following are guarded by the Egress's mu.
	ready, ending bool
	// unready is what a probe that fails says, whatever the router answers; lost says that its node has no power.
	unready, lost bool
}

// NewEgress makes an Egress, which has no router yet. It ends with Close, before the rig.
func (r *Rig) NewEgress(ctx context.Context, namespace, name string, spec v2.EgressSpec) (*Egress, error) {
	path, err := (&build.Builder{Log: r.opts.Log}).Own(ctx, "cmd/coil-egress", r.opts.Tags...)
	if err != nil {
		return nil, err
	}
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: spec}
	if _, err := r.Coil.CoilV2().Egresses(namespace).Create(ctx, e, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	made := &Egress{Namespace: namespace, Name: name, Flags: []string{"--drain-period=1s"}, rig: r, program: path, ended: make(chan struct{})}
	// It outlives the test's step that makes it.
	ctx, made.end = context.WithCancel(context.WithoutCancel(ctx))
	go made.run(ctx)
	return made, nil
}

// Close ends the routers' programs, and what plays Kubernetes for them. The objects stay.
func (e *Egress) Close() error {
	e.end()
	<-e.ended
	var errs []error
	for _, r := range e.Routers() {
		errs = append(errs, r.stop())
	}
	return errors.Join(errs...)
}

// Routers are those that weren't deleted.
func (e *Egress) Routers() []*Router {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.routers)
}

// AddRouter starts a router on a node, without waiting until it is ready.
func (e *Egress) AddRouter(ctx context.Context, n *Node) (*Router, error) {
	e.mu.Lock()
	e.made++
	name := fmt.Sprintf("%s-%d", e.Name, e.made)
	e.mu.Unlock()
	s, err := n.NewSandbox(ctx, SandboxOptions{Namespace: e.Namespace, Name: name, Labels: plan.RouterLabels(e.Name)})
	if err != nil {
		return nil, err
	}
	result, err := s.Add(ctx)
	if err != nil {
		return nil, err
	}
	r := &Router{Sandbox: s, Addrs: result.Addrs, egress: e}
	server, err := url.Parse(e.rig.API.RESTConfig().Host)
	if err != nil {
		return nil, err
	}
	if r.api, err = netlab.NewProxy(ctx, s.ns, server.Host, server.Host); err != nil {
		return nil, err
	}
	kubeconfig, err := e.rig.kubeconfigIn(e.Namespace, "coil-egress")
	if err != nil {
		return nil, err
	}
	var addrs, node []string
	for _, a := range r.Addrs {
		addrs = append(addrs, a.String())
	}
	for _, u := range n.uplinks() {
		node = append(node, u.own.Addr().String())
	}
	r.Program = &Program{
		Path: e.program, Netns: s.Path, Log: e.rig.path(name + ".log"), Args: append([]string{"--kubeconfig=" + kubeconfig, "--debug-socket=" + r.DebugSocket(), "-v=2"}, e.Flags...),
		Env: []string{"COIL_POD_ADDRESSES=" + strings.Join(addrs, ","), "COIL_NODE_ADDRESSES=" + strings.Join(node, ","), "COIL_POD_NAMESPACE=" + e.Namespace,
			"COIL_POD_NAME=" + name, "COIL_EGRESS_NAME=" + e.Name},
	}
	if err := errors.Join(s.Report(ctx, r.Addrs, false), r.Program.Start()); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.routers = append(e.routers, r)
	return r, nil
}

// SetUnready lets the router's probes fail, or answers them again.
func (r *Router) SetUnready(unready bool) {
	r.egress.mu.Lock()
	defer r.egress.mu.Unlock()
	r.unready = unready
}

// Ready says whether the pod is ready.
func (r *Router) Ready() bool {
	r.egress.mu.Lock()
	defer r.egress.mu.Unlock()
	return r.ready
}

// Lose says that the router's node has lost its power: nobody asks it any more, and its Pod stays as it is.
func (r *Router) Lose() error {
	r.egress.rounds.Lock()
	defer r.egress.rounds.Unlock()
	r.egress.mu.Lock()
	r.lost = true
	r.egress.mu.Unlock()
	return r.stop()
}

// Delete deletes the router's Pod as Kubernetes does: it is listed as ending, gets SIGTERM, drains, and is gone.
func (r *Router) Delete(ctx context.Context) error {
	pods := r.egress.rig.Core.CoreV1().Pods(r.Namespace)
	if err := pods.Delete(ctx, r.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(60))}); err != nil {
		return err
	}
	r.egress.mu.Lock()
	r.ending = true
	r.egress.mu.Unlock()
	r.Program.Stop()
	return r.Remove(ctx)
}

// Remove takes the router away at once, with its Pod.
func (r *Router) Remove(ctx context.Context) error {
	e := r.egress
	e.mu.Lock()
	e.routers = slices.DeleteFunc(e.routers, func(o *Router) bool { return o == r })
	e.mu.Unlock()
	err := r.stop()
	if r.ns != nil {
		err = errors.Join(err, r.Del(ctx))
	}
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
	if gone := e.rig.Core.CoreV1().Pods(r.Namespace).Delete(ctx, r.Name, now); !apierrors.IsNotFound(gone) {
		err = errors.Join(err, gone)
	}
	return errors.Join(err, r.Close())
}

// stop ends what runs for the router.
func (r *Router) stop() error {
	r.Program.Kill()
	if r.api == nil {
		return nil
	}
	err := r.api.Close()
	r.api = nil
	return err
}

// Report writes, as kubelet does, that the sandbox's pod runs with some addresses, and whether it is ready.
func (s *Sandbox) Report(ctx context.Context, addrs []netip.Addr, ready bool) error {
	status := corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}}
	if ready {
		status.Conditions[0].Status = corev1.ConditionTrue
	}
	for _, a := range addrs {
		status.PodIPs = append(status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	if len(addrs) > 0 {
		status.PodIP = addrs[0].String()
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": s.UID}, "status": status})
	if err != nil {
		return err
	}
	_, err = s.Node.rig.Core.CoreV1().Pods(s.Namespace).Patch(ctx, s.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// probes is how often routers are asked, and their lists are written.
const probes = 200 * time.Millisecond

// run plays Kubernetes for the routers.
func (e *Egress) run(ctx context.Context) {
	defer close(e.ended)
	tick := time.NewTicker(probes)
	defer tick.Stop()
	for {
		err := e.round(ctx)
		e.mu.Lock()
		e.trouble = err
		e.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Trouble is what went wrong when the routers' state was last written; nil if all went well.
func (e *Egress) Trouble() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.trouble
}

// round asks each router, and writes what has changed.
func (e *Egress) round(ctx context.Context) error {
	e.rounds.Lock()
	defer e.rounds.Unlock()
	var errs []error
	for _, r := range e.Routers() {
		e.mu.Lock()
		lost, unready, was := r.lost, r.unready, r.ready
		e.mu.Unlock()
		if lost {
			continue
		}
		ready := !unready && r.probe(ctx) == nil
		if ready == was {
			continue
		}
		if err := r.Report(ctx, r.Addrs, ready); err != nil {
			errs = append(errs, err)
			continue
		}
		e.mu.Lock()
		r.ready = ready
		e.mu.Unlock()
	}
	return errors.Join(append(errs, e.list(ctx))...)
}

// probe asks a router whether it is ready, as kubelet does.
func (r *Router) probe(ctx context.Context) error {
	client := &http.Client{Timeout: cmp.Or(r.egress.Patience, time.Second), Transport: &http.Transport{DialContext: r.Node.Dial, DisableKeepAlives: true}}
	_, err := netlab.Get(ctx, client, "http://"+net.JoinHostPort(r.Addrs[0].String(), "8081")+"/readyz")
	return err
}

// ForwardPods lets the node's kernel forward packets of pods of other nodes, as kube-proxy does.
func (n *Node) ForwardPods() error { return n.ns.Forward() }
