// Package sysctl reads and sets the kernel's parameters below /proc/sys/net of a
// network namespace, and remembers the values that it replaced.
//
// It must not know which parameters are wanted.
package sysctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// ErrNotExist: there is no such parameter, since the link is gone or the kernel
// lacks the feature.
var ErrNotExist = errors.New("no such kernel parameter")

// Get returns the value of a parameter such as "net/ipv4/ip_forward" in a
// network namespace. Parts are separated by slashes, since names of links may
// contain dots.
func Get(ns *netns.NS, key string) (string, error) {
	return netns.In(ns, func() (string, error) { return read(key) })
}

// Set sets parameters in a network namespace that have another value, in order,
// and says whether it wrote any.
func Set(ns *netns.NS, settings ...Setting) (bool, error) {
	return netns.In(ns, func() (changed bool, err error) {
		for _, s := range settings {
			old, err := read(s.Key)
			if err != nil {
				return changed, err
			}
			if old == s.Value {
				continue
			}
			if err := write(s); err != nil {
				return changed, err
			}
			changed = true
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
		_, err := os.Stat(path(key))
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return err == nil, err
	})
}

// path is where the thread's own namespace shows the parameter.
func path(key string) string { return "/proc/sys/" + key }

func read(key string) (string, error) {
	b, err := os.ReadFile(path(key))
	if err != nil {
		return "", classify("read", key, err)
	}
	return strings.TrimSpace(string(b)), nil
}

func write(s Setting) error {
	// Not os.WriteFile: nothing must be created or truncated below /proc/sys.
	f, err := os.OpenFile(path(s.Key), os.O_WRONLY, 0)
	if err != nil {
		return classify("set", s.String(), err)
	}
	_, err = f.WriteString(s.Value)
	if err := errors.Join(err, f.Close()); err != nil {
		return classify("set", s.String(), err)
	}
	return nil
}

func classify(verb, what string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotExist
	}
	return fmt.Errorf("%s kernel parameter %s: %w", verb, what, err)
}
