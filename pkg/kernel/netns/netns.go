// Package netns opens network namespaces, tells them apart, and runs functions
// inside of them.
//
// It owns the rule that a thread never keeps a foreign namespace. It must not
// know what is done inside: netlink sockets carry their namespace, so only files
// below /proc/sys/net and the opening of sockets need to be there.
package netns

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotExist: nothing is at the path. The pod is gone: DEL is done with it,
	// ADD can't succeed any more.
	ErrNotExist = errors.New("network namespace does not exist")
	// ErrNotNetns: something else is at the path. A runtime that has unmounted the
	// namespace but not removed the file leaves an ordinary file.
	ErrNotNetns = errors.New("not a network namespace")
)

// NS is an open network namespace. It stays alive while it is open, also when
// its path is removed.
type NS struct {
	fd    int
	path  string
	inode uint64
}

// Open opens the namespace at a path, such as /run/netns/NAME or
// /proc/PID/ns/net. The error wraps ErrNotExist or ErrNotNetns where they apply.
func Open(path string) (*NS, error) {
	// Without O_NONBLOCK, a FIFO at the path would block for ever.
	fd, err := retry(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("open %s: %w", path, ErrNotExist)
	}
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	n := &NS{fd: fd, path: path}
	if err := n.identify(); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return n, nil
}

// Current opens the namespace that the process was started in.
func Current() (*NS, error) {
	// The main thread is never moved: Do works on threads of its own.
	return Open("/proc/self/ns/net")
}

func (n *NS) identify() error {
	var fs unix.Statfs_t
	if _, err := retry(func() (int, error) { return 0, unix.Fstatfs(n.fd, &fs) }); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	// NS_GET_NSTYPE (ioctl_ns(2)) fails on anything that isn't a namespace, and
	// tells a network namespace from the other kinds.
	if fs.Type != unix.NSFS_MAGIC {
		return ErrNotNetns
	}
	if kind, err := unix.IoctlRetInt(n.fd, unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return ErrNotNetns
	}
	var st unix.Stat_t
	if err := unix.Fstat(n.fd, &st); err != nil {
		return fmt.Errorf("stat: %w", err)
	}
	n.inode = st.Ino
	return nil
}

// Fd is the file descriptor, valid until Close.
func (n *NS) Fd() int { return n.fd }

// Inode identifies the namespace while it lives; a later one may get the same
// number again.
func (n *NS) Inode() uint64 { return n.inode }

// String is the path by which the namespace was opened.
func (n *NS) String() string { return n.path }

// Close gives the namespace up.
func (n *NS) Close() error {
	if err := unix.Close(n.fd); err != nil {
		return fmt.Errorf("close %s: %w", n.path, err)
	}
	return nil
}

// Panic is the error of a function that panicked in a namespace.
type Panic struct {
	Value any
	Stack []byte
}

// Error is the value and the stack: without that nobody would find the fault.
func (p *Panic) Error() string {
	return fmt.Sprintf("function in network namespace panicked: %v\n%s", p.Value, p.Stack)
}

// home is the namespace to which threads are returned.
var home = sync.OnceValues(Current)

// Home says whether it is the namespace that the process was started in, as a nil NS is.
func (n *NS) Home() bool {
	if n == nil {
		return true
	}
	back, err := home()
	return err == nil && n.inode == back.inode
}

// Do calls fn on a thread that is in the namespace, and returns its error, or a Panic.
// Goroutines that fn starts aren't in the namespace. A nil NS is the namespace that the process
// was started in: no right to enter one is needed for it.
func (n *NS) Do(fn func() error) error {
	if n == nil {
		return fn()
	}
	back, err := home()
	if err != nil {
		return err
	}
	if n.inode == back.inode {
		return fn() // all threads that aren't in use by aside are there
	}
	return aside(back, func() error {
		if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", n.path, err)
		}
		return fn()
	})
}

// In is Do with a function that returns a value, too.
func In[T any](n *NS, fn func() (T, error)) (value T, err error) {
	err = n.Do(func() error {
		value, err = fn()
		return err
	})
	return value, err
}

// New makes a namespace, which ends when nobody has it open any more.
func New() (n *NS, err error) {
	back, err := home()
	if err != nil {
		return nil, err
	}
	err = aside(back, func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make network namespace: %w", err)
		}
		n, err = Open("/proc/thread-self/ns/net")
		return err
	})
	return n, err
}

// aside calls fn, which changes the namespace of its thread, on a thread that nobody else uses until
// it is back.
func aside(back *NS, fn func() error) error {
	done := make(chan error, 1)
	// A goroutine of its own, so that the caller's thread is never at risk.
	go func() {
		err := errors.New("function in network namespace ended its goroutine")
		defer func() {
			// Nobody else could recover here, and the process would end.
			if p := recover(); p != nil {
				err = &Panic{p, debug.Stack()}
			}
			done <- err
		}()
		runtime.LockOSThread()
		defer func() {
			// A thread that can't go back ends together with its goroutine, because
			// it stays locked: nobody else ever runs in the wrong namespace.
			if unix.Setns(back.fd, unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = fn()
	}()
	return <-done
}

// retry repeats a system call that a signal interrupted.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
