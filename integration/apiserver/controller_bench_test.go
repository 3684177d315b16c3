package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit"
)

// BenchmarkControllerRequests compares the controller that answers many BlockRequests at
// once with a bare client that does the same three writes for each.
//
//	COIL_TEST_TIERS=apiserver go test ./integration/apiserver -run '^$' -bench ControllerRequests -benchtime 1x
func BenchmarkControllerRequests(b *testing.B) {
	const total, parallel = 1000, 16
	var bare, served float64
	var latencies []time.Duration
	for range b.N {
		bare += bareClient(b, total, parallel)
		rate, each := controllerRate(b, total, parallel)
		served += rate
		latencies = append(latencies, each...)
	}
	slices.Sort(latencies)
	b.ReportMetric(bare/float64(b.N), "bare/s")
	b.ReportMetric(served/float64(b.N), "answers/s")
	b.ReportMetric(served/bare, "ratio")
	b.ReportMetric(latencies[len(latencies)/2].Seconds(), "p50-s")
	b.ReportMetric(latencies[len(latencies)*99/100].Seconds(), "p99-s")
	b.ReportMetric(0, "ns/op")
}

// benchBits makes blocks so small that one Node can have all of a benchmark: see pools.NodeLimit.
const benchBits = 2

var rounds atomic.Int64

// freshSubnets returns a subnet that no other pool of this benchmark has.
func freshSubnets(n int) v2.SubnetSet {
	i := rounds.Add(1)
	return dual(fmt.Sprintf("%d.%d.0.0/16", n, i), fmt.Sprintf("fd00:%d:%d::/112", n, i))
}

// each calls f for 0 to total-1, some at once.
func each(b *testing.B, total, parallel int, f func(ctx context.Context, i int) error) {
	b.Helper()
	g, ctx := errgroup.WithContext(b.Context())
	g.SetLimit(parallel)
	for i := range total {
		g.Go(func() error { return f(ctx, i) })
	}
	if err := g.Wait(); err != nil {
		b.Fatal(err)
	}
}

func bareClient(b *testing.B, total, parallel int) float64 {
	c := ipamCluster(b)
	pool := c.pool(b, fresh("bare"), benchBits, freshSubnets(40))
	n := c.node(b, fresh("bare-node"))
	client := testkit.Must(versioned.NewForConfig(c.serviceAccount(b)))(b)
	p := testkit.Must(pools.Parse(pool.Spec))(b)
	start := time.Now()
	each(b, total, parallel, func(ctx context.Context, i int) error { return c.bareAnswer(ctx, client, pool, p, n, i) })
	return float64(total) / time.Since(start).Seconds()
}

func (c *cluster) bareAnswer(ctx context.Context, client versioned.Interface, pool *v2.AddressPool, p ipam.Pool, n *corev1.Node, i int) error {
	r, err := c.tryAsk(ctx, fmt.Sprintf("%s-r-%d", pool.Name, i), n, pool.Name)
	if err != nil {
		return err
	}
	block, err := p.Block(int32(i))
	if err != nil {
		return err
	}
	made, err := client.CoilV2().AddressBlocks().Create(ctx,
		pools.NewBlock(pool, int32(i), block, pools.Holder{NodeName: n.Name, NodeUID: n.UID, RequestUID: r.UID}), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	now := metav1.Now()
	r.Status.AddressBlockName = made.Name
	r.Status.Conditions = []v2.BlockRequestCondition{{
		Type: v2.BlockRequestComplete, Status: corev1.ConditionTrue, Reason: "BlockAssigned", Message: "The node has the block",
		LastProbeTime: now, LastTransitionTime: now,
	}}
	_, err = client.CoilV2().BlockRequests().UpdateStatus(ctx, r, metav1.UpdateOptions{})
	return err
}

// controllerRate returns the answers per second and how long each took.
func controllerRate(b *testing.B, total, parallel int) (float64, []time.Duration) {
	c := ipamCluster(b)
	pool := c.pool(b, fresh("served"), benchBits, freshSubnets(41))
	n := c.node(b, fresh("served-node"))
	stop := c.run(b, c.serviceAccount(b), options())
	defer stop()
	warmUp := fresh("warm-up")
	c.ask(b, warmUp, n, pool.Name)
	c.answer(b, warmUp)
	prefix := fresh("r")

	var mu sync.Mutex
	asked, answered := map[string]time.Time{}, map[string]time.Time{}
	f := externalversions.NewSharedInformerFactory(c.coil, 0)
	if _, err := f.Coil().V2().BlockRequests().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) {
			if r, ok := obj.(*v2.BlockRequest); ok && r.Status.AddressBlockName != "" && strings.HasPrefix(r.Name, prefix+"-") {
				mu.Lock()
				defer mu.Unlock()
				answered[r.Name] = time.Now()
			}
		},
	}); err != nil {
		b.Fatal(err)
	}
	end := make(chan struct{})
	f.Start(end)
	f.WaitForCacheSync(end)
	defer func() { close(end); f.Shutdown() }()

	start := time.Now()
	each(b, total, parallel, func(ctx context.Context, i int) error {
		name := fmt.Sprintf("%s-%d", prefix, i)
		mu.Lock()
		asked[name] = time.Now()
		mu.Unlock()
		_, err := c.tryAsk(ctx, name, n, pool.Name)
		return err
	})
	testkit.Eventually(b, 2*time.Minute, "all answers", func() error {
		mu.Lock()
		defer mu.Unlock()
		if len(answered) < total {
			return fmt.Errorf("%d answers", len(answered))
		}
		return nil
	})
	var last time.Time
	var latencies []time.Duration
	for name, at := range answered {
		if at.After(last) {
			last = at
		}
		latencies = append(latencies, at.Sub(asked[name]))
	}
	return float64(total) / last.Sub(start).Seconds(), latencies
}
