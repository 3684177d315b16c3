package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/bench/pairs"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	// block is how many packets are measured before another side has its turn: in a few milliseconds.
	block = 500
	// firstPort and lastPort are those from which first packets come, each from another one until the kernel forgets all of them.
	firstPort, lastPort = 2048, 60000
	// flowPort is that of connections whose later packets are measured.
	flowPort = 1024
)

var (
	clientAddr = netip.MustParseAddr("10.255.0.2")
	serverAddr = netip.MustParseAddr("10.254.0.2")
)

// forwarding is a machine that forwards packets between a client and a server. The server has the addresses of all endpoints. All that happens between a packet's being sent and
// its arrival is done by the thread that sends it.
type forwarding struct {
	machine, client, server *netlab.NS
	// own says that the machine is closed along with the rest.
	own     bool
	targets []netip.AddrPort
	// raw is the client's socket for first packets, and all the server's for whatever comes to endpoints.
	raw, all int
	port     uint16
	sent     uint32
}

// newBareForwarding is newForwarding with a machine that follows connections, and translates nothing.
func newBareForwarding(ctx context.Context, targets []netip.AddrPort) (*forwarding, error) {
	machine, err := netlab.New()
	if err != nil {
		return nil, err
	}
	if _, err := machine.Run(ctx, "nft", "table inet bare { chain forward { type filter hook forward priority filter; ct state invalid drop; }; }"); err != nil {
		return nil, errors.Join(err, machine.Close())
	}
	f, err := newForwarding(ctx, machine, targets)
	if err != nil {
		return nil, errors.Join(err, machine.Close())
	}
	f.own = true
	return f, nil
}

// newForwarding connects a machine with a client, which sends to targets, and a server.
func newForwarding(ctx context.Context, machine *netlab.NS, targets []netip.AddrPort) (_ *forwarding, err error) {
	f := &forwarding{machine: machine, targets: targets, raw: -1, all: -1, port: firstPort}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	for _, ns := range []**netlab.NS{&f.client, &f.server} {
		if *ns, err = netlab.New(); err != nil {
			return nil, err
		}
	}
	err = errors.Join(
		machine.IP(ctx, "link add outside type veth peer name eth0 netns "+f.client.Path(), "link add inside type veth peer name eth0 netns "+f.server.Path(),
			"link set outside up", "link set inside up", "addr add 10.255.0.1/24 dev outside", "addr add 10.254.0.1/24 dev inside", "route add 10.0.0.0/12 via "+serverAddr.String()),
		f.client.IP(ctx, "link set eth0 up", "addr add "+clientAddr.String()+"/24 dev eth0", "route add default via 10.255.0.1"),
		f.server.IP(ctx, "link set eth0 up", "addr add "+serverAddr.String()+"/24 dev eth0", "route add default via 10.254.0.1", "route add local 10.0.0.0/12 dev lo"),
		machine.Forward(), machine.RPFilter(0, "outside", "inside"), f.server.RPFilter(0, "eth0"),
	)
	if err != nil {
		return nil, err
	}
	f.raw, err = netns.In(f.client.NS, func() (int, error) {
		return unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
	})
	if err != nil {
		return nil, err
	}
	if f.all, err = datagrams(f.server, netip.AddrPortFrom(netip.IPv4Unspecified(), endpointPort), netip.AddrPort{}); err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(f.all, unix.IPPROTO_IP, unix.IP_PKTINFO, 1); err != nil {
		return nil, err
	}
	// A link that has just come up may drop packets for a moment.
	err = testkit.Within(ctx, 10*time.Second, func() error {
		_, err := f.first(targets[0])
		return err
	})
	return f, err
}

// datagrams returns a socket of a namespace that has the address at, and hears from the address to alone if that is valid.
func datagrams(ns *netlab.NS, at, to netip.AddrPort) (int, error) {
	return netns.In(ns.NS, func() (int, error) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return -1, err
		}
		err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, sockaddr(at)))
		if to.IsValid() {
			err = errors.Join(err, unix.Connect(fd, sockaddr(to)))
		}
		if err != nil {
			return -1, errors.Join(err, unix.Close(fd))
		}
		return fd, nil
	})
}

func sockaddr(a netip.AddrPort) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

