package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/machine"
)

// own are the top-level directories that a machine with a disk doesn't share with the host.
var own = []string{"dev", "lost+found", "opt", "proc", "run", "sys", "var"}

// makeRoot gives the machine its file system and makes every mount shared, as systemd does on a
// real node: pods' mount propagation depends on it.
func makeRoot(dir machine.Dir, spec machine.Spec) error {
	// Nothing may leak to the host.
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	root := "/"
	if spec.Root {
		root = dir.Disk("")
		if err := assemble(dir, spec, root); err != nil {
			return err
		}
	}
	hierarchies, err := machine.Hierarchies()
	if err != nil {
		return err
	}
	if err := errors.Join(
		mount("proc", filepath.Join(root, "proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
		mount("sysfs", filepath.Join(root, "sys"), "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
	); err != nil {
		return err
	}
	if err := mountCgroups(root, hierarchies); err != nil {
		return err
	}
	if spec.Root {
		if err := shadow(dir, spec, root); err != nil {
			return err
		}
		if err := pivot(root); err != nil {
			return err
		}
		if err := writeRun(spec); err != nil {
			return err
		}
	}
	return mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

// assemble mounts everything at root except for the file systems of the kernel that show
// namespaces.
func assemble(dir machine.Dir, spec machine.Spec, root string) error {
	if err := mount(root, root, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	for _, d := range []string{
		"dev", "proc", "run", "sys", "opt/cni/bin",
		"var/cache", "var/lib/cni", "var/lib/coil", "var/log/pods", "var/log/containers", "var/tmp",
	} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	for link, target := range map[string]string{"var/run": "/run", "var/lock": "/run/lock"} {
		if err := symlink(target, filepath.Join(root, link)); err != nil {
			return err
		}
	}
	if err := errors.Join(shareHost(dir, root), shareModules(root)); err != nil {
		return err
	}
	for _, src := range spec.Programs {
		target := filepath.Join(root, machine.ProgramDir, filepath.Base(src))
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		if err := errors.Join(
			mount(src, target, "", unix.MS_BIND, ""),
			mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""),
		); err != nil {
			return err
		}
	}
	return errors.Join(
		mount("/dev", filepath.Join(root, "dev"), "", unix.MS_BIND|unix.MS_REC, ""),
		mount("tmpfs", filepath.Join(root, "run"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"),
	)
}

// shareHost lets the machine see the host's other top-level directories: those of the system, as
// far as it doesn't change them, and all others as they are, for whatever a test wants to run.
func shareHost(dir machine.Dir, root string) error {
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range entries {
		src, target := filepath.Join("/", e.Name()), filepath.Join(root, e.Name())
		switch {
		case slices.Contains(own, e.Name()):
		case e.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(src)
			if err != nil {
				return err
			}
			if err := symlink(to, target); err != nil {
				return err
			}
		case e.IsDir():
			if err := os.MkdirAll(target, 0o755); err != nil {
				return err
			}
			if err := share(dir, e.Name(), target); err != nil {
				return err
			}
		}
	}
	return nil
}

func share(dir machine.Dir, name, target string) error {
	if !slices.Contains(machine.SystemDirs, name) {
		return mount("/"+name, target, "", unix.MS_BIND|unix.MS_REC, "")
	}
	options := "lowerdir=/" + name + ",upperdir=" + dir.Upper(name) + ",workdir=" + dir.Work(name)
	return mount("overlay", target, "overlay", 0, options)
}

// shareModules shows the modules of the running kernel, which may be a mount of their own that an
// overlay doesn't show.
func shareModules(root string) error {
	const modules = "lib/modules"
	if _, err := os.Stat("/" + modules); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return mount("/"+modules, filepath.Join(root, modules), "", unix.MS_BIND|unix.MS_REC, "")
}

// mountCgroups mounts the host's hierarchies; in the new cgroup namespace their roots are the
// machine's own cgroups.
func mountCgroups(root string, hierarchies []machine.Hierarchy) error {
	base := filepath.Join(root, "sys/fs/cgroup")
	if len(hierarchies) == 1 && hierarchies[0].V2 {
		if err := mount("cgroup2", base, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return err
		}
		return leaveCgroupRoot(base)
	}
	if err := mount("tmpfs", base, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755"); err != nil {
		return err
	}
	for _, h := range hierarchies {
		target := filepath.Join(root, h.Mountpoint)
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		fstype := "cgroup"
		if h.V2 {
			fstype = "cgroup2"
		}
		options := h.Options
		if strings.HasPrefix(options, "name=") {
			options = "none," + options
		}
		if err := mount(fstype, target, fstype, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
			return err
		}
	}
	return nil
}

// leaveCgroupRoot moves this process out of the machine's version 2 root cgroup: one that has
// processes can't give controllers to its children.
func leaveCgroupRoot(base string) error {
	leaf := filepath.Join(base, "init")
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte("0"), 0); err != nil {
		return fmt.Errorf("move into %s: %w", leaf, err)
	}
	return machine.DelegateControllers(base)
}

// shadow covers the files that show or change the real machine.
func shadow(dir machine.Dir, spec machine.Spec, root string) error {
	errs := []error{
		mount(dir.Shadow("boot_id"), filepath.Join(root, "proc/sys/kernel/random/boot_id"), "", unix.MS_BIND, ""),
	}
	for path := range spec.Shadow {
		errs = append(errs, mount(dir.Shadow(machine.ShadowName(path)), filepath.Join(root, "proc/sys", path), "", unix.MS_BIND, ""))
	}
	return errors.Join(errs...)
}

// pivot makes root the root directory and drops the old one.
func pivot(root string) error {
	if err := unix.Chdir(root); err != nil {
		return err
	}
	// With "." twice the old root ends up on top of the new one, see pivot_root(2).
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root to %s: %w", root, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root: %w", err)
	}
	return unix.Chdir("/")
}

// writeRun fills the new tmpfs on /run.
func writeRun(spec machine.Spec) error {
	for _, d := range []string{filepath.Dir(machine.BootIDFile), "/run/lock", "/run/netns"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	return os.WriteFile(machine.BootIDFile, []byte(spec.BootID+"\n"), 0o444)
}

// symlink makes link point to target; a link of an earlier power-on is kept.
func symlink(target, link string) error {
	if old, err := os.Readlink(link); err == nil && old == target {
		return nil
	}
	return os.Symlink(target, link)
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %q at %s (type %q, options %q): %w", source, target, fstype, data, err)
	}
	return nil
}
