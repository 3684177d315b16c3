package conntrack

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Only flows whose destination is translated are asked about, each with where it leads.
func TestForgetForwarded(t *testing.T) {
	ns := netnstest.New(t)
	for _, f := range []struct{ port, src, dst, replySrc, replyDst, to string }{
		{"1001", "192.0.2.1", "198.51.100.1", "10.1.0.1", "192.0.2.1", "5353"},
		{"1002", "192.0.2.1", "198.51.100.1", "10.1.0.2", "192.0.2.1", "5353"},
		{"1003", "2001:db8:2::1", "2001:db8::1", "fd01::1", "2001:db8:2::1", "5353"},
		{"2001", "192.0.2.1", "198.51.100.1", "198.51.100.1", "192.0.2.1", "53"},
		{"2002", "192.0.2.1", "198.51.100.1", "198.51.100.1", "10.0.0.1", "53"},
	} {
		run(t, ns, "-I", "-p", "udp", "-t", "600", "-s", f.src, "-d", f.dst, "-r", f.replySrc, "-q", f.replyDst,
			"--sport", f.port, "--dport", "53", "--reply-port-src", f.to, "--reply-port-dst", f.port)
	}
	var asked []string
	n, err := table(t, ns).ForgetForwarded(t.Context(), func(f Forwarded) bool {
		asked = append(asked, f.To.String()+" "+f.Endpoint.String())
		return f.Endpoint == netip.MustParseAddrPort("10.1.0.1:5353") || f.Endpoint == netip.MustParseAddrPort("[fd01::1]:5353")
	})
	slices.Sort(asked)
	if want := []string{"198.51.100.1:53 10.1.0.1:5353", "198.51.100.1:53 10.1.0.2:5353", "[2001:db8::1]:53 [fd01::1]:5353"}; err != nil || n != 2 || !slices.Equal(asked, want) {
		t.Errorf("%d flows were forgotten, %v, of %q, want 2 of %q", n, err, asked, want)
	}
	if got, want := flows(t, ns), []string{"1002", "2001", "2002"}; !slices.Equal(got, want) {
		t.Errorf("flows %v are left, want %v", got, want)
	}
}
