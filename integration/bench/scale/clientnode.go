package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/egress"
	"github.com/coil-net/coil/pkg/node/routerhealth"
	"github.com/coil-net/coil/pkg/node/view"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	// clientNodeEnv has what a clientNode is to do. A program that is started with it is one.
	clientNodeEnv = "COIL_SCALE_CLIENT_NODE"
	// clientsMade is what a clientNode prints when all of its clients have their tunnels.
	clientsMade = "all clients are made"
)

// clientNode is a process that does what coild does for clients of an Egress: its watches, its loop
// and its kernel objects, in network namespaces of its own. Only tunnels are played, by veths, since not each
// machine's kernel has FoU: coild itself would start no client there.
type clientNode struct {
	Name, Kubeconfig string
	Pods             []clientPod
}

// clientPod is a pod of the node.
type clientPod struct {
	Namespace, Name, UID string
	Addr4, Addr6         netip.Addr
}

// playClientNode does what the environment asks for, if it does, and never returns then.
func playClientNode() {
	config, ok := os.LookupEnv(clientNodeEnv)
	if !ok {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	var c clientNode
	err := json.Unmarshal([]byte(config), &c)
	if err == nil {
		err = c.run(ctx)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "client node:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (c clientNode) run(ctx context.Context) error {
	clients, err := kube.Connect(c.Kubeconfig, "coild")
	if err != nil {
		return err
	}
	recorder, flush, err := kube.RunRecorder(ctx, clients.Core, "coild")
	if err != nil {
		return err
	}
	defer flush()
	var m *egress.Manager
	var watches kube.Watches
	view.WatchNode(&watches, clients, c.Name)
	v := view.WatchEgresses(&watches, clients, c.Name, view.WatchNamespaces(&watches, clients), view.EgressHandlers{
		Pod:       func(n types.NamespacedName) { m.PodChanged(n) },
		Egress:    func(n types.NamespacedName) { m.EgressChanged(n) },
		Namespace: func(name string) { m.NamespaceChanged(name) },
	})
	kernel := &network{Network: clientnet.New(dataplane.ProtocolNode, veths{}, nil), want: len(c.Pods), made: map[uint64]bool{}}
	health := routerhealth.New(kernel, v, recorder)
	m = egress.New(egress.Config{
		Port: dataplane.FouPort, Protocol: dataplane.ProtocolNode, Drift: 10 * time.Second,
		Available: func() error { return nil }, Repaired: func(context.Context, clientnet.Outcome) {}, Health: health,
	}, v, kernel, noRecord{}, recorder, reconcile.NewMetrics(nil))
	sandboxes, err := c.sandboxes(ctx)
	if err != nil {
		return err
	}
	if err := m.Restore(ctx, sandboxes); err != nil {
		return err
	}
	if err := watches.Register(); err != nil {
		return err
	}
	defer watches.Shutdown()
	watches.Start(ctx)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return m.Run(ctx, watches.Synced()...) })
	group.Go(func() error { return health.Run(ctx, m) })
	return group.Wait()
}

// sandboxes makes the pods' network namespaces, which end with the process.
func (c clientNode) sandboxes(ctx context.Context) ([]node.Sandbox, error) {
	var all []node.Sandbox
	for _, p := range c.Pods {
		ns, err := netlab.New()
		if err != nil {
			return nil, err
		}
		err = ns.IP(ctx, fmt.Sprintf(`link add eth0 mtu 1450 type veth peer name outside
link set outside up
link set eth0 up
addr add %s/32 dev eth0
addr add %s/128 dev eth0 nodad
route add 169.254.1.1 dev eth0
route add default via 169.254.1.1 dev eth0
-6 route add default dev eth0
`, p.Addr4, p.Addr6))
		if err != nil {
			return nil, err
		}
		all = append(all, node.Sandbox{
			ID: attachment.ID{ContainerID: p.UID, IfName: "eth0"}, Pod: store.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID},
			Netns:   store.Netns{Path: ns.Path(), Inode: ns.Inode()},
			Address: ipam.Address{IPv4: p.Addr4, IPv6: p.Addr6},
		})
	}
	return all, nil
}

