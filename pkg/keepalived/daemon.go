package keepalived

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coil-net/coil/pkg/atomicfile"
)

// Options say where keepalived is. The zero value is for Debian's.
type Options struct {
	// Program is keepalived; it checks configurations.
	Program string
	// Main is the configuration that the daemon was started with. It includes the folder of Fragment.
	Main string
	// Fragment is Coil's file.
	Fragment string
	// PIDFile names the daemon's process.
	PIDFile string
	// DumpFolder is where the daemon writes its state, as the daemon sees it.
	DumpFolder string
	// Patience is how long the daemon may take to do what a new configuration says.
	Patience time.Duration
}

// withDefaults returns the options with what Debian has where they are empty.
func (o Options) withDefaults() Options {
	return Options{
		Program:    cmp.Or(o.Program, "/usr/sbin/keepalived"),
		Main:       cmp.Or(o.Main, "/etc/keepalived/keepalived.conf"),
		Fragment:   cmp.Or(o.Fragment, "/etc/keepalived/coil/coil.conf"),
		PIDFile:    cmp.Or(o.PIDFile, "/run/keepalived.pid"),
		DumpFolder: cmp.Or(o.DumpFolder, "/tmp"),
		Patience:   cmp.Or(o.Patience, 5*time.Second),
	}
}

const mode = 0o644

// Daemon is the keepalived of this machine. Only States may be called while another call runs. One process of a machine has
// one Daemon: two would take each other's files for left ones.
type Daemon struct {
	// Counts counts since the beginning.
	Counts Counts

	o Options
	// mu guards the file that the daemon writes its state to.
	mu sync.Mutex
}

// Counts counts what was done.
type Counts struct {
	// Unchanged is of changes that keepalived had already.
	Unchanged atomic.Uint64
	// Reloads is of changes that keepalived has taken.
	Reloads atomic.Uint64
	// Rollbacks is of changes that were taken back.
	Rollbacks atomic.Uint64
}

// New returns the keepalived that options describe.
func New(o Options) *Daemon { return &Daemon{o: o.withDefaults()} }

// Used says whether keepalived was ever told anything: Coil's file is there.
func (d *Daemon) Used() bool {
	_, err := os.Stat(d.o.Fragment)
	return err == nil
}

// Addresses returns the addresses that Coil's files name, in any order: keepalived may have them, whether it runs or is about to be started.
func (d *Daemon) Addresses() (all []netip.Addr, err error) {
	for _, path := range []string{d.o.Fragment, d.formerPath()} {
		text, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read which addresses keepalived may have: %w", err)
		}
		all = append(all, addressesIn(text)...)
	}
	return all, nil
}

// States returns all instances that the daemon has, those of the operator, too. It makes keepalived write
// its state to files of DumpFolder, which stay.
func (d *Daemon) States(ctx context.Context) ([]InstanceState, error) {
	var states []InstanceState
	err := wait(ctx, d.o.Patience, statePause, func() (done bool, err error) {
		states, err = d.dump(ctx)
		return err == nil || errors.Is(err, ErrNotRunning), err
	})
	return states, err
}

// Apply makes keepalived answer as wanted; it does nothing when that is so and no instance has a fault. If keepalived doesn't run, the configuration is
// in place for it, and the error is ErrNotRunning. After another error keepalived goes on as before.
func (d *Daemon) Apply(ctx context.Context, c Config) error {
	change, err := d.Prepare(ctx, c)
	if err != nil {
		return err
	}
	return change.Commit(ctx)
}

// Remove takes Coil's file away, after keepalived has given up what that says. keepalived needn't run.
func (d *Daemon) Remove(ctx context.Context) error {
	if err := d.Apply(ctx, Config{}); err != nil && !errors.Is(err, ErrNotRunning) {
		return err
	}
	if err := os.Remove(d.o.Fragment); err != nil {
		return err
	}
	return d.forgetFormer() // it is there if keepalived doesn't run
}

// Prepare has keepalived check a configuration, and changes nothing that keepalived or a person would see. An error that is
// a RefusedError has what keepalived says.
func (d *Daemon) Prepare(ctx context.Context, c Config) (*Change, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	change := &Change{d: d, want: c.sorted(), text: c.Render()}
	if err := errors.Join(os.MkdirAll(filepath.Dir(d.o.Fragment), 0o755), d.removeLeft()); err != nil {
		return nil, fmt.Errorf("prepare the folder of keepalived's configuration: %w", err)
	}
	now, err := os.ReadFile(d.o.Fragment)
	if errors.Is(err, fs.ErrNotExist) {
		// The check needs the name; an empty file says nothing to keepalived.
		err = atomicfile.Write(d.o.Fragment, nil, mode)
	}
	if err != nil {
		return nil, fmt.Errorf("read the present configuration: %w", err)
	}
	if err := change.remember(ctx, now); err != nil {
		return nil, err
	}
	if change.nothing {
		return change, nil
	}
	if err := d.check(ctx, change.text); err != nil {
		return nil, err
	}
	return change, nil
}
