package cluster

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	lab "github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// serverPort is where the server outside listens.
const serverPort = "8080"

// servers are the addresses of the server outside, to which Egresses lead.
var servers = []netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:1::10")}

// outside is the network beyond the nodes, with a server that remembers who came from where.
type outside struct {
	mu     sync.Mutex // guards visits
	visits map[string][]netip.Addr
}

// newOutside gives the fabric the server, and keeps its routes to the nodes' blocks as the nodes'
// routers would be told them.
func newOutside(t *testing.T, s *site) *outside {
	t.Helper()
	o := &outside{visits: map[string][]netip.Addr{}}
	fabric := testkit.Must(netlab.Open(testkit.Must(s.NetNS(lab.Fabric))(t)))(t)
	t.Cleanup(func() { fabric.Close() })
	for _, a := range servers {
		testkit.Must(s.Exec(t.Context(), lab.Fabric, "ip", "address", "add", a.String(), "dev", "lo"))(t)
	}
	l := testkit.Must(fabric.Listen(t.Context(), "tcp", ":"+serverPort))(t)
	server := &http.Server{Handler: o}
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = server.Serve(l) }) // ends by Close
	work.Go(func() {
		if err := s.announce(ctx); ctx.Err() == nil {
			t.Errorf("announce blocks: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		server.Close()
		work.Wait()
	})
	return o
}

// ServeHTTP tells a visitor, whose name is the path, from where it comes.
func (o *outside) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	a := from.Addr().Unmap()
	name := strings.TrimPrefix(r.URL.Path, "/")
	o.mu.Lock()
	if !slices.Contains(o.visits[name], a) {
		o.visits[name] = append(o.visits[name], a)
	}
	o.mu.Unlock()
	w.Header().Set("Connection", "close")
	_, _ = io.WriteString(w, a.String()) // a visitor who has left needs no answer
}

// from returns the addresses that a visitor came from since forget.
func (o *outside) from(visitor string) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var all []string
	for _, a := range o.visits[visitor] {
		all = append(all, a.String())
	}
	slices.Sort(all)
	return all
}

// forget forgets who came.
func (o *outside) forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	clear(o.visits)
}

// announce keeps the fabric's routes to the blocks of the nodes until ctx ends.
func (s *site) announce(ctx context.Context) error {
	for ctx.Err() == nil {
		// Without a version it begins with what there is. The API server ends it now and then, and may
		// be away.
		w, err := s.coil.CoilV2().AddressBlocks().Watch(ctx, metav1.ListOptions{})
		if err != nil {
			select {
			case <-time.After(time.Second):
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		for e := range w.ResultChan() {
			b, ok := e.Object.(*v2.AddressBlock)
			if !ok {
				break // a Status: the connection broke
			}
			if err := s.route(ctx, b, e.Type == watch.Deleted); err != nil {
				w.Stop()
				return err
			}
		}
		w.Stop()
	}
	return ctx.Err()
}

// route makes the routes to a block, or deletes them. Those of no node are floating addresses, which nodes announce themselves.
func (s *site) route(ctx context.Context, b *v2.AddressBlock, deleted bool) error {
	if b.Labels[v2.LabelNode] == "" {
		return nil
	}
	addrs, err := s.Addrs(b.Labels[v2.LabelNode])
	if err != nil {
		return err
	}
	var errs []error
	for _, cidr := range []*string{b.IPv4, b.IPv6} {
		if cidr == nil {
			continue
		}
		p, err := netip.ParsePrefix(*cidr)
		if err != nil {
			return err
		}
		via := addrs[slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.Is4() == p.Addr().Is4() })].String()
		args := []string{"ip", "route", "replace", *cidr, "via", via}
		if deleted {
			args = []string{"ip", "route", "flush", *cidr, "via", via} // also when there is none
		}
		_, err = s.Exec(ctx, lab.Fabric, args...)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
