package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/bench/pairs"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/testkit"
)

// leastServices is beside how few Services packets are measured, too.
const leastServices = 10

// Sides are machines that forward packets, each between a client and a server of its own: one has coil-lb-agent, one kube-proxy in its mode nftables, and one follows
// connections and translates nothing.
const (
	byCoil = iota
	byKubeProxy
	untranslated
	sideCount
)

// measureTranslation compares what a packet costs that a gateway machine sends to an endpoint with one that kube-proxy does: the first one of a connection, for which rules choose an
// endpoint, and later ones.
func measureTranslation(ctx context.Context, o options, rep *report) (err error) {
	m, err := newMachines(ctx, o, corev1.ProtocolUDP)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.rig.Close()) }()
	for _, n := range []int{min(leastServices, o.services), o.services} {
		if err := m.translate(ctx, n, rep); err != nil {
			return fmt.Errorf("%d Services: %w", n, err)
		}
	}
	return nil
}

// translate measures packets to n Services.
func (m *machines) translate(ctx context.Context, n int, rep *report) (err error) {
	if err := m.grow(ctx, n); err != nil {
		return err
	}
	gateway, err := m.rig.NewGateway(ctx, fmt.Sprint("translates-", n), v2.LoadBalancerGatewaySpec{Pools: []string{gatewayPool}, Endpoints: v2.EndpointsPod, Masquerade: v2.MasqueradeNever})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gateway.Close()) }()
	proxy, err := m.rig.NewServiceProxy(ctx, nodeName(0))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, proxy.Close()) }()
	// One after the other: each has the machine for itself.
	for _, p := range []struct {
		*rig.Program
		name   string
		serves func() error
	}{
		{gateway.Program, "coil-lb-agent", func() error { return ready(ctx, gateway.NS) }},
		{proxy.Program, "kube-proxy", func() error { return proxied(ctx, proxy, n) }},
	} {
		began := time.Now()
		if err := p.Start(); err != nil {
			return err
		}
		if err := p.serves(); err != nil {
			return fmt.Errorf("%w; the end of the log of %s:\n%s", err, p.name, p.Logs(20))
		}
		rep.Figures.Note(fmt.Sprintf("translation: %d Services of %d endpoints, from the start of %s until the kernel has them", n, m.endpoints, p.name), "s", time.Since(began).Seconds())
		p.Kill() // it has no more to do
	}
	targets, err := m.targets(ctx, n)
	if err != nil {
		return err
	}
	var sides [sideCount]*forwarding
	for side, connect := range [sideCount]func() (*forwarding, error){
		byCoil:       func() (*forwarding, error) { return newForwarding(ctx, gateway.NS, targets[byCoil]) },
		byKubeProxy:  func() (*forwarding, error) { return newForwarding(ctx, proxy.NS, targets[byKubeProxy]) },
		untranslated: func() (*forwarding, error) { return newBareForwarding(ctx, targets[untranslated]) },
	} {
		if sides[side], err = connect(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, sides[side].close()) }()
	}
	return m.compare(ctx, n, sides, rep)
}

// compare measures all sides in turns.
func (m *machines) compare(ctx context.Context, n int, sides [sideCount]*forwarding, rep *report) error {
	random := rand.New(rand.NewPCG(1, uint64(n)))
	for _, kind := range []struct {
		name    string
		measure func(*forwarding, context.Context, *rand.Rand) (float64, error)
	}{{"the first packet of a connection", (*forwarding).firsts}, {"a packet of a connection and its answer", (*forwarding).others}} {
		values, err := m.inTurns(func(side int) (float64, error) { return kind.measure(sides[side], ctx, random) })
		if err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
		what := fmt.Sprintf("translation: %d Services of %d endpoints, %s, ", n, m.endpoints, kind.name)
		for side, name := range [sideCount]string{"coil-lb-agent", "kube-proxy", "untranslated"} {
			rep.Figures.Note(what+name, "us", 1e6*pairs.Median(values[side]))
		}
		r := pairs.RatioOf(values[byCoil], values[byKubeProxy])
		rep.Figures.AtMost(what+fmt.Sprintf("coil-lb-agent by kube-proxy, median of %d pairs", m.pairs), "", r.Median, 1)
		rep.Figures.Note(what+"the same, lower bound (95 %)", "", r.Low)
		rep.Figures.Note(what+"the same, upper bound (95 %)", "", r.High)
	}
	return nil
}

// inTurns measures all sides in turns, by a thread that others hardly disturb.
func (m *machines) inTurns(measure func(side int) (float64, error)) (values [][]float64, err error) {
	done := make(chan error)
	go func() {
		err := pairs.UrgentOnOne()
		if err == nil {
			values, err = pairs.InTurns(m.pairs, sideCount, measure)
		}
		done <- err
	}()
	err = <-done
	return values, err
}

// targets are where clients of each side send: the addresses of Services outside, their ClusterIPs, and endpoints.
func (m *machines) targets(ctx context.Context, n int) (all [sideCount][]netip.AddrPort, err error) {
	for i := range n {
		b, err := m.spec.Block(int32(i))
		if err != nil {
			return all, err
		}
		all[byCoil] = append(all[byCoil], netip.AddrPortFrom(b.IPv4.Addr(), servicePort))
		all[untranslated] = append(all[untranslated], netip.AddrPortFrom(m.endpoint(i, i%m.endpoints), endpointPort))
	}
	l, err := m.rig.Core.CoreV1().Services(shops).List(ctx, metav1.ListOptions{})
	if err != nil {
		return all, err
	}
	for i := range l.Items {
		a, err := netip.ParseAddr(l.Items[i].Spec.ClusterIP)
		if err != nil {
			return all, err
		}
		all[byKubeProxy] = append(all[byKubeProxy], netip.AddrPortFrom(a, servicePort))
	}
	return all, nil
}

// proxied waits until kube-proxy serves n Services.
func proxied(ctx context.Context, p *rig.ServiceProxy, n int) error {
	table, err := nft.NewIP(p.NS.NS, "kube-proxy", dataplane.IPv4)
	if err != nil {
		return err
	}
	defer table.Close()
	return testkit.Within(ctx, 20*time.Minute, func() error {
		all, err := table.Sets(ctx)
		if err != nil {
			return err
		}
		for _, s := range all {
			// That of the API server has no endpoints.
			if s.Name == "service-ips" && len(s.Elements) == n {
				return nil
			}
		}
		return fmt.Errorf("kube-proxy doesn't serve %d Services", n)
	})
}
