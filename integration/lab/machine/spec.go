// Package machine runs one pretended machine: a set of namespaces whose PID 1 is the program
// labinit, with an own root file system, own cgroups and supervised programs. Killing that PID 1
// is a power cut. The package knows nothing of Kubernetes nor of how machines are connected.
package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Paths inside a machine.
const (
	// BootIDFile holds the boot ID of the machine, a new one after each power-on. Containers see
	// it wherever they mount the machine's /run; /proc/sys/kernel/random/boot_id shows it only
	// outside of containers, whose /proc is a fresh one.
	BootIDFile = "/run/coil-lab/boot_id"
	// ProgramDir has one directory for each directory of Spec.Programs.
	ProgramDir = "/opt/coil-lab"
)

// SystemDirs are the host's directories that a machine sees and changes only for itself. Symbolic
// links among them, as /lib is on most hosts, are links in the machine too.
var SystemDirs = []string{"bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr"}

// Spec is everything that labinit has to know. It is stored in the machine's directory.
type Spec struct {
	Hostname  string
	BootID    string
	MachineID string
	// Root says whether the machine has a disk of its own; otherwise it works on the host's
	// files, and only /proc and /sys are its own.
	Root bool
	// Programs are directories of the host that appear, read only, under ProgramDir by their
	// base names.
	Programs []string
	// Shadow maps files below /proc/sys to what they pretend to contain. It protects settings
	// of the real machine that no namespace isolates.
	Shadow map[string]string
	// Forward are the addresses inside the machine that the listeners given to Start lead to,
	// in their order.
	Forward    []string
	Components []Component
}

// Component is a program that labinit starts and restarts.
type Component struct {
	Name string // also the base name of its log
	Path string
	Args []string
	Env  []string // in addition to PATH
	// After is what has to be there before the start: a file, usually a socket, by its absolute
	// path, or a TCP server by its host:port.
	After string
	// Manual leaves the first start to OpStart.
	Manual bool
}

// Validate reports everything that is wrong with the spec.
func (s Spec) Validate() error {
	var errs []error
	if s.Hostname == "" {
		errs = append(errs, errors.New("no host name"))
	}
	if s.Root && (s.BootID == "" || s.MachineID == "") {
		errs = append(errs, errors.New("a machine with a disk needs a boot ID and a machine ID"))
	}
	seen := map[string]bool{}
	for _, c := range s.Components {
		if c.Name == "" || c.Path == "" || c.Name != filepath.Base(c.Name) {
			errs = append(errs, fmt.Errorf("component %q: bad name or no path", c.Name))
		}
		if seen[c.Name] {
			errs = append(errs, fmt.Errorf("component %q: twice", c.Name))
		}
		seen[c.Name] = true
	}
	return errors.Join(errs...)
}

// Dir is a machine's directory on the host. Its files are:
//
//	spec.json      the spec of the last power-on
//	log/           one file for each component, and init.log
//	ctl.sock       the socket of labinit
//	disk/          the root file system of a machine with a disk
//	upper/, work/  the overlays over the host's directories of SystemDirs
//	shadow/        the contents for Spec.Shadow and the boot ID
type Dir string

func (d Dir) join(elem ...string) string {
	return filepath.Join(append([]string{string(d)}, elem...)...)
}

// Disk returns the place on the host of a path of the machine's disk. Files below /var and /opt
// appear in the machine.
func (d Dir) Disk(path string) string { return d.join("disk", path) }

// Upper returns the place on the host of a path below one of SystemDirs, for writing while the
// machine is off.
func (d Dir) Upper(path string) string { return d.join("upper", path) }

// Work returns the work directory of the overlay over one of SystemDirs.
func (d Dir) Work(dir string) string { return d.join("work", dir) }

// Log returns the log of a component, or of labinit for "init".
func (d Dir) Log(component string) string { return d.join("log", component+".log") }

// ControlSocket returns the path of labinit's socket.
func (d Dir) ControlSocket() string { return d.join("ctl.sock") }

// Shadow returns the place on the host of the content for a shadowed file.
func (d Dir) Shadow(name string) string { return d.join("shadow", name) }

// ReadSpec reads the stored spec.
func (d Dir) ReadSpec() (Spec, error) {
	var s Spec
	b, err := os.ReadFile(d.join("spec.json"))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("read %s: %w", d.join("spec.json"), err)
	}
	return s, nil
}

func (d Dir) writeSpec(s Spec) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(d.join("spec.json"), append(b, '\n'), 0o600)
}
