package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// transport sends and receives datagrams.
type transport interface {
	write(b []byte) error
	// read returns the size of the datagram, of which b has as much as fits.
	read(b []byte) (int, error)
}

// conn is a conversation with the kernel, by a socket of our own: the library's takes twice the time
// for an answer, and sends one request at a time. After an error of transport its state
// is unknown and it must be closed. It isn't safe for concurrent use.
type conn struct {
	socket
	transport
	// port is the socket's address (nl_pid of netlink(7)).
	port uint32
	seq  uint32
	out  []byte
}

// socket is a netlink socket.
type socket struct{ fd int }

// replyTimeout bounds the wait for an answer. rtnetlink answers within the call
// that sends, so that this only guards against a lost datagram.
const replyTimeout = 10 * time.Second

// buffers are for receiving. The kernel fills dumps up to 32 KiB at a time.
var buffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// dial opens a socket of a netlink protocol in the network namespace of the calling
// thread.
func dial(protocol int) (c *conn, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	// Errors carry the kernel's own words (EXT_ACK) and not a copy of the request
	// (CAP_ACK); dumps are filtered by the kernel (GET_STRICT_CHK, Linux 4.20).
	// Without them everything works still, so that a refusal isn't an error.
	for _, option := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK, unix.NETLINK_GET_STRICT_CHK} {
		_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, option, 1)
	}
	tv := unix.NsecToTimeval(replyTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return nil, fmt.Errorf("set timeout of netlink socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("bind netlink socket: %w", err)
	}
	bound, err := unix.Getsockname(fd)
	if err != nil {
		return nil, fmt.Errorf("address of netlink socket: %w", err)
	}
	c = &conn{socket: socket{fd}, transport: socket{fd}}
	if sa, ok := bound.(*unix.SockaddrNetlink); ok {
		c.port = sa.Pid
	}
	return c, nil
}

func (s socket) close() { _ = unix.Close(s.fd) }

