package routes

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// How long it takes from a BlockRequest until another node's BIRD has the routes of both
// families: coil-ipam-controller, coild, the node's BIRD, the router's and the other's. The
// clock starts when a watch shows the BlockRequest.
func TestConvergence(t *testing.T) {
	const runs = 100
	ctx := t.Context()
	c := onTwo(t, nil, both)
	n, remote := c.nodes[0], c.nodes[1].daemon.(*bird)
	pool := c.pool(0, 10)
	first := c.blocksOf(c.pod(n, pool))
	c.announced(n, first...)
	c.eventually(20*time.Second, "the sessions of both nodes are up", func() error {
		has, err := remote.routes()
		for _, p := range first {
			if err == nil && !slices.ContainsFunc(has, func(a announcement) bool { return a.prefix == p }) {
				err = fmt.Errorf("the remote BIRD has no %s: %v", p, has)
			}
		}
		return err
	})
	requests, err := c.Coil.CoilV2().BlockRequests().Watch(ctx, metav1.ListOptions{LabelSelector: v2.LabelNode + "=" + n.Name})
	c.check(err)
	defer requests.Stop()
	created := make(chan time.Time, runs)
	go func() {
		for e := range requests.ResultChan() {
			if e.Type == "ADDED" {
				created <- time.Now()
			}
		}
	}()
	var toRemote []time.Duration
	for range runs {
		s := c.sandbox(n, pool)
		before, err := remote.routes()
		c.check(err)
		added := make(chan error, 1)
		go func() { _, err := s.Add(ctx); added <- err }()
		var asked time.Time
		select {
		case asked = <-created:
		case <-time.After(testkit.Timeout(10 * time.Second)):
			t.Fatal("no BlockRequest")
		}
		var has []announcement
		c.check(testkit.Within(ctx, 20*time.Second, func() error {
			if has, err = remote.routes(); err == nil && len(has) < len(before)+len(both) {
				err = fmt.Errorf("the remote BIRD has %v", has)
			}
			return err
		}))
		toRemote = append(toRemote, time.Since(asked))
		c.check(<-added)
		for _, p := range c.blocksOf(s) {
			if !slices.ContainsFunc(has, func(a announcement) bool { return a.prefix == p }) {
				t.Fatalf("the remote BIRD has no %s: %v", p, has)
			}
		}
	}
	at := func(q float64) time.Duration { return figures.NearestRank(toRemote, q).Round(100 * time.Microsecond) }
	t.Attr("convergence", fmt.Sprintf("%d runs from BlockRequest to the routes at a remote BIRD: p50 %s, p99 %s, longest %s", runs, at(0.5), at(0.99), at(1)))
	if p99 := at(0.99); p99 > testkit.Limit(5*time.Second) {
		t.Errorf("p99 is %s", p99)
	}
}

// blocksOf are the blocks of one address of a pod.
func (c *network) blocksOf(s *rig.Sandbox) []netip.Prefix {
	c.t.Helper()
	var all []netip.Prefix
	for _, a := range c.addrs(s) {
		all = append(all, netip.PrefixFrom(a, a.BitLen()))
	}
	return all
}
