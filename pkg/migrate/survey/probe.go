package survey

import (
	"context"
	"errors"
	"fmt"
	"path"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/wait"
	typedcore "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/plan/probe"
)

const (
	// probesAtOnce bounds how many nodes are looked at at the same time.
	probesAtOnce = 16
	// pollInterval is how often the API server is asked for the state of each of their pods.
	pollInterval = time.Second
	// cleanTimeout bounds the removal of a pod.
	cleanTimeout = 10 * time.Second

	container = "probe"
	// component is the label of the pods.
	component = "coil-preflight"
)

// Probes looks at nodes.
type Probes struct {
	Pods typedcore.PodInterface
	// Image is that of the Coil that is to be installed.
	Image string
	// Timeout bounds how long one node is looked at.
	Timeout time.Duration
}

// Run looks at all nodes on which coild runs and whose kubelet is there. A node that can't be looked at doesn't keep the
// others from it. When ctx ends, the rest have its error, and no pod stays.
func (p Probes) Run(ctx context.Context, nodes []*corev1.Node) map[string]preflight.Probe {
	p.removeOld(ctx)
	var mu sync.Mutex
	all := map[string]preflight.Probe{}
	var group errgroup.Group
	group.SetLimit(probesAtOnce)
	for _, n := range nodes {
		if !preflight.Runs(n) || preflight.Away(n) {
			continue
		}
		group.Go(func() error {
			result, err := p.look(ctx, n.Name)
			mu.Lock()
			defer mu.Unlock()
			all[n.Name] = preflight.Probe{Result: result, Err: err}
			return nil
		})
	}
	_ = group.Wait() // errors are in the map
	return all
}

// removeOld removes pods of earlier runs that were killed. They have ended by themselves (activeDeadlineSeconds).
func (p Probes) removeOld(ctx context.Context) {
	pods, err := p.Pods.List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
	if err != nil {
		return // they harm nobody
	}
	for _, old := range pods.Items {
		if ended(old.Status.Phase) {
			_ = p.remove(ctx, old.Name) // likewise
		}
	}
}

// look runs a pod on a node, and returns what it says. The pod doesn't outlive it.
func (p Probes) look(ctx context.Context, node string) (result *probe.Result, err error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	pod := p.pod(node)
	defer func() {
		// Also after an error: a pod may be made although nobody answered.
		if rerr := p.remove(ctx, pod.Name); rerr != nil {
			err = errors.Join(err, fmt.Errorf("pod %s stays: %w", pod.Name, rerr))
		}
	}()
	ctx, cancel := context.WithTimeoutCause(ctx, p.Timeout, fmt.Errorf("not within %v (--timeout)", p.Timeout))
	defer cancel()
	if _, err := p.Pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return nil, fmt.Errorf("make a pod that looks at the node: %w", err)
	}
	if err := p.await(ctx, pod.Name); err != nil {
		return nil, err
	}
	log, err := p.Pods.GetLogs(pod.Name, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the log of pod %s: %w", pod.Name, err)
	}
	return probe.Parse(log)
}

// remove deletes a pod at once, also after ctx has ended.
func (p Probes) remove(ctx context.Context, pod string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	err := p.Pods.Delete(ctx, pod, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func ended(p corev1.PodPhase) bool { return p == corev1.PodSucceeded || p == corev1.PodFailed }

// hopeless are reasons for which a container that waits won't start within the time that there is.
var hopeless = map[string]bool{
	"ImagePullBackOff": true, "InvalidImageName": true, "ErrImageNeverPull": true, "CreateContainerConfigError": true,
}

// noImage are reasons for which a container waits for its image.
var noImage = map[string]bool{"ImagePullBackOff": true, "ErrImagePull": true}

// await returns when a pod has ended. An error says why the pod can't be expected to say anything.
func (p Probes) await(ctx context.Context, name string) error {
	state := "Pending"
	err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		pod, err := p.Pods.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, fmt.Errorf("pod %s was deleted", name)
		} else if err != nil {
			state = err.Error()
			return false, nil
		}
		state = string(pod.Status.Phase)
		if pod.Status.Phase == corev1.PodFailed && pod.Status.Reason != "" {
			return false, fmt.Errorf("pod %s: %s: %s", name, pod.Status.Reason, pod.Status.Message)
		}
		for _, c := range pod.Status.ContainerStatuses {
			if w := c.State.Waiting; w != nil {
				state = w.Reason + ": " + w.Message
				if noImage[w.Reason] {
					state += ": import the image on the node, or give one that the node can pull (--image)"
				}
				if hopeless[w.Reason] {
					return false, fmt.Errorf("pod %s: %s", name, state)
				}
			}
		}
		return ended(pod.Status.Phase), nil
	})
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return fmt.Errorf("pod %s is %s: %w", name, state, cause)
	}
	return err
}

// folders are those of the node that the pod reads. They exist on each node, so that the runtime makes none.
var folders = []string{"/etc", "/lib", "/var/lib"}

// pod is one that runs coild probe on a node. It needs no network, since there may be none yet.
func (p Probes) pod(node string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name:   component + "-" + rand.String(8),
			Labels: map[string]string{"app.kubernetes.io/name": "coil-migrator", "app.kubernetes.io/component": component},
		},
		Spec: corev1.PodSpec{
			NodeName:                      node, // past the scheduler, as to nodes that are cordoned
			HostNetwork:                   true,
			RestartPolicy:                 corev1.RestartPolicyNever,
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			ActiveDeadlineSeconds:         new(int64(max(1, p.Timeout.Seconds()))),
			TerminationGracePeriodSeconds: new(int64(0)),
			AutomountServiceAccountToken:  new(false),
			EnableServiceLinks:            new(false),
			Containers: []corev1.Container{{
				Name: container, Image: p.Image, ImagePullPolicy: corev1.PullIfNotPresent,
				Command: []string{"/coild", "probe"},
				SecurityContext: &corev1.SecurityContext{
					// root owns the record of addresses, and may read it without any capability.
					RunAsUser:                new(int64(0)),
					Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
					AllowPrivilegeEscalation: new(false),
					ReadOnlyRootFilesystem:   new(true),
					SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
					// With SELinux, a confined container can't read the node's folders.
					SELinuxOptions: &corev1.SELinuxOptions{Type: "spc_t"},
				},
			}},
		},
	}
	for i, folder := range folders {
		name := fmt.Sprintf("folder-%d", i)
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			HostPath: &corev1.HostPathVolumeSource{Path: folder, Type: new(corev1.HostPathDirectory)},
		}})
		c := &pod.Spec.Containers[0]
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: path.Join("/host", folder), ReadOnly: true})
	}
	return pod
}
