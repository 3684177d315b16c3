package keepalived

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/atomicfile"
)

// RefusedError says that keepalived wouldn't run with a configuration.
type RefusedError struct {
	// Said is what "keepalived -t" says.
	Said string
}

func (e *RefusedError) Error() string { return "keepalived refuses the configuration: " + e.Said }

// canary is what keepalived refuses in each configuration that includes it.
const canary = "coil_asks_whether_this_file_is_included\n"

// check has keepalived check the main configuration as it will be with a text in the place of Coil's file.
func (d *Daemon) check(ctx context.Context, text []byte) error {
	var refused *RefusedError
	switch err := d.try(ctx, []byte(canary)); {
	case err == nil:
		return fmt.Errorf("%s doesn't include %s: add the line: include %s", d.o.Main, d.o.Fragment, filepath.Join(filepath.Dir(d.o.Fragment), "*.conf"))
	case !errors.As(err, &refused):
		return err
	}
	err := d.try(ctx, text)
	if errors.As(err, &refused) && d.try(ctx, nil) != nil {
		return fmt.Errorf("%w (without Coil's part, too: mend %s, or what it includes, first)", err, d.o.Main)
	}
	return err
}

// try runs "keepalived -t" where Coil's file has a text.
//
// A main file includes others by patterns, with relative names and with conditions. Only keepalived knows what it reads, so
// that no copy of the files is sure to be the same. So it reads its own files by their own names, in a mount namespace
// where another file is bound to the name of Coil's. Nobody else sees that one. It needs CAP_SYS_ADMIN.
func (d *Daemon) try(ctx context.Context, text []byte) error {
	// The name is one that RemoveStale finds after a crash, and no pattern of an include.
	tmp, err := os.CreateTemp(filepath.Dir(d.o.Fragment), "."+filepath.Base(d.o.Fragment)+".tmp-*")
	if err != nil {
		return fmt.Errorf("write the configuration to check: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(text)
	if err = errors.Join(err, tmp.Chmod(mode), tmp.Close()); err != nil {
		return fmt.Errorf("write the configuration to check: %w", err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, d.o.Program, "-t", "-f", d.o.Main)
	cmd.Stdout, cmd.Stderr = &out, &out
	err = withBound(tmp.Name(), d.o.Fragment, cmd.Run)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("check the configuration: %w", ctx.Err())
	case errors.As(err, &exit) && exit.Exited():
		return &RefusedError{Said: firstLines(out.String())}
	}
	return fmt.Errorf("check the configuration: %w: %s", err, firstLines(out.String()))
}

// withBound calls a function in a thread that has a mount namespace of its own, where a file is bound to the name of another
// one. Programs that the function starts have it, too. The namespace ends with the thread, which isn't used again.
func withBound(file, to string, f func() error) error {
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		failed <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return fmt.Errorf("make a mount namespace: %w", err)
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
				return fmt.Errorf("part from the mount namespace: %w", err)
			}
			if err := unix.Mount(file, to, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("bind %s to %s: %w", file, to, err)
			}
			return f()
		}()
	}()
	return <-failed
}

// firstLines shortens what keepalived says, which may be a line for each address, to one line.
func firstLines(said string) string {
	const most = 5
	lines := strings.Split(strings.TrimSpace(said), "\n")
	if len(lines) > most {
		lines = append(lines[:most], fmt.Sprintf("and %d lines more", len(lines)-most))
	}
	return strings.Join(lines, "; ")
}

// removeLeft removes what calls have left that were killed.
func (d *Daemon) removeLeft() error { return atomicfile.RemoveStale(d.o.Fragment, 0) }
