package coilctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/app/coilctl/web"
	"github.com/coil-net/coil/pkg/kube/listing"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/page"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// leasesEvery is how often Leases are read while somebody looks. Their holders renew them every few seconds: a watch would tell of each.
const leasesEvery = 10 * time.Second

// early is for how long the cluster is followed before somebody has opened the page.
const early = 30 * time.Second

// serveOptions are the flags of the command serve.
type serveOptions struct {
	*tool
	listen string
	remote bool
}

// serve returns the command that serves a page.
func (t *tool) serve() *cobra.Command {
	o := &serveOptions{tool: t}
	c := &cobra.Command{
		Use: "serve", Short: "Show the cluster in a browser on this computer, on a page that follows its changes", Args: cobra.NoArgs,
		Long: "Show the cluster in a browser on this computer, on a page that follows its changes. The page has what is wrong, maps of AddressPools, nodes, " +
			"the ways out by Egresses and the ways in by Services, and changes nothing. The API server is asked only while somebody looks, and in the first half minute for the page to be there at once, with your rights. Whoever can connect to " +
			"the address sees what you may see: there is no login.\n\n" +
			"Rights: " + rights(everything) + "; watch these, too; get leases of coordination.k8s.io in the namespace " + preflight.Namespace + ". What you may not list isn't shown.",
		Example: "  coilctl serve\n  coilctl serve --listen=127.0.0.1:0",
		RunE:    func(c *cobra.Command, _ []string) error { return o.run(c.Context()) },
	}
	c.Flags().StringVar(&o.listen, "listen", "127.0.0.1:8580", "address and port of the page; port 0 is one that is free")
	c.Flags().BoolVar(&o.remote, "allow-remote", false, "let --listen be an address that other computers reach: everybody who reaches it sees the page")
	return c
}

// errRemote: others would see the page.
var errRemote = errors.New("--listen isn't an address of this computer alone, such as 127.0.0.1:8580: whoever reaches it would see the page; --allow-remote says that they may")

func (o *serveOptions) run(ctx context.Context) error {
	c, err := o.connect()
	if err != nil {
		return err
	}
	addr, err := net.ResolveTCPAddr("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen=%s: %w", o.listen, err)
	}
	if !addr.IP.IsLoopback() && !o.remote {
		return errRemote
	}
	l, err := net.ListenTCP("tcp", addr)
	if err != nil {
		return fmt.Errorf("--listen=%s: %w", o.listen, err)
	}
	if err := printf(o.Out, "http://%s/\n", l.Addr()); err != nil {
		return errors.Join(err, l.Close())
	}
	return web.Serve(ctx, l, web.Options{
		Title: o.cluster(), Remote: o.remote, Early: early,
		Follow: func(ctx context.Context, done *sync.WaitGroup, changed func()) (func() page.Cluster, error) {
			return newFollowed(c, o.now, changed).start(ctx, done), nil
		},
	})
}

// cluster names the cluster: the context of the kubeconfig, or else the API server.
func (t *tool) cluster() string {
	raw, err := t.flags.ToRawKubeConfigLoader().RawConfig()
	name := raw.CurrentContext
	if t.flags.Context != nil && *t.flags.Context != "" {
		name = *t.flags.Context
	}
	if err == nil && name != "" {
		return name
	}
	if cfg, err := t.config(); err == nil {
		return cfg.Host
	}
	return ""
}

// followed is a cluster that the page follows.
type followed struct {
	clients clients
	now     func() time.Time
	changed func()
	// synced tells that there are objects by which it is known which Leases matter.
	synced chan struct{}

	mu      sync.Mutex // guards what follows
	fill    []func(*inventory.Objects)
	sources []page.Source
	// absent says which kinds of everything aren't installed.
	absent []bool
	// leases are those that there are of the ones that were read.
	leases []*coordinationv1.Lease
	read   []health.Lease
}

func newFollowed(c clients, now func() time.Time, changed func()) *followed {
	f := &followed{clients: c, now: now, changed: changed, synced: make(chan struct{}, 1), absent: make([]bool, len(everything))}
	for _, k := range everything {
		f.sources = append(f.sources, page.Source{Resource: k.resource})
	}
	f.sources = append(f.sources, page.Source{Resource: page.Leases})
	return f
}

// start follows until ctx ends, which done awaits.
func (f *followed) start(ctx context.Context, done *sync.WaitGroup) func() page.Cluster {
	f.mu.Lock() // until each source has its place, nothing is told of any
	for i, k := range everything {
		f.fill = append(f.fill, k.follow(ctx, done, f.clients, listing.Follower{
			Synced:   func() { f.known(i) },
			Changed:  f.changed,
			Failed:   func(err error) { f.failed(i, err) },
			Answered: func() { f.tell(i, failed(nil)) },
		}))
	}
	f.mu.Unlock()
	done.Go(func() { f.readLeases(ctx) })
	return f.look
}

// known notes that all objects of a source are there.
func (f *followed) known(i int) {
	f.tell(i, func(s *page.Source) { f.absent[i], s.Known = false, true })
	select {
	case f.synced <- struct{}{}:
	default: // that is told already
	}
}

// failed notes that a source can't be read, or that there is no such kind.
func (f *followed) failed(i int, err error) {
	f.tell(i, func(s *page.Source) {
		if apierrors.IsNotFound(err) && (f.absent[i] || !s.Known) {
			f.absent[i] = true
		}
		if f.absent[i] {
			s.Known, err = true, nil
		}
		failed(err)(s)
	})
}

// failed notes the error of a request, nil after an answer.
func failed(err error) func(*page.Source) {
	return func(s *page.Source) {
		switch {
		case err == nil:
			s.Problem, s.Since = "", nil
		case s.Since == nil:
			now := metav1.Now()
			s.Since = &now
			fallthrough
		default:
			s.Problem = err.Error()
		}
	}
}

// tell changes what is known of a source.
func (f *followed) tell(i int, change func(*page.Source)) {
	f.mu.Lock()
	before := f.sources[i]
	change(&f.sources[i])
	after := f.sources[i]
	f.mu.Unlock()
	if before != after {
		f.changed()
	}
}

// look returns what is known at the moment.
func (f *followed) look() page.Cluster {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := page.Cluster{Objects: inventory.Objects{Now: f.now(), Leases: f.leases}, Sources: slices.Clone(f.sources)}
	if err := notInstalled(everything, f.absent); err != nil {
		for i, k := range everything {
			if k.coils {
				c.Sources[i].Known, c.Sources[i].Problem = false, err.Error()
			}
		}
	}
	for i, s := range c.Sources {
		if s.Known && s.Since != nil && s.Since.Time.Before(c.Objects.Now) {
			c.Objects.Now = s.Since.Time // nobody is late by what can't be heard
		}
		if s.Known && i < len(f.fill) {
			f.fill[i](&c.Objects)
		}
	}
	for _, wanted := range health.Leases(c.Objects) {
		if !slices.Contains(f.read, wanted) {
			c.Sources[len(everything)].Known = false
		}
	}
	return c
}

// readLeases reads the Leases that have to do with what there is, from time to time.
func (f *followed) readLeases(ctx context.Context) {
	every := time.NewTicker(leasesEvery)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.synced:
		case <-every.C:
		}
		o := f.look().Objects
		o.Leases = nil
		read := health.Leases(o)
		err := leasesOf(ctx, f.clients, &o)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			f.mu.Lock()
			f.leases, f.read = o.Leases, read
			f.mu.Unlock()
		}
		f.tell(len(everything), func(s *page.Source) {
			s.Known = s.Known || err == nil
			failed(err)(s)
		})
		f.changed()
	}
}
