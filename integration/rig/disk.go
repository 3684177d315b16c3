package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// disk is an ext4 filesystem in a file.
type disk struct {
	image, dir string
	mounted    bool
}

func newDisk(image, dir string, size int64) (*disk, error) {
	f, err := os.Create(image)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return nil, err
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", image).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mkfs.ext4: %w: %s", err, out)
	}
	d := &disk{image: image, dir: dir}
	return d, d.mount()
}

func (d *disk) mount() error {
	if out, err := exec.Command("mount", "-o", "loop,errors=remount-ro", d.image, d.dir).CombinedOutput(); err != nil {
		return fmt.Errorf("mount %s: %w: %s", d.image, err, out)
	}
	d.mounted = true
	return nil
}

// device is the block device of what is mounted.
func (d *disk) device(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "findmnt", "--noheadings", "--output=SOURCE", d.dir).Output()
	if err != nil {
		return "", fmt.Errorf("find the device of %s: %w", d.dir, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// renew mounts the disk anew, free of errors. It is a copy of what was mounted, which goes on in
// every mount namespace that was made meanwhile, with its errors.
func (d *disk) renew(ctx context.Context) error {
	name, err := d.device(ctx)
	if err != nil {
		return err
	}
	device, err := os.Open(name)
	if err != nil {
		return err
	}
	defer device.Close()
	if err := unix.Unmount(d.dir, 0); err != nil {
		return fmt.Errorf("unmount the disk: %w", err)
	}
	d.mounted = false
	if err := device.Sync(); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "cp", "--sparse=always", d.image, d.image+".new").CombinedOutput(); err != nil {
		return fmt.Errorf("copy the disk: %w: %s", err, out)
	}
	if err := os.Rename(d.image+".new", d.image); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "e2fsck", "-p", d.image).CombinedOutput(); err != nil {
		// 1 is "errors corrected".
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			return fmt.Errorf("e2fsck: %w: %s", err, out)
		}
	}
	return d.mount()
}

func (d *disk) unmount() error {
	if !d.mounted {
		return nil
	}
	d.mounted = false
	return unix.Unmount(d.dir, unix.MNT_DETACH)
}

var errNoDisk = errors.New("the node has no disk of its own: set DiskBytes")

// FillDisk takes all space of the disk, again if some was freed.
func (n *Node) FillDisk() error {
	if n.disk == nil {
		return errNoDisk
	}
	f, err := os.OpenFile(filepath.Join(n.StateDir(), "filler"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 64 << 10; size > 0; {
		if _, err := f.Write(make([]byte, size)); errors.Is(err, unix.ENOSPC) {
			size /= 2
		} else if err != nil {
			return err
		}
	}
	return nil
}

// EmptyDisk gives the space back.
func (n *Node) EmptyDisk() error { return os.Remove(filepath.Join(n.StateDir(), "filler")) }

// BreakDisk makes the kernel find an error on the disk, after which it is read-only, for
// files that are open too.
func (n *Node) BreakDisk(ctx context.Context) error {
	if n.disk == nil {
		return errNoDisk
	}
	device, err := n.disk.device(ctx)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join("/sys/fs/ext4", filepath.Base(device), "trigger_fs_error"), []byte("1"), 0)
}

// MountDisk mounts the disk anew, read-only or not. Nothing may have files open on it.
func (n *Node) MountDisk(ctx context.Context, readOnly bool) error {
	if n.disk == nil {
		return errNoDisk
	}
	if err := n.disk.renew(ctx); err != nil || !readOnly {
		return err
	}
	return n.RemountDisk(true)
}

// RemountDisk makes the disk read-only or writable, which is possible while nothing is
// open for writing on it.
func (n *Node) RemountDisk(readOnly bool) error {
	flags := uintptr(unix.MS_REMOUNT)
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	if err := unix.Mount("", n.StateDir(), "", flags, ""); err != nil {
		return fmt.Errorf("remount %s: %w", n.StateDir(), err)
	}
	return nil
}
