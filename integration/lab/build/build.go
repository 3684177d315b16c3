// Package build compiles the programs that the lab runs from their released Go modules, once,
// into the user's cache folder. It owns the nested modules under modules/ and the programs; it
// knows nothing of how these are run.
package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/coil-net/coil/integration/lab/cache"
)

// ErrNoGo says that there is no Go toolchain in PATH; nothing can be built until one is installed.
var ErrNoGo = errors.New("no go command in PATH: install Go 1.26 or later from https://go.dev/dl")

// Built in the environment says that the programs of this repository were built just now: in a
// virtual machine, to link them takes minutes.
const Built = "COIL_LAB_BUILT"

// Builder builds programs on demand. The zero value builds the newest pinned Kubernetes
// silently; a Builder may be used by several goroutines and several processes at once.
type Builder struct {
	// KubernetesVersion selects one of the pinned releases by its version or a prefix of it,
	// as "v1.36.3" or "1.36". Empty means the newest.
	KubernetesVersion string
	// Log receives the progress of builds that take long; nil discards it.
	Log io.Writer

	mu sync.Mutex // serialises builds of this process, which then contend for the file lock
}

// Binaries locates built programs by name.
type Binaries map[string]string

// Dir returns the directory of the program, for a PATH.
func (b Binaries) Dir(name string) string { return filepath.Dir(b[name]) }

// Programs returns the paths of the named programs, having built those that the cache lacks.
func (b *Builder) Programs(ctx context.Context, names ...string) (Binaries, error) {
	mods, err := b.modules()
	if err != nil {
		return nil, err
	}
	goVersion, err := toolchain(ctx)
	if err != nil {
		return nil, err
	}
	found := Binaries{}
	for _, m := range mods {
		var wanted []string
		for _, n := range names {
			if _, ok := m.packages[n]; ok {
				wanted = append(wanted, n)
			}
		}
		if len(wanted) == 0 {
			continue
		}
		dir, err := b.ensure(ctx, m, goVersion, wanted)
		if err != nil {
			return nil, err
		}
		for _, n := range wanted {
			found[n] = filepath.Join(dir, n)
		}
	}
	for _, n := range names {
		if _, ok := found[n]; !ok {
			return nil, fmt.Errorf("build %s: no pinned module has this program", n)
		}
	}
	return found, nil
}

// owned has the programs that this process has built from the source of this repository, by directory and name. That
// source isn't edited while tests run, and to ask the go command whether it was takes half a second of a processor each time.
var owned sync.Map

// Own returns the path of a program of this repository, built from the source as it is when this
// process first asks for it. pkg is relative to the module's root, as
// "integration/lab/machine/labinit". Programs built with different tags are different files.
func (b *Builder) Own(ctx context.Context, pkg string, tags ...string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	if _, err := toolchain(ctx); err != nil {
		return "", err
	}
	dir, err := cache.Dir()
	if err != nil {
		return "", err
	}
	// The checkout's path keeps the programs of two checkouts apart.
	sum := sha256.Sum256([]byte(root))
	dir = filepath.Join(dir, strings.Join(append([]string{"own-" + hex.EncodeToString(sum[:6])}, tags...), "+"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	unlock, err := cache.Lock(ctx, dir+".lock", b.log())
	if err != nil {
		return "", err
	}
	defer unlock()
	out := filepath.Join(dir, filepath.Base(pkg))
	if _, known := owned.Load(out); known || os.Getenv(Built) != "" {
		if _, err := os.Stat(out); err == nil {
			return out, nil
		}
	}
	tmp := out + ".new"
	// The go command links a program again unless its target is up to date, which takes seconds.
	if old, err := os.ReadFile(out); err == nil {
		if err := os.WriteFile(tmp, old, 0o755); err != nil {
			return "", err
		}
	}
	cmd := goCommand(ctx, root, "build", "-trimpath", "-buildvcs=false", "-tags="+strings.Join(append([]string{"grpcnotrace"}, tags...), ","), "-ldflags=-s -w", "-o", tmp, "./"+pkg)
	if msg, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", pkg, err, msg)
	}
	// A rename leaves processes that still run the old program alone, but an unchanged program
	// keeps its inode, so that copies and page cache stay shared.
	if same(tmp, out) {
		err = os.Remove(tmp)
	} else {
		err = os.Rename(tmp, out)
	}
	if err == nil {
		owned.Store(out, nil)
	}
	return out, err
}

// ensure returns the cache directory of m with all wanted programs in it.
func (b *Builder) ensure(ctx context.Context, m module, goVersion string, wanted []string) (string, error) {
	dir, err := cache.Dir()
	if err != nil {
		return "", err
	}
	key, err := m.key(goVersion)
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, m.name+"-"+key)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if len(missing(dir, wanted)) == 0 {
		return dir, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	unlock, err := cache.Lock(ctx, dir+".lock", b.log())
	if err != nil {
		return "", err
	}
	defer unlock()
	for _, name := range missing(dir, wanted) {
		if err := b.compile(ctx, m, dir, name); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// compile builds one program and moves it into dir when it is complete.
func (b *Builder) compile(ctx context.Context, m module, dir, name string) error {
	tmp, err := os.MkdirTemp(dir, ".build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	out := filepath.Join(tmp, name)
	args := append([]string{"build", "-v", "-trimpath"}, m.flags()...)
	cmd := goCommand(ctx, m.dir, append(args, "-o", out, m.packages[name])...)
	p := newProgress(b.log(), name+" "+m.version)
	cmd.Stderr = p
	err = cmd.Run()
	p.finish(err == nil)
	if ctx.Err() != nil {
		return fmt.Errorf("build %s: %w", name, ctx.Err())
	}
	if err != nil {
		return fmt.Errorf("build %s in %s: %w\n%s", name, m.dir, err, p.messages())
	}
	return os.Rename(out, filepath.Join(dir, name))
}

func (b *Builder) log() io.Writer {
	if b.Log == nil {
		return io.Discard
	}
	return b.Log
}

func missing(dir string, names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool {
		_, err := os.Stat(filepath.Join(dir, n))
		return err == nil
	})
}

// same reports whether both files exist with the same content.
func same(a, b string) bool {
	x, err := os.ReadFile(a)
	if err != nil {
		return false
	}
	y, err := os.ReadFile(b)
	return err == nil && bytes.Equal(x, y)
}

// goCommand prepares the go command so that the user's settings can't change what is built.
func goCommand(ctx context.Context, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "PWD="+dir)
	return cmd
}

// toolchains has the versions that toolchain has found, by the path of the go command.
var toolchains sync.Map

// toolchain returns the version of the go command, which is part of a cache key.
func toolchain(ctx context.Context) (string, error) {
	path, err := exec.LookPath("go")
	if err != nil {
		return "", ErrNoGo
	}
	if v, ok := toolchains.Load(path); ok {
		return v.(string), nil
	}
	out, err := exec.CommandContext(ctx, "go", "env", "GOVERSION").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOVERSION: %w", err)
	}
	version := strings.TrimSpace(string(out))
	toolchains.Store(path, version)
	return version, nil
}
