// Command image writes the container image of the programs in cmd/ into a file.
//
// It owns the flags: the image's name, its architecture, the file. It must not know what is in the image.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/coil-net/coil/hack/pack"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("image", flag.ExitOnError)
	name := fs.String("name", "localhost/coil:dev", "full name and tag of the image")
	output := fs.String("output", "build/coil-image.tar", "the archive to write")
	arch := fs.String("arch", runtime.GOARCH, "GOARCH of the programs")
	kept := fs.String("programs", "", "folder for the programs; one that is up to date there isn't linked again; by default a temporary one")
	if err := fs.Parse(args); err != nil {
		return err
	}
	created, err := sourceDate(os.Getenv("SOURCE_DATE_EPOCH"))
	if err != nil {
		return err
	}
	bin := *kept
	if bin == "" {
		if bin, err = os.MkdirTemp("", "coil-image-"); err != nil {
			return err
		}
		defer os.RemoveAll(bin)
	} else if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	b := pack.Build{Root: "."}
	programs, err := b.Image(ctx, *arch, bin)
	if err != nil {
		return err
	}
	img := pack.Image{Name: *name, Arch: *arch, Created: created, Revision: pack.Revision(ctx, "."), Files: programs}
	info, err := img.WriteFile(*output)
	if err != nil {
		return err
	}
	for _, f := range programs {
		if f.Link != "" {
			fmt.Printf("  %-24s is %s\n", f.Path, f.Link)
		} else {
			fmt.Printf("  %-24s %6.1f MiB\n", f.Path, float64(f.Size)/(1<<20))
		}
	}
	fmt.Printf("%s: %s %s, %.1f MiB\n", filepath.Clean(*output), *name, info.Digest, float64(info.Size)/(1<<20))
	return nil
}

// sourceDate is the time of everything in the image: by default the epoch, so that the same
// source gives the same bytes (reproducible-builds.org/specs/source-date-epoch).
func sourceDate(env string) (time.Time, error) {
	if env == "" {
		return time.Unix(0, 0).UTC(), nil
	}
	sec, err := strconv.ParseInt(env, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	return time.Unix(sec, 0).UTC(), nil
}
