// Package cleanup removes Coil's objects from a node, when Coil leaves it.
//
// It owns the order of that, and the decision whether it may be: not while coild runs, and not
// from under pods. Objects without a mark of Coil's stay. It must not know of Kubernetes' API:
// AddressBlocks go with their pool or their Node.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/delqueue"
	"github.com/coil-net/coil/pkg/kernel/neighbour"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

// Config has the numbers and files of coild and coil-router, and says how much to remove.
type Config struct {
	// Kernel has the numbers of coild; its SysctlRecord has the host's old parameters.
	Kernel podnet.Options
	// ExportTable and RouterProtocol are coild's and coil-router's.
	ExportTable, RouterProtocol int

	Socket, DebugSocket, Database, DelQueueDir string
	// APIServers is the file of the API servers' addresses.
	APIServers string
	// CNIConfDir and CNIConfName are of the network configuration; an empty name is none.
	CNIConfDir, CNIConfName string
	// CNIBinDir is the folder of the plugin.
	CNIBinDir string

	// Force cuts the network of running pods off.
	Force bool
	// State removes the record of addresses, too.
	State bool
	// Out gets a line for each removed object.
	Out io.Writer
}

// ErrInUse: coild runs, or pods need the objects that would be removed. Nothing was removed.
var ErrInUse = errors.New("nothing was removed")

// run is one cleanup.
type run struct {
	Config
	network *podnet.Network
	record  *sqlite.Retired
	errs    []error
}

// Run removes everything. It goes on after a failure and joins the errors; ErrInUse means that nothing
// was removed. It can be repeated, and does nothing the second time.
func Run(ctx context.Context, c Config) (err error) {
	if err := unserved(ctx, c.Socket); err != nil {
		return err
	}
	record, err := sqlite.Retire(c.Database)
	if errors.Is(err, sqlite.ErrLocked) {
		return fmt.Errorf("%w: a coild is starting or ending: %w; delete the DaemonSet coild first", ErrInUse, err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, record.Close()) }()
	network, err := podnet.New(c.Kernel)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, network.Close()) }()
	r := &run{Config: c, network: network, record: record}
	traces, err := r.look(ctx)
	if err != nil {
		return err
	}
	r.all(ctx, traces)
	return errors.Join(r.errs...)
}

// unserved returns ErrInUse if somebody listens at the socket.
func unserved(ctx context.Context, socket string) error {
	// A file that isn't a socket refuses connections like a socket that nobody listens at.
	if info, err := os.Lstat(socket); err == nil && info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is not a socket: it can't be coild's", socket)
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	switch {
	case err == nil:
		conn.Close()
		return fmt.Errorf("%w: a coild serves at %s, and would make everything again; delete the DaemonSet coild first", ErrInUse, socket)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return nil
	}
	return fmt.Errorf("find out whether a coild serves at %s: %w", socket, err)
}

// look returns the links to remove, or ErrInUse when pods need some.
func (r *run) look(ctx context.Context) ([]podnet.Trace, error) {
	traces, err := r.network.Traces(ctx)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(traces, func(t podnet.Trace) bool { return t.InUse }) {
		return traces, nil // a damaged record doesn't matter
	}
	ended, names := r.pods(ctx)
	var pods []string
	for _, t := range traces {
		if !t.InUse || ended[t.ID] {
			continue
		}
		pod := t.String()
		if name, ok := names[t.ID]; ok {
			pod = fmt.Sprintf("pod %s (%s)", name, pod)
		}
		pods = append(pods, pod)
	}
	if len(pods) > 0 && !r.Force {
		return nil, errors.Join(append(r.errs, fmt.Errorf("%w: %d pods would lose their network; delete them, or use --force:\n  %s",
			ErrInUse, len(pods), strings.Join(pods, "\n  ")))...)
	}
	for _, p := range pods {
		fmt.Fprintln(r.Out, "cutting off", p)
	}
	return traces, nil
}

// pods returns which attachments have ended, since the runtime deleted them, even if only
// the plugin or coild knows that yet; and the names of pods. A pod whose record can't be read
// counts as running.
func (r *run) pods(ctx context.Context) (ended map[attachment.ID]bool, names map[attachment.ID]string) {
	ended, names = map[attachment.ID]bool{}, map[attachment.ID]string{}
	queued, _, err := delqueue.New(r.DelQueueDir).List()
	r.done(err)
	for _, q := range queued {
		ended[q.ID] = true
	}
	recorded, err := r.record.List(ctx)
	r.done(err)
	for _, a := range recorded {
		names[a.ID] = a.Namespace + "/" + a.Name
		if a.State == store.Releasing {
			ended[a.ID] = true
		}
	}
	return ended, names
}

