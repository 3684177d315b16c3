package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/coil-net/coil/integration/lab/cache"
)

// kernel is a Debian kernel package, unpacked in the cache.
type kernel struct {
	release string // as `uname -r` has it
	image   string
	modules string // what the kernel looks for in /lib/modules
}

var seriesFormat = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)

// findKernel returns a kernel of the series, such as "6.12", and fetches it when the cache has none.
func findKernel(ctx context.Context, series string, log io.Writer) (kernel, error) {
	if !seriesFormat.MatchString(series) {
		return kernel{}, fmt.Errorf("kernel %q: want a series such as 6.1 or 6.12", series)
	}
	dir, err := cache.Once(ctx, "linux-"+series, log, func(dir string) error { return fetchKernel(ctx, series, dir, log) })
	if err != nil {
		return kernel{}, err
	}
	return openKernel(dir)
}

// download downloads the newest package of the series into a folder.
func download(ctx context.Context, series, dir string, log io.Writer) error {
	names, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", "linux-image-"+series+".").Output()
	if err != nil {
		return fmt.Errorf("list kernel packages: %w", err)
	}
	pkg := newestPackage(series, strings.Fields(string(names)))
	if pkg == "" {
		return fmt.Errorf("no package linux-image-%s.*-amd64 is known (Debian 12 has 6.1, and 6.12 in its security archive)", series)
	}
	fmt.Fprintf(log, "downloading %s\n", pkg)
	return quietly(ctx, dir, "apt-get", "download", pkg)
}

// openKernel describes the package that is unpacked in dir.
func openKernel(dir string) (kernel, error) {
	entries, err := os.ReadDir(filepath.Join(dir, "lib/modules"))
	if err != nil {
		return kernel{}, err
	}
	if len(entries) != 1 {
		return kernel{}, fmt.Errorf("%s has %d kernels: remove it", dir, len(entries))
	}
	release := entries[0].Name()
	k := kernel{
		release: release,
		image:   filepath.Join(dir, "boot/vmlinuz-"+release),
		modules: filepath.Join(dir, "lib/modules"),
	}
	_, err = os.Stat(k.image)
	return k, err
}

// fetchKernel downloads the newest package of the series and unpacks it into dir. Nothing is
// installed. Package lists that are missing or outdated are updated, which needs root.
func fetchKernel(ctx context.Context, series, dir string, log io.Writer) error {
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".linux-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := download(ctx, series, tmp, log); err != nil {
		fmt.Fprintf(log, "updating the package lists: %v\n", err)
		if err := quietly(ctx, tmp, "apt-get", "update"); err != nil {
			return err
		}
		if err := download(ctx, series, tmp, log); err != nil {
			return err
		}
	}
	archives, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(archives) != 1 {
		return errors.Join(fmt.Errorf("apt-get download left %d archives", len(archives)), err)
	}
	if err := quietly(ctx, tmp, "dpkg-deb", "-x", archives[0], dir); err != nil {
		return err
	}
	k, err := openKernel(dir)
	if err != nil {
		return err
	}
	// The package's own installation would do this.
	return quietly(ctx, tmp, "depmod", "-b", dir, k.release)
}

// newestPackage picks the ordinary kernel of the highest version among names.
func newestPackage(series string, names []string) string {
	// Not -cloud-amd64, which has no 9p, nor -rt-amd64, nor -amd64-unsigned and -amd64-dbg.
	format := regexp.MustCompile(`^linux-image-` + regexp.QuoteMeta(series) + `\.[0-9]+([-+][0-9a-z]+)?-amd64$`)
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !format.MatchString(n) })
	if len(names) == 0 {
		return ""
	}
	return slices.MaxFunc(names, compareNatural)
}

// compareNatural orders strings by the numbers in them.
func compareNatural(a, b string) int {
	x, y := numbers(a), numbers(b)
	if c := slices.Compare(x, y); c != 0 {
		return c
	}
	return strings.Compare(a, b)
}

var digits = regexp.MustCompile(`[0-9]+`)

func numbers(s string) []int {
	var all []int
	for _, d := range digits.FindAllString(s, -1) {
		n, _ := strconv.Atoi(d) // only digits
		all = append(all, n)
	}
	return all
}

// quietly runs a command; what it says is in the error only.
func quietly(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out.Bytes()))
	}
	return nil
}
