package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/lab/build"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// A node with the label is a gateway by the DaemonSet, beside coild and kube-proxy: clients to whom the network sends the addresses by that node reach all endpoints.
func TestServicesByGatewayOnNode(t *testing.T) {
	s := newServices(t)
	ctx, node := t.Context(), s.Nodes()[0]
	manifests := filepath.Join(testkit.Must(build.Root())(t), "manifests")
	for _, args := range [][]string{
		{"apply", "-f", filepath.Join(manifests, "services", "gateway-rbac.yaml")}, {"apply", "-f", filepath.Join(manifests, "services", "gateway-own.yaml")},
		{"apply", "-k", filepath.Join(manifests, "gateway")}, {"label", "node", node, "coil.cybozu.com/lb-gateway=true"},
	} {
		testkit.Must(s.Kubectl(ctx, args...))(t)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		// The kernel goes on without the program, so that comes last.
		testkit.Check(t, s.coil.CoilV2().LoadBalancerGateways().Delete(ctx, node, metav1.DeleteOptions{}))
		testkit.Eventually(t, 30*time.Second, "the node is no gateway any more", func() error {
			tables, err := s.Exec(ctx, node, "nft", "list", "tables")
			if err == nil && strings.Contains(string(tables), "coil_lb") {
				err = fmt.Errorf("there is %s", tables)
			}
			return err
		})
		testkit.Must(s.Kubectl(ctx, "delete", "--wait", "-k", filepath.Join(manifests, "gateway")))(t)
		testkit.Must(s.Kubectl(ctx, "label", "node", node, "coil.cybozu.com/lb-gateway-"))(t)
	})
	const subnet, subnet6 = "172.30.0.136/29", "fd00:172:30::130/125"
	dmz := s.ns + "-dmz"
	testkit.Must(s.coil.CoilV2().AddressPools().Create(ctx, &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: dmz}, Spec: v2.AddressPoolSpec{
		Purpose: v2.PurposeFloating, Announce: v2.AnnounceGateway, Subnets: []v2.SubnetSet{{IPv4: new(subnet), IPv6: new(subnet6)}},
	}}, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		testkit.Check(t, s.coil.CoilV2().AddressPools().Delete(context.WithoutCancel(ctx), dmz, metav1.DeleteOptions{}))
	})
	// The Service proxy of the node doesn't translate what is translated already: the gateway sends to pods.
	testkit.Must(s.coil.CoilV2().LoadBalancerGateways().Create(ctx, &v2.LoadBalancerGateway{
		ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{dmz}, Endpoints: v2.EndpointsPod},
	}, metav1.CreateOptions{}))(t)
	at := testkit.Must(s.Addrs(node))(t)
	for _, a := range at {
		route := fmt.Sprintf("%s via %s", subnet, a)
		if a.Is6() {
			route = fmt.Sprintf("%s via %s", subnet6, a)
		}
		testkit.Check(t, s.client.IP(ctx, "route add "+route))
		t.Cleanup(func() { testkit.Check(t, s.client.IP(context.WithoutCancel(ctx), "route del "+route)) })
	}
	s.serve("web", s.Nodes()...)
	s.running(t, s.ns, 2*time.Minute)
	s.make("web", "web", corev1.ServiceExternalTrafficPolicyCluster)
	_, err := s.core.CoreV1().Services(s.ns).Patch(ctx, "web", types.MergePatchType, []byte(fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, v2.AnnotationPool, dmz)), metav1.PatchOptions{})
	testkit.Check(t, err)
	var addrs []netip.Addr
	testkit.Eventually(t, time.Minute, "the gateway serves both addresses", func() error {
		o, err := s.core.CoreV1().Services(s.ns).Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			return err
		}
		addrs = nil
		for _, in := range o.Status.LoadBalancer.Ingress {
			if a := netip.MustParseAddr(in.IP); netip.MustParsePrefix(subnet).Contains(a) || netip.MustParsePrefix(subnet6).Contains(a) {
				addrs = append(addrs, a)
			}
		}
		if len(addrs) != 2 {
			return fmt.Errorf("its status is %+v", o.Status)
		}
		return nil
	})
	s.reaches(addrs, "web-0", "web-1", "web-2")
	testkit.Check(t, s.core.CoreV1().Pods(s.ns).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "app=web"}))
	s.refused(node, addrs)
	testkit.Check(t, s.core.CoreV1().Services(s.ns).Delete(ctx, "web", metav1.DeleteOptions{}))
	testkit.Eventually(t, time.Minute, "the addresses are given back", func() error {
		blocks, err := s.blocksOf(t, dmz)
		if err == nil && len(blocks) > 0 {
			err = fmt.Errorf("there is %s", blocks[0].Name)
		}
		return err
	})
}
