package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// source are endpoints that send for as long as a client hears them.
var source = map[corev1.IPFamily]string{corev1.IPv4Protocol: "10.1.0.4", corev1.IPv6Protocol: "fd01::4"}

// Scenario 27: transfers of both families go on while the endpoints of their Service change, except for theirs: in the long form a thousand times. Nothing is reset, lost, or late.
func TestServiceTransfer(t *testing.T) {
	l := newLab(t, rigtest.New(t), v2.LoadBalancerGatewaySpec{Pools: []string{pool}, Endpoints: v2.EndpointsPod, Masquerade: v2.MasqueradeNever})
	ctx := t.Context()
	testkit.Check(t, l.pods.IP(ctx, "addr add "+source[corev1.IPv4Protocol]+"/24 dev eth0", "addr add "+source[corev1.IPv6Protocol]+"/64 dev eth0 nodad"))
	l.service()
	for _, f := range families {
		listener := testkit.Must(l.pods.Listen(ctx, "tcp", net.JoinHostPort(source[f], "8080")))(t)
		t.Cleanup(func() { listener.Close() })
		go netlab.Serve(listener, func(c net.Conn) { send(ctx, c) })
		l.slice(f, source[f])
	}
	testkit.Check(t, l.gateway.Start())
	var at []netip.AddrPort
	testkit.Eventually(t, 20*time.Second, "the Service tells its addresses", func() (err error) { at, err = l.addresses(); return err })

	var transfers sync.WaitGroup
	ended, end := context.WithCancel(ctx)
	defer end()
	for _, a := range at {
		conn := testkit.Must(l.client.Dial(ctx, "tcp", a.String()))(t)
		t.Cleanup(func() { conn.Close() })
		transfers.Go(func() {
			n, longest, err := hear(ended, conn)
			t.Logf("%s: %d bytes; the longest pause took %s", a, n, longest)
			if limit := testkit.Limit(time.Second); err != nil || longest > limit {
				t.Errorf("%s: after %d bytes: %v; the longest pause took %s, want %s at most", a, n, err, longest, limit)
			}
		})
	}
	table := testkit.Must(nft.New(l.gateway.NS.NS, dataplane.NftTableLB))(t)
	t.Cleanup(table.Close)
	began, updates := time.Now(), testkit.LBForm.Times(100, 1000)
	for i := range updates {
		f := families[i%len(families)]
		all := []string{source[f]}
		for j := range (i/len(families) + 1) % 7 {
			// Some are before the one that stays, which so has another place.
			all = append(all, strings.TrimSuffix(source[f], "4")+strconv.Itoa([]int{2, 3, 5, 6, 7, 8}[(i+j)%6]))
		}
		l.slice(f, all...)
		testkit.Eventually(t, 10*time.Second, "the kernel has the endpoints", func() error { return has(ctx, table, f, len(all)) })
	}
	t.Logf("%d updates took %s", updates, time.Since(began))
	end()
	transfers.Wait()
}

// addresses are those that the Service web tells.
func (l *lab) addresses() (at []netip.AddrPort, err error) {
	s, err := l.Core.CoreV1().Services(namespace).Get(l.t.Context(), "web", metav1.GetOptions{})
	if err != nil || len(s.Status.LoadBalancer.Ingress) != len(families) {
		return nil, fmt.Errorf("%+v: %w", s.Status, err)
	}
	for _, i := range s.Status.LoadBalancer.Ingress {
		at = append(at, netip.AddrPortFrom(netip.MustParseAddr(i.IP), 80))
	}
	return at, nil
}

// has says whether the kernel has so many endpoints of a family.
func has(ctx context.Context, table *nft.Table, f corev1.IPFamily, n int) error {
	sets, err := table.Sets(ctx)
	if err != nil {
		return err
	}
	for _, s := range sets {
		if s.Name == "endpoints_"+strings.ToLower(string(f)) && len(s.Elements) != n {
			return fmt.Errorf("it has %d of %s, want %d", len(s.Elements), f, n)
		}
	}
	return nil
}

// numbered is a piece of a transfer, which begins with its number.
const numbered = 16 << 10

// send sends numbered pieces until the other end has gone.
func send(ctx context.Context, c net.Conn) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for b, n := make([]byte, numbered), uint64(0); ; n++ {
		binary.BigEndian.PutUint64(b, n)
		if _, err := c.Write(b); err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// hear reads pieces until the context ends, and returns how many bytes that were and for how long nothing came at most.
func hear(ctx context.Context, c net.Conn) (bytes int, longest time.Duration, err error) {
	last := time.Now()
	for b, n := make([]byte, numbered), uint64(0); ctx.Err() == nil; n++ {
		if err := c.SetReadDeadline(time.Now().Add(testkit.Timeout(10 * time.Second))); err != nil {
			return bytes, longest, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return bytes, longest, err
		}
		if got := binary.BigEndian.Uint64(b); got != n {
			return bytes, longest, fmt.Errorf("piece %d is %d", n, got)
		}
		bytes += len(b)
		longest, last = max(longest, time.Since(last)), time.Now()
	}
	if bytes == 0 {
		err = errors.New("nothing came")
	}
	return bytes, longest, err
}
