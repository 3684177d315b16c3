package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/integration/audit"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node/blocks"
	"github.com/coil-net/coil/pkg/node/view"
	"github.com/coil-net/coil/pkg/plan/keys"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	// marker is the Namespace that is made while requests are refused.
	marker = "made-meanwhile"
	// syncTimeout is how long it may take until all coilds are in sync.
	syncTimeout = 10 * time.Minute
	// addPause is how long kubelet waits after an ADD that failed before it tries again.
	addPause = 10 * time.Second
)

// measureRefusals plays many coilds at an API server. First some start at once, as after a change of their DaemonSet. Then all
// requests are refused for a while, as by an API server that has more to do than it can: each node wants a block meanwhile.
// Of a coild only what asks the API server is real: its clients, its watches and its loop for blocks.
func measureRefusals(ctx context.Context, o options, rep *report) (err error) {
	r, err := rig.New(ctx, rig.Options{Log: o.log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	root, err := build.Root()
	if err != nil {
		return err
	}
	if _, err := r.API.Kubectl(ctx, "apply", "-k", filepath.Join(root, "manifests", "flowcontrol")); err != nil {
		return err
	}
	f, err := newFleet(ctx, r, o.refusedCoilds, o.log)
	if err != nil {
		return err
	}
	cfg, err := r.API.UserConfig(audit.User(account), "system:serviceaccounts", "system:serviceaccounts:kube-system")
	if err != nil {
		return err
	}
	klog.SetLogger(klog.Logger{}) // each coild has lines about each of its watches
	defer klog.ClearLogger()
	t := newTraffic()
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.QPS = -1
	cfg.Wrap(t.to)
	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	defer func() { cancel(); err = errors.Join(err, group.Wait()) }()
	var all []*playedCoild
	start := func(nodes []holder) error {
		for _, n := range nodes {
			p, err := playCoild(cfg, n, f.pools[len(all)%poolCount].Name)
			if err != nil {
				return err
			}
			all = append(all, p)
			group.Go(func() error { return p.run(ctx) })
		}
		return awaitPlayed(ctx, t, all, (*playedCoild).started, "have filled their caches")
	}
	atOnce := min(o.restarted, o.refusedCoilds)
	began := time.Now()
	t.reset()
	if err := start(f.nodes[:atOnce]); err != nil {
		return err
	}
	reportRestart(rep, t, atOnce, time.Since(began))
	for i := atOnce; i < len(f.nodes); i += parallel {
		if err := start(f.nodes[i:min(i+parallel, len(f.nodes))]); err != nil {
			return err
		}
	}
	if err := pass(o.quiet)(ctx); err != nil {
		return err
	}
	return f.refuse(ctx, t, all, rep, o)
}

// reportRestart says what the API server sees of coilds that start at once.
func reportRestart(rep *report, t *traffic, n int, took time.Duration) {
	what := fmt.Sprintf("%d coilds start at once", n)
	rep.Figures.Note(what+": until all have filled their caches", "s", took.Seconds())
	rep.Figures.Note(what+": requests in the busiest second", "", float64(t.peak()))
	rep.Figures.Note(what+": requests that the API server answers 429", "", float64(t.tooMany()))
	kinds, counts := t.byKind()
	for _, kind := range kinds {
		rep.Figures.Note(what+": "+kind, "", float64(counts[kind]))
	}
}

// refuse refuses all requests for a while, and then waits until all coilds are in sync.
func (f *fleet) refuse(ctx context.Context, t *traffic, all []*playedCoild, rep *report, o options) error {
	t.reset()
	t.refuse(true)
	for _, p := range all {
		close(p.wanted)
	}
	_, err := f.rig.Core.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: marker, Annotations: map[string]string{v2.AnnotationPool: f.pools[0].Name}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create a Namespace: %w", err)
	}
	if err := pass(o.refused)(ctx); err != nil {
		return err
	}
	const windows = 8
	n, seconds := len(all), int(o.refused/time.Second)
	what := fmt.Sprintf("%d coilds are refused for %s", n, o.refused)
	for w := range windows {
		from, to := w*seconds/windows, (w+1)*seconds/windows
		if to > from {
			rep.Figures.Note(fmt.Sprintf("%s: requests, seconds %d to %d", what, from, to), "/s", t.rate(from, to))
		}
	}
	// The longest pauses are of 15 to 30 s.
	last := t.rate(seconds*3/4, seconds)
	rep.Figures.AtMost(what+": requests of each in the last quarter", "/min", 60*last/float64(n), 4)
	rep.Figures.AtMost(what+": requests in the last quarter by those in the first", "", last/t.rate(0, seconds/4), 0.3)

	t.reset()
	t.refuse(false)
	began := time.Now()
	if err := awaitPlayed(ctx, t, all, (*playedCoild).inSync, "are in sync"); err != nil {
		return err
	}
	rep.Figures.AtMost(what+": from then on until all are in sync", "s", time.Since(began).Seconds(), 60)
	rep.Figures.Note(what+": from then on, requests in the busiest second", "", float64(t.peak()))
	rep.Figures.Note(what+": from then on, requests that the API server answers 429", "", float64(t.tooMany()))
	return nil
}

// awaitPlayed waits until coilds have all their watches open, and something holds of each.
func awaitPlayed(ctx context.Context, t *traffic, all []*playedCoild, is func(*playedCoild) bool, what string) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(syncTimeout))
	defer cancel()
	return testkit.Poll(ctx, 20*time.Millisecond, func() error {
		some := 0
		for _, p := range all {
			if is(p) {
				some++
			}
		}
		if want := len(all) * len(audit.Allowed(account)); some < len(all) || t.open() < want {
			return fmt.Errorf("%d of %d coilds %s, with %d of %d watches", some, len(all), what, t.open(), want)
		}
		return nil
	})
}

