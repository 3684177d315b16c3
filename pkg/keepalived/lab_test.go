package keepalived

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// patience is for what takes a second or two on a machine that does nothing else.
const patience = 15 * time.Second

// lab is a host and gateways on one link. The host is the network, too: its bridge br0 has the links of the gateways.
type lab struct {
	host     *netnstest.NS
	gateways []*gateway
}

// gateway is a machine that runs keepalived, whose link to the network is eth0.
type gateway struct {
	*netnstest.NS
	*Daemon
	number int
	dir    string
	cmd    *exec.Cmd
}

// newLab makes a host 10.0.0.254, fd00::254 and gateways 10.0.0.1, fd00::1 and on, whose keepaliveds run.
func newLab(t *testing.T, gateways int) *lab {
	t.Helper()
	l := &lab{host: netnstest.New(t)}
	l.host.Configure(t, "link add br0 type bridge", "link set br0 up", "addr add 10.0.0.254/24 dev br0", "addr add fd00::254/64 dev br0 nodad",
		"route add 10.1.0.0/16 dev br0", "-6 route add fd01::/64 dev br0")
	for n := 1; n <= gateways; n++ {
		g := newGateway(t, n)
		g.Configure(t, fmt.Sprintf("link add eth0 type veth peer name port%d netns %s", n, l.host.Path), "link set eth0 up",
			fmt.Sprintf("addr add 10.0.0.%d/24 dev eth0", n), fmt.Sprintf("addr add fd00::%d/64 dev eth0 nodad", n),
			fmt.Sprintf("addr add fe80::%d/64 dev eth0 nodad", n))
		l.host.Configure(t, fmt.Sprintf("link set port%d master br0 up", n))
		l.gateways = append(l.gateways, g)
		g.start(t)
	}
	return l
}

// newGateway makes one that is alone, and doesn't run keepalived yet.
func newGateway(t *testing.T, number int) *gateway {
	t.Helper()
	g := &gateway{NS: netnstest.New(t), number: number, dir: t.TempDir()}
	testkit.Check(t, os.WriteFile(g.file("keepalived.conf"), []byte("include coil/*.conf\n"), 0o644),
		os.WriteFile(g.file("keepalived"), []byte("#!/bin/sh\nexec nsenter --net="+g.Path+" keepalived \"$@\"\n"), 0o755))
	g.Daemon = New(g.options())
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(g.file("log"))
			t.Logf("log of gateway %d:\n%s", number, log[max(0, len(log)-8<<10):])
		}
	})
	return g
}

func (g *gateway) file(name string) string { return filepath.Join(g.dir, name) }

func (g *gateway) options() Options {
	return Options{
		Program: g.file("keepalived"), Main: g.file("keepalived.conf"), Fragment: g.file("coil/coil.conf"),
		PIDFile: g.file("keepalived.pid"), DumpFolder: g.dir, Patience: testkit.Timeout(5 * time.Second),
	}
}

// start runs keepalived until the test is over.
func (g *gateway) start(t *testing.T) {
	t.Helper()
	if g.cmd != nil {
		gone(t, g.cmd)
	}
	log := testkit.Must(os.OpenFile(g.file("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644))(t)
	defer log.Close()
	cmd := exec.Command("nsenter", "--net="+g.Path, "keepalived", "-n", "-l", "-G",
		"-f", g.file("keepalived.conf"), "-p", g.file("keepalived.pid"), "-r", g.file("vrrp.pid"))
	cmd.Env = append(os.Environ(), "TMPDIR="+g.dir)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	testkit.Check(t, startWithThread(t, cmd))
	g.cmd = cmd
	t.Cleanup(func() {
		end(t, cmd, syscall.SIGKILL)
		gone(t, cmd)
	})
	testkit.Eventually(t, patience, "keepalived starts", func() error {
		_, err := g.States(t.Context())
		return err
	})
}

// startWithThread starts a command that ends with this process, whatever ends that: a signal of the kernel tells it that the
// thread has ended that started it, so the thread does nothing else until the test is over.
func startWithThread(t *testing.T, cmd *exec.Cmd) error {
	started, over := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		started <- cmd.Start()
		<-over
	}()
	t.Cleanup(func() { close(over) })
	return <-started
}

// end ends keepalived with all its processes, which may be zombies for a while.
func end(t *testing.T, cmd *exec.Cmd, by syscall.Signal) {
	t.Helper()
	if cmd.ProcessState != nil {
		return
	}
	if by == syscall.SIGKILL {
		testkit.Check(t, syscall.Kill(-cmd.Process.Pid, by))
	} else {
		testkit.Check(t, cmd.Process.Signal(by))
	}
	_ = cmd.Wait() // it was killed
}

// gone waits until no process is left of a keepalived that was ended, which takes as long as the machine's init takes.
func gone(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	testkit.Eventually(t, patience, "keepalived ends", func() error {
		if err := syscall.Kill(-cmd.Process.Pid, 0); !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("processes of group %d are left: %v", cmd.Process.Pid, err)
		}
		return nil
	})
}

// kill ends keepalived so that it can't clean up.
func (g *gateway) kill(t *testing.T) { t.Helper(); end(t, g.cmd, syscall.SIGKILL) }

// stop ends keepalived as systemd does.
func (g *gateway) stop(t *testing.T) {
	t.Helper()
	end(t, g.cmd, syscall.SIGTERM)
	gone(t, g.cmd)
}

// own is an address of the gateway.
func (g *gateway) own(format string) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(format, g.number))
}

