package machine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// cgroupRoot is where the host's hierarchies are mounted, see cgroups(7).
const cgroupRoot = "/sys/fs/cgroup"

const createAttempts = 5

// Cgroup is a machine's cgroup: the same path, such as "coil-lab/name/node", in every hierarchy
// of the host, whether those are of version 1, version 2 or both.
type Cgroup string

// Hierarchy is a mounted cgroup hierarchy.
type Hierarchy struct {
	Mountpoint string
	V2         bool
	Options    string // of the mount, version 1: its controllers or its name
}

// Hierarchies returns those that are mounted on the host.
func Hierarchies() ([]Hierarchy, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []Hierarchy
	s := bufio.NewScanner(f)
	for s.Scan() {
		if h, ok := parseHierarchy(s.Text()); ok {
			all = append(all, h)
		}
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted below " + cgroupRoot)
	}
	return all, nil
}

// parseHierarchy reads a line of proc(5)'s mountinfo; the fields after the lone dash are type,
// source and the file system's own options.
func parseHierarchy(line string) (Hierarchy, bool) {
	mount, super, ok := strings.Cut(line, " - ")
	fields, own := strings.Fields(mount), strings.Fields(super)
	if !ok || len(fields) < 5 || len(own) < 3 {
		return Hierarchy{}, false
	}
	h := Hierarchy{Mountpoint: fields[4], V2: own[0] == "cgroup2"}
	if !h.V2 && own[0] != "cgroup" || h.Mountpoint != cgroupRoot && filepath.Dir(h.Mountpoint) != cgroupRoot {
		return Hierarchy{}, false
	}
	if !h.V2 {
		h.Options = strings.Join(slices.DeleteFunc(strings.Split(own[2], ","), func(o string) bool {
			return o == "rw" || o == "ro" || o == "xattr" || o == "clone_children" || strings.HasPrefix(o, "release_agent=")
		}), ",")
	}
	return h, true
}

func (c Cgroup) dirs() ([]string, error) {
	all, err := Hierarchies()
	if err != nil {
		return nil, err
	}
	dirs := make([]string, len(all))
	for i, h := range all {
		dirs[i] = filepath.Join(h.Mountpoint, string(c))
	}
	return dirs, nil
}

// create makes the cgroup in every hierarchy and moves the process there.
func (c Cgroup) create(pid int) error {
	all, err := Hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		err := c.createIn(h, pid)
		// The removal of another machine may remove the common parents in between.
		for attempt := 1; attempt < createAttempts && errors.Is(err, fs.ErrNotExist); attempt++ {
			err = c.createIn(h, pid)
		}
		if err != nil {
			return fmt.Errorf("make cgroup %s below %s: %w", c, h.Mountpoint, err)
		}
	}
	return nil
}

func (c Cgroup) createIn(h Hierarchy, pid int) error {
	dir := h.Mountpoint
	for elem := range strings.SplitSeq(string(c), "/") {
		if h.V2 {
			if err := DelegateControllers(dir); err != nil {
				return err
			}
		}
		dir = filepath.Join(dir, elem)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := inheritCpuset(dir); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
}

// inheritCpuset fills what version 1's cpuset leaves empty in a new cgroup and requires before it
// takes a process.
func inheritCpuset(dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if strings.TrimSpace(string(own)) != "" {
			continue
		}
		parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // version 2: empty means the parent's
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), parent, 0); err != nil && !v2(dir) {
			return fmt.Errorf("set %s of %s: %w", name, dir, err)
		}
	}
	return nil
}

func v2(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "cgroup.controllers"))
	return err == nil
}

// DelegateControllers makes all controllers of a version 2 cgroup available in its children.
func DelegateControllers(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(b)) {
		// Each alone: one that can't be delegated, as cpu beside realtime processes, must not
		// keep back the others.
		err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+name), 0)
		if err != nil && (name == "memory" || name == "pids") {
			return fmt.Errorf("delegate cgroup controller %s of %s: %w", name, dir, err)
		}
	}
	return nil
}

// Remove kills what runs in the cgroup or below it and removes it from every hierarchy.
func (c Cgroup) Remove(ctx context.Context) error {
	dirs, err := c.dirs()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		err := wait.PollUntilContextCancel(ctx, pollPause, true, func(context.Context) (bool, error) { return removeTree(dir) })
		if err != nil {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
	}
	return nil
}

// RemoveParents removes the cgroups above c up to the first of its path as far as they are empty.
func (c Cgroup) RemoveParents() error {
	dirs, err := c.dirs()
	if err != nil {
		return err
	}
	levels := strings.Count(string(c), "/")
	for _, dir := range dirs {
		for range levels {
			dir = filepath.Dir(dir)
			if unix.Rmdir(dir) != nil {
				break // another machine's, or gone already
			}
		}
	}
	return nil
}

// removeTree makes one attempt and reports whether nothing is left.
func removeTree(dir string) (bool, error) {
	gone := true
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		if err == nil && e.IsDir() {
			killAll(path)
		}
		return err
	})
	if err != nil {
		return false, err
	}
	var children []string
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		if err == nil && e.IsDir() {
			children = append(children, path)
		}
		return err
	})
	if err != nil {
		return false, err
	}
	for _, path := range slices.Backward(children) { // children come after their parents
		switch err := unix.Rmdir(path); {
		case err == nil || errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY):
			gone = false // a killed process is still on its way out
		default:
			return false, err
		}
	}
	return gone, nil
}

func killAll(dir string) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return // removed meanwhile; else Rmdir reports it
	}
	for s := range strings.FieldsSeq(string(b)) {
		// 0 stands for a process of another PID namespace, which is not ours to kill.
		if pid, err := strconv.Atoi(s); err == nil && pid > 0 {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}
