// Package rtnl talks to the kernel about links, addresses, routes and rules by
// rtnetlink(7). Nothing else in Coil does.
//
// It owns the messages: how a wanted object is encoded, how an answer is read,
// and that an incomplete answer is an error and never a list. Its sockets also carry messages of
// other packages in other protocols of netlink(7). It must not know which objects are wanted, nor
// the owners of objects that it finds.
package rtnl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

var (
	// ErrDumpInterrupted: the kernel's list changed while it was read, several
	// times in a row. Nothing is known; try again later.
	ErrDumpInterrupted = errors.New("dump was interrupted by changes")
	// ErrExist: an object of the same identity is there already.
	ErrExist = errors.New("exists already")
	// ErrNotExist: the object, or the link that it needs, isn't there.
	ErrNotExist = errors.New("does not exist")
	// ErrInvalid: the kernel refuses the request as it is.
	ErrInvalid = errors.New("invalid request")
	// ErrTooMany: another network namespace has more objects than Coil ever makes there.
	ErrTooMany = errors.New("too many objects")
	// ErrNoFamily: the kernel, or the link, has this address family switched off.
	ErrNoFamily = errors.New("address family is not available")

	errMalformed = errors.New("malformed netlink message")
)

// Error is the kernel's refusal of a request. It matches the errors of this
// package and its errno.
type Error struct {
	Request Request
	Errno   unix.Errno
	// Detail has the kernel's words; often empty.
	Detail string
}

// Error is the request, the errno and the kernel's words.
func (e *Error) Error() string {
	s := e.Request.String() + ": " + e.Errno.Error()
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }

// Is classifies the errno.
func (e *Error) Is(target error) bool {
	switch e.Errno {
	case unix.EEXIST:
		return target == ErrExist
	case unix.ENODEV, unix.ESRCH, unix.ENOENT, unix.EADDRNOTAVAIL, unix.ENETUNREACH, unix.EHOSTUNREACH:
		return target == ErrNotExist
	case unix.EINVAL:
		return target == ErrInvalid
	case unix.EAFNOSUPPORT, unix.EOPNOTSUPP, unix.EACCES:
		return target == ErrNoFamily
	}
	return false
}

type traceKey struct{}

// WithTrace makes send observe the requests of handles that are called with the context, for tests and measurements: it
// is called before each request is sent. Its error makes this request, and those that follow in its batch, fail
// without being sent.
func WithTrace(ctx context.Context, send func(Request) error) context.Context {
	return context.WithValue(ctx, traceKey{}, send)
}

func observe(ctx context.Context, r Request) error {
	if send, ok := ctx.Value(traceKey{}).(func(Request) error); ok {
		return send(r)
	}
	return nil
}

const (
	// maxIdle bounds the sockets that a handle keeps open.
	maxIdle = 16
	// maxBatch bounds the requests of one datagram, so that the refusals of all of
	// them fit into the socket's receive buffer.
	maxBatch = 64
	// maxDumps bounds how often an interrupted dump is repeated at once.
	maxDumps = 20
	// maxOfPod bounds a list of objects of a pod, where a program may have made millions: twice as many as Coil makes, of
	// which most are routes. Routes that aren't wanted are deleted one by one.
	maxOfPod = 32_768
)

// Handle sends requests in one network namespace. It is safe for concurrent
// use: each call has a socket of its own while it lasts.
type Handle struct {
	ns       *netns.NS
	protocol int
	idle     chan *conn
	// most is how many messages a list may take, 0 any number.
	most int

	mu    sync.Mutex
	ports map[uint32]time.Time // of the sockets, and when each was closed

	removal sync.Mutex // guards the next
	removed uint32     // the group in which links are removed, 0 as long as none was chosen
}

// New returns a handle for a namespace, nil for the one that the process was
// started in. The namespace must stay open as long as the handle is used.
func New(ns *netns.NS) (*Handle, error) { return NewProtocol(ns, unix.NETLINK_ROUTE) }

// NewProtocol is New for another protocol of netlink(7), such as NETLINK_NETFILTER.
func NewProtocol(ns *netns.NS, protocol int) (*Handle, error) {
	h := &Handle{ns: ns, protocol: protocol, idle: make(chan *conn, maxIdle), ports: map[uint32]time.Time{}}
	c, err := h.dial()
	if err != nil {
		return nil, err
	}
	h.idle <- c
	return h, nil
}

// Close closes the sockets. No call may be in progress.
func (h *Handle) Close() {
	for {
		select {
		case c := <-h.idle:
			h.closing(c)
		default:
			return
		}
	}
}

func (h *Handle) dial() (*conn, error) {
	c, err := netns.In(h.ns, func() (*conn, error) { return dial(h.protocol) })
	if err == nil {
		h.opened(c)
	}
	return c, err
}

// with calls fn with a socket. An error that isn't the kernel's refusal leaves
// the socket in an unknown state, so that it is closed.
func (h *Handle) with(fn func(*conn) error) error {
	var c *conn
	select {
	case c = <-h.idle:
	default:
		var err error
		if c, err = h.dial(); err != nil {
			return err
		}
	}
	usable := false
	defer func() { // also if fn panics
		if usable {
			select {
			case h.idle <- c:
				return
			default:
			}
		}
		h.closing(c)
	}()
	err := fn(c)
	var refused *Error
	usable = err == nil || errors.As(err, &refused) || errors.Is(err, ErrDumpInterrupted)
	return err
}