// instance is one of the gateway in a family, whose peers are the lab's other gateways.
func (l *lab) instance(g *gateway, name, source string, routerID, priority int, addresses []netip.Addr) Instance {
	i := Instance{Name: name, Interface: "eth0", RouterID: routerID, Priority: priority, Source: g.own(source), Addresses: addresses}
	for _, other := range l.gateways {
		if other != g {
			i.Peers = append(i.Peers, other.own(source))
		}
	}
	return i
}

// apply applies instances of both families; all gateways call their common instances the same.
func (g *gateway) apply(t *testing.T, instances ...Instance) {
	t.Helper()
	start := time.Now()
	if err := g.Apply(t.Context(), Config{instances}); err != nil {
		t.Fatalf("gateway %d: %v", g.number, err)
	}
	t.Logf("gateway %d: %d instances applied in %s", g.number, len(instances), time.Since(start).Round(time.Millisecond))
}

// state is that of an instance of the gateway.
func (g *gateway) state(t *testing.T, name string) InstanceState {
	t.Helper()
	s, ok := named(testkit.Must(g.States(t.Context()))(t), name)
	if !ok {
		t.Fatalf("gateway %d has no instance %s", g.number, name)
	}
	return s
}

// count counts which of some addresses the links of the gateway have.
func (g *gateway) count(t *testing.T, want []netip.Addr) (n int) {
	t.Helper()
	all := testkit.Must(netns.In(g.NS.NS, net.InterfaceAddrs))(t)
	have := map[netip.Addr]bool{}
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		testkit.Check(t, err)
		have[p.Addr()] = true
	}
	for _, a := range want {
		if have[a] {
			n++
		}
	}
	return n
}

// masters waits until the gateway is the master of an instance, and none of the others is.
func (l *lab) masters(t *testing.T, name string, master *gateway, others ...*gateway) {
	t.Helper()
	testkit.Eventually(t, patience, fmt.Sprintf("gateway %d is the master of %s", master.number, name), func() error {
		var errs []error
		for _, g := range append([]*gateway{master}, others...) {
			s := g.state(t, name)
			want, n := Backup, 0
			if g == master {
				want, n = Master, len(s.Addresses)
			}
			var all []netip.Addr
			for _, a := range s.Addresses {
				all = append(all, a.Address)
			}
			if s.State != want || s.Assigned() != n || g.count(t, all) != n {
				errs = append(errs, fmt.Errorf("gateway %d is %s and has %d of %d addresses, %d in the kernel", g.number, s.State, s.Assigned(), len(s.Addresses), g.count(t, all)))
			}
		}
		return errors.Join(errs...)
	})
}

// mac is the link-layer address that the host has of an address; "" if it has none.
func (l *lab) mac(t *testing.T, a netip.Addr) string {
	t.Helper()
	fields := strings.Fields(l.host.IP(t, "neigh", "show", "to", a.String(), "dev", "br0"))
	for i, f := range fields {
		if f == "lladdr" {
			return fields[i+1]
		}
	}
	return ""
}

// mac is the link-layer address of the gateway.
func (g *gateway) mac(t *testing.T) string {
	t.Helper()
	i := testkit.Must(netns.In(g.NS.NS, func() (*net.Interface, error) { return net.InterfaceByName("eth0") }))(t)
	return i.HardwareAddr.String()
}

// elections counts how often instances of the gateway have changed their state since it started.
func (g *gateway) elections(t *testing.T) int {
	t.Helper()
	return strings.Count(string(testkit.Must(os.ReadFile(g.file("log")))(t)), ") Entering ")
}

// some4 and some6 are addresses that gateways can answer for.
func some4(n int) (all []netip.Addr) {
	for i := 1; i <= n; i++ {
		all = append(all, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}))
	}
	return all
}

func some6(n int) (all []netip.Addr) {
	for i := 1; i <= n; i++ {
		all = append(all, netip.AddrFrom16([16]byte{0: 0xfd, 1: 1, 14: byte(i >> 8), 15: byte(i)}))
	}
	return all
}
