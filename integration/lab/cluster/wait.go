package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	registerTimeout = 60 * time.Second
	readyTimeout    = 120 * time.Second
	// pollPause is the shortest pause between two requests: on emulated processors, answers keep other programs
	// from their work.
	pollPause = 100 * time.Millisecond
	// controlPlaneLabel is what kubeadm sets; a kubelet isn't allowed to.
	controlPlaneLabel = "node-role.kubernetes.io/control-plane"
)

func (c *Cluster) place() (stateDir, name string) { return filepath.Dir(c.dir), c.Name() }

func (c *Cluster) client() (kubernetes.Interface, error) { return kubernetes.NewForConfig(c.rest) }

func (c *Cluster) waitRegistered(ctx context.Context, name string) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(registerTimeout))
	defer cancel()
	err = testkit.Poll(ctx, pollPause, func() error {
		_, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		return err
	})
	if err != nil {
		log := c.Machine(name).Log("kubelet")
		return fmt.Errorf("wait for %s to register: %w; the end of %s:\n%s", name, err, log, proc.Tail(log, 15))
	}
	return nil
}

// waitServiceAccount waits for the account without which no pod can be made.
func (c *Cluster) waitServiceAccount(ctx context.Context) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(registerTimeout))
	defer cancel()
	for _, namespace := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem} {
		err := testkit.Poll(ctx, pollPause, func() error {
			_, err := client.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
			return err
		})
		if err != nil {
			return fmt.Errorf("wait for the ServiceAccount default of %s: %w", namespace, err)
		}
	}
	return nil
}

func (c *Cluster) labelControlPlane(ctx context.Context) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	patch := []byte(`{"metadata":{"labels":{"` + controlPlaneLabel + `":""}}}`)
	_, err = client.CoreV1().Nodes().Patch(ctx, c.Nodes()[0], types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// WaitReady waits until all nodes that are on have reported, since their last power-on, that they
// are ready.
func (c *Cluster) WaitReady(ctx context.Context) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(readyTimeout))
	defer cancel()
	return testkit.Poll(ctx, pollPause, func() error {
		nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		ready := map[string]error{}
		for _, n := range nodes.Items {
			ready[n.Name] = c.nodeReady(n)
		}
		var errs []error
		for _, name := range c.Nodes() {
			if _, err := c.init(name); err != nil {
				continue
			}
			if err, ok := ready[name]; !ok {
				errs = append(errs, fmt.Errorf("%s has not registered", name))
			} else if err != nil {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
}

func (c *Cluster) nodeReady(n corev1.Node) error {
	spec, err := c.Machine(n.Name).ReadSpec()
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a Node that somebody made by hand
	}
	if err != nil {
		return err
	}
	if n.Status.NodeInfo.BootID != spec.BootID {
		return fmt.Errorf("%s has not reported since its power-on", n.Name)
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == corev1.NodeReady {
			if cond.Status == corev1.ConditionTrue {
				return nil
			}
			return fmt.Errorf("%s is not ready: %s", n.Name, cond.Message)
		}
	}
	return fmt.Errorf("%s has not reported yet", n.Name)
}

// WaitWorkloads waits until every Deployment and DaemonSet of a namespace is fully up to date and
// available.
func (c *Cluster) WaitWorkloads(ctx context.Context, namespace string) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(readyTimeout))
	defer cancel()
	return testkit.Poll(ctx, pollPause, func() error {
		deployments, err := client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		daemons, err := client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var errs []error
		for _, d := range deployments.Items {
			want := int32(1)
			if d.Spec.Replicas != nil {
				want = *d.Spec.Replicas
			}
			s := d.Status
			if s.ObservedGeneration < d.Generation || s.UpdatedReplicas < want || s.AvailableReplicas < want || s.Replicas > want {
				errs = append(errs, fmt.Errorf("deployment %s: %d of %d available", d.Name, s.AvailableReplicas, want))
			}
		}
		for _, d := range daemons.Items {
			s := d.Status
			if s.ObservedGeneration < d.Generation || s.UpdatedNumberScheduled < s.DesiredNumberScheduled || s.NumberAvailable < s.DesiredNumberScheduled {
				errs = append(errs, fmt.Errorf("daemon set %s: %d of %d available", d.Name, s.NumberAvailable, s.DesiredNumberScheduled))
			}
		}
		return errors.Join(errs...)
	})
}
