package floating

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// A node whose Service proxy loses its rules reaches the API server by that one's own address. Its coild finds that address in a file if it starts meanwhile.
// It keeps the address that needs the API server, because no other node lives.
func TestWithoutServiceProxy(t *testing.T) {
	t.Parallel()
	f, ctx := newFixtureOf(t, "without-rules", 2, rig.NodeOptions{InCluster: true}), t.Context()
	f.held(0)
	holder, other := f.Candidates[0], f.Candidates[1]
	known := filepath.Join(holder.StateDir(), "api-servers.json")
	testkit.Eventually(t, 10*time.Second, "the API server's address is remembered", func() error {
		_, err := os.Stat(known)
		return err
	})
	pings := f.pings()
	other.Coild.Kill()
	lasts(t, 2*time.Second)
	before := f.holding()
	if before.Holder != holder.Name {
		t.Fatalf("the address has moved: %+v", before)
	}
	testkit.Check(t, holder.LoseAPI(ctx))
	began := time.Now()
	testkit.Eventually(t, 10*time.Second, "the holder has noticed", func() error {
		if f.answering(0) == nil {
			return errors.New("it answers")
		}
		return nil
	})
	testkit.Eventually(t, 20*time.Second, "the holder answers again", func() error { return f.answering(0) })
	took := time.Since(began)
	silent := outage(t, pings)
	t.Logf("back after %s, silent for %s", took.Round(10*time.Millisecond), silent)
	if most := 10 * time.Second; took > testkit.Limit(most) || silent > testkit.Limit(most) {
		t.Errorf("back after %s, silent for %s, want %s at most", took, silent, most)
	}
	if holder.Coild.CountLogs("An API server is reached by its own address") != 1 {
		t.Error("the log doesn't say once how the API server is reached")
	}
	oneConnection(t, holder)
	holder.Coild.Kill()
	testkit.Check(t, holder.Start(ctx))
	f.held(0)
	oneConnection(t, holder)
}

// oneConnection waits until all clients of a node's coild have one connection to the API server.
func oneConnection(t *testing.T, n *rig.Node) {
	t.Helper()
	testkit.Eventually(t, 5*time.Second, "coild has one connection to the API server", func() error {
		if conns, err := n.APIConnections(t.Context()); conns != 1 || err != nil {
			return fmt.Errorf("it has %d, %w", conns, err)
		}
		return nil
	})
}

// leavesWithoutServiceProxy has the address of a Service leave a node whose Service proxy has lost its rules, also those that lead to the API server.
func leavesWithoutServiceProxy(t *testing.T) {
	s, ctx := newServedOf(t, "leaving", v2.AnnounceNeighbor, rig.NodeOptions{InCluster: true}), t.Context()
	s.serve("web", s.ports[0])
	addrs, holder := s.answers(s.nodes...)
	var taken []time.Duration
	for range len(s.nodes) - 1 { // a node that has lost its rules says so for five minutes
		began := time.Now()
		testkit.Check(t, holder.LoseAPI(ctx))
		testkit.Must(holder.Run(ctx, "nft", "delete table inet proxy"))(t)
		asking, end := context.WithCancel(ctx)
		asked := make(chan struct{})
		go func() { // packets that nobody translates are what the node is judged by
			defer close(asked)
			for asking.Err() == nil {
				for _, a := range addrs {
					_, _ = s.hears(a, s.ports[0])
				}
			}
		}()
		again, next := s.answersWithin(time.Minute, slices.DeleteFunc(slices.Clone(s.nodes), func(n *rig.Node) bool { return n == holder })...)
		taken = append(taken, time.Since(began).Round(100*time.Millisecond))
		end()
		<-asked
		if !slices.Equal(again, addrs) {
			t.Errorf("%s has %v, and %s had %v", next.Name, again, holder.Name, addrs)
		}
		testkit.Check(t, holder.TranslateAPI(ctx))
		s.proxy(holder)
		holder = next
	}
	testkit.Check(t, s.services().Delete(ctx, "web", metav1.DeleteOptions{}))
	testkit.Eventually(t, 20*time.Second, "the Service is gone", func() error {
		_, err := s.services().Get(ctx, "web", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is there: %w", err)
	})
	t.Logf("reached again after %s", taken)
	// The node finds out within 30 s, as with an API server that needs no proxy; the connection that is lost has ended by then.
	if longest := slices.Max(taken); longest > testkit.Limit(35*time.Second) {
		t.Errorf("the Service wasn't reached for %s, want 35s at most", longest)
	}
}
