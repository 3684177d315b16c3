package echo

import (
	"bytes"
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
			n, ok := p.answer(b, secret)
			if other, is := p.answer(b, []byte("another secret's")); is && (ok || !bytes.HasSuffix(b, []byte("another secret's"))) {
				t.Errorf("%s: %x is answer %d, also without the secret %d", family, b, n, other)
			}
			if ok && (!bytes.HasSuffix(b, secret) || b[len(b)-secretSize-headerICMP] != p.reply) {
				t.Errorf("%s: %x is answer %d", family, b, n)
			}
		}
	})
}
