package egress

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// sniffer sees all packets that leave a network namespace, by whatever link.
type sniffer struct{ *netlab.Capture }

// sent is what tells packets apart.
type sent struct {
	link int // index
	dst  netip.Addr
	// sport and dport are of UDP; 0 for others.
	sport, dport uint16
}

// sniff begins to look.
func sniff(t *testing.T, ns *netnstest.NS) *sniffer {
	t.Helper()
	s := &sniffer{testkit.Must(ns.Lab().NewCapture("", func(p netlab.Packet) bool { return p.Out }))(t)}
	t.Cleanup(func() {
		if missed, err := s.Close(); err != nil || missed > 0 {
			t.Errorf("the sniffer missed %d packets, %v", missed, err)
		}
	})
	return s
}

// take returns how many packets were seen so far of each kind that is asked for, and forgets
// all.
func (s *sniffer) take(which func(sent) bool) map[sent]int {
	found := map[sent]int{}
	for _, p := range s.Take() {
		k := sent{link: p.Link, dst: p.Dst}
		if p.Protocol == unix.IPPROTO_UDP {
			k.sport, k.dport = p.SPort, p.DPort
		}
		if which(k) {
			found[k]++
		}
	}
	return found
}
