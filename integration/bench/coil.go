package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// coil is Coil as users have it: API server, coil-ipam-controller, a node with its
// coild, and the plugin.
type coil struct {
	*plugin
	rig     *rig.Rig
	machine *rig.Node
}

// blockBits makes blocks so large that the API server and the controller, which in a
// cluster are elsewhere, don't share the processors with what is measured.
const blockBits = 12

// namespaceOf is the Namespace of pods of a family; a pool has the same name.
func namespaceOf(family string) string { return "bench-" + family }

func newCoil(ctx context.Context, log io.Writer) (_ *coil, err error) {
	r, err := rig.New(ctx, rig.Options{Log: log})
	if err != nil {
		return nil, err
	}
	c := &coil{rig: r}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	for family, subnet := range map[string]v2.SubnetSet{
		ipv4: rig.V4("10.0.0.0/12"),
		dual: rig.Dual("10.16.0.0/12", "fd00:16::/108"),
	} {
		if err := r.AddPool(ctx, namespaceOf(family), blockBits, subnet); err != nil {
			return nil, err
		}
		if err := r.AddNamespace(ctx, namespaceOf(family), namespaceOf(family)); err != nil {
			return nil, err
		}
	}
	if c.machine, err = r.AddNode(ctx, rig.NodeOptions{}); err != nil {
		return nil, err
	}
	c.plugin, err = pluginOf(c.machine)
	return c, err
}

// pluginOf is the plugin of a node of the rig.
func pluginOf(n *rig.Node) (*plugin, error) {
	host, err := spaceOf(netns.Open(n.NetnsPath()))
	if err != nil {
		return nil, err
	}
	b, err := n.Conf(nil)
	if err != nil {
		return nil, err
	}
	var conf map[string]any
	if err := json.Unmarshal(b, &conf); err != nil {
		return nil, err
	}
	return &plugin{
		title: "coil", host: host, path: n.Plugin(), stop: host.close,
		conf:      map[string]map[string]any{ipv4: conf, dual: conf},
		namespace: map[string]string{ipv4: namespaceOf(ipv4), dual: namespaceOf(dual)},
	}, nil
}

func (c *coil) close() error { return errors.Join(c.plugin.close(), c.rig.Close()) }

// announce makes the Pod objects that kubelet would have seen before the runtime.
func (c *coil) announce(ctx context.Context, family string, from, to int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	for i := from; i < to; i++ {
		g.Go(func() error {
			p := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%d", i), Namespace: namespaceOf(family)},
				Spec:       corev1.PodSpec{NodeName: c.machine.Name, Containers: []corev1.Container{{Name: "c", Image: "none"}}},
			}
			made, err := c.rig.Core.CoreV1().Pods(p.Namespace).Create(ctx, p, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			if err == nil {
				c.uids.Store(types.NamespacedName{Namespace: p.Namespace, Name: p.Name}, made.UID)
			}
			return err
		})
	}
	return g.Wait()
}
