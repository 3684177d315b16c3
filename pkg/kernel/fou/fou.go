//go:build !coil_vxlan

package fou

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// FOU_ of linux/fou.h. The library keeps the number of the family in a variable that nothing guards, and
// starts a goroutine for each answer, which ends the process if that is too short.
const (
	familyName = "fou"
	version    = 1

	cmdAdd = 1
	cmdDel = 2
	cmdGet = 3

	attrPort    = 1
	attrFamily  = 2
	attrIPProto = 3
	attrType    = 4

	encapDirect = 1
)

// socket is a port that is open.
type socket struct {
	port                    uint16
	family, protocol, encap byte
}

// socketOf returns the port that decapsulates packets of a family.
func socketOf(port uint16, f dataplane.Family) socket {
	if f == dataplane.IPv4 {
		return socket{port, unix.AF_INET, unix.IPPROTO_IPIP, encapDirect}
	}
	return socket{port, unix.AF_INET6, unix.IPPROTO_IPV6, encapDirect}
}

// ports are those of a network namespace.
type ports struct {
	*rtnl.Handle
	id   uint16 // of the family "fou" of generic netlink
	open []socket
}

// read returns the ports of a namespace, to be closed; ErrUnavailable.
func read(ctx context.Context, ns *netns.NS) (*ports, error) {
	h, err := rtnl.NewProtocol(ns, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, err
	}
	p := &ports{Handle: h}
	if err = p.resolve(ctx); err == nil {
		err = p.list(ctx)
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return p, nil
}

// Ensure opens a port for each family in a network namespace, for packets of the same
// family inside, unless it is open already. nil is the namespace of the process.
// ErrUnavailable, ErrTaken.
func Ensure(ctx context.Context, ns *netns.NS, port uint16, families ...dataplane.Family) error {
	p, err := read(ctx, ns)
	if err != nil {
		return err
	}
	defer p.Close()
	var errs []error
	for _, f := range families {
		s := socketOf(port, f)
		if slices.Contains(p.open, s) {
			continue
		}
		err := p.Do(ctx, p.request(cmdAdd, s, fmt.Sprintf("fou add port %d ipproto %d (%s)", port, s.protocol, f)))
		if errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EALREADY) {
			err = fmt.Errorf("%w: %w", err, ErrTaken)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Check says which of the ports that Ensure opens isn't open. Nothing is changed.
func Check(ctx context.Context, ns *netns.NS, port uint16, families ...dataplane.Family) error {
	p, err := read(ctx, ns)
	if err != nil {
		return err
	}
	defer p.Close()
	var errs []error
	for _, f := range families {
		if !slices.Contains(p.open, socketOf(port, f)) {
			errs = append(errs, fmt.Errorf("FoU port %d of %s is not open", port, f))
		}
	}
	return errors.Join(errs...)
}

// Remove closes the port that Ensure opens, in all families. That no port is open is success, also for
// want of FoU.
func Remove(ctx context.Context, ns *netns.NS, port uint16) error {
	p, err := read(ctx, ns)
	if errors.Is(err, ErrUnavailable) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	var errs []error
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		s := socketOf(port, f)
		if !slices.Contains(p.open, s) {
			continue
		}
		_, err := p.Apply(ctx, rtnl.ErrInvalid, p.request(cmdDel, s, fmt.Sprintf("fou del port %d (%s)", port, f))) // EINVAL says that there is none
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// request is a request about a port.
func (p *ports) request(cmd byte, s socket, text string) rtnl.Request {
	body := rtnl.AppendAttribute(header(cmd), attrPort, binary.BigEndian.AppendUint16(nil, s.port))
	body = rtnl.AppendAttribute(body, attrFamily, []byte{s.family})
	if cmd == cmdAdd {
		body = rtnl.AppendAttribute(body, attrIPProto, []byte{s.protocol})
		body = rtnl.AppendAttribute(body, attrType, []byte{s.encap})
	}
	return rtnl.NewRequest(p.id, 0, body, "%s", text)
}

// list reads the ports that are open.
func (p *ports) list(ctx context.Context) error {
	r := rtnl.NewRequest(p.id, 0, header(cmdGet), "fou show")
	err := p.Dump(ctx, r, func(body []byte) error {
		_, rest, as := rtnl.Cut(body, headerSize)
		p.open = append(p.open, socket{
			port:     as.Find(rest, attrPort).Port(),
			family:   as.Find(rest, attrFamily).U8(),
			protocol: as.Find(rest, attrIPProto).U8(),
			encap:    as.Find(rest, attrType).U8(),
		})
		return as.Err
	})
	if err != nil {
		return fmt.Errorf("list FoU ports: %w", err)
	}
	return nil
}

// resolve reads the number of the family; ErrUnavailable.
func (p *ports) resolve(ctx context.Context) error {
	body := rtnl.AppendAttribute(header(unix.CTRL_CMD_GETFAMILY), unix.CTRL_ATTR_FAMILY_NAME, append([]byte(familyName), 0))
	r := rtnl.NewRequest(unix.GENL_ID_CTRL, 0, body, "generic netlink family "+familyName)
	err := p.Get(ctx, r, func(body []byte) error {
		_, rest, as := rtnl.Cut(body, headerSize)
		p.id = as.Find(rest, unix.CTRL_ATTR_FAMILY_ID).U16()
		return as.Err
	})
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w: %w", err, ErrUnavailable)
	}
	return err
}

// headerSize is that of struct genlmsghdr: command, version, two bytes reserved.
const headerSize = 4

func header(cmd byte) []byte { return []byte{cmd, version, 0, 0} }