// Do sends requests and returns the errors of those that failed, joined. The
// kernel works through all of them in order, also when one fails.
func (h *Handle) Do(ctx context.Context, reqs ...Request) error {
	_, err := h.Apply(ctx, nil, reqs...)
	return err
}

// Apply is Do that returns how many requests succeeded. Requests that fail with the tolerated
// error, such as ErrNotExist of objects that are to be removed, are neither counted nor told.
func (h *Handle) Apply(ctx context.Context, tolerated error, reqs ...Request) (n int, err error) {
	var errs []error
	for _, err := range h.Each(ctx, reqs...) {
		switch {
		case err == nil:
			n++
		case errors.Is(err, tolerated):
		case len(errs) > 0 && errs[len(errs)-1] == err: // of the socket: it concerns many requests, but is told once
		default:
			errs = append(errs, err)
		}
	}
	return n, errors.Join(errs...)
}

// Requests are those of several objects.
func Requests[T any](objects []T, request func(T) Request) []Request {
	reqs := make([]Request, 0, len(objects))
	for _, o := range objects {
		reqs = append(reqs, request(o))
	}
	return reqs
}

// Each is Do with the error of each request apart, nil where it succeeded. An
// error that isn't an *Error means that it is unknown whether the request was
// carried out.
func (h *Handle) Each(ctx context.Context, reqs ...Request) []error {
	results := make([]error, len(reqs))
	for start := 0; start < len(reqs); start += maxBatch {
		end := min(start+maxBatch, len(reqs))
		if err := h.batch(ctx, reqs[start:end], results[start:end]); err != nil {
			fill(results[end:], err)
			break
		}
	}
	return results
}

// batch sends at most maxBatch requests. Its error means that no more should be
// sent, and is among the results.
func (h *Handle) batch(ctx context.Context, reqs []Request, results []error) error {
	var stop error
	n := 0
	for ; n < len(reqs); n++ {
		if stop = errors.Join(ctx.Err(), observe(ctx, reqs[n])); stop != nil {
			stop = fmt.Errorf("%s: %w", reqs[n], stop)
			break
		}
	}
	fill(results[n:], stop)
	if n > 0 {
		if err := h.with(func(c *conn) error { return c.batch(reqs[:n], results[:n]) }); err != nil {
			stop = fmt.Errorf("%s: %w", reqs[0], err)
			fill(results[:n], stop)
		}
	}
	return stop
}

// fill sets err where there is none.
func fill(results []error, err error) {
	for i := range results {
		if results[i] == nil {
			results[i] = err
		}
	}
}

// ask sends a request for objects and calls found with the body of each answer.
func (h *Handle) ask(ctx context.Context, r Request, flags uint16, found func(body []byte) error) error {
	if err := errors.Join(ctx.Err(), observe(ctx, r)); err != nil {
		return fmt.Errorf("%s: %w", r, err)
	}
	return h.with(func(c *conn) error { return c.ask(r, flags, found) })
}

// Get sends a request for one object and calls found with the body of the answer, which
// is valid until it returns.
func (h *Handle) Get(ctx context.Context, r Request, found func(body []byte) error) error {
	return h.ask(ctx, r, 0, found)
}

// Dump sends a request for all objects and calls found with the body of each answer,
// which is valid until it returns. An object may be missing if objects change meanwhile;
// an error means that any may be.
func (h *Handle) Dump(ctx context.Context, r Request, found func(body []byte) error) error {
	return h.ask(ctx, r, unix.NLM_F_DUMP, found)
}

// NewOfPod is New for the namespace of a pod, where a program may have made millions of objects: see Bound.
func NewOfPod(ns *netns.NS) (*Handle, error) {
	h, err := New(ns)
	if err == nil {
		h.Bound(maxOfPod)
	}
	return h, err
}

// Bound sets how many messages a list may take before it is ErrTooMany. It must be called before the handle is used.
func (h *Handle) Bound(messages int) { h.most = messages }

// List sends a request for all objects and returns those that parse accepts. A handle with a bound returns
// ErrTooMany rather than a longer list.
func List[T any](ctx context.Context, h *Handle, r Request, parse func(body []byte) (T, bool, error)) ([]T, error) {
	return Collect(ctx, h, r, func(all []T, body []byte) ([]T, error) {
		x, ok, err := parse(body)
		if ok && err == nil {
			all = append(all, x)
		}
		return all, err
	})
}

// Collect is List where one answer has any number of objects, which add appends.
func Collect[T any](ctx context.Context, h *Handle, r Request, add func(all []T, body []byte) ([]T, error)) ([]T, error) {
	var err error
	for range maxDumps {
		var all []T
		messages := 0
		err = h.Dump(ctx, r, func(body []byte) (err error) {
			all, err = add(all, body)
			if messages++; h.most > 0 && (messages > h.most || len(all) > maxOfPod) {
				all = nil
				return fmt.Errorf("%s: %w: more than %d messages or %d objects", r, ErrTooMany, h.most, maxOfPod)
			}
			return err
		})
		if err == nil {
			return all, nil
		}
		if !errors.Is(err, ErrDumpInterrupted) {
			break
		}
	}
	return nil, err
}
