// Package preflight tells what this machine lacks to run the lab, and the command that installs
// it. It changes nothing.
package preflight

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/coil-net/coil/integration/lab/image"
)

// Use is what somebody wants to do with the lab.
type Use int

// Uses. Starting only an API server needs nothing but Go.
const (
	Cluster Use = iota
	VM
	// Routing is a network with the routing daemons that people use.
	Routing
	// Gateway is a machine outside of a cluster whose keepalived has addresses of Services.
	Gateway
)

// need is a program and the Debian package that has it.
type need struct {
	program string
	pkg     string
	uses    []Use
}

var needs = []need{
	{"runc", "runc", []Use{Cluster}},
	{"ip", "iproute2", []Use{Cluster, Routing, Gateway}},
	{"nsenter", "util-linux", []Use{Cluster, Routing, Gateway}},
	{"mount", "mount", []Use{Cluster, Routing}},
	{"nft", "nftables", []Use{Cluster}},
	{"conntrack", "conntrack", []Use{Cluster}},
	{"modprobe", "kmod", []Use{Cluster, VM}},
	{"busybox", "busybox-static", []Use{Cluster, VM}},
	{"qemu-system-x86_64", "qemu-system-x86", []Use{VM}},
	{"xz", "xz-utils", []Use{VM}},
	{"dpkg-deb", "dpkg", []Use{VM}},
	{"bird", "bird2", []Use{Routing}},
	{"vtysh", "frr", []Use{Routing}},
	{"keepalived", "keepalived", []Use{Gateway}},
}

// Packages lists the Debian packages of all uses, sorted.
func Packages() []string {
	var all []string
	for _, n := range needs {
		all = append(all, n.pkg)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// MissingError says which programs are missing.
type MissingError struct {
	Programs []string
	Packages []string
}

// Error implements error: one line with the command that installs everything.
func (e *MissingError) Error() string {
	return fmt.Sprintf("missing %s: apt-get install --no-install-recommends %s",
		strings.Join(e.Programs, ", "), strings.Join(e.Packages, " "))
}

// ErrNotRoot says that the lab has to be started by root.
var ErrNotRoot = errors.New("namespaces and mounts need root: run it with sudo, or in a root shell")

// Check returns nil when the machine has everything for all of the uses, else all that it lacks:
// a MissingError, ErrNotRoot, or both joined.
func Check(uses ...Use) error {
	var errs []error
	if os.Geteuid() != 0 {
		errs = append(errs, ErrNotRoot)
	}
	missing := &MissingError{}
	for _, n := range needs {
		wanted := slices.ContainsFunc(n.uses, func(u Use) bool { return slices.Contains(uses, u) })
		if wanted && !installed(n.program) {
			missing.Programs = append(missing.Programs, n.program)
			missing.Packages = append(missing.Packages, n.pkg)
		}
	}
	if len(missing.Programs) > 0 {
		errs = append(errs, missing)
	}
	return errors.Join(errs...)
}

func installed(program string) bool {
	if program == "busybox" {
		_, err := image.Busybox()
		return err == nil
	}
	_, err := exec.LookPath(program)
	return err == nil
}