// close takes client and server away, and the machine if it is the forwarding's own.
func (f *forwarding) close() error {
	var errs []error
	for _, fd := range []int{f.raw, f.all} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	for _, ns := range []*netlab.NS{f.client, f.server} {
		if ns != nil {
			errs = append(errs, ns.Close())
		}
	}
	if f.own {
		errs = append(errs, f.machine.Close())
	}
	return errors.Join(errs...)
}

// any is one of the targets.
func (f *forwarding) any(random *rand.Rand) netip.AddrPort {
	return f.targets[random.IntN(len(f.targets))]
}

// firsts returns the median of how many seconds first packets of connections to any targets take.
func (f *forwarding) firsts(ctx context.Context, random *rand.Rand) (float64, error) {
	if int(f.port)+block > lastPort {
		if _, err := f.machine.Run(ctx, "conntrack", "-F"); err != nil {
			return 0, err
		}
		f.port = firstPort
	}
	took := make([]float64, block)
	for i := range took {
		to := f.any(random)
		d, err := f.first(to)
		if err != nil {
			return 0, fmt.Errorf("a packet to %s: %w", to, err)
		}
		took[i] = d.Seconds()
	}
	return pairs.Median(took), nil
}

// first returns how long the first packet of a connection takes.
func (f *forwarding) first(target netip.AddrPort) (time.Duration, error) {
	f.port++
	f.sent++
	packet, got, to := make([]byte, 12), make([]byte, 4), sockaddr(target)
	// A checksum of 0 is none (RFC 768).
	binary.BigEndian.PutUint16(packet, f.port)
	binary.BigEndian.PutUint16(packet[2:], target.Port())
	binary.BigEndian.PutUint16(packet[4:], uint16(len(packet)))
	binary.BigEndian.PutUint32(packet[8:], f.sent)
	to.Port = 0
	began := time.Now()
	if err := unix.Sendto(f.raw, packet, 0, to); err != nil {
		return 0, err
	}
	for {
		err := receive(f.all, got)
		// One that was given up may have been late.
		if took := time.Since(began); err != nil || binary.BigEndian.Uint32(got) == f.sent {
			return took, err
		}
	}
}

// receive reads a datagram, for which it waits for a moment.
func receive(fd int, b []byte) error {
	for {
		if _, err := unix.Read(fd, b); !errors.Is(err, unix.EAGAIN) {
			return err
		}
		if ready, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000); ready == 0 && err == nil {
			return errors.New("it didn't arrive within a second")
		}
	}
}

// others returns the median of how many seconds a packet and its answer take, of a connection to any target whose ends have both sent before.
func (f *forwarding) others(_ context.Context, random *rand.Rand) (_ float64, err error) {
	from := netip.AddrPortFrom(clientAddr, flowPort)
	client, err := datagrams(f.client, from, f.any(random))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, unix.Close(client)) }()
	b := make([]byte, 4)
	if _, err := unix.Write(client, b); err != nil {
		return 0, err
	}
	endpoint, err := f.arrived()
	if err != nil {
		return 0, err
	}
	server, err := datagrams(f.server, netip.AddrPortFrom(endpoint, endpointPort), from)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, unix.Close(server)) }()
	if _, err := unix.Write(server, b); err != nil {
		return 0, err
	}
	if err := receive(client, b); err != nil {
		return 0, err
	}
	took := make([]float64, block)
	for i := range took {
		at := time.Now()
		for _, way := range [][2]int{{client, server}, {server, client}} {
			if _, err := unix.Write(way[0], b); err != nil {
				return 0, err
			}
			if err := receive(way[1], b); err != nil {
				return 0, err
			}
		}
		took[i] = time.Since(at).Seconds()
	}
	return pairs.Median(took), nil
}

// arrived waits for a packet, and returns the endpoint that it has come to.
func (f *forwarding) arrived() (netip.Addr, error) {
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(f.all), Events: unix.POLLIN}}, 1000); err != nil {
		return netip.Addr{}, err
	}
	control := make([]byte, unix.CmsgSpace(unix.SizeofInet4Pktinfo))
	_, n, _, _, err := unix.Recvmsg(f.all, make([]byte, 4), control, 0)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("the first packet of a connection: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil {
		return netip.Addr{}, err
	}
	if len(messages) != 1 || len(messages[0].Data) < unix.SizeofInet4Pktinfo {
		return netip.Addr{}, errors.New("the kernel doesn't say where a packet has come to")
	}
	// struct in_pktinfo: index of the link, own address, the packet's destination
	return netip.AddrFrom4([4]byte(messages[0].Data[8:12])), nil
}
