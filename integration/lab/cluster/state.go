package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/machine"
)

// state is the record of a cluster, in cluster.json.
type state struct {
	Families          []Family
	KubernetesVersion string
	ReferenceCNI      bool
	ControlPlane      *Remote
	Programs          build.Binaries
	Labinit           string
	Fabric            *machine.Init
	Nodes             []node
}

// node is one node; Init is nil while it is off.
type node struct {
	Name      string
	Index     int
	MachineID string
	// ProxyMode is the mode of its kube-proxy.
	ProxyMode string
	Init      *machine.Init
}

// nodeName names nodes as kind does.
func nodeName(cluster string, index int) string {
	switch index {
	case 0:
		return cluster + "-control-plane"
	case 1:
		return cluster + "-worker"
	}
	return fmt.Sprintf("%s-worker%d", cluster, index)
}

func (c *Cluster) stateFile() string { return filepath.Join(c.dir, "cluster.json") }

func (c *Cluster) load() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := os.ReadFile(c.stateFile())
	if err != nil {
		return err
	}
	c.state = state{}
	if err := json.Unmarshal(b, &c.state); err != nil {
		return fmt.Errorf("read %s: %w", c.stateFile(), err)
	}
	return nil
}

// record changes the state and stores it before it returns.
func (c *Cluster) record(change func(*state)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.state)
	b, err := json.MarshalIndent(c.state, "", "  ")
	if err != nil {
		return err
	}
	tmp := c.stateFile() + ".new"
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, c.stateFile())
}

func (c *Cluster) node(name string) (node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.state.Nodes, func(n node) bool { return n.Name == name })
	if i < 0 {
		return node{}, fmt.Errorf("cluster %q has no node %q", c.Name(), name)
	}
	return c.state.Nodes[i], nil
}

// init returns the PID 1 of a machine that is on.
func (c *Cluster) init(name string) (machine.Init, error) {
	i := c.fabric()
	if name != Fabric {
		n, err := c.node(name)
		if err != nil {
			return machine.Init{}, err
		}
		i = n.Init
	}
	if i == nil || !i.Alive() {
		return machine.Init{}, fmt.Errorf("%s is off", name)
	}
	return *i, nil
}

func (c *Cluster) fabric() *machine.Init {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.Fabric
}

func (c *Cluster) programs() build.Binaries {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.Programs
}

func (c *Cluster) referenceCNI() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.ReferenceCNI
}

// remote returns the control plane elsewhere, nil for one in the fabric.
func (c *Cluster) remote() *Remote {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.ControlPlane
}

func (c *Cluster) cgroup(name string) machine.Cgroup {
	return machine.Cgroup("coil-lab/" + c.Name() + "/" + name)
}

// lock serialises the commands that change a cluster, of all processes. The file is beside the
// cluster's directory; unlock removes it when there is no cluster.
func lock(ctx context.Context, dir string, log io.Writer) (unlock func() error, err error) {
	path := dir + ".lock"
	told := false
	for {
		// Both are made again when another cluster's last step was to remove them.
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && samePath(f, path) {
			return func() error { return release(f, dir) }, nil
		}
		f.Close()
		if err == nil {
			continue // the holder before us removed the file: lock the new one
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if !told {
			fmt.Fprintf(log, "waiting for another lab command to release %s\n", path)
			told = true
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("lock %s: %w", path, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// release gives the lock back. Without a cluster the file goes too, and without any cluster the
// state directory.
func release(f *os.File, dir string) error {
	defer f.Close()
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Remove(f.Name()); err != nil {
		return err
	}
	err := unix.Rmdir(filepath.Dir(dir))
	// A mount point stays: somebody gave the lab a file system of its own.
	for _, fine := range []error{unix.ENOTEMPTY, unix.ENOENT, unix.EBUSY} {
		if errors.Is(err, fine) {
			return nil
		}
	}
	return err
}

// samePath reports whether path still leads to the open file.
func samePath(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}