func (s socket) write(b []byte) error {
	for {
		err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (s socket) read(b []byte) (int, error) {
	for {
		// With MSG_TRUNC the result is the size that was sent.
		n, from, err := unix.Recvfrom(s.fd, b, unix.MSG_TRUNC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if sa, ok := from.(*unix.SockaddrNetlink); err == nil && (!ok || sa.Pid != 0) {
			continue // not from the kernel
		}
		return n, err
	}
}

// append adds a request to the datagram that is being built.
func (c *conn) append(r Request, flags uint16) {
	c.seq++
	n := unix.SizeofNlMsghdr + len(r.body)
	b := binary.NativeEndian.AppendUint32(c.out, uint32(n))
	b = binary.NativeEndian.AppendUint16(b, r.kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|r.flags|flags)
	b = binary.NativeEndian.AppendUint32(b, c.seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, r.body...)
	c.out = append(b, make([]byte, align(n)-n)...)
}

// Kind is the type of the message.
func (m Message) Kind() uint16 { return m.kind }

// send sends the datagram that was built.
func (c *conn) send() error {
	err := c.transport.write(c.out)
	c.out = c.out[:0]
	if err != nil {
		return fmt.Errorf("send to netlink: %w", err)
	}
	return nil
}

// Message is one message that was received; Body is valid until the next one.
type Message struct {
	kind, flags uint16
	seq, port   uint32
	Body        []byte
}

// receive calls each with the messages that arrive, until it returns false or an
// error.
func (c *conn) receive(each func(Message) (bool, error)) error {
	buf := buffers.Get().(*[64 << 10]byte)
	defer buffers.Put(buf)
	for {
		n, err := c.transport.read(buf[:])
		if err != nil {
			return fmt.Errorf("receive from netlink: %w", err)
		}
		if n > len(buf) {
			return fmt.Errorf("receive from netlink: datagram of %d bytes: %w", n, errMalformed)
		}
		more, err := split(buf[:n], each)
		if err != nil || !more {
			return err
		}
	}
}

// split calls each with the messages of a datagram, until it returns false or
// an error.
func split(b []byte, each func(Message) (bool, error)) (more bool, err error) {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.SizeofNlMsghdr || n > len(b) {
			return false, fmt.Errorf("message of %d bytes in %d bytes: %w", n, len(b), errMalformed)
		}
		m := Message{
			kind:  binary.NativeEndian.Uint16(b[4:]),
			flags: binary.NativeEndian.Uint16(b[6:]),
			seq:   binary.NativeEndian.Uint32(b[8:]),
			port:  binary.NativeEndian.Uint32(b[12:]),
			Body:  b[unix.SizeofNlMsghdr:n],
		}
		if more, err = each(m); err != nil || !more {
			return more, err
		}
		b = b[min(align(n), len(b)):]
	}
	return true, nil
}

// acknowledged reads the errno of an NLMSG_ERROR or NLMSG_DONE message, and the
// kernel's words about it.
func (m Message) acknowledged() (unix.Errno, string, error) {
	if len(m.Body) < 4 {
		if m.kind == unix.NLMSG_DONE {
			return 0, "", nil
		}
		return 0, "", fmt.Errorf("acknowledgement of %d bytes: %w", len(m.Body), errMalformed)
	}
	errno := unix.Errno(-int32(binary.NativeEndian.Uint32(m.Body)))
	if m.flags&unix.NLM_F_ACK_TLVS == 0 {
		return errno, "", nil
	}
	tlvs := m.Body[4:]
	if m.kind == unix.NLMSG_ERROR {
		// The header of the request, and all of it without NLM_F_CAPPED.
		skip := unix.SizeofNlMsghdr
		if m.flags&unix.NLM_F_CAPPED == 0 && len(tlvs) >= skip {
			skip = align(int(binary.NativeEndian.Uint32(tlvs)))
		}
		tlvs = tlvs[min(skip, len(tlvs)):]
	}
	var as Attributes // the words are a courtesy, the errno counts
	return errno, as.Find(tlvs, unix.NLMSGERR_ATTR_MSG).Text(), nil
}

// batch sends requests in one datagram and puts the error of each, or nil, into
// results, which is of the same length. The kernel works through all of them
// also when one fails. The error is one of transport.
func (c *conn) batch(reqs []Request, results []error) error {
	first := c.seq + 1
	for i, r := range reqs {
		// Errors are reported anyway; success only of the last, which says that the
		// kernel is through.
		var ack uint16
		if i == len(reqs)-1 {
			ack = unix.NLM_F_ACK
		}
		c.append(r, ack)
	}
	last := c.seq
	if err := c.send(); err != nil {
		return err
	}
	return c.receive(func(m Message) (bool, error) {
		i := m.seq - first
		if m.kind != unix.NLMSG_ERROR || i >= uint32(len(reqs)) {
			return false, fmt.Errorf("answer of type %d to message %d: %w", m.kind, m.seq, errMalformed)
		}
		errno, words, err := m.acknowledged()
		if err == nil && errno != 0 {
			results[i] = &Error{Request: reqs[i], Errno: errno, Detail: words}
		}
		return m.seq != last, err
	})
}

// ask sends a request and calls found with each answer: of a dump (NLM_F_DUMP) there
// are any number, otherwise it is one. When the answers of a dump are not one consistent
// list, the error is ErrDumpInterrupted and they must be thrown away.
func (c *conn) ask(r Request, flags uint16, found func(body []byte) error) error {
	c.append(r, flags)
	if err := c.send(); err != nil {
		return err
	}
	dump := flags&unix.NLM_F_DUMP != 0
	var failure error
	interrupted := false
	err := c.receive(func(m Message) (bool, error) {
		if m.seq != c.seq {
			return false, fmt.Errorf("answer to message %d: %w", m.seq, errMalformed)
		}
		interrupted = interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
		if m.kind != unix.NLMSG_ERROR && m.kind != unix.NLMSG_DONE {
			if failure == nil {
				failure = found(m.Body)
			}
			// The kernel's time for the rest of the list grows with its square; the caller closes the socket.
			return dump && !errors.Is(failure, ErrTooMany), nil
		}
		errno, words, err := m.acknowledged()
		if err == nil && (errno != 0 || !dump) {
			failure = &Error{Request: r, Errno: errno, Detail: words}
		}
		return false, err
	})
	switch {
	case err != nil:
		return err
	case failure != nil:
		return failure
	case interrupted:
		return fmt.Errorf("%s: %w", r, ErrDumpInterrupted)
	}
	return nil
}
