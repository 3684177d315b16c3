package coild

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node/debug"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// debugCommand is the first argument that asks a running coild.
const debugCommand = "debug"

// debugOptions are the flags of "coild debug", of which those of coild have the same names.
type debugOptions struct {
	Options
	Timeout time.Duration
	path    string
	// wrong says why the words ask for nothing; nil if they do.
	wrong error
}

// waits are how long to wait for answers at most, by paths.
var waits = map[string]time.Duration{debug.PathRecord: time.Minute, debug.PathDB: 2 * time.Minute}

// waitFor is how long to wait for the answer of a path at most.
func waitFor(path string) time.Duration {
	if debug.Sends(path) {
		return debug.SendWithin + 2*time.Second
	}
	return cmp.Or(waits[path], 3*time.Second)
}

// debugMain runs "coild debug" with the arguments after that, and returns the exit code: words, then flags.
func debugMain(args []string) int {
	words, flags := program.Words(args)
	o := &debugOptions{}
	o.path, o.wrong = debug.Path(words)
	return program.Main("coild "+debugCommand, flags, o, o.run)
}

// AddFlags implements program.Options.
func (o *debugOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Socket, "socket", "/run/coild.sock", "unix socket of coild; it is asked at the one beside it, of the name with -debug")
	fs.DurationVar(&o.Timeout, "timeout", waitFor(o.path), "the longest time to wait for the answer")
}

// Validate implements program.Options.
func (o *debugOptions) Validate() error {
	return errors.Join(o.wrong, program.Absolute("--socket", o.Socket), program.Positive("--timeout", o.Timeout))
}

// run prints the answer. Of a file it prints the sum on the standard error: what brings the output to its reader may cut it short.
func (o *debugOptions) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	limit := int64(inspection.Limit)
	switch o.path {
	case debug.PathRecord:
		limit = inspection.DatabaseLimit
	case debug.PathDB:
		limit = inspection.CopyLimit
	}
	sum := sha256.New()
	n, err := observe.AskSocket(ctx, o.debugSocket(), o.path, limit, io.MultiWriter(os.Stdout, sum))
	if err != nil {
		return fmt.Errorf("ask coild: %w", err)
	}
	if o.path == debug.PathDB {
		_, err = fmt.Fprintln(os.Stderr, inspection.Sum{Bytes: n, SHA256: hex.EncodeToString(sum.Sum(nil))})
	}
	return err
}

// serveDebug answers what people ask until ctx ends. Pods are served without it, too.
func (d *daemon) serveDebug(ctx context.Context) error {
	if err := d.debugServer().Serve(ctx, d.debugSocket()); err != nil {
		klog.FromContext(ctx).Error(err, "Nobody can ask what is wrong")
	}
	return nil
}

// debugServer answers what people ask.
func (d *daemon) debugServer() *debug.Server {
	return &debug.Server{
		Node: d.lookAtNode, Record: d.store, Gone: func(a store.Allocation) bool { return a.Path != "" && !d.lives(a) }, Way: d.way, Follow: d.follow, Send: d.send,
		Look: func(ctx context.Context, alloc store.Allocation, into *inspection.Attachment) {
			for _, p := range d.parts {
				if p.look != nil {
					p.look(ctx, alloc, into)
				}
			}
		},
		Copy: func(ctx context.Context, limit int64) (io.ReadCloser, int64, error) {
			c, err := d.store.Copy(ctx, limit)
			if err != nil {
				return nil, 0, err
			}
			return c, c.Size, nil
		},
		LookAtHost: func(ctx context.Context) []inspection.Comparison {
			all := []inspection.Comparison{}
			for _, p := range d.parts {
				if p.lookAtHost != nil {
					all = append(all, p.lookAtHost(ctx)...)
				}
			}
			return all
		},
		LookAtAddress: func(ctx context.Context, a netip.Addr) (all []inspection.Comparison) {
			for _, p := range d.parts {
				if p.lookAtAddress != nil {
					all = append(all, p.lookAtAddress(ctx, a)...)
				}
			}
			return all
		},
	}
}

