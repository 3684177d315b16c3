// Package fou opens UDP ports at which the kernel takes IP packets out of UDP (Foo over
// UDP, linux/fou.h).
//
// It owns the messages about these ports. It must not know who sends to them.
package fou

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

var (
	// ErrUnavailable: the kernel has no FoU: its module isn't loaded, and nothing loads it
	// by itself.
	ErrUnavailable = errors.New("the kernel has no FoU: the module fou is not loaded")
	// ErrTaken: something else in the network namespace has the port.
	ErrTaken = errors.New("the UDP port is taken")
)

// FOU_ of linux/fou.h.
const (
	familyName = "fou"
	version    = 1

	cmdAdd = 1
	cmdGet = 3

	attrPort    = 1
	attrFamily  = 2
	attrIPProto = 3
	attrType    = 4

	encapDirect = 1
)

// protocols are what is inside, by the family of what is outside.
var protocols = map[dataplane.Family]struct{ family, inner byte }{
	dataplane.IPv4: {unix.AF_INET, unix.IPPROTO_IPIP},
	dataplane.IPv6: {unix.AF_INET6, unix.IPPROTO_IPV6},
}

// Ensure opens a port for each family in a network namespace, for packets of the same
// family inside, unless it is open already. nil is the namespace of the process.
// ErrUnavailable, ErrTaken.
func Ensure(ctx context.Context, ns *netns.NS, port uint16, families ...dataplane.Family) error {
	h, err := rtnl.NewProtocol(ns, unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	defer h.Close()
	id, err := resolve(ctx, h)
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range families {
		errs = append(errs, ensure(ctx, h, id, port, f))
	}
	return errors.Join(errs...)
}

func ensure(ctx context.Context, h *rtnl.Handle, id uint16, port uint16, f dataplane.Family) error {
	open, err := list(ctx, h, id)
	if err != nil {
		return err
	}
	p := protocols[f]
	wanted := socket{port, p.family, p.inner, encapDirect}
	for _, s := range open {
		if s == wanted {
			return nil
		}
	}
	body := header(cmdAdd)
	body = rtnl.AppendAttribute(body, attrPort, binary.BigEndian.AppendUint16(nil, port))
	body = rtnl.AppendAttribute(body, attrFamily, []byte{p.family})
	body = rtnl.AppendAttribute(body, attrIPProto, []byte{p.inner})
	body = rtnl.AppendAttribute(body, attrType, []byte{encapDirect})
	err = h.Do(ctx, rtnl.NewRequest(id, 0, body, func() string {
		return fmt.Sprintf("fou add port %d ipproto %d (%s)", port, p.inner, f)
	}))
	if errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EALREADY) {
		return fmt.Errorf("%w: %w", err, ErrTaken)
	}
	return err
}

// socket is a port that is open.
type socket struct {
	port                    uint16
	family, protocol, encap byte
}

// list returns the ports that are open in the namespace.
func list(ctx context.Context, h *rtnl.Handle, id uint16) ([]socket, error) {
	var all []socket
	r := rtnl.NewRequest(id, 0, header(cmdGet), func() string { return "fou show" })
	err := h.Dump(ctx, r, func(body []byte) error {
		var s socket
		err := attributes(body, func(kind uint16, value []byte) error {
			switch {
			case kind == attrPort && len(value) >= 2:
				s.port = binary.BigEndian.Uint16(value)
			case kind == attrFamily && len(value) >= 1:
				s.family = value[0]
			case kind == attrIPProto && len(value) >= 1:
				s.protocol = value[0]
			case kind == attrType && len(value) >= 1:
				s.encap = value[0]
			}
			return nil
		})
		all = append(all, s)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list FoU ports: %w", err)
	}
	return all, nil
}

// resolve returns the number of the family "fou" of generic netlink; ErrUnavailable.
func resolve(ctx context.Context, h *rtnl.Handle) (uint16, error) {
	body := rtnl.AppendAttribute(header(unix.CTRL_CMD_GETFAMILY), unix.CTRL_ATTR_FAMILY_NAME, append([]byte(familyName), 0))
	var id uint16
	r := rtnl.NewRequest(unix.GENL_ID_CTRL, 0, body, func() string { return "generic netlink family " + familyName })
	err := h.Get(ctx, r, func(body []byte) error {
		return attributes(body, func(kind uint16, value []byte) error {
			if kind == unix.CTRL_ATTR_FAMILY_ID && len(value) >= 2 {
				id = binary.NativeEndian.Uint16(value)
			}
			return nil
		})
	})
	if errors.Is(err, unix.ENOENT) {
		return 0, fmt.Errorf("%w: %w", err, ErrUnavailable)
	}
	return id, err
}

// headerSize is that of struct genlmsghdr: command, version, two bytes reserved.
const headerSize = 4

func header(cmd byte) []byte { return []byte{cmd, version, 0, 0} }

func attributes(body []byte, each func(kind uint16, value []byte) error) error {
	return rtnl.EachAttribute(body[min(headerSize, len(body)):], each)
}
