package conntrack

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func table(t *testing.T, ns *netnstest.NS) *Table {
	t.Helper()
	c, err := New(ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// run runs the program conntrack in the namespace.
func run(t *testing.T, ns *netnstest.NS, args ...string) string {
	t.Helper()
	out, err := ns.Run("conntrack", args...)
	if err != nil {
		t.Fatalf("conntrack %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// flows are the source ports of the namespace's flows, which tell them apart.
func flows(t *testing.T, ns *netnstest.NS) []string {
	t.Helper()
	var all []string
	for _, family := range []string{"ipv4", "ipv6"} {
		for line := range strings.Lines(run(t, ns, "-L", "-f", family)) {
			if _, ports, ok := strings.Cut(line, " sport="); ok {
				port, _, _ := strings.Cut(ports, " ")
				all = append(all, port)
			}
		}
	}
	slices.Sort(all)
	return all
}

func TestForget(t *testing.T) {
	ns := netnstest.New(t)
	const pod, pod6, other, other6, service = "10.1.0.1", "fd00::1", "10.1.0.2", "fd00::2", "10.96.0.1"
	for _, f := range []struct{ port, src, dst, replySrc, replyDst, zone string }{
		{"1001", pod, other, other, pod, ""},
		{"1002", other, pod, pod, other, ""},
		{"1003", other, service, pod, other, ""},           // to the pod, through a Service
		{"1004", pod, "192.0.2.1", "192.0.2.1", other, ""}, // from the pod, masqueraded
		{"1005", "192.0.2.1", other, other, pod, ""},       // masqueraded as the pod
		{"1006", pod6, other6, other6, pod6, ""},
		{"1007", other, pod, pod, other, "7"},
		{"2001", other, service, other, other, ""},
		{"2002", "10.1.0.11", "10.1.0.10", "10.1.0.10", "10.1.0.11", ""},
		{"2003", other6, "fd00::11", "fd00::11", other6, ""},
	} {
		args := []string{"-I", "-p", "udp", "-t", "600", "-s", f.src, "-d", f.dst, "-r", f.replySrc, "-q", f.replyDst,
			"--sport", f.port, "--dport", "53", "--reply-port-src", "53", "--reply-port-dst", f.port}
		if f.zone != "" {
			args = append(args, "--zone", f.zone)
		}
		run(t, ns, args...)
	}
	if got := flows(t, ns); len(got) != 10 {
		t.Fatalf("flows %v, want 10", got)
	}
	c := table(t, ns)
	n, err := c.Forget(t.Context(), netip.MustParseAddr(pod), netip.MustParseAddr(pod6))
	if err != nil || n != 7 {
		t.Errorf("%d flows forgotten, %v; want 7", n, err)
	}
	if got, want := flows(t, ns), []string{"2001", "2002", "2003"}; !slices.Equal(got, want) {
		t.Errorf("flows %v are left, want %v", got, want)
	}
	if n, err := c.Forget(t.Context(), netip.MustParseAddr(pod)); err != nil || n != 0 {
		t.Errorf("again: %d flows forgotten, %v", n, err)
	}
	if n, err := c.Forget(t.Context()); err != nil || n != 0 {
		t.Errorf("of no address: %d flows forgotten, %v", n, err)
	}
}

// udp is the request that makes a flow of UDP between two addresses.
func udp(src, dst [4]byte, sport uint16) rtnl.Request {
	const typeNew = unix.NFNL_SUBSYS_CTNETLINK << 8 // IPCTNL_MSG_CT_NEW
	nested := func(kind uint16, parts ...[]byte) []byte {
		return rtnl.AppendAttribute(nil, kind|unix.NLA_F_NESTED, slices.Concat(parts...))
	}
	tuple := func(kind uint16, src, dst [4]byte, sport, dport uint16) []byte {
		return nested(kind,
			nested(ctaTupleIP, rtnl.AppendAttribute(nil, ctaIPv4Src, src[:]), rtnl.AppendAttribute(nil, ctaIPv4Dst, dst[:])),
			nested(2, // CTA_TUPLE_PROTO: number, source port, destination port
				rtnl.AppendAttribute(nil, 1, []byte{unix.IPPROTO_UDP}),
				rtnl.AppendAttribute(nil, 2, binary.BigEndian.AppendUint16(nil, sport)),
				rtnl.AppendAttribute(nil, 3, binary.BigEndian.AppendUint16(nil, dport))))
	}
	body := slices.Concat([]byte{unix.AF_INET, 0, 0, 0},
		tuple(ctaTupleOrig, src, dst, sport, 53), tuple(ctaTupleReply, dst, src, 53, sport),
		rtnl.AppendAttribute(nil, 7, binary.BigEndian.AppendUint32(nil, 600))) // CTA_TIMEOUT, in seconds
	return rtnl.NewRequest(typeNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, body, "conntrack -I")
}

// A node may have a hundred thousand flows when a pod ends.
func TestForgetInALargeTable(t *testing.T) {
	const many = 100_000
	ns := netnstest.New(t)
	c := table(t, ns)
	var reqs []rtnl.Request
	for i := range many {
		reqs = append(reqs, udp([4]byte{10, 1, byte(i >> 8), byte(i)}, [4]byte{10, 2, 0, 1}, uint16(1024+i>>16)))
	}
	if err := c.h.Do(t.Context(), reqs...); err != nil {
		t.Fatal(err)
	}
	var pods []netip.Addr
	for i := range 100 {
		pods = append(pods, netip.AddrFrom4([4]byte{10, 1, 7, byte(i)}))
	}
	begin := time.Now()
	n, err := c.Forget(t.Context(), pods...)
	took := time.Since(begin)
	if want := 200; err != nil || n != want { // each has two: 100,000 are more than 65,536
		t.Errorf("%d flows forgotten, %v; want %d", n, err, want)
	}
	again, err := c.Forget(t.Context(), pods...)
	if err != nil || again != 0 {
		t.Errorf("again: %d flows forgotten, %v", again, err)
	}
	t.Logf("100 addresses forgotten among %d flows in %s", many, took)
	if allocs := testing.AllocsPerRun(1, func() { _, _ = c.Forget(t.Context(), pods...) }); allocs > 5000 {
		t.Errorf("%.0f allocations for a table of %d flows, want them not to grow with it", allocs, many)
	}
}

// One flow is found by its first packet, also if it is translated, and others aren't; flows of packets that coild sent are told.
func TestFind(t *testing.T) {
	ns := netnstest.New(t)
	c := table(t, ns)
	at := netip.MustParseAddrPort
	if _, ok, err := c.Find(t.Context(), unix.IPPROTO_UDP, at("10.1.0.1:1001"), at("192.0.2.1:53")); err != nil || ok {
		t.Errorf("without flows: %v, %v", ok, err)
	}
	run(t, ns, "-I", "-p", "udp", "-t", "600", "-s", "10.1.0.1", "-d", "192.0.2.1", "-r", "192.0.2.1", "-q", "198.51.100.7", "--sport", "1001", "--dport", "53", "--reply-port-src", "53", "--reply-port-dst", "2002")
	run(t, ns, "-I", "-p", "tcp", "-t", "600", "-s", "fd00::1", "-d", "fd00::2", "--sport", "1001", "--dport", "443", "--state", "SYN_SENT")
	run(t, ns, "-I", "-p", "icmp", "-t", "600", "-s", "10.1.0.1", "-d", "192.0.2.1", "--icmp-type", "8", "--icmp-code", "0", "--icmp-id", "77")
	for _, f := range []struct {
		protocol byte
		src, dst string
		source   string // as which it goes on; empty if there is none
	}{
		{unix.IPPROTO_UDP, "10.1.0.1:1001", "192.0.2.1:53", "198.51.100.7:2002"},
		{unix.IPPROTO_UDP, "10.1.0.1:1002", "192.0.2.1:53", ""},
		{unix.IPPROTO_UDP, "10.1.0.1:1001", "192.0.2.1:54", ""},
		{unix.IPPROTO_TCP, "10.1.0.1:1001", "192.0.2.1:53", ""},
		{unix.IPPROTO_TCP, "[fd00::1]:1001", "[fd00::2]:443", "[fd00::1]:1001"},
		{unix.IPPROTO_ICMP, "10.1.0.1:77", "192.0.2.1:0", "10.1.0.1:77"},
		{unix.IPPROTO_ICMP, "10.1.0.1:78", "192.0.2.1:0", ""},
	} {
		got, ok, err := c.Find(t.Context(), f.protocol, at(f.src), at(f.dst))
		if err != nil || ok != (f.source != "") || ok && got.Source != at(f.source) {
			t.Errorf("protocol %d from %s to %s: %+v, %v, %v; want %q", f.protocol, f.src, f.dst, got, ok, err, f.source)
		}
	}
	if _, _, err := c.Find(t.Context(), unix.IPPROTO_ICMP, at("[fd00::1]:1"), at("[fd00::2]:0")); err == nil {
		t.Error("ICMP of IPv6 addresses was looked for")
	}
	got, err := c.Sent(t.Context(), inspection.Flows{Client: netip.MustParseAddr("10.1.0.1"), Protocol: inspection.ICMP, To: at("192.0.2.1:0"), IDs: []uint16{76, 77}})
	if want := (inspection.Flow{ID: 77, Source: "10.1.0.1", Destination: "192.0.2.1"}); err != nil || len(got) != 1 || got[0].ID != want.ID || got[0].Source != want.Source || got[0].Destination != want.Destination {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}