// playedCoild is a coild without a kernel and a record.
type playedCoild struct {
	node, pool string
	uid        types.UID
	clients    kube.Clients
	watches    kube.Watches
	self       *view.Node
	blocks     *blocks.Manager
	// wanted is closed when a pod of the node needs a block.
	wanted chan struct{}
	// filled says that the caches are, saw that the marker is in one, got that the node has its block.
	filled, saw, got atomic.Bool
}

// playCoild composes one. It has clients of its own, as each program has.
func playCoild(cfg *rest.Config, n holder, pool string) (*playedCoild, error) {
	cfg = rest.CopyConfig(cfg)
	kube.Patient(cfg)
	clients, err := kube.NewClients(cfg)
	if err != nil {
		return nil, err
	}
	p := &playedCoild{node: n.name, uid: n.uid, pool: pool, clients: clients, wanted: make(chan struct{})}
	p.self = view.WatchNode(&p.watches, clients, n.name)
	namespaces := view.WatchNamespaces(&p.watches, clients)
	namespaces.OnChange(func(name string) {
		if name == marker {
			p.saw.Store(true)
		}
	})
	ignored := func(types.NamespacedName) {}
	view.WatchEgresses(&p.watches, clients, n.name, namespaces, view.EgressHandlers{Pod: ignored, Egress: ignored, Namespace: func(string) {}})
	mine := labels.Set{v2.LabelNode: n.name}.String()
	held, requests := kube.AddressBlockInformer(clients.Coil, mine), kube.BlockRequestInformer(clients.Coil, mine)
	p.watches.Add(held, nil)
	p.watches.Add(requests, nil)
	p.watches.Add(kube.FloatingBlockInformer(clients.Coil), nil)
	p.watches.Add(kube.SecretInformer(clients.Core, keys.Namespace, keys.Name), nil)
	p.blocks, err = blocks.New(blocks.Config{
		NodeName: n.name, NodeUID: n.uid, Uses: func(context.Context, *v2.AddressBlock) (bool, error) { return true, nil },
		Warn: func(string, string, ...any) {}, MinAge: time.Hour, StatusInterval: 30 * time.Second,
	}, clients.Coil, held, requests, &quietRecord{}, noExport{}, reconcile.NewMetrics(nil))
	return p, err
}

// run starts as coild does, and works until ctx ends.
func (p *playedCoild) run(ctx context.Context) error {
	for {
		_, err := p.self.Live(ctx)
		if err == nil {
			break
		}
		if pass(time.Second)(ctx) != nil {
			return nil
		}
	}
	if err := p.watches.Register(); err != nil {
		return err
	}
	defer p.watches.Shutdown()
	p.watches.Start(ctx)
	if kube.WaitForSync(ctx, append(p.watches.Synced(), p.blocks.Synced()...)...) != nil {
		return nil
	}
	p.filled.Store(true)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.blocks.Run(ctx) })
	group.Go(func() error { p.attach(ctx); return nil })
	return group.Wait()
}

// attach asks for a block as long as the node has none, as each attempt of kubelet to attach a pod does.
func (p *playedCoild) attach(ctx context.Context) {
	select {
	case <-p.wanted:
	case <-ctx.Done():
		return
	}
	for ctx.Err() == nil {
		since := p.blocks.Generation(p.pool)
		if len(p.blocks.Usable(p.pool)) > 0 {
			p.got.Store(true)
			return
		}
		add, cancel := context.WithTimeout(ctx, addPause)
		if p.blocks.Ask(add, p.pool, since) != nil {
			_ = pass(addPause)(ctx) // the end of ctx ends the loop
		}
		cancel()
	}
}

func (p *playedCoild) started() bool { return p.filled.Load() }

func (p *playedCoild) inSync() bool { return p.filled.Load() && p.saw.Load() && p.got.Load() }

// quietRecord has one address of each block in use.
type quietRecord struct{ busyRecord }

func (r *quietRecord) Usage(ctx context.Context) ([]store.Usage, error) {
	us, err := r.busyRecord.Usage(ctx)
	for i := range us {
		us[i].Allocated = 1
	}
	return us, err
}
