package keepalived

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/coil-net/coil/pkg/atomicfile"
)

// ErrNotFollowed says that keepalived has read a configuration, and doesn't follow it. The former configuration is put back: such a change reloads keepalived twice.
var ErrNotFollowed = errors.New("keepalived doesn't do what")

// Change is a configuration that keepalived would take. Whoever changes something else along with it prepares both,
// commits both, and rolls back what it has committed when the other one fails.
type Change struct {
	d    *Daemon
	want []Instance // in normal form
	text []byte
	// former is what a roll-back puts in place.
	former []byte
	// before is what the daemon had when it followed former; nil if that isn't known.
	before []InstanceState
	// nothing says that keepalived has what is wanted.
	nothing, committed bool
}

// formerPath is of the last file that keepalived was seen to follow, while that isn't sure of the present one: a crash
// in between must not make a file that keepalived doesn't follow the one that is gone back to. No include finds it.
func (d *Daemon) formerPath() string {
	return filepath.Join(filepath.Dir(d.o.Fragment), "."+filepath.Base(d.o.Fragment)+".former")
}

// remember notes what is in place before the change.
func (c *Change) remember(ctx context.Context, now []byte) error {
	former, err := os.ReadFile(c.d.formerPath())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the former configuration: %w", err)
	}
	sure := err != nil
	if c.former = former; sure {
		c.former = now
	}
	states, err := c.d.States(ctx)
	if err != nil {
		return ctx.Err() // Commit meets what is wrong with the daemon
	}
	if sure {
		c.before = states
	}
	c.nothing = bytes.Equal(now, c.text) && c.followed(states) == nil && !c.faulty(states)
	return nil
}

// Commit puts the configuration in place, has keepalived read it, and waits until keepalived does what it says; otherwise
// it puts the former one back. If keepalived doesn't run, the configuration stays in place, and the error is ErrNotRunning.
// It is ErrNotRunning, too, after keepalived has ended because of the configuration, which is taken back then.
func (c *Change) Commit(ctx context.Context) error {
	d := c.d
	if c.nothing {
		d.Counts.Unchanged.Add(1)
		return d.forgetFormer()
	}
	if err := atomicfile.Write(d.formerPath(), c.former, mode); err != nil {
		return err
	}
	c.committed = true
	if err := atomicfile.Write(d.o.Fragment, c.text, mode); err != nil {
		return errors.Join(err, c.Rollback(context.WithoutCancel(ctx))) // it may be in place
	}
	if err := d.signal(syscall.SIGHUP); err != nil {
		if errors.Is(err, ErrNotRunning) {
			return fmt.Errorf("the configuration is in place: %w", err)
		}
		return errors.Join(err, c.Rollback(context.WithoutCancel(ctx)))
	}
	if err := c.await(ctx, c.followed); err != nil {
		return errors.Join(fmt.Errorf("%w %s says: %w", ErrNotFollowed, d.o.Fragment, err), c.Rollback(context.WithoutCancel(ctx)))
	}
	d.Counts.Reloads.Add(1)
	return d.forgetFormer()
}

// Rollback undoes a Commit: it puts the former configuration in place, and waits until keepalived does what that says. It
// does nothing when there was no Commit, or one that has changed nothing.
func (c *Change) Rollback(ctx context.Context) error {
	if !c.committed {
		return nil
	}
	d := c.d
	if err := atomicfile.Write(d.o.Fragment, c.former, mode); err != nil {
		return fmt.Errorf("put the former configuration back: %w", err)
	}
	c.committed = false
	d.Counts.Rollbacks.Add(1)
	if err := d.signal(syscall.SIGHUP); err != nil {
		return fmt.Errorf("the former configuration is in place: %w", err)
	}
	if err := c.await(ctx, c.undone); err != nil {
		return fmt.Errorf("the former configuration is in place, but keepalived doesn't do what it says: %w", err)
	}
	return d.forgetFormer()
}

// forgetFormer says that keepalived follows the present file.
func (d *Daemon) forgetFormer() error {
	if err := os.Remove(d.formerPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the former configuration: %w", err)
	}
	return nil
}

// await waits until the daemon's instances are as wanted. keepalived says "Reload complete" of a file that it has not
// understood, and has no instance then; and it ends when it reads of a link that isn't there.
func (c *Change) await(ctx context.Context, as func([]InstanceState) error) error {
	return wait(ctx, c.d.o.Patience, statePause, func() (bool, error) {
		states, err := c.d.dump(ctx)
		if err == nil {
			err = as(states)
		}
		return err == nil || errors.Is(err, ErrNotRunning), err
	})
}

// followed returns why the daemon's instances aren't the wanted ones.
func (c *Change) followed(states []InstanceState) error {
	if err := (Config{c.want}).Followed(states); err != nil {
		return err
	}
	return c.without(states, c.former, c.text)
}

// faulty tells whether a wanted instance has a fault. keepalived 2.2.7 looks for the source of adverts only when it reads its
// files: until it reads them again, an instance stays in that state whose source has come since, track_src_ip or not.
func (c *Change) faulty(states []InstanceState) bool {
	return slices.ContainsFunc(c.want, func(want Instance) bool {
		have, _ := named(states, want.Name)
		return have.State == Fault
	})
}

// undone returns why the daemon's instances aren't those before the change.
func (c *Change) undone(states []InstanceState) error {
	for _, name := range instancesIn(c.former) {
		have, ok := named(states, name)
		if !ok {
			return fmt.Errorf("instance %s is missing", name)
		}
		if before, ok := named(c.before, name); ok {
			if err := have.differsIn(before.instance()); err != nil {
				return fmt.Errorf("instance %s %w", name, err)
			}
		}
	}
	return c.without(states, c.text, c.former)
}

// without returns which instance the daemon has that a text has and another one hasn't.
func (c *Change) without(states []InstanceState, old, present []byte) error {
	keep := instancesIn(present)
	for _, name := range instancesIn(old) {
		if _, ok := named(states, name); ok && !slices.Contains(keep, name) {
			return fmt.Errorf("instance %s is still there", name)
		}
	}
	return nil
}

// named returns the instance of a name.
func named(states []InstanceState, name string) (InstanceState, bool) {
	i := slices.IndexFunc(states, func(s InstanceState) bool { return s.Name == name })
	if i < 0 {
		return InstanceState{}, false
	}
	return states[i], true
}