// lookAtNode says which node this is, and whether it works.
func (d *daemon) lookAtNode() inspection.Node {
	n := inspection.Node{
		Name: d.NodeName, UID: string(d.self.UID), Version: program.Version(), Now: time.Now(), IPAM: d.IPAM, Egress: d.Egress,
	}
	if err := d.health.Ready(); err != nil {
		n.NotReady = err.Error()
	}
	if d.noTunnels != nil {
		if err := d.noTunnels(); err != nil {
			n.NoTunnels = err.Error()
		}
	}
	if count, limit, err := conntrack.SizeIn(nil); err == nil {
		n.Conntrack = &inspection.Conntrack{Count: count, Limit: limit}
	}
	return n
}

// way is how the kernel reaches an address.
func (d *daemon) way(ctx context.Context, a netip.Addr) (string, error) {
	return d.network.Handle().Way(ctx, rtnl.Packet{To: a})
}

// follow is how packets of a pod go to an address: in the pod and, from its link, on the host.
func (d *daemon) follow(ctx context.Context, alloc store.Allocation, to netip.Addr) ([]inspection.Hop, error) {
	hops, err := clientnet.Way(ctx, alloc.Netns, alloc.Address.Addrs(), to)
	for i := range hops {
		hops[i].InPod = true
	}
	if err != nil || len(hops) == 0 || hops[len(hops)-1].Dropped != "" || alloc.HostIfIndex == 0 {
		return hops, err
	}
	last := hops[len(hops)-1]
	p := rtnl.Packet{In: alloc.HostIfIndex}
	if p.To, err = netip.ParseAddr(last.To); err != nil {
		return hops, err
	}
	if p.From, err = netip.ParseAddr(last.From); err != nil {
		return hops, err
	}
	hop, err := clientnet.HopOf(ctx, d.network.Handle(), p)
	hop.InTunnel = last.InTunnel
	return append(hops, hop), err
}

// look compares what was made for a pod with what there is.
func (a *addresses) look(ctx context.Context, alloc store.Allocation, into *inspection.Attachment) {
	if alloc.State != store.Attached || a.assign.Linkless(alloc) {
		return // its link isn't there yet, or not any more
	}
	pod, made := a.assign.WiringOf(alloc)
	into.Objects = append(into.Objects, a.network.Look(ctx, pod, made)...)
}

// lookAtHost compares what all pods share.
func (a *addresses) lookAtHost(ctx context.Context) []inspection.Comparison {
	all := a.network.LookAtHost(ctx)
	blocks, err := a.blocks.ToExport(ctx)
	if err != nil {
		return append(all, inspection.Comparison{Topic: inspection.Blocks, Object: "routes of blocks", Unknown: err.Error()})
	}
	return append(all, a.exporter.Look(ctx, blocks)...)
}

// look says which floating addresses lead to a pod, and whether they do.
func (h *holder) look(ctx context.Context, alloc store.Allocation, into *inspection.Attachment) {
	uid := types.UID(alloc.UID)
	pod, here := h.pod(uid)
	h.mu.Lock()
	var addrs []netip.Addr
	for _, a := range h.announced {
		if uid != "" && a.Pod == uid {
			addrs = append(addrs, a.Addrs()...)
		}
	}
	h.mu.Unlock()
	for _, a := range addrs {
		into.Floating = append(into.Floating, a.String())
		want, has := place.Inward(pod, h.PodTable, a)
		if !here || !has {
			continue
		}
		c := inspection.Comparison{Topic: inspection.Floating, Object: "way to floating address " + a.String(), Want: want.String()}
		switch r, err := h.network.Handle().RouteTo(ctx, a, 0); {
		case errors.Is(err, rtnl.ErrNotExist):
		case err != nil:
			c.Unknown = err.Error()
		default:
			c.Have, c.OK = r.String(), r.Table == want.Table && r.Link == want.Link && r.Gateway == want.Gateway
		}
		into.Objects = append(into.Objects, c)
	}
}

// lookAtAddress compares what takes packets for an address of Services with what there is, if a block says that Services have the address.
func (h *holder) lookAtAddress(ctx context.Context, a netip.Addr) []inspection.Comparison {
	blocks := h.blocks.All()
	i := slices.IndexFunc(blocks, func(b *v2.AddressBlock) bool {
		if b.Floating == nil || len(b.Floating.Ports) == 0 || b.Labels[v2.LabelAnnounce] == string(v2.AnnounceGateway) {
			return false
		}
		prefixes, err := ipam.ParseBlock(b.IPv4, b.IPv6)
		return err == nil && slices.Contains(prefixes.At(0).Addrs(), a)
	})
	if i < 0 {
		return nil
	}
	return h.place.Look(ctx, a, floating.PortsOf(blocks[i]))
}
