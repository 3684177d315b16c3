// Package pack builds the programs in cmd/, and packs those for clusters into a container image. The image is an OCI archive
// that has nothing else. No container engine is needed.
//
// It owns the flags of the go command for users' programs, and the layout of the image. It must not know what a program does.
package pack

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Tools are the programs in cmd/ that admins run on their own machines: the image doesn't have them, and releases have
// each as a file for each of ToolSystems.
var Tools = []string{"coil-migrator", "coilctl"}

// Machines are the programs in cmd/ that also run on machines outside of clusters, under systemd: releases have each as a file for each architecture, too.
var Machines = []string{"coil-lb-agent", "coil-lb-controller"}

// ToolSystems are the values of GOOS/GOARCH for which releases have the tools.
var ToolSystems = []string{"linux/amd64", "linux/arm64", "darwin/arm64"}

// joined has, by the name of a combined program, the programs that it consists of, sorted. The image has the combined
// program once, under the name of each: these programs link mostly the same packages.
var joined = map[string][]string{
	"coil-controllers": {"coil-egress-controller", "coil-ipam-controller", "coil-lb-controller"},
	"coil-routers":     {"coil-egress", "coil-lb-agent", "coil-router"},
}

// stamped are the variables that hold the version of a program. That of the CNI plugin is its own, because the plugin
// links as little as it can.
var stamped = []string{
	"github.com/coil-net/coil/pkg/app/program.version",
	"github.com/coil-net/coil/pkg/app/coil.version",
}

// Build is how programs are built.
type Build struct {
	// Root is the folder of the module.
	Root string
	// Version is the version that programs print. If it is empty, they print the one that the go command finds in git.
	Version string
}

// Image compiles for Linux, into dir, every program of cmd/ but the Tools, and returns them as files of the
// image's root directory, sorted by name.
func (b Build) Image(ctx context.Context, arch, dir string) ([]File, error) {
	names, err := programs(b.Root)
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(Tools, name) })
	if err := b.compile(ctx, "linux/"+arch, dir+string(filepath.Separator), names...); err != nil {
		return nil, err
	}
	var files []File
	for _, name := range names {
		if _, ok := joined[name]; ok {
			continue
		}
		f := File{Path: "/" + name, Source: filepath.Join(dir, name)}
		for whole, parts := range joined {
			if i := slices.Index(parts, name); i >= 0 && slices.Contains(names, whole) {
				f.Source = filepath.Join(dir, whole)
				if i > 0 {
					f.Link = "/" + parts[0]
				}
			}
		}
		info, err := os.Stat(f.Source)
		if err != nil {
			return nil, fmt.Errorf("cmd/%s: no program came of it: %w", name, err)
		}
		if f.Size = info.Size(); f.Size == 0 {
			return nil, fmt.Errorf("cmd/%s: the program is empty", name)
		}
		if err := static(f.Source); err != nil {
			return nil, fmt.Errorf("cmd/%s: %w", name, err)
		}
		files = append(files, f)
	}
	return files, nil
}

// Tool compiles one program of cmd/ for a system, such as darwin/arm64, into the file out.
func (b Build) Tool(ctx context.Context, name, system, out string) error {
	return b.compile(ctx, system, out, name)
}

// compile runs the go command. out is a file for one program, or a folder that ends in a slash.
func (b Build) compile(ctx context.Context, system, out string, names ...string) error {
	goos, goarch, _ := strings.Cut(system, "/")
	ldflags := "-s -w"
	if b.Version != "" {
		for _, variable := range stamped {
			ldflags += " -X=" + variable + "=" + b.Version
		}
	}
	args := []string{"build", "-trimpath", "-tags=grpcnotrace", "-ldflags=" + ldflags, "-o", out}
	if b.Version != "" || Revision(ctx, b.Root) == "" {
		// What git says depends on the tags that this clone has, and outside of a usable repository the go command
		// would end instead of leaving it out.
		args = append(args, "-buildvcs=false")
	}
	for _, name := range names {
		args = append(args, "./cmd/"+name)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.Root
	// The programs run on every processor of the architecture, whatever this machine's settings are.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+goos, "GOARCH="+goarch, "GOAMD64=v1", "GOARM64=v8.0",
		"GOFLAGS=-mod=readonly", "GOWORK=off")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go build of %s for %s: %w", strings.Join(names, ", "), system, err)
	}
	return nil
}

// programs returns the names of the directories in cmd/ with Go code, sorted.
func programs(root string) ([]string, error) {
	mains, err := filepath.Glob(filepath.Join(root, "cmd", "*", "*.go"))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, m := range mains {
		name := filepath.Base(filepath.Dir(m))
		if len(names) == 0 || names[len(names)-1] != name {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no programs in %s", filepath.Join(root, "cmd"))
	}
	return names, nil
}

// errDynamic says that a program needs what the image doesn't have.
var errDynamic = errors.New("is dynamically linked, but the image has no libraries")

func static(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errDynamic
		}
	}
	return nil
}

// Revision returns the commit that is checked out, or nothing where git can't tell.
func Revision(ctx context.Context, root string) string {
	cmd := exec.CommandContext(ctx, "git", "rev-parse", "HEAD")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
