package rtnl

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// encoder appends the parts of a message.
type encoder struct{ b []byte }

func (e *encoder) u16(v uint16) { e.b = binary.NativeEndian.AppendUint16(e.b, v) }
func (e *encoder) u32(v uint32) { e.b = binary.NativeEndian.AppendUint32(e.b, v) }
func (e *encoder) pad()         { e.b = append(e.b, make([]byte, align(len(e.b))-len(e.b))...) }

// datagram builds what the kernel would send.
type datagram struct{ encoder }

func (d *datagram) message(kind, flags uint16, seq uint32, body []byte) {
	d.u32(uint32(unix.SizeofNlMsghdr + len(body)))
	d.u16(kind)
	d.u16(flags)
	d.u32(seq)
	d.u32(0)
	d.b = append(d.b, body...)
	d.pad()
}

// script plays the kernel: it ignores what it is sent and answers with datagrams.
type script [][]byte

func (s *script) write([]byte) error { return nil }

func (s *script) read(b []byte) (int, error) {
	if len(*s) == 0 {
		return 0, unix.EAGAIN
	}
	next := (*s)[0]
	*s = (*s)[1:]
	return copy(b, next), nil
}

func request(text string) Request { return Request{text: func() string { return text }} }

func TestDumpInterrupted(t *testing.T) {
	entry := func(flags uint16) []byte {
		var d datagram
		d.message(unix.RTM_NEWROUTE, unix.NLM_F_MULTI|flags, 1, make([]byte, 12))
		return d.b
	}
	done := func(flags uint16, body []byte) []byte {
		var d datagram
		d.message(unix.NLMSG_DONE, unix.NLM_F_MULTI|flags, 1, body)
		return d.b
	}
	failed := encoder{}
	errno := -int32(unix.ENOBUFS)
	failed.u32(uint32(errno))
	for _, c := range []struct {
		name    string
		answers script
		entries int
		is      error
	}{
		{"complete", script{entry(0), entry(0), done(0, make([]byte, 4))}, 2, nil},
		{"complete, in one datagram", script{append(entry(0), done(0, nil)...)}, 1, nil},
		{"interrupted at the first", script{entry(unix.NLM_F_DUMP_INTR), entry(0), done(0, nil)}, 2, ErrDumpInterrupted},
		{"interrupted at the end", script{entry(0), done(unix.NLM_F_DUMP_INTR, nil)}, 1, ErrDumpInterrupted},
		{"failed at the end", script{entry(0), done(0, failed.b)}, 1, unix.ENOBUFS},
		{"no end", script{entry(0), entry(0)}, 2, unix.EAGAIN},
	} {
		t.Run(c.name, func(t *testing.T) {
			entries := 0
			err := (&conn{transport: &c.answers}).ask(request("show"), unix.NLM_F_DUMP, func([]byte) error {
				entries++
				return nil
			})
			if entries != c.entries || !errors.Is(err, c.is) || c.is == nil && err != nil {
				t.Errorf("%d entries, %v", entries, err)
			}
		})
	}
	unreadable := errors.New("unreadable")
	answers := script{entry(0), entry(0), done(0, nil)}
	err := (&conn{transport: &answers}).ask(request("show"), unix.NLM_F_DUMP, func([]byte) error { return unreadable })
	if !errors.Is(err, unreadable) || len(answers) != 0 {
		t.Errorf("got %v with %d datagrams left", err, len(answers))
	}
}

// A program in a pod makes as many routes as it likes; the agent doesn't keep them all in memory.
func TestListOfAPodIsBounded(t *testing.T) {
	for _, c := range []struct {
		name    string
		most    int
		objects int
		foreign bool
		is      error
	}{
		{"the node's own", 0, 5000, false, nil},
		{"a pod's", 4096, 4096, false, nil},
		{"too many of a pod", 4096, 5000, false, ErrTooMany},
		{"too many of a pod that aren't Coil's", 4096, 5000, true, ErrTooMany},
	} {
		var answers script
		for range c.objects {
			var d datagram
			d.message(unix.RTM_NEWROUTE, unix.NLM_F_MULTI, 1, make([]byte, 12))
			answers = append(answers, d.b)
		}
		var done datagram
		done.message(unix.NLMSG_DONE, unix.NLM_F_MULTI, 1, make([]byte, 4))
		answers = append(answers, done.b)
		h := &Handle{idle: make(chan *conn, 1), ports: map[uint32]time.Time{}}
		h.Bound(c.most)
		h.idle <- &conn{transport: &answers}
		all, err := List(t.Context(), h, request("show"), func([]byte) (int, bool, error) { return 0, !c.foreign, nil })
		if !errors.Is(err, c.is) || c.is == nil && (err != nil || len(all) != c.objects) || c.is != nil && all != nil {
			t.Errorf("%s: %d objects, %v", c.name, len(all), err)
		}
		// The rest would take the kernel long.
		if left := len(answers); (left > 0) != (c.is != nil) {
			t.Errorf("%s: %d datagrams aren't read", c.name, left)
		}
	}
}

