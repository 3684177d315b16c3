package main

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

// joined has, by the name of a combined program, the programs that it consists of, sorted. The image has the combined
// program once, under the name of each: these programs link mostly the same packages.
var joined = map[string][]string{
	"coil-controllers": {"coil-egress-controller", "coil-ipam-controller"},
	"coil-routers":     {"coil-egress", "coil-router"},
}

// build compiles every program of root's cmd/ for Linux into dir, and returns them as files
// of the image's root directory, sorted by name. flags are more of the go command's.
func build(ctx context.Context, root, arch, dir string, flags ...string) ([]file, error) {
	names, err := programs(root)
	if err != nil {
		return nil, err
	}
	args := append([]string{"build", "-tags=grpcnotrace", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}, flags...)
	if revision(ctx, root) == "" {
		// Outside a usable repository the go command would end instead of leaving it out.
		args = append(args, "-buildvcs=false")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "./cmd/...")...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOFLAGS=-mod=readonly")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("go build ./cmd/...: %w", err)
	}
	var files []file
	for _, name := range names {
		if _, ok := joined[name]; ok {
			continue
		}
		f := file{path: "/" + name, source: filepath.Join(dir, name)}
		for whole, parts := range joined {
			if i := slices.Index(parts, name); i >= 0 && slices.Contains(names, whole) {
				f.source = filepath.Join(dir, whole)
				if i > 0 {
					f.link = "/" + parts[0]
				}
			}
		}
		info, err := os.Stat(f.source)
		if err != nil {
			return nil, fmt.Errorf("cmd/%s: no program came of it: %w", name, err)
		}
		if f.size = info.Size(); f.size == 0 {
			return nil, fmt.Errorf("cmd/%s: the program is empty", name)
		}
		if err := static(f.source); err != nil {
			return nil, fmt.Errorf("cmd/%s: %w", name, err)
		}
		files = append(files, f)
	}
	return files, nil
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

// revision returns the commit that is checked out, or nothing where git can't tell.
func revision(ctx context.Context, root string) string {
	cmd := exec.CommandContext(ctx, "git", "rev-parse", "HEAD")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
