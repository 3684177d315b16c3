package cniplugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/coil-net/coil/pkg/cniconf/netconf"
	"github.com/coil-net/coil/pkg/cniplugin/unary"
	"github.com/coil-net/coil/pkg/delqueue"
)

// ConnectTimeout is how long a command waits for somebody to listen on the socket.
const ConnectTimeout = time.Second

// Timeouts bound each command as a whole, connecting included.
type Timeouts struct {
	Add, Del, Check, GC, Status time.Duration
}

// DefaultTimeouts end before the runtime loses patience (the kubelet's
// runtimeRequestTimeout is 2 minutes, its longest call twice that), so that the
// reason reaches the events of the pod instead of "signal: killed". STATUS is asked
// every 5 seconds.
func DefaultTimeouts() Timeouts {
	return Timeouts{
		Add:    100 * time.Second,
		Del:    60 * time.Second,
		Check:  30 * time.Second,
		GC:     60 * time.Second,
		Status: 5 * time.Second,
	}
}

// method is the gRPC method of each command.
var method = map[verb]string{
	verbAdd:    "/pkg.cnirpc.CNI/Add",
	verbDel:    "/pkg.cnirpc.CNI/Del",
	verbCheck:  "/pkg.cnirpc.CNI/Check",
	verbGC:     "/pkg.cnirpc.CNI/GC",
	verbStatus: "/pkg.cnirpc.CNI/Status",
}

// Plugin does CNI's commands.
type Plugin struct {
	// Stdout is where results go. Errors are the caller's to print.
	Stdout io.Writer
	// Timeouts are DefaultTimeouts outside of tests.
	Timeouts Timeouts
}

// Funcs returns the commands. Their errors are of type *types.Error.
func (p Plugin) Funcs(ctx context.Context) skel.CNIFuncs {
	bound := func(timeout time.Duration, do func(context.Context, *skel.CmdArgs) error) func(*skel.CmdArgs) error {
		return func(args *skel.CmdArgs) error {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			return do(ctx, args)
		}
	}
	t := p.Timeouts
	return skel.CNIFuncs{
		Add:    bound(t.Add, p.add),
		Del:    bound(t.Del, p.del),
		Check:  bound(t.Check, p.check),
		GC:     bound(t.GC, p.gc),
		Status: bound(t.Status, p.status),
	}
}

func (p Plugin) add(ctx context.Context, args *skel.CmdArgs) error {
	conf, r, err := parse(verbAdd, args)
	if err != nil {
		return err
	}
	// skel looks at this only after ADD, when it is too late to answer an error.
	if o := strings.ToUpper(args.NetnsOverride); o != "TRUE" && o != "1" {
		if same, err := ns.CheckNetNS(args.Netns); err != nil {
			return err
		} else if same {
			return types.NewError(types.ErrInvalidNetNS, fmt.Sprintf("CNI_NETNS %q is the host's network namespace", args.Netns), "")
		}
	}
	// A DEL of the same ID that coild hasn't replayed yet is history now.
	if err := delqueue.New(conf.DelQueueDir).Remove(r.id()); err != nil {
		return types.NewError(types.ErrTryAgainLater, "an earlier deletion of the same container can't be cancelled", err.Error())
	}
	answer, err := call(ctx, verbAdd, conf, r)
	if err != nil {
		return toCNIError(verbAdd, conf.Socket, err)
	}
	raw, err := unmarshalAddResponse(answer)
	if err != nil {
		return types.NewError(types.ErrDecodingFailure, "answer of coild to ADD can't be decoded", err.Error())
	}
	if len(raw) == 0 && conf.PrevResult != nil {
		raw = conf.PrevResult // a chained plugin that adds nothing hands on what it got
	}
	result, err := netconf.DecodeResult(raw, conf.CNIVersion)
	if err != nil {
		return types.NewError(types.ErrDecodingFailure, "answer of coild to ADD is not a CNI result", err.Error())
	}
	converted, err := result.GetAsVersion(conf.CNIVersion)
	if err != nil {
		return types.NewError(types.ErrIncompatibleCNIVersion, "result of coild can't be converted to CNI version "+conf.CNIVersion, err.Error())
	}
	if err := converted.PrintTo(p.Stdout); err != nil {
		return types.NewError(types.ErrIOFailure, "result can't be written", err.Error())
	}
	return nil
}

// del queues the deletion when coild can't be reached, and succeeds: a pod must not
// stay Terminating while coild is being updated. When the record is on the disk it
// tries coild once more, for the case that coild read the queue just before; see
// package delqueue for why nothing is lost.
func (p Plugin) del(ctx context.Context, args *skel.CmdArgs) error {
	conf, r, err := parse(verbDel, args)
	if err != nil {
		return err
	}
	_, err = call(ctx, verbDel, conf, r)
	if err == nil {
		return nil
	}
	if !lost(err) {
		return toCNIError(verbDel, conf.Socket, err)
	}
	queue := delqueue.New(conf.DelQueueDir)
	record := delqueue.Record{
		ID:           r.id(),
		PodNamespace: r.args[argPodNamespace],
		PodName:      r.args[argPodName],
		QueuedAt:     time.Now().UTC(),
	}
	if qerr := queue.Add(record); qerr != nil {
		e := toCNIError(verbDel, conf.Socket, err)
		e.Details = strings.TrimPrefix(e.Details+"; "+qerr.Error(), "; ")
		return e
	}
	again := unary.Client{Socket: conf.Socket}
	if _, err := again.Call(ctx, method[verbDel], r.marshal()); err == nil {
		// coild replays the record if it can't be removed; that does no harm.
		_ = queue.Remove(record.ID)
	}
	return nil
}

func (p Plugin) check(ctx context.Context, args *skel.CmdArgs) error {
	return simple(ctx, verbCheck, args)
}

// gc fails without a list of valid attachments: see netconf.ValidAttachments.
func (p Plugin) gc(ctx context.Context, args *skel.CmdArgs) error {
	if _, err := netconf.ValidAttachments(args.StdinData); err != nil {
		return err
	}
	return simple(ctx, verbGC, args)
}

func (p Plugin) status(ctx context.Context, args *skel.CmdArgs) error {
	return simple(ctx, verbStatus, args)
}

// simple does a command that has no result. GC and STATUS are newer than the first
// coild: one that doesn't know them has nothing to say against them.
func simple(ctx context.Context, v verb, args *skel.CmdArgs) error {
	conf, r, err := parse(v, args)
	if err != nil {
		return err
	}
	_, err = call(ctx, v, conf, r)
	var s *unary.Status
	switch {
	case err == nil:
		return nil
	case (v == verbGC || v == verbStatus) && errors.As(err, &s) && s.FromServer && s.Code == unary.Unimplemented:
		return nil
	}
	return toCNIError(v, conf.Socket, err)
}

// parse reads what every command needs.
func parse(v verb, args *skel.CmdArgs) (netconf.Conf, request, error) {
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return netconf.Conf{}, request{}, err
	}
	r, err := newRequest(v, args, conf)
	return conf, r, err
}

// call calls coild.
func call(ctx context.Context, v verb, conf netconf.Conf, r request) ([]byte, error) {
	return unary.Client{Socket: conf.Socket, ConnectTimeout: ConnectTimeout}.Call(ctx, method[v], r.marshal())
}