// The namespace of a pod is bounded, the node's isn't.
func TestOnlyPodsAreBounded(t *testing.T) {
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	for name, open := range map[string]func(*netns.NS) (*Handle, error){"a pod": NewOfPod, "the node": New} {
		h, err := open(ns)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		if bounded := h.most > 0; bounded != (name == "a pod") {
			t.Errorf("%s: a list takes at most %d messages", name, h.most)
		}
	}
}

// A program in a pod that finds an answer at which the agent panics doesn't take all its files.
func TestPanicClosesTheSocket(t *testing.T) {
	h, err := New(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	fd := 0
	func() {
		defer func() {
			if p := recover(); p != "at fault" {
				t.Errorf("the caller's panic is %v", p)
			}
		}()
		_ = h.with(func(c *conn) error {
			fd = c.fd
			panic("at fault")
		})
	}()
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) || len(h.idle) != 0 {
		t.Errorf("the socket is open: %v, %d are idle", err, len(h.idle))
	}
}

// A listener that can't be made leaves no socket open: it is tried again and again.
func TestListenClosesTheSocket(t *testing.T) {
	free := func() int {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		return fd
	}
	before := free()
	if _, err := listen(unix.NETLINK_ROUTE, nil, []int{1 << 20}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a group that doesn't exist: %v", err)
	}
	if after := free(); after != before {
		t.Errorf("the first free descriptor was %d and is %d", before, after)
	}
}

func TestBatch(t *testing.T) {
	answer := func(seq uint32, errno unix.Errno) []byte {
		var d datagram
		var body encoder
		body.u32(uint32(-int32(errno)))
		body.b = append(body.b, make([]byte, unix.SizeofNlMsghdr)...)
		d.message(unix.NLMSG_ERROR, 0, seq, body.b)
		return d.b
	}
	reqs := []Request{request("one"), request("two"), request("three")}
	for _, c := range []struct {
		name    string
		answers script
		errs    []error
		is      error
	}{
		{"all succeed", script{answer(3, 0)}, []error{nil, nil, nil}, nil},
		{"one is refused", script{answer(2, unix.EEXIST), answer(3, 0)}, []error{nil, unix.EEXIST, nil}, nil},
		{"the last is refused", script{answer(3, unix.EEXIST)}, []error{nil, nil, unix.EEXIST}, nil},
		{"all are refused", script{answer(1, unix.EPERM), answer(2, unix.EPERM), answer(3, unix.EPERM)}, []error{unix.EPERM, unix.EPERM, unix.EPERM}, nil},
		{"no answer", script{answer(1, unix.EPERM)}, []error{unix.EPERM, nil, nil}, unix.EAGAIN},
		{"an answer to something else", script{answer(4, 0)}, []error{nil, nil, nil}, errMalformed},
	} {
		t.Run(c.name, func(t *testing.T) {
			results := make([]error, len(reqs))
			err := (&conn{transport: &c.answers}).batch(reqs, results)
			if !errors.Is(err, c.is) || c.is == nil && err != nil {
				t.Errorf("got %v", err)
			}
			for i := range results {
				if !errors.Is(results[i], c.errs[i]) || c.errs[i] == nil && results[i] != nil {
					t.Errorf("request %d: %v", i, results[i])
				}
			}
		})
	}
}

func TestSplit(t *testing.T) {
	ack := make([]byte, 4+unix.SizeofNlMsghdr)
	for _, c := range []struct {
		name  string
		build func(*datagram)
		kinds []uint16
		bad   bool
	}{
		{"two messages", func(d *datagram) {
			d.message(unix.RTM_NEWLINK, 0, 1, make([]byte, 17))
			d.message(unix.NLMSG_ERROR, 0, 1, ack)
		}, []uint16{unix.RTM_NEWLINK, unix.NLMSG_ERROR}, false},
		{"a message longer than the datagram", func(d *datagram) {
			d.message(unix.RTM_NEWLINK, 0, 1, make([]byte, 16))
			binary.NativeEndian.PutUint32(d.b, 1000)
		}, nil, true},
		{"a message shorter than its header", func(d *datagram) {
			d.message(unix.RTM_NEWLINK, 0, 1, make([]byte, 16))
			binary.NativeEndian.PutUint32(d.b, 3)
		}, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var d datagram
			c.build(&d)
			var kinds []uint16
			_, err := split(d.b, func(m Message) (bool, error) {
				kinds = append(kinds, m.kind)
				return true, nil
			})
			if c.bad != errors.Is(err, errMalformed) || len(kinds) != len(c.kinds) {
				t.Errorf("got %v, %v", kinds, err)
			}
		})
	}
}