// all does the removal: first nothing new may come, then nothing be announced. The records that tell the next run of
// pods that are left go last.
func (r *run) all(ctx context.Context, traces []podnet.Trace) {
	if r.CNIConfName != "" {
		files, err := cniconf.Remove(r.CNIConfDir, r.CNIConfName)
		r.done(err, files...)
	}
	handle := r.network.Handle()
	routes := func(protocol, table int) {
		res, err := route.New(handle, protocol, table).Sync(ctx, nil)
		if res.Deleted > 0 {
			r.removed(fmt.Sprintf("%d routes of protocol %d from table %d", res.Deleted, protocol, table))
		}
		r.done(err)
	}
	proxies, err := neighbour.New(handle, r.Kernel.Protocol).Sync(ctx, nil)
	if proxies.Deleted > 0 {
		r.removed(fmt.Sprintf("%d proxy neighbour entries of protocol %d", proxies.Deleted, r.Kernel.Protocol))
	}
	r.done(err)
	routes(dataplane.ProtocolFloating, r.ExportTable)
	routes(dataplane.ProtocolFloating, r.Kernel.PodTable)
	routes(dataplane.ProtocolFloating, unix.RT_TABLE_LOCAL)
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		r.done(r.removeTable(ctx, func(ns *netns.NS, name string) (*nft.Table, error) { return nft.NewIP(ns, name, f) }, dataplane.NftTableFloating))
	}
	r.done(r.removeTable(ctx, nft.NewARP, dataplane.NftTableFloating))
	r.done(r.removeTable(ctx, nft.New, dataplane.NftTableProbes))
	routes(r.Kernel.Protocol, r.ExportTable)
	routes(r.RouterProtocol, unix.RT_TABLE_MAIN)
	r.done(r.network.Dismantle(ctx, traces, r.removed))
	r.removeTransit(ctx, routes)
	routes(r.Kernel.Protocol, dataplane.TableUnassigned)
	r.done(r.restoreParameters())
	for _, socket := range []string{r.Socket, r.DebugSocket} {
		r.file(socket)
		r.file(observe.Unfinished(socket))
	}
	plugin := filepath.Join(r.CNIBinDir, spec.PluginType)
	r.file(plugin)
	r.done(atomicfile.RemoveStale(plugin, 0))
	r.folder(r.DelQueueDir) // one that still runs sees that its file is gone; see package delqueue
	r.file(r.APIServers)
	r.done(atomicfile.RemoveStale(r.APIServers, 0))
	if r.State {
		files, err := r.record.Remove()
		r.done(err, files...)
		r.file(r.Kernel.SysctlRecord + ".corrupt")
	}
}

// removeTransit removes that by which clients leave by the node's address, when no router can send any more.
func (r *run) removeTransit(ctx context.Context, routes func(protocol, table int)) {
	routes(dataplane.ProtocolTransit, r.Kernel.PodTable)
	r.done(r.removeTable(ctx, nft.New, dataplane.NftTableMasquerade))
}

// removeTable removes a table of nftables, which open opens.
func (r *run) removeTable(ctx context.Context, open func(*netns.NS, string) (*nft.Table, error), name string) error {
	t, err := open(nil, name)
	if err != nil {
		return err
	}
	defer t.Close()
	exists, err := t.Exists(ctx)
	if err != nil || !exists {
		return err
	}
	if _, err := t.Sync(ctx, dataplane.Ruleset{}); err != nil {
		return err
	}
	r.removed(fmt.Sprintf("table %s of nftables", t))
	return nil
}

// restoreParameters gives the host the kernel parameters that it had before coild.
func (r *run) restoreParameters() (err error) {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	restored, err := sysctl.NewRecord(r.Kernel.SysctlRecord).Restore(ns)
	for _, s := range restored {
		fmt.Fprintln(r.Out, "restored", s)
	}
	return err
}

// done notes an error, and files that were removed.
func (r *run) done(err error, files ...string) {
	for _, f := range files {
		r.removed(f)
	}
	r.errs = append(r.errs, err)
}

func (r *run) removed(what string) { fmt.Fprintln(r.Out, "removed", what) }

// file removes a file, but no folder.
func (r *run) file(path string) {
	info, err := os.Lstat(path)
	if err == nil && info.IsDir() {
		err = fmt.Errorf("%s is a folder, not Coil's file", path)
	}
	if err == nil {
		err = os.Remove(path)
	}
	switch {
	case err == nil:
		r.removed(path)
	case !errors.Is(err, fs.ErrNotExist):
		r.done(err)
	}
}

// folder removes a folder with its content.
func (r *run) folder(path string) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return
	}
	err := os.RemoveAll(path)
	r.done(err)
	if err == nil {
		r.removed(path)
	}
}
