package rig

import (
	"context"
	"errors"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// NewNodeAddressEgress makes an Egress whose clients leave by addresses of nodes, if it isn't there.
func (r *Rig) NewNodeAddressEgress(ctx context.Context, namespace, name string) error {
	_, err := r.Coil.CoilV2().Egresses(namespace).Create(ctx, &v2.Egress{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       v2.EgressSpec{Destinations: []string{"192.0.2.0/24", "2001:db8::/32"}, Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfNode}},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// NewEgressRouter makes a pod that has the labels of a router of an Egress, which needn't exist. It runs nothing.
func (n *Node) NewEgressRouter(ctx context.Context, namespace, egress string) (*Sandbox, error) {
	s, err := n.NewSandbox(ctx, SandboxOptions{Namespace: namespace, Labels: plan.RouterLabels(egress)})
	if err != nil {
		return nil, err
	}
	_, err = s.Add(ctx)
	return s, err
}

// NodeAddress is what a node has to translate the packets of the clients of routers, and the routers that have their namespace: routes, the table of nftables, and
// addresses on lo.
func (n *Node) NodeAddress(ctx context.Context, routers ...*Sandbox) (string, error) {
	out, err := n.Run(ctx, "sh", "-c", `
		for family in -4 -6; do ip -N $family route show table 116 proto 33; done
		nft -s list table inet coil_masquerade 2>/dev/null || true`)
	for _, r := range routers {
		lo, e := r.Run(ctx, "ip", "-o", "address", "show", "dev", "lo")
		for line := range strings.Lines(lo) {
			// The index, the link, the family and the address come first.
			if f := strings.Fields(line); len(f) > 3 && (strings.HasPrefix(f[3], "169.254.") || strings.HasPrefix(f[3], "fd9c:41e7:6a5b:")) {
				out += fmt.Sprintln("lo", f[3])
			}
		}
		err = errors.Join(err, e)
	}
	return out, err
}