// network says when all clients are made.
type network struct {
	*clientnet.Network
	want int

	mu   sync.Mutex
	made map[uint64]bool // by inode of the namespace
}

// Client implements egress.Network.
func (n *network) Client(ctx context.Context, at store.Netns, c client.Client) (clientnet.Outcome, error) {
	out, err := n.Network.Client(ctx, at, c)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil && len(out.State.Tunnels) == 2 && !n.made[at.Inode] {
		if n.made[at.Inode] = true; len(n.made) == n.want {
			fmt.Println(clientsMade)
		}
	}
	return out, err
}

// noRecord records nothing: coild writes its record only when Egresses change.
type noRecord struct{}

func (noRecord) SetClient(context.Context, store.Client) error         { return nil }
func (noRecord) ForgetClients(context.Context, ...attachment.ID) error { return nil }
func (noRecord) ListClients(context.Context) ([]store.Client, error)   { return nil, nil }

// veths are Tunnels that lead nowhere. They are made once, and stay.
type veths struct{}

var sinks = map[dataplane.Family]string{dataplane.IPv4: dataplane.ReceiverIPv4, dataplane.IPv6: dataplane.ReceiverIPv6}

func (v veths) Make(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error) {
	links := map[netip.Addr]dataplane.TunnelLink{}
	var result dataplane.Result
	var errs []error
	for _, w := range want {
		name := dataplane.TunnelName(w.Remote, 0)
		index, made, err := veth(ctx, h, name, ns.Fd())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if made {
			result.Added++
		}
		links[w.Remote] = dataplane.TunnelLink{Index: index, Name: name}
		if _, _, err := veth(ctx, h, sinks[dataplane.FamilyOf(w.Remote)], ns.Fd()); err != nil {
			errs = append(errs, err)
		}
	}
	return links, result, errors.Join(errs...)
}

func (veths) Prune(context.Context, *netns.NS, *rtnl.Handle, uint16, []dataplane.Tunnel, ...dataplane.Family) (dataplane.Result, error) {
	return dataplane.Result{}, nil
}

func (v veths) Check(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error) {
	links, _, err := v.Make(ctx, ns, h, port, want)
	return links, err
}

func (v veths) MakeSinks(ctx context.Context, h *rtnl.Handle, _ int, families ...dataplane.Family) (map[dataplane.Family]int, error) {
	links := map[dataplane.Family]int{}
	for _, f := range families {
		index, err := v.Sink(ctx, h, f)
		if err != nil {
			return links, err
		}
		links[f] = index
	}
	return links, nil
}

func (veths) Sink(ctx context.Context, h *rtnl.Handle, f dataplane.Family) (int, error) {
	l, err := h.LinkByName(ctx, sinks[f])
	return l.Index, err
}

// veth makes a pair of links with both ends in a namespace, unless it is there.
func veth(ctx context.Context, h *rtnl.Handle, name string, ns int) (index int, made bool, err error) {
	l, err := h.LinkByName(ctx, name)
	if err == nil {
		return l.Index, false, nil
	}
	peer := "x" + strings.TrimPrefix(name, "fou")
	err = h.Do(ctx, rtnl.AddVeth(rtnl.Veth{
		Name: name, MAC: net.HardwareAddr{2, 0xc0, 0, 0, 0, 0}, PeerName: peer, PeerMAC: net.HardwareAddr{2, 0xc0, 0, 0, 0, 1}, PeerNetns: ns, MTU: 1400,
	}))
	if err != nil {
		return 0, false, err
	}
	for _, end := range []string{peer, name} {
		if index, err = h.IndexByName(end); err != nil {
			return 0, false, err
		}
		if err = h.Do(ctx, rtnl.SetLink(index, rtnl.LinkChange{Up: true, NoAutoAddress: true})); err != nil {
			return 0, false, err
		}
	}
	return index, true, nil
}
