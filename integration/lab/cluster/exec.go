package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/coil-net/coil/integration/lab/machine"
)

// EnterArgs returns the command line that runs a command inside a machine.
func (c *Cluster) EnterArgs(name string, args ...string) ([]string, error) {
	i, err := c.init(name)
	if err != nil {
		return nil, err
	}
	return c.enterArgs(i, args...), nil
}

func (c *Cluster) enterArgs(i machine.Init, args ...string) []string {
	search := []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	for _, dir := range c.programDirs() {
		search = append(search, path.Join(machine.ProgramDir, filepath.Base(dir)))
	}
	return append([]string{
		"nsenter", "--target", strconv.Itoa(i.PID), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--",
		"env", "PATH=" + strings.Join(search, ":"),
		"CONTAINERD_ADDRESS=" + containerdSocket, "CONTAINERD_NAMESPACE=k8s.io",
	}, args...)
}

func (c *Cluster) enter(ctx context.Context, i machine.Init, args ...string) (*exec.Cmd, error) {
	if len(args) == 0 {
		return nil, errors.New("no command")
	}
	line := c.enterArgs(i, args...)
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	// nsenter forks into the PID namespace; both are in one process group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd, nil
}

// Logs writes the logs of a machine's components; an empty component means all of them.
func (c *Cluster) Logs(w io.Writer, name, component string) error {
	if name != Fabric {
		if _, err := c.node(name); err != nil {
			return err
		}
	}
	pattern := component
	if component == "" {
		pattern = "*"
	}
	files, err := filepath.Glob(c.Machine(name).Log(pattern))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("%s has no log of %q", name, component)
	}
	slices.Sort(files)
	for _, f := range files {
		if err := copyLog(w, f, fmt.Sprintf("==> %s %s <==\n", name, strings.TrimSuffix(filepath.Base(f), ".log"))); err != nil {
			return err
		}
	}
	return nil
}

func copyLog(w io.Writer, file, title string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.WriteString(w, title); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}
