package rig

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// serverAddr is the API server's own address on nodes of which NodeOptions.InCluster is true.
var serverAddr = netip.MustParseAddr("198.18.0.1")

// accountDir is where client-go looks for what a pod knows of the API server.
const accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// inCluster is what a node has so that its coild reaches the API server as a pod does.
type inCluster struct {
	node   *Node
	server netip.AddrPort
	proxy  *netlab.Proxy
}

// newInCluster makes the token of coild's ServiceAccount, and the EndpointSlice of the API server, if there is none.
func (n *Node) newInCluster(ctx context.Context) (*inCluster, error) {
	cfg := n.rig.API.RESTConfig()
	at, err := url.Parse(cfg.Host)
	if err != nil {
		return nil, err
	}
	bound, err := netip.ParseAddrPort(at.Host)
	if err != nil {
		return nil, err
	}
	c := &inCluster{node: n, server: netip.AddrPortFrom(serverAddr, bound.Port())}
	ask := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(86400))}}
	token, err := n.rig.Core.CoreV1().ServiceAccounts(metav1.NamespaceSystem).CreateToken(ctx, "coild", ask, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("make a token of coild: %w", err)
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{c.server.Addr().String()}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}},
		Ports:       []discoveryv1.EndpointPort{{Name: new("https"), Port: new(int32(c.server.Port())), Protocol: new(corev1.ProtocolTCP)}},
	}
	if _, err := n.rig.Core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(ctx, slice, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("make the EndpointSlice of the API server: %w", err)
	}
	return c, errors.Join(
		os.WriteFile(n.path("token"), []byte(token.Status.Token), 0o600),
		os.WriteFile(n.path("ca.crt"), cfg.CAData, 0o600),
	)
}

// clusterIP is that of the API server.
func clusterIP() netip.AddrPort {
	return netip.AddrPortFrom(controlplane.DefaultServiceCIDRs()[0].Addr().Next(), 443)
}

// connect makes the API server's address on the node that has been switched on, and the rules that lead the ClusterIP there.
func (c *inCluster) connect(ctx context.Context) error {
	if err := c.node.ns.IP(ctx, netlab.AddAddr(netip.PrefixFrom(serverAddr, serverAddr.BitLen()), "lo")); err != nil {
		return err
	}
	at, err := url.Parse(c.node.rig.API.RESTConfig().Host)
	if err != nil {
		return err
	}
	if c.proxy, err = netlab.NewProxy(ctx, c.node.ns, c.server.String(), at.Host); err != nil {
		return err
	}
	return c.node.TranslateAPI(ctx)
}

// close ends the way to the API server.
func (c *inCluster) close() error {
	if c.proxy == nil {
		return nil
	}
	err := c.proxy.Close()
	c.proxy = nil
	return err
}

// run lets coild run with the files of a pod.
func (c *inCluster) run(p *Program) {
	const script = `mount -t tmpfs none /var/run && mkdir -p "$1" && cp "$2" "$3" "$1" && shift 3 && exec "$@"`
	p.Args = append([]string{"--mount", "--propagation=slave", "sh", "-ec", script, "sh", accountDir, c.node.path("token"), c.node.path("ca.crt"), p.Path}, p.Args...)
	p.Path = "unshare"
}

// TranslateAPI makes the rules that lead the ClusterIP to the API server. The node's coild must be in the cluster, as NodeOptions say.
func (n *Node) TranslateAPI(ctx context.Context) error {
	ip := clusterIP()
	_, err := n.Run(ctx, "nft", fmt.Sprintf(`add table ip api; delete table ip api; table ip api {
		chain output {
			type nat hook output priority -100
			ip daddr %s tcp dport %d dnat to %s
		}
	}`, ip.Addr(), ip.Port(), n.inCluster.server))
	return err
}

// LoseAPI takes these rules away, as when the node's Service proxy has lost all of its own. Packets of connections get lost, too.
func (n *Node) LoseAPI(ctx context.Context) error {
	// The kernel translates on what it tracks as long as there is any rule of NAT: what is sent is dropped before.
	_, err := n.Run(ctx, "nft", fmt.Sprintf(`delete table ip api; table ip api {
		chain output {
			type filter hook output priority raw
			ip daddr %s drop
		}
	}`, clusterIP().Addr()))
	return err
}

// APIConnections returns how many connections the node has to the API server's own address.
func (n *Node) APIConnections(ctx context.Context) (int, error) {
	// The address is the node's, too: without the port the other ends count as well.
	out, err := n.Run(ctx, "ss", "-Htn", "state", "established", "dst", n.inCluster.server.String())
	return strings.Count(out, "\n"), err
}
