package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// newcomers has the addresses of endpoints that replace others: each is used once.
var newcomers = netip.MustParsePrefix("10.200.0.0/13")

// newcomer is the nth of these, as the kernel has it: address and port.
func newcomer(n int) (a netip.Addr, element [6]byte) {
	first := newcomers.Addr().As4()
	binary.BigEndian.PutUint32(element[:], binary.BigEndian.Uint32(first[:])+uint32(n))
	binary.BigEndian.PutUint16(element[4:], endpointPort)
	return netip.AddrFrom4([4]byte(element[:4])), element
}

// hearing notes when the kernel of a machine says for the first time that it has endpoints.
type hearing struct {
	handle   *rtnl.Handle
	listener *rtnl.Listener

	mu    sync.Mutex            // guards all below
	heard map[[6]byte]time.Time // the zero time for those that aren't there yet
	lost  bool
}

func hear(ns *netlab.NS) (*hearing, error) {
	handle, err := rtnl.NewProtocol(ns.NS, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	l, err := handle.Listen(nil, unix.NFNLGRP_NFTABLES)
	if err != nil {
		handle.Close()
		return nil, err
	}
	return &hearing{handle: handle, listener: l, heard: map[[6]byte]time.Time{}}, nil
}

func (h *hearing) run(ctx context.Context) error {
	return h.listener.Run(ctx, 0, func(m *rtnl.Message) bool {
		now := time.Now()
		h.mu.Lock()
		defer h.mu.Unlock()
		if m == nil {
			h.lost = true
			return false
		}
		// The message has the address and the port of an endpoint side by side.
		for i := range max(0, len(m.Body)-5) {
			key := [6]byte(m.Body[i:])
			if at, ok := h.heard[key]; ok && at.IsZero() {
				h.heard[key] = now
			}
		}
		return false
	}, func() {})
}

func (h *hearing) expect(element [6]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heard[element] = time.Time{}
}

// at is when the kernel had an endpoint.
func (h *hearing) at(element [6]byte) (time.Time, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch at := h.heard[element]; {
	case h.lost:
		return at, errors.New("notifications of the kernel were lost")
	case at.IsZero():
		return at, fmt.Errorf("the kernel hasn't %s", netip.AddrFrom4([4]byte(element[:4])))
	default:
		return at, nil
	}
}

func (h *hearing) close() error {
	h.handle.Close()
	return h.listener.Close()
}

// change is the replacement of an endpoint.
type change struct {
	element      [6]byte
	sent, answer time.Time
}

// follow replaces endpoints of the first n Services one after another, each by a write of its EndpointSlice, and measures how late they are in the kernel of a machine. It returns the
// median in ms.
func (m *machines) follow(ctx context.Context, g *rig.Gateway, n int, rep *report) (median float64, err error) {
	h, err := hear(g.NS)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	hearing, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- h.run(hearing) }()
	defer func() {
		stop()
		err = errors.Join(err, <-ended)
	}()
	changes := make([]change, int(m.following.Seconds()*changesPerSecond))
	group, groupCtx := errgroup.WithContext(ctx)
	if m.profiles {
		group.Go(func() error {
			return m.profile(groupCtx, g, fmt.Sprintf("profile?seconds=%d", int(m.following.Seconds())), "cpu")
		})
	}
	used, err := usage(ctx, []int{g.PID()}, func(ctx context.Context) error { return m.replace(ctx, h, n, changes) })
	if err := errors.Join(err, group.Wait()); err != nil {
		return 0, err
	}
	var fromSent, fromAnswer []time.Duration
	for _, c := range changes {
		var at time.Time
		err := testkit.Within(ctx, 10*time.Second, func() (err error) { at, err = h.at(c.element); return err })
		if err != nil {
			return 0, err
		}
		fromSent, fromAnswer = append(fromSent, at.Sub(c.sent)), append(fromAnswer, max(0, at.Sub(c.answer)))
	}
	if m.profiles {
		if err := m.profile(ctx, g, "heap", "heap"); err != nil {
			return 0, err
		}
	}
	what := fmt.Sprintf("gateway: %d changes/s of endpoints of %d Services, ", changesPerSecond, n)
	median = figures.Quantile(fromSent, 0.5)
	rep.Figures.Note(what+"from the EndpointSlice's write being sent until the kernel has it, median", "ms", median)
	rep.Figures.AtMost(what+"from the EndpointSlice's write being sent until the kernel has it, p99", "ms", figures.Quantile(fromSent, 0.99), 100)
	rep.Figures.Note(what+"from the EndpointSlice's write being sent until the kernel has it, the latest", "ms", figures.Quantile(fromSent, 1))
	rep.Figures.Note(what+"from its being answered, median", "ms", figures.Quantile(fromAnswer, 0.5))
	rep.Figures.Note(what+"from its being answered, p99", "ms", figures.Quantile(fromAnswer, 0.99))
	rep.Figures.Note(what+"processor that the agent uses", "%", 100*used[0])
	return median, nil
}

// replace makes the changes at an even pace, each of another one of the first n Services.
func (m *machines) replace(ctx context.Context, h *hearing, n int, changes []change) error {
	writes, ctx := errgroup.WithContext(ctx)
	tick := time.NewTicker(time.Second / changesPerSecond)
	defer tick.Stop()
	for i := range changes {
		c := &changes[i]
		s := m.slice(i * 7919 % n) // a prime number
		var a netip.Addr
		a, c.element = newcomer(m.replaced)
		m.replaced++
		// Each time that the Service's turn comes another endpoint is replaced, and the one before comes back.
		s.Endpoints[i/n%len(s.Endpoints)].Addresses = []string{a.String()}
		h.expect(c.element)
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), writes.Wait())
		case <-tick.C:
		}
		writes.Go(func() error {
			c.sent = time.Now()
			_, err := m.rig.Core.DiscoveryV1().EndpointSlices(shops).Update(ctx, s, metav1.UpdateOptions{})
			c.answer = time.Now()
			return err
		})
	}
	return writes.Wait()
}

// profile writes a profile of the agent beside the results.
func (m *machines) profile(ctx context.Context, g *rig.Gateway, kind, name string) error {
	text, err := ask(ctx, g.NS, "http://127.0.0.1:9400/debug/pprof/"+kind)
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(m.out, 0o755), os.WriteFile(filepath.Join(m.out, g.Name+"."+name), []byte(text), 0o644))
}
