// Command release makes the files of a version: images, manifests, the tools of admins, programs and units for machines
// outside of clusters, SBOMs, and checksums. The same commit gives the same bytes.
//
// It owns what a release consists of. It must not know what a program does.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/coil-net/coil/hack/pack"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("release", flag.ExitOnError)
	version := fs.String("version", "", "the version, such as v3.0.0; by default the tag of the commit")
	image := fs.String("image", "localhost/coil", "name of the image without tag")
	output := fs.String("output", "build/release", "the folder to write; what is in it is replaced")
	archs := fs.String("archs", "amd64,arm64", "GOARCH of the images, separated by commas")
	if err := fs.Parse(args); err != nil {
		return err
	}
	src, err := findSource(ctx, ".", *version)
	if err != nil {
		return err
	}
	if err := os.MkdirAll("build", 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("build", ".release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	r := release{source: src, image: *image, bin: filepath.Join(tmp, "bin"), out: filepath.Join(tmp, "out")}
	if err := r.make(ctx, strings.Split(*archs, ",")); err != nil {
		return err
	}
	// Only a complete release takes the place of an earlier one.
	if err := os.RemoveAll(*output); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(*output), 0o755); err != nil {
		return err
	}
	if err := os.Rename(r.out, *output); err != nil {
		return err
	}
	fmt.Printf("%s: release %s of commit %s\n", filepath.Clean(*output), src.version, src.commit)
	return nil
}

// release is a release that is being made.
type release struct {
	source
	image string // its name without tag
	bin   string // folder of programs
	out   string // folder of the release's files
}

// make makes all files, the checksums last.
func (r release) make(ctx context.Context, archs []string) error {
	for _, dir := range []string{r.bin, r.out} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	b := pack.Build{Root: ".", Version: r.version}
	for _, arch := range archs {
		if err := r.programs(ctx, b, arch); err != nil {
			return err
		}
	}
	if err := errors.Join(r.manifests(ctx), r.units()); err != nil {
		return err
	}
	return writeSums(r.out)
}

// programs makes the files of an architecture: the image, single programs, and the SBOM of both.
func (r release) programs(ctx context.Context, b pack.Build, arch string) error {
	dir := filepath.Join(r.bin, arch)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	files, err := b.Image(ctx, arch, dir)
	if err != nil {
		return err
	}
	img := pack.Image{Name: r.image + ":" + r.version, Arch: arch, Created: r.time, Revision: r.commit, Version: r.version, Files: files}
	if _, err := img.WriteFile(filepath.Join(r.out, "coil-image-"+arch+".tar")); err != nil {
		return err
	}
	var listed []program
	for _, f := range files {
		listed = append(listed, program{name: strings.TrimPrefix(f.Path, "/"), file: f.Source})
	}
	for _, single := range singles(arch) {
		file := filepath.Join(r.out, single.file())
		if err := b.Tool(ctx, single.program, single.system, file); err != nil {
			return err
		}
		listed = append(listed, program{name: single.file(), file: file})
	}
	return r.writeSBOM(filepath.Join(r.out, "coil-sbom-"+arch+".cdx.json"), listed)
}

// single is a program for a system, such as linux/amd64, that a release has as a file.
type single struct{ program, system string }

// file is the name of the file.
func (s single) file() string { return s.program + "-" + strings.ReplaceAll(s.system, "/", "-") }

// singles are those for an architecture.
func singles(arch string) (all []single) {
	for _, system := range pack.ToolSystems {
		if strings.HasSuffix(system, "/"+arch) {
			for _, tool := range pack.Tools {
				all = append(all, single{tool, system})
			}
		}
	}
	for _, name := range pack.Machines {
		all = append(all, single{name, "linux/" + arch})
	}
	return all
}

// units copies the units of systemd for machines outside of clusters.
func (r release) units() error {
	for _, name := range pack.Machines {
		unit, err := os.ReadFile(filepath.Join("manifests", "systemd", name+".service"))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(r.out, name+".service"), unit, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// sums is the name of the file with the checksums.
const sums = "SHA256SUMS"

// writeSums writes the checksums of all files of a folder into one more, as sha256sum(1) does.
func writeSums(dir string) error {
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return err
	}
	var lines []byte
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		lines = fmt.Appendf(lines, "%x  %s\n", sha256.Sum256(b), e.Name())
	}
	return os.WriteFile(filepath.Join(dir, sums), lines, 0o644)
}
