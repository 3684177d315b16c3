// Package sysctl reads and sets the kernel's parameters below /proc/sys/net of a
// network namespace, and remembers the values that it replaced.
//
// It must not know which parameters are wanted.
package sysctl

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// ErrNotExist: there is no such parameter, since the link is gone or the kernel
// lacks the feature.
var ErrNotExist = errors.New("no such kernel parameter")

// Get returns the value of a parameter such as "net/ipv4/ip_forward" in a
// network namespace. Parts are separated by slashes, since names of links may
// contain dots.
func Get(ns *netns.NS, key string) (string, error) {
	return netns.In(ns, func() (string, error) { return read(path(ns, key), key) })
}

// Set sets parameters in a network namespace that have another value, in order,
// and says whether it wrote any.
func Set(ns *netns.NS, settings ...Setting) (bool, error) {
	return netns.In(ns, func() (changed bool, err error) {
		for _, s := range settings {
			wrote, err := s.set(path(ns, s.Key))
			if err != nil {
				return changed, err
			}
			changed = changed || wrote
		}
		return changed, nil
	})
}

// Setting is a parameter and its value.
type Setting struct{ Key, Value string }

// String prints the setting as sysctl(8) does.
func (s Setting) String() string { return s.Key + " = " + s.Value }

// Exists says whether there is a parameter, or a directory of parameters, in a
// network namespace.
func Exists(ns *netns.NS, key string) (bool, error) {
	return netns.In(ns, func() (bool, error) {
		_, err := os.Stat(path(ns, key))
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return err == nil, err
	})
}

// path is where a thread in the namespace finds the parameter.
func path(ns *netns.NS, key string) string {
	if of, ok := strings.CutPrefix(key, ofLinks); ok && ns.Home() {
		return own() + of
	}
	return root + key
}

const (
	root    = "/proc/sys/"
	ofLinks = "net/ipv6/conf/" // parameters of IPv6 of links
)

// own is the folder ofLinks of the namespace that the process was started in. Each namespace has a folder net/ipv6 in the
// same place, and the kernel compares all of them with the thread's at each step of a look-up (fs/proc/proc_sysctl.c,
// proc_sys_compare), which takes most of a millisecond for a new link where a thousand pods have parameters of IPv6. So
// the folder is opened once.
var own = sync.OnceValue(func() string {
	fd, err := unix.Open(root+ofLinks, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return root + ofLinks // its use returns the error
	}
	return fmt.Sprintf("/proc/self/fd/%d/", fd)
})

func read(path, key string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", classify("read", key, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// set sets the parameter in the file at a path if that has another value, and says whether it did.
func (s Setting) set(path string) (wrote bool, err error) {
	// The file is opened once, to read and to write: to find it takes long, see own.
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) {
		// A parameter that can't be written may have the value.
		if old, rerr := read(path, s.Key); rerr == nil && old == s.Value {
			return false, nil
		}
	}
	if err != nil {
		return false, classify("set", s.String(), err)
	}
	defer f.Close()
	old, err := io.ReadAll(f)
	if err != nil {
		return false, classify("read", s.Key, err)
	}
	if strings.TrimSpace(string(old)) == s.Value {
		return false, nil
	}
	// Numbers are taken at the beginning of the file only (kernel.sysctl_writes_strict).
	if _, err := f.WriteAt([]byte(s.Value), 0); err != nil {
		return false, classify("set", s.String(), err)
	}
	return true, nil
}

func classify(verb, what string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotExist
	}
	return fmt.Errorf("%s kernel parameter %s: %w", verb, what, err)
}
