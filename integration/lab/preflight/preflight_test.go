package preflight

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCheckNamesEverythingAtOnce(t *testing.T) {
	dir := t.TempDir()
	for _, have := range []string{"ip", "nsenter", "mount", "conntrack", "modprobe", "xz", "dpkg-deb"} {
		if err := os.WriteFile(filepath.Join(dir, have), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	for _, tc := range []struct {
		name string
		uses []Use
		want []string
	}{
		{"cluster", []Use{Cluster}, []string{"runc", "nftables", "busybox-static"}},
		{"vm", []Use{VM}, []string{"busybox-static", "qemu-system-x86"}},
		{"routing", []Use{Routing}, []string{"bird2", "frr"}},
		{"gateway", []Use{Gateway}, []string{"keepalived"}},
		{"both", []Use{Cluster, VM}, []string{"runc", "nftables", "busybox-static", "qemu-system-x86"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			missing := (*MissingError)(nil)
			err := Check(tc.uses...)
			if !errors.As(err, &missing) {
				t.Fatalf("error is %v, want a MissingError", err)
			}
			if d := cmp.Diff(tc.want, missing.Packages); d != "" {
				t.Errorf("packages (-want +got):\n%s", d)
			}
			if line := missing.Error(); !strings.HasSuffix(line, strings.Join(tc.want, " ")) || strings.Contains(line, "\n") {
				t.Errorf("the error is not one line that ends in the packages: %q", line)
			}
		})
	}
}

func TestPackagesAreUnique(t *testing.T) {
	p := Packages()
	if !slices.IsSorted(p) || len(slices.Compact(slices.Clone(p))) != len(p) || !slices.Contains(p, "busybox-static") {
		t.Errorf("packages are %v", p)
	}
}
