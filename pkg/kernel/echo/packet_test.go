package echo

import (
	"net/netip"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
)

// No bytes make the parser panic, and none without the secret are an answer.
func FuzzAnswer(f *testing.F) {
	secret := make([]byte, secretSize)
	f.Add([]byte{})
	for _, a := range []string{"10.1.1.1", "fd01::1"} {
		to := netip.MustParseAddr(a)
		packet := answerTo(protocols[dataplane.FamilyOf(to)].packet(Question{From: to, To: to}, 1, secret))
		for _, skip := range []int{0, headerIPv6} {
			for _, size := range []int{1, headerIPv4, headerIPv4 + headerICMP, len(packet)} {
				f.Add(packet[min(skip, size):min(size, len(packet))])
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for family, p := range protocols {
			p.answer(b, secret)
			if n, ok := p.answer(b, []byte("another secret's")); ok && len(b) < secretSize {
				t.Errorf("%s: %v is answer %d", family, b, n)
			}
		}
	})
}
