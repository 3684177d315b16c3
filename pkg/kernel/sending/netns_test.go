package sending

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// A pod sends by its host: to hosts that answer, refuse, are told to be unreachable or prohibited by a router, and are silent.
func TestSendFromNamespace(t *testing.T) {
	host, pod := netnstest.New(t), netnstest.New(t)
	ctx := t.Context()
	testkit.Check(t,
		host.Lab().Forward(),
		// Only errors about routes are limited then: five, and one more each second.
		host.Lab().Sysctl("ipv4/icmp_ratemask=0", "ipv6/icmp/ratelimit=0"),
		host.Lab().IP(ctx, fmt.Sprintf("link add pod type veth peer name eth0 netns %s", pod.Lab().Path()),
			"link set pod up", "addr add 192.0.2.1/24 dev pod", "addr add 2001:db8::1/64 dev pod nodad",
			"route add unreachable 198.51.100.0/25", "route add prohibit 198.51.100.128/25", "route add blackhole 203.0.113.0/24",
			"route add unreachable 2001:db8:1::/48", "route add blackhole 2001:db8:2::/48"),
		pod.Lab().IP(ctx, "link set eth0 up", "addr add 192.0.2.7/24 dev eth0", "addr add 2001:db8::7/64 dev eth0 nodad",
			"route add default via 192.0.2.1", "route add default via 2001:db8::1", "route add unreachable 198.18.0.0/24"),
	)
	testkit.Eventually(t, 10*time.Second, "the host answers", func() error { return pod.Ping(netip.MustParseAddr("2001:db8::1"), time.Second) })
	type answer struct {
		to    string
		words string
		by    string
	}
	for at, from := range map[string]string{"192.0.2.1": "192.0.2.7", "2001:db8::1": "2001:db8::7"} {
		tcp, answering, silent := listen(t, at, host.Do)
		v4 := tcp.Addr().Is4()
		const refusing = "9"
		port := func(a netip.AddrPort) string { return a.String() }
		closed := net.JoinHostPort(at, refusing)
		of := map[Kind][]answer{
			Echo: {{at, "echo reply", at}},
			TCP:  {{port(tcp), "SYN-ACK", at}, {closed, "RST", at}},
			UDP:  {{port(answering), "datagram", at}, {port(silent), "", ""}, {closed, "port unreachable (ICMP type 3, code 3)", at}},
		}
		if v4 {
			for kind, suffix := range map[Kind]string{Echo: "", TCP: ":9", UDP: ":9"} {
				of[kind] = append(of[kind], answer{"198.51.100.1" + suffix, "host unreachable (ICMP type 3, code 1)", at}, answer{"203.0.113.5" + suffix, "", ""})
			}
			of[Echo] = append(of[Echo], answer{"198.51.100.129", "communication prohibited (ICMP type 3, code 13)", at})
		} else {
			of[UDP][2].words = "port unreachable (ICMPv6 type 1, code 4)"
			of[Echo] = append(of[Echo], answer{"2001:db8:1::5", "no route (ICMPv6 type 1, code 0)", at}, answer{"2001:db8:2::5", "", ""})
			of[TCP] = append(of[TCP], answer{"[2001:db8:1::5]:9", "no route (ICMPv6 type 1, code 0)", at}, answer{"[2001:db8:2::5]:9", "", ""})
			of[UDP] = append(of[UDP], answer{"[2001:db8:1::5]:9", "no route (ICMPv6 type 1, code 0)", at})
		}
		for kind, all := range of {
			for _, c := range all {
				t.Run(fmt.Sprintf("%d to %s", kind, c.to), func(t *testing.T) {
					order := Order{Kind: kind, Count: 2, Interval: 20 * time.Millisecond, Wait: testkit.Timeout(5 * time.Second)}
					switch {
					case c.words == "":
						order.Wait = 100 * time.Millisecond
					case !strings.HasPrefix(c.words, "port") && strings.Contains(c.words, "ICMP"):
						order.Count = 1
					}
					if kind == Echo {
						order.To = netip.AddrPortFrom(netip.MustParseAddr(c.to), 0)
					} else {
						order.To = netip.MustParseAddrPort(c.to)
					}
					source, got, err := Send(ctx, pod.NS, order)
					if err != nil || source.String() != from || len(got) != order.Count {
						t.Fatalf("from %s: %+v, %v", source, got, err)
					}
					for _, o := range got {
						by := ""
						if o.By.IsValid() {
							by = o.By.String()
						}
						if o.Words(kind, v4) != c.words || by != c.by || o.NotSent != nil {
							t.Errorf("%+v: %q by %q, want %q by %q", o, o.Words(kind, v4), by, c.words, c.by)
						}
					}
				})
			}
		}
	}
	for _, kind := range []Kind{Echo, UDP, TCP} {
		order := Order{Kind: kind, Count: 1, To: netip.MustParseAddrPort("198.18.0.1:9"), Wait: time.Minute}
		if kind == Echo {
			order.To = netip.AddrPortFrom(order.To.Addr(), 0)
		}
		if _, got, err := Send(ctx, pod.NS, order); err != nil || len(got) != 1 || got[0].NotSent != unix.EHOSTUNREACH {
			t.Errorf("kind %d without a way: %+v, %v", kind, got, err)
		}
	}
}
