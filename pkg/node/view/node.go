package view

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/reconcile"
)

// Node is the node's own Node. Its methods may be called concurrently, but for OnChange.
type Node struct {
	name    string
	clients kube.Clients
	nodes   kube.Cache[corev1.Node]
	changed []func()
}

// WatchNode returns the Node of a name.
func WatchNode(w *kube.Watches, clients kube.Clients, name string) *Node {
	i := kube.NodeInformer(clients.Core, fields.OneTermEqualSelector(metav1.ObjectNameField, name).String())
	n := &Node{name: name, clients: clients, nodes: kube.CacheOf[corev1.Node](i)}
	w.Add(i, reconcile.Handler(func(*corev1.Node) {
		for _, changed := range n.changed {
			changed()
		}
	}))
	return n
}

// OnChange lets changed be called when the Node has changed; it must not block. It is for the time before the watches
// start.
func (n *Node) OnChange(changed func()) { n.changed = append(n.changed, changed) }

// Live reads the Node from the API server.
func (n *Node) Live(ctx context.Context) (*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	var live corev1.Node
	if err := n.clients.Core.Get().Resource("nodes").Name(n.name).Do(ctx).Into(&live); err != nil {
		return nil, fmt.Errorf("read Node %s (COIL_NODE_NAME): %w", n.name, err)
	}
	return &live, nil
}

// Addrs returns the InternalIPs of the Node, as far as known.
func (n *Node) Addrs() ipam.Address {
	cached := n.nodes.Find(n.name)
	if cached == nil {
		return ipam.Address{}
	}
	return routes.InternalIPs(cached)
}

// Balances says whether addresses of Services may be on the node, as far as known.
func (n *Node) Balances() bool {
	cached := n.nodes.Find(n.name)
	return cached != nil && loadbalancer.Serves(cached)
}
