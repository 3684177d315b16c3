package cniplugin

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/cniplugin/unary"
	"github.com/coil-net/coil/pkg/delqueue"
)

// ConnectTimeout is how long a command waits for somebody to listen on the socket.
const ConnectTimeout = time.Second

// Plugin does CNI's commands.
type Plugin struct {
	// Stdout is where results go. Errors are the caller's to print.
	Stdout io.Writer

	timeout time.Duration // of tests; 0 for that of the command
	file    string        // of tests; "" for that of the program
}

// do does a command. Its errors are of type *spec.Error.
func (p Plugin) do(c command) error {
	if c.verb == verbVersion {
		return p.print(spec.VersionJSON())
	}
	c.deadline = time.Now().Add(cmp.Or(p.timeout, verbs[c.verb].timeout))
	if err := c.complete(); err != nil {
		return err
	}
	switch c.verb {
	case verbAdd:
		return p.add(c)
	case verbDel:
		return p.del(c)
	case verbGC:
		if _, err := spec.ValidAttachments(c.stdinData); err != nil {
			return err
		}
	}
	return simple(c)
}

// print writes to standard output.
func (p Plugin) print(b []byte) error {
	if _, err := p.Stdout.Write(b); err != nil {
		return spec.NewError(spec.CodeIOFailure, "result can't be written", err.Error())
	}
	return nil
}

func (p Plugin) add(c command) error {
	if same, err := c.inHostNetwork(); err != nil {
		return err
	} else if same {
		return spec.NewError(spec.CodeInvalidNetns, fmt.Sprintf("CNI_NETNS %q is the host's network namespace", c.netns), "")
	}
	// A DEL of the same ID that coild hasn't replayed yet is history now.
	if err := delqueue.New(c.conf.DelQueueDir).Remove(c.ID); err != nil {
		return spec.NewError(spec.CodeTryAgainLater, "an earlier deletion of the same container can't be cancelled", err.Error())
	}
	answer, err := c.call(ConnectTimeout)
	if err != nil {
		return toCNIError(c.verb, c.conf.Socket, err)
	}
	raw, err := unmarshalAddResponse(answer)
	if err != nil {
		return spec.NewError(spec.CodeDecodingFailure, "answer of coild to ADD can't be decoded", err.Error())
	}
	if len(raw) == 0 {
		raw = c.conf.PrevResult // a chained plugin that adds nothing passes the result on
	}
	result, err := spec.ParseResult(raw, c.conf.CNIVersion)
	if err != nil {
		return spec.NewError(spec.CodeDecodingFailure, "answer of coild to ADD is not a CNI result", err.Error())
	}
	return p.print(result.As(c.conf.CNIVersion))
}

// del queues the deletion when coild can't be reached, and succeeds: a pod must not
// stay Terminating while coild is being updated. When the record is on the disk it
// tries coild once more, for the case that coild read the queue just before; see
// package delqueue for why nothing is lost, and nothing left.
func (p Plugin) del(c command) error {
	_, err := c.call(ConnectTimeout)
	if err == nil {
		return nil
	}
	if !lost(err) {
		return toCNIError(c.verb, c.conf.Socket, err)
	}
	queue := delqueue.New(c.conf.DelQueueDir)
	record := delqueue.Record{
		ID:           c.ID,
		PodNamespace: c.args[argPodNamespace],
		PodName:      c.args[argPodName],
		QueuedAt:     time.Now().UTC(),
	}
	if qerr := queue.Add(record); qerr != nil {
		e := toCNIError(c.verb, c.conf.Socket, err)
		e.Details = strings.TrimPrefix(e.Details+"; "+qerr.Error(), "; ")
		return e
	}
	if _, err := c.call(0); err == nil {
		// coild replays the record if it can't be removed; that does no harm.
		_ = queue.Remove(record.ID)
	}
	if p.removed() {
		if err := queue.Withdraw(record.ID); err != nil {
			return spec.NewError(spec.CodeTryAgainLater, "coil was removed from the node, but not the deletion that it noted", err.Error())
		}
	}
	return nil
}

// removed says that the plugin's own file is gone, as after coild cleanup. An update replaces it.
func (p Plugin) removed() bool {
	file := p.file
	if file == "" {
		var err error
		if file, err = os.Executable(); err != nil {
			return false
		}
	}
	_, err := os.Lstat(file)
	return errors.Is(err, fs.ErrNotExist)
}

// simple does a command that has no result. GC and STATUS are newer than the first
// coild: one that doesn't know them has nothing to say against them.
func simple(c command) error {
	_, err := c.call(ConnectTimeout)
	var s *unary.Status
	switch {
	case err == nil:
		return nil
	case (c.verb == verbGC || c.verb == verbStatus) && errors.As(err, &s) && s.FromServer && s.Code == unary.Unimplemented:
		return nil
	}
	return toCNIError(c.verb, c.conf.Socket, err)
}

// call calls coild. It waits until somebody listens on the socket, and makes one attempt at least.
func (c command) call(connectTimeout time.Duration) ([]byte, error) {
	return unary.Client{Socket: c.conf.Socket, ConnectTimeout: connectTimeout}.Call(c.deadline, verbs[c.verb].method, c.marshal())
}
