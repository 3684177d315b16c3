package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	// gatewayPool is the pool of the addresses that gateways serve.
	gatewayPool = "gateways"
	// fewServices is beside how many Services a change is measured, too.
	fewServices = 100
	// endpointPort is where endpoints listen, and servicePort the port of Services.
	endpointPort = 8080
	servicePort  = 443
)

// machines are gateways that serve Services, one after the other. The Services, their endpoints and addresses are objects alone: nobody else looks at them.
type machines struct {
	options
	rig  *rig.Rig
	spec ipam.Pool
	pool *v2.AddressPool
	// protocol is that of the Services, and made how many there are so far.
	protocol corev1.Protocol
	made     int
	// replaced are the endpoints so far that others have replaced.
	replaced int
}

// newMachines starts an API server, with nodes.
func newMachines(ctx context.Context, o options, p corev1.Protocol) (_ *machines, err error) {
	m := &machines{options: o, protocol: p}
	if m.rig, err = rig.New(ctx, rig.Options{NoController: true, Log: o.log}); err != nil {
		return nil, err
	}
	if err := m.prepare(ctx); err != nil {
		return nil, errors.Join(err, m.rig.Close())
	}
	return m, nil
}

// measureGateway measures coil-lb-agent on a gateway machine: how soon after its start the kernel has all Services, how late an endpoint's change is there beside few Services and
// beside many, and its memory.
func measureGateway(ctx context.Context, o options, rep *report) (err error) {
	m, err := newMachines(ctx, o, corev1.ProtocolTCP)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.rig.Close()) }()
	late := map[int]float64{}
	few := min(fewServices, o.services)
	for _, n := range []int{few, o.services} {
		if late[n], err = m.measure(ctx, n, rep); err != nil {
			return fmt.Errorf("%d Services: %w", n, err)
		}
	}
	what := fmt.Sprintf("gateway: an endpoint's change, median, beside %d Services by beside %d", o.services, few)
	rep.Figures.AtMost(what, "", late[o.services]/late[few], 1.5)
	return nil
}

// prepare makes the pool, a namespace, and nodes.
func (m *machines) prepare(ctx context.Context) error {
	if err := errors.Join(m.rig.AddPool(ctx, gatewayPool, 0, rig.V4("198.18.0.0/15")), m.rig.AddNamespace(ctx, shops, "")); err != nil {
		return err
	}
	patch := fmt.Appendf(nil, `{"spec":{"announce":%q,"purpose":%q}}`, v2.AnnounceGateway, v2.PurposeFloating)
	p, err := m.rig.Coil.CoilV2().AddressPools().Patch(ctx, gatewayPool, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return err
	}
	m.pool = p
	if m.spec, err = pools.Parse(p.Spec); err != nil {
		return err
	}
	return each(ctx, min(servingNodes, m.nodes), func(ctx context.Context, i int) error {
		_, err := m.rig.Core.CoreV1().Nodes().Create(ctx, nodeObject(i), metav1.CreateOptions{})
		return err
	})
}

// grow makes Services with endpoints and addresses until there are n.
func (m *machines) grow(ctx context.Context, n int) error {
	first := m.made
	m.made = n
	return each(ctx, n-first, func(ctx context.Context, i int) error {
		i += first
		s := balanced(serviceName(i))
		s.Spec.Ports[0].Protocol = m.protocol
		if _, err := m.rig.Core.CoreV1().Services(shops).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			return err
		}
		if _, err := m.rig.Core.DiscoveryV1().EndpointSlices(shops).Create(ctx, m.slice(i), metav1.CreateOptions{}); err != nil {
			return err
		}
		b, err := m.block(i)
		if err != nil {
			return err
		}
		_, err = m.rig.Coil.CoilV2().AddressBlocks().Create(ctx, b, metav1.CreateOptions{})
		return err
	})
}

// block is the address of a Service, as coil-ipam-controller and coil-lb-controller make it.
func (m *machines) block(i int) (*v2.AddressBlock, error) {
	a, err := m.spec.Block(int32(i))
	if err != nil {
		return nil, err
	}
	name := serviceName(i)
	return pools.NewFloating(m.pool, int32(i), a, v2.Floating{
		Owner: v2.FloatingOwner{Kind: "Service", Namespace: shops, Name: name, UID: uuid.NewUUID()}, Claim: name,
		Ports: []v2.FloatingPort{{Protocol: m.protocol, Port: servicePort, Service: shops + "/" + name}},
	}), nil
}

// endpoint is one of a Service.
func (m *machines) endpoint(i, j int) netip.Addr {
	n := i*m.endpoints + j
	return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
}

