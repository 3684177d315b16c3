package vm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/coil-net/coil/integration/lab/vm/protocol"
)

// bootModules are the kernel modules for the console and for the host's files. A kernel that has one built in has
// no file of it.
var bootModules = []string{"virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"}

// diskModules are further ones for a machine with a disk. ext4 asks for crc32c by the name of the algorithm, not as what it depends on.
var diskModules = []string{"virtio_blk", "crc32c_generic", "ext4"}

// writeInitramfs writes an archive with vminit and modules.
func writeInitramfs(ctx context.Context, out, vminit string, k kernel, modules []string) error {
	program, err := os.ReadFile(vminit)
	if err != nil {
		return err
	}
	base := filepath.Join(k.modules, k.release)
	dep, err := os.ReadFile(filepath.Join(base, "modules.dep"))
	if err != nil {
		return err
	}
	order, err := loadOrder(dep, modules)
	if err != nil {
		return fmt.Errorf("read %s/modules.dep: %w", base, err)
	}
	var archive bytes.Buffer
	w := cpioWriter{w: &archive}
	w.dir("dev")
	w.file("init", 0o755, program)
	w.dir(strings.TrimPrefix(protocol.ModuleDir, "/"))
	for i, m := range order {
		content, err := readModule(ctx, filepath.Join(base, m))
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%s/%02d-%s", strings.TrimPrefix(protocol.ModuleDir, "/"), i, moduleName(m))
		w.file(name, 0o644, content)
	}
	if err := w.close(); err != nil {
		return err
	}
	return os.WriteFile(out, archive.Bytes(), 0o600)
}

// loadOrder returns the files of the modules and of all that they depend on, each after what it
// needs. A line of modules.dep(5) lists a module's dependencies, the last to be loaded first.
func loadOrder(dep []byte, modules []string) ([]string, error) {
	needs := map[string][]string{} // by name
	files := map[string]string{}
	s := bufio.NewScanner(bytes.NewReader(dep))
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		file, rest, ok := strings.Cut(s.Text(), ":")
		if !ok {
			return nil, fmt.Errorf("line %q has no colon", s.Text())
		}
		files[moduleName(file)] = file
		needs[moduleName(file)] = strings.Fields(rest)
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	var order []string
	for _, m := range modules {
		for _, file := range slices.Backward(needs[m]) {
			if !slices.Contains(order, file) {
				order = append(order, file)
			}
		}
		if file, ok := files[m]; ok && !slices.Contains(order, file) {
			order = append(order, file)
		}
	}
	if len(order) == 0 {
		return nil, errors.New("none of the needed modules is there")
	}
	return order, nil
}

// moduleName turns "kernel/fs/9p/9p.ko.xz" into "9p".
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return name
}

// readModule returns a module's content; vminit shall not need to decompress.
func readModule(ctx context.Context, file string) ([]byte, error) {
	switch path.Ext(file) {
	case ".ko":
		return os.ReadFile(file)
	case ".xz":
		b, err := exec.CommandContext(ctx, "xz", "--decompress", "--stdout", file).Output()
		if err != nil {
			return nil, fmt.Errorf("decompress %s: %w", file, err)
		}
		return b, nil
	}
	return nil, fmt.Errorf("module %s: unknown compression", file)
}

// cpioWriter writes the "newc" format that the kernel unpacks
// (Documentation/driver-api/early-userspace/buffer-format.rst). It keeps its first error.
type cpioWriter struct {
	w     io.Writer
	inode int
	err   error
}

func (c *cpioWriter) dir(name string) { c.entry(name, 0o40755, nil) }
func (c *cpioWriter) file(name string, mode uint32, content []byte) {
	c.entry(name, 0o100000|mode, content)
}

func (c *cpioWriter) close() error {
	c.entry("TRAILER!!!", 0, nil)
	return c.err
}

func (c *cpioWriter) entry(name string, mode uint32, content []byte) {
	c.inode++
	// magic, inode, mode, uid, gid, links, mtime, size, four device numbers, name size, checksum
	header := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
		c.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	c.padded([]byte(header + name + "\x00"))
	c.padded(content)
}

// padded writes b up to a multiple of four bytes; headers and contents begin at such.
func (c *cpioWriter) padded(b []byte) {
	if c.err != nil {
		return
	}
	b = append(slices.Clone(b), make([]byte, -len(b)&3)...)
	_, c.err = c.w.Write(b)
}
