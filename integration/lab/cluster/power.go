package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/coil-net/coil/integration/lab/machine"
	"github.com/coil-net/coil/pkg/testkit"
)

// PowerOff cuts the power of a node: every process of it is killed at once, and its network
// namespace, its tmpfs and its mounts are gone. Its disk stays. The API server isn't told.
func (c *Cluster) PowerOff(ctx context.Context, name string) error {
	return c.locked(ctx, func() error {
		n, err := c.node(name)
		if err != nil {
			return err
		}
		if n.Init == nil {
			return nil
		}
		if err := c.removeMachine(ctx, name, *n.Init); err != nil {
			return err
		}
		return c.recordInit(name, nil)
	})
}

// PowerOn starts a node that is off, with the same disk, a new boot ID and a new network
// namespace. It returns when the node's programs are being started.
func (c *Cluster) PowerOn(ctx context.Context, name string) error {
	return c.locked(ctx, func() error {
		n, err := c.node(name)
		if err != nil {
			return err
		}
		if n.Init != nil {
			if n.Init.Alive() {
				return fmt.Errorf("%s is on", name)
			}
			// Somebody killed it without PowerOff.
			if err := c.removeMachine(ctx, name, *n.Init); err != nil {
				return err
			}
		}
		return c.powerOn(ctx, n)
	})
}

// locked runs change with the cluster's lock and the newest state.
func (c *Cluster) locked(ctx context.Context, change func() error) error {
	unlock, err := lock(ctx, c.dir, c.log)
	if err != nil {
		return err
	}
	if err = c.load(); err == nil {
		err = change()
	}
	return errors.Join(err, unlock())
}

func (c *Cluster) removeMachine(ctx context.Context, name string, i machine.Init) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(machineTimeout))
	defer cancel()
	if err := machine.Kill(ctx, i); err != nil {
		return fmt.Errorf("power off %s: %w", name, err)
	}
	if err := c.cgroup(name).Remove(ctx); err != nil {
		return fmt.Errorf("power off %s: %w", name, err)
	}
	return nil
}

// Down removes a cluster and all that belongs to it, whatever state it is in; nothing is fine
// too. stateDir and name may be empty for the defaults.
func Down(ctx context.Context, stateDir, name string) error {
	opts := Options{StateDir: stateDir, Name: name}
	opts.defaults()
	if err := opts.Validate(); err != nil {
		return err
	}
	c := newCluster(opts)
	unlock, err := lock(ctx, c.dir, c.log)
	if err != nil {
		return err
	}
	return errors.Join(c.remove(ctx), unlock())
}

// Down removes the cluster.
func (c *Cluster) Down(ctx context.Context) error {
	stateDir, name := c.place()
	return Down(ctx, stateDir, name)
}

func (c *Cluster) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(machineTimeout))
	defer cancel()
	// Every machine is marked with its directory, so the record isn't needed for this.
	inits, err := machine.Find(c.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, i := range inits {
		errs = append(errs, machine.Kill(ctx, i))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	all := machine.Cgroup("coil-lab/" + c.Name())
	if err := all.Remove(ctx); err != nil {
		return err
	}
	return errors.Join(all.RemoveParents(), os.RemoveAll(c.dir))
}

// Status is that of one machine.
type Status struct {
	Name       string
	On         bool
	Components []machine.Status
	Problem    error // why the components of a machine that is on are unknown
}

// Status returns the status of all machines, the fabric's first.
func (c *Cluster) Status(ctx context.Context) []Status {
	var all []Status
	for _, name := range slices.Concat([]string{Fabric}, c.Nodes()) {
		s := Status{Name: name}
		if _, err := c.init(name); err == nil {
			s.On = true
			if s.Components, err = c.Machine(name).Components(ctx); err != nil {
				s.Problem = err
			}
		}
		all = append(all, s)
	}
	return all
}

// List returns the names of the clusters in a state directory.
func List(stateDir string) ([]string, error) {
	opts := Options{StateDir: stateDir}
	opts.defaults()
	entries, err := os.ReadDir(opts.StateDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