// slice lists the endpoints of a Service, as kube-controller-manager does.
func (m *machines) slice(i int) *discoveryv1.EndpointSlice {
	name := serviceName(i)
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name + "-x7k2p", GenerateName: name + "-",
			Labels:          map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
			Annotations:     map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339)},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: name, UID: uuid.NewUUID(), Controller: new(true)}},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(endpointPort)), Protocol: new(m.protocol)}},
	}
	for j := range m.endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{m.endpoint(i, j).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			NodeName:   new(nodeName((i*m.endpoints + j) % min(servingNodes, m.nodes))), Zone: new(fmt.Sprint("zone-", j%6)),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: shops, Name: fmt.Sprintf("%s-%09x-%05x", name, i, j), UID: uuid.NewUUID()},
		})
	}
	return s
}

// measure measures a machine that serves the first n Services, and returns how late the median of changes of endpoints is, in ms.
func (m *machines) measure(ctx context.Context, n int, rep *report) (late float64, err error) {
	if err := m.grow(ctx, n); err != nil {
		return 0, err
	}
	g, err := m.rig.NewGateway(ctx, fmt.Sprint("gateway-", n), v2.LoadBalancerGatewaySpec{Pools: []string{gatewayPool}, Endpoints: v2.EndpointsPod})
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w; the end of the agent's log:\n%s", err, g.Logs(20))
		}
		err = errors.Join(err, g.Close())
	}()
	table, err := nft.New(g.NS.NS, dataplane.NftTableLB)
	if err != nil {
		return 0, err
	}
	defer table.Close()
	began := time.Now()
	if err := g.Start(); err != nil {
		return 0, err
	}
	if err := ready(ctx, g.NS); err != nil {
		return 0, err
	}
	took := time.Since(began)
	if err := serves(ctx, table, n*m.endpoints); err != nil {
		return 0, err
	}
	applied, err := loopSeconds(ctx, g.NS, "gateway-apply")
	if err != nil {
		return 0, err
	}
	what := fmt.Sprintf("gateway: %d Services of %d endpoints, ", n, m.endpoints)
	rep.Figures.AtMost(what+"from the agent's start until the kernel has them", "s", took.Seconds(), 10)
	rep.Figures.Note(what+"of that to plan the table and to write it", "s", applied)
	if late, err = m.follow(ctx, g, n, rep); err != nil {
		return 0, err
	}
	if err := serves(ctx, table, n*m.endpoints); err != nil {
		return 0, err
	}
	now, peak, err := memory(g.PID())
	if err != nil {
		return 0, err
	}
	rep.Figures.AtMost(what+"resident memory of coil-lb-agent after the changes", "MiB", now, 120)
	rep.Figures.Note(what+"resident memory of coil-lb-agent, most of the whole run", "MiB", peak)
	return late, nil
}

// serves says whether the kernel has so many endpoints.
func serves(ctx context.Context, table *nft.Table, endpoints int) error {
	all, err := table.Sets(ctx)
	if err != nil {
		return err
	}
	for _, s := range all {
		if s.Name == dataplane.IPv4.Named("endpoints") && len(s.Elements) == endpoints {
			return nil
		}
	}
	return fmt.Errorf("the kernel doesn't have %d endpoints", endpoints)
}

// ask returns what the agent of a machine answers.
func ask(ctx context.Context, ns *netlab.NS, url string) (string, error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return ns.Dial(ctx, network, address)
	}}
	defer transport.CloseIdleConnections()
	return netlab.Get(ctx, &http.Client{Transport: transport}, url)
}

// ready waits until the agent of a machine has done what the caches say.
func ready(ctx context.Context, ns *netlab.NS) error {
	err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, testkit.Timeout(2*time.Minute), true, func(ctx context.Context) (bool, error) {
		_, err := ask(ctx, ns, "http://127.0.0.1:9401/readyz")
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait until the agent is ready: %w", err)
	}
	return nil
}

// loopSeconds is for how long a loop of the agent has worked, in seconds.
func loopSeconds(ctx context.Context, ns *netlab.NS, loop string) (float64, error) {
	text, err := ask(ctx, ns, "http://127.0.0.1:9400/metrics")
	if err != nil {
		return 0, err
	}
	found := regexp.MustCompile(`(?m)^coil_reconcile_duration_seconds_sum\{[^}]*loop="` + loop + `"[^}]*\} (\S+)$`).FindStringSubmatch(text)
	if found == nil {
		return 0, fmt.Errorf("the agent doesn't tell how long its loop %s has worked", loop)
	}
	return strconv.ParseFloat(found[1], 64)
}
