// Package module loads kernel modules, as modprobe(8) does, from the files of the running
// kernel below /lib/modules.
//
// It owns the order in which they are loaded and the compression of their files. It must
// not know the purpose of a module.
package module

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/sys/unix"
)

// ErrNotFound: the kernel's folder has no such module.
var ErrNotFound = errors.New("no such kernel module")

// Load loads modules and those that they need into the running kernel; modules that are built in or
// loaded already are left as they are. dir is /lib/modules, or where that is mounted. It goes
// on after a failure and returns the errors of all modules, joined.
func Load(dir string, names ...string) error {
	l, err := newLoader(dir)
	if err != nil {
		return err
	}
	return l.load(names)
}

// newLoader returns the loader of the running kernel.
func newLoader(dir string) (loader, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return loader{}, fmt.Errorf("uname: %w", err)
	}
	return loader{dir: filepath.Join(dir, unix.ByteSliceToString(uts.Release[:])), proc: "/proc/modules", insert: insert}, nil
}

// insert puts a module into the kernel (init_module(2)). The call that takes a file doesn't
// take a compressed one from every kernel.
func insert(image []byte) error { return unix.InitModule(image, "") }

type loader struct {
	dir    string // of the running kernel
	proc   string // the list of loaded modules
	insert func(image []byte) error
}

func (l loader) load(names []string) error {
	present, err := l.present()
	if err != nil {
		return err
	}
	missing := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return present[canonical(n)] })
	if len(missing) == 0 {
		return nil
	}
	files, err := l.dependencies()
	if err != nil {
		return fmt.Errorf("load kernel modules %s: %w", strings.Join(missing, ", "), err)
	}
	var errs []error
	for _, name := range missing {
		errs = append(errs, l.loadOne(name, files, present))
	}
	return errors.Join(errs...)
}

// loadOne loads a module after those that it needs.
func (l loader) loadOne(name string, files map[string][]string, present map[string]bool) error {
	paths, ok := files[canonical(name)]
	if !ok {
		return fmt.Errorf("%w as %s in %s", ErrNotFound, name, l.dir)
	}
	// The modules that one needs are listed after it, and need only such as are listed still later.
	for _, path := range slices.Backward(paths) {
		if present[nameOf(path)] {
			continue
		}
		image, err := read(filepath.Join(l.dir, path))
		if err != nil {
			return fmt.Errorf("kernel module %s: %w", name, err)
		}
		if err := l.insert(image); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("kernel module %s: load %s: %w", name, path, err)
		}
		present[nameOf(path)] = true
	}
	return nil
}

// present returns the names of the modules that are loaded or built in.
func (l loader) present() (map[string]bool, error) {
	out := map[string]bool{}
	for _, list := range []string{l.proc, filepath.Join(l.dir, "modules.builtin")} {
		modules, err := lines(list)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // a kernel without modules has no such list
			return nil, fmt.Errorf("list kernel modules that are loaded or built in: %w", err)
		}
		for _, line := range modules {
			out[nameOf(strings.Fields(line)[0])] = true
		}
	}
	return out, nil
}

// dependencies returns, for each module, its file and those that it needs (modules.dep(5)).
func (l loader) dependencies() (map[string][]string, error) {
	modules, err := lines(filepath.Join(l.dir, "modules.dep"))
	files := make(map[string][]string, len(modules))
	for _, line := range modules {
		path, needs, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("modules.dep: %q: no colon", line)
		}
		files[nameOf(path)] = append([]string{path}, strings.Fields(needs)...)
	}
	return files, err
}

// lines returns the lines of a file that aren't empty.
func lines(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	empty := func(line string) bool { return strings.TrimSpace(line) == "" }
	return slices.DeleteFunc(strings.Split(string(data), "\n"), empty), err
}

// nameOf is the name of the module of a file, such as ip_tunnel of kernel/net/ipv4/ip_tunnel.ko.xz.
func nameOf(path string) string {
	name, _, _ := strings.Cut(filepath.Base(path), ".")
	return canonical(name)
}

// canonical is the name as the kernel has it: files may have dashes instead.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }

// read returns the module in a file, which may be compressed.
func read(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r io.Reader
	switch filepath.Ext(path) {
	case ".ko":
		return data, nil
	case ".xz":
		r, err = xz.NewReader(bytes.NewReader(data))
	case ".zst":
		var d *zstd.Decoder
		if d, err = zstd.NewReader(bytes.NewReader(data)); err == nil {
			defer d.Close()
		}
		r = d
	case ".gz":
		r, err = gzip.NewReader(bytes.NewReader(data))
	default:
		return nil, fmt.Errorf("%s: compressed in an unknown way", path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	image, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return image, nil
}
