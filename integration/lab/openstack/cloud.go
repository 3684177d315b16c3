// Package openstack starts a small cloud: a real Keystone and a real Neutron of Debian's packages, on 127.0.0.1, without
// agents. So its ports have addresses, quotas and rules, but no network, and are DOWN for ever.
//
// It owns the cache with the unpacked packages, the programs' configuration, and the proxy by which a test makes their answers late,
// wrong or lost (Front). It needs no root, and installs nothing. It must not know its users.
//
//	cloud, err := openstack.Start(ctx, openstack.Options{Log: os.Stderr})
//	defer cloud.Stop()
//	p, err := cloud.NewProject(ctx)    // with a user and a network of its own
//	front, err := cloud.NewFront()     // its URL is the auth_url
//
// The logs of Keystone and Neutron, in the directory of the cloud, have their answers.
package openstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/integration/lab/scratch"
	"github.com/coil-net/coil/pkg/testkit"
)

// python is Debian's own: its packages have modules for no other.
const python = "/usr/bin/python3"

const (
	// readyTimeout is long: at the first start, Python compiles all modules.
	readyTimeout = 3 * time.Minute
	// A free port can be taken by somebody else before the program that it was meant for listens on it.
	startAttempts = 3
)

// Options of a cloud. The zero value is ready to use.
type Options struct {
	// Log receives a line for each step of the first start, which takes minutes; nil discards them.
	Log io.Writer
	// PageSize is how many objects an answer of Neutron has at most; the default is 7.
	PageSize int
}

// Cloud is a running Keystone and Neutron.
type Cloud struct {
	programs
	dir      *scratch.Dir
	keystone *proc.Process
	neutron  *proc.Process
	admin    *Session
	external string // the ID of the external network
	projects atomic.Int64
}

// programs are Keystone and Neutron with their files in one directory.
type programs struct {
	root string // has the unpacked packages
	conf conf
}

// conf is what the files of configuration are made of.
type conf struct {
	Dir                       string
	KeystonePort, NeutronPort int
	PageSize                  int
}

// IdentityURL is where Keystone listens.
func (p *programs) IdentityURL() string {
	return "http://127.0.0.1:" + strconv.Itoa(p.conf.KeystonePort)
}

// NetworkURL is where Neutron listens.
func (p *programs) NetworkURL() string { return "http://127.0.0.1:" + strconv.Itoa(p.conf.NeutronPort) }

// Start starts a cloud and returns when it answers. On an error nothing is left running.
func Start(ctx context.Context, o Options) (_ *Cloud, err error) {
	if o.Log == nil {
		o.Log = io.Discard
	}
	if o.PageSize == 0 {
		o.PageSize = 7
	}
	root, template, err := prepare(ctx, o.Log)
	if err != nil {
		return nil, fmt.Errorf("prepare OpenStack: %w", err)
	}
	c := &Cloud{programs: programs{root: root}}
	for attempt := 1; ; attempt++ {
		err := c.start(ctx, template, o.PageSize)
		if err == nil {
			return c, nil
		}
		err = errors.Join(err, c.Stop())
		if attempt == startAttempts || !errors.Is(err, proc.ErrEnded) {
			return nil, err
		}
	}
}

func (c *Cloud) start(ctx context.Context, template string, pageSize int) (err error) {
	if c.dir, err = scratch.New("coil-openstack-"); err != nil {
		return err
	}
	dir := c.dir.Path("state")
	if err := os.CopyFS(dir, os.DirFS(template)); err != nil {
		return err
	}
	if err := c.configure(dir, pageSize); err != nil {
		return err
	}
	if c.keystone, c.neutron, err = c.run(ctx); err != nil {
		return err
	}
	if c.admin, err = c.Login(ctx, "admin", "admin", "admin"); err != nil {
		return err
	}
	return errors.Join(c.publish(ctx), c.findExternal(ctx))
}

// Stop ends the programs and removes their files. It can be called more than once.
func (c *Cloud) Stop() error {
	kill(c.neutron, c.keystone)
	if c.dir == nil {
		return nil
	}
	return c.dir.Remove()
}

// kill kills programs, and their children: Neutron has some that would notice its end only after a while.
func kill(all ...*proc.Process) {
	for _, p := range all {
		if p != nil {
			_ = unix.Kill(-p.PID(), unix.SIGKILL) // fails when none is left
			p.Kill()
		}
	}
}

// configure chooses ports and writes the files of configuration.
func (p *programs) configure(dir string, pageSize int) error {
	ports, err := freePorts(2)
	if err != nil {
		return err
	}
	p.conf = conf{Dir: dir, KeystonePort: ports[0], NeutronPort: ports[1], PageSize: pageSize}
	return writeFiles(p.conf)
}

// command runs one of the commands of oslab.py.
func (p *programs) command(log string, args ...string) proc.Command {
	return proc.Command{
		Path: python, Args: append([]string{filepath.Join(p.conf.Dir, "oslab.py")}, args...), Log: filepath.Join(p.conf.Dir, log),
		Env: []string{"OSROOT=" + p.root, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + p.conf.Dir, "LANG=C.UTF-8"},
	}
}

// run starts both programs, and waits until they answer.
func (p *programs) run(ctx context.Context) (keystone, neutron *proc.Process, err error) {
	if neutron, err = proc.Start(p.command("neutron.out", "neutron", filepath.Join(p.conf.Dir, "neutron.conf"))); err != nil {
		return nil, nil, err
	}
	keystone, err = proc.Start(p.command("keystone.out", "keystone", filepath.Join(p.conf.Dir, "keystone.conf"), strconv.Itoa(p.conf.KeystonePort)))
	if err != nil {
		return nil, neutron, err
	}
	return keystone, neutron, errors.Join(answers(ctx, keystone, p.IdentityURL()+"/v3"), answers(ctx, neutron, p.NetworkURL()+"/"))
}

// answers waits until a program answers at a URL.
func answers(ctx context.Context, p *proc.Process, url string) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(readyTimeout))
	defer cancel()
	return p.WaitFor(ctx, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: %s", url, resp.Status)
		}
		return nil
	})
}

// freePorts returns ports on which nobody listens.
func freePorts(n int) (ports []int, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // after all are chosen, so that they differ
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
