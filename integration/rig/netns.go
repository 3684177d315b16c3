package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// namespace is a network namespace that lives as long as it is open here, or has
// processes; its lo is up.
type namespace struct{ *netns.NS }

// newNamespace makes one.
func newNamespace() (*namespace, error) {
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}
	if err := ns.Do(loopbackUp); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &namespace{ns}, nil
}

// loopbackUp brings up lo of the thread's namespace.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	return nil
}

// path leads to the namespace from any process, while it is open here.
func (n *namespace) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.Fd()) }

// run runs a program in the namespace and returns its output.
func (n *namespace) run(ctx context.Context, stdin string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.path(), "--", name}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, exit.Stderr)
	}
	return string(out), err
}

// listen listens in the namespace.
func (n *namespace) listen(ctx context.Context, network, address string) (l net.Listener, err error) {
	err = n.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, network, address)
		return err
	})
	return l, err
}

// dial connects from the namespace.
func (n *namespace) dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = n.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// fabric is the network between the nodes: a bridge in a namespace of its own, which
// is the nodes' router too, and that of the nodes that have a segment of their own.
type fabric struct{ *namespace }

func newFabric(ctx context.Context) (*fabric, error) {
	ns, err := newNamespace()
	if err != nil {
		return nil, err
	}
	// Without an address of its own the bridge takes the lowest of its ports'; nodes that knew another
	// one would send nowhere for up to a minute.
	_, err = ns.run(ctx, `
link add br0 address 02:00:00:00:00:fe type bridge
addr add 10.255.0.1/16 dev br0
addr add fd00:255::1/64 dev br0 nodad
link set br0 up
`, "ip", "-batch", "-")
	f := &fabric{ns}
	if err := errors.Join(err, f.forward()); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return f, nil
}

func (f *fabric) close() error { return f.Close() }

// proxy connects what is dialed in a namespace with an address of the machine.
type proxy struct {
	listener net.Listener
	target   string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
	wg    sync.WaitGroup
}

func newProxy(ctx context.Context, ns *namespace, target string) (*proxy, error) {
	l, err := ns.listen(ctx, "tcp4", target)
	if err != nil {
		return nil, fmt.Errorf("listen at %s in the namespace: %w", target, err)
	}
	p := &proxy{listener: l, target: target, conns: map[net.Conn]bool{}}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(c) })
	}
}

func (p *proxy) serve(c net.Conn) {
	defer c.Close()
	up, err := net.Dial("tcp4", p.target)
	if err != nil {
		return
	}
	defer up.Close()
	if !p.keep(c, up) {
		return
	}
	defer p.forget(c, up)
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{c, up}, {up, c}} {
		both.Go(func() {
			// The end of one direction ends both; the reason doesn't matter.
			_, _ = io.Copy(pair[0], pair[1])
			c.Close()
			up.Close()
		})
	}
	both.Wait()
}

func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return false
	}
	for _, c := range conns {
		p.conns[c] = true
	}
	return true
}

func (p *proxy) forget(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.conns, c)
	}
}

// setCut ends all connections and refuses new ones, or lets them through again.
func (p *proxy) setCut(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	if cut {
		for c := range p.conns {
			c.Close()
		}
	}
}

func (p *proxy) close() error {
	err := p.listener.Close()
	p.setCut(true)
	p.wg.Wait()
	return err
}
