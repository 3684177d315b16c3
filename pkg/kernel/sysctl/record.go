package sysctl

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Record sets parameters that belong to the host rather than to Coil, and keeps
// their old values in a file, so that they can be restored when Coil leaves.
type Record struct {
	path string
	// mu guards the file.
	mu sync.Mutex
}

// NewRecord returns the record that is kept in a file; the file and its folder
// are made when the first value is recorded.
func NewRecord(path string) *Record { return &Record{path: path} }

// Set sets the parameters that have another value, after their old values were
// recorded, and says whether it wrote any; with them the values of what the kernel
// changes along. The oldest value of a parameter stays recorded until Restore. A
// value that can't be recorded isn't changed.
func (r *Record) Set(ns *netns.NS, settings ...Setting) (changed bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old, err := r.load()
	if err != nil {
		return false, err
	}
	known := len(old)
	for _, s := range settings {
		value, err := Get(ns, s.Key)
		if err != nil {
			return false, err
		}
		if _, ok := old[s.Key]; ok || value == s.Value {
			continue
		}
		along, err := changedAlong(ns, s.Key)
		if err != nil {
			return false, err
		}
		along[s.Key] = value
		maps.Copy(along, old) // the oldest values stay
		old = along
	}
	if len(old) > known {
		if err := r.save(old); err != nil {
			return false, err
		}
	}
	return Set(ns, settings...)
}

// Restore sets all recorded parameters to their old values, removes the record, and
// returns the settings that it changed. Parameters that don't exist any more are skipped. After an
// error the record is still there.
func (r *Record) Restore(ns *netns.NS) (restored []Setting, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old, err := r.load()
	if err != nil {
		return nil, err
	}
	// First the parameters that others follow: the others are then set to their own old values.
	keys := slices.SortedFunc(maps.Keys(old), func(a, b string) int {
		return cmp.Or(len(follow[b])-len(follow[a]), cmp.Compare(a, b))
	})
	var errs []error
	for _, key := range keys {
		s := Setting{key, old[key]}
		changed, err := Set(ns, s)
		if err != nil && !errors.Is(err, ErrNotExist) {
			errs = append(errs, err)
		}
		if changed {
			restored = append(restored, s)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return restored, err
	}
	if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return restored, fmt.Errorf("remove record of kernel parameters: %w", err)
	}
	return restored, nil
}

// follow has the parameters that the kernel changes when one is changed: inet_forward_change() of
// net/ipv4/devinet.c, which turns the acceptance of redirects off, or on even if an admin had
// turned it off, and addrconf_forward_change() of net/ipv6/addrconf.c. Both set every link's.
var follow = map[string][]string{
	"net/ipv4/ip_forward":          {"net/ipv4/conf/*/forwarding", "net/ipv4/conf/all/accept_redirects"},
	"net/ipv6/conf/all/forwarding": {"net/ipv6/conf/*/forwarding"},
}

// changedAlong returns the values of the parameters that follow one, by key.
func changedAlong(ns *netns.NS, key string) (map[string]string, error) {
	return netns.In(ns, func() (map[string]string, error) {
		along := map[string]string{}
		for _, pattern := range follow[key] {
			files, err := filepath.Glob(root + pattern)
			if err != nil {
				return nil, err
			}
			for _, f := range files {
				k := strings.TrimPrefix(f, root)
				value, err := read(f, k)
				switch {
				case err == nil && k != key && k != "net/ipv4/conf/all/forwarding": // another name of ip_forward
					along[k] = value
				case err != nil && !errors.Is(err, ErrNotExist):
					return nil, err
				}
			}
		}
		return along, nil
	})
}

// load returns the recorded values by key; none if there is no file. A file that
// can't be understood is set aside: the host's old values are lost then, but
// that must not keep the node from working.
func (r *Record) load() (map[string]string, error) {
	old := map[string]string{}
	b, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return old, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read record of kernel parameters: %w", err)
	}
	if err := json.Unmarshal(b, &old); err != nil {
		if err := os.Rename(r.path, r.path+".corrupt"); err != nil {
			return nil, fmt.Errorf("set corrupt record of kernel parameters aside: %w", err)
		}
		return map[string]string{}, nil
	}
	return old, nil
}

// save replaces the file, so that it is never half written.
func (r *Record) save(old map[string]string) error {
	b, err := json.MarshalIndent(old, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(r.path), 0o755)
	}
	if err == nil {
		err = atomicfile.Write(r.path, append(b, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("record kernel parameters: %w", err)
	}
	return nil
}