func TestAcknowledgement(t *testing.T) {
	var d datagram
	body := encoder{}
	errno := -int32(unix.EEXIST)
	body.u32(uint32(errno))
	body.b = append(body.b, make([]byte, unix.SizeofNlMsghdr)...)
	body.b = append(body.b, word(unix.NLMSGERR_ATTR_MSG, "no room").Serialize()...)
	d.message(unix.NLMSG_ERROR, unix.NLM_F_ACK_TLVS|unix.NLM_F_CAPPED, 5, body.b)
	_, err := split(d.b, func(m Message) (bool, error) {
		got, words, err := m.acknowledged()
		if got != unix.EEXIST || words != "no room" || err != nil {
			t.Errorf("got %v, %q, %v", got, words, err)
		}
		return true, nil
	})
	if err != nil {
		t.Error(err)
	}
	if _, _, err := (Message{kind: unix.NLMSG_ERROR, Body: []byte{1}}).acknowledged(); !errors.Is(err, errMalformed) {
		t.Errorf("a short one: %v", err)
	}
	if got, _, err := (Message{kind: unix.NLMSG_DONE}).acknowledged(); got != 0 || err != nil {
		t.Errorf("an empty NLMSG_DONE: %v, %v", got, err)
	}
}

func TestAttributes(t *testing.T) {
	e := encoder{append(number(1, 0x01020304).Serialize(), nest(2, word(3, "abc")).Serialize()...)}
	parse := func(b []byte) ([]Attribute, error) {
		var as Attributes
		return slices.Collect(as.In(b)), as.Err
	}
	as, err := parse(e.b)
	if err != nil || len(as) != 2 || as[0].U32() != 0x01020304 || as[1].Kind != 2 {
		t.Fatalf("got %v, %v", as, err)
	}
	inner, err := parse(as[1].Value)
	if err != nil || len(inner) != 1 || inner[0].Text() != "abc" {
		t.Errorf("got %v, %v", inner, err)
	}
	var found Attributes
	if a := found.Find(e.b, 2, 3); a.Kind != 3 || a.Text() != "abc" {
		t.Errorf("found %v in another attribute", a)
	}
	for _, path := range [][]uint16{{4}, {2, 4}, {4, 3}, {3}} {
		if a := found.Find(e.b, path...); a.Kind != 0 || a.Value != nil {
			t.Errorf("found %v at %d, where nothing is", a, path)
		}
	}
	if a := (&Attributes{}).Find(e.b[:len(e.b)-8], 1); a.U32() != 0x01020304 {
		t.Errorf("found %v before a malformed one", a)
	}
	if short := (Attribute{}); short.U8() != 0 || short.U32() != 0 || short.Addr().IsValid() {
		t.Error("an empty attribute has a value")
	}
	for _, n := range []uint16{3, 100} {
		binary.NativeEndian.PutUint16(e.b, n)
		if as, err := parse(e.b); !errors.Is(err, errMalformed) || len(as) > 0 {
			t.Errorf("attribute of %d bytes: %v, %v", n, as, err)
		}
		var as Attributes
		if a := as.Find(e.b, 2); a.Kind != 0 || !errors.Is(as.Err, errMalformed) {
			t.Errorf("behind an attribute of %d bytes: %v, %v", n, a, as.Err)
		}
	}
}

func TestErrorIs(t *testing.T) {
	all := []error{ErrExist, ErrNotExist, ErrInvalid, ErrNoFamily}
	for errno, want := range map[unix.Errno]error{
		unix.EEXIST: ErrExist, unix.ENODEV: ErrNotExist, unix.ESRCH: ErrNotExist, unix.ENOENT: ErrNotExist,
		unix.ENETUNREACH: ErrNotExist, unix.EADDRNOTAVAIL: ErrNotExist, unix.EINVAL: ErrInvalid,
		unix.EBUSY: nil, unix.EAFNOSUPPORT: ErrNoFamily, unix.EPERM: nil,
	} {
		err := &Error{Request: request("link del 3"), Errno: errno, Detail: "why"}
		for _, e := range all {
			if errors.Is(err, e) != (e == want) {
				t.Errorf("%v is %v: %t", errno, e, errors.Is(err, e))
			}
		}
		if !errors.Is(err, errno) || !strings.HasPrefix(err.Error(), "link del 3: ") || !strings.HasSuffix(err.Error(), ": why") {
			t.Errorf("got %q", err)
		}
	}
}
