package nft

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Words that aren't understood are an error that names the rule, and the place in it.
func TestCompileRefuses(t *testing.T) {
	for text, place := range map[string]string{
		"ip saddr 10.0.0.1 acept":                                     `before "acept"`,
		"ip saddr fd00::1 accept":                                     `before "accept"`,
		"ip6 saddr 10.0.0.1 accept":                                   `before "accept"`,
		"th dport 65536 accept":                                       `before "accept"`,
		"th dport":                                                    `before ""`,
		"iif eth0 accept":                                             `before "accept"`,
		`iifname "eth0" accept`:                                       `before "accept"`,
		"ct state open accept":                                        `before "accept"`,
		"ct mark set ct mark | 1":                                     `before "| 1"`,
		"snat ip 10.0.0.1":                                            `before "10.0.0.1"`,
		"snat ip to ip6 saddr":                                        `before ""`,
		"snat ip to ip saddr . ip daddr":                              `before ""`,
		"snat ip to ip saddr map":                                     `before ""`,
		"dnat ip addr . port to 10.0.0.1":                             `before "10.0.0.1"`,
		"dnat ip addr . port to ip daddr":                             `before ""`,
		"snat ip addr . port to ip saddr map @m":                      `before "addr . port to ip saddr map @m"`,
		"add @m { ip saddr timeout soon }":                            `before "soon }"`,
		"ip6 saddr . ip6 daddr . ip6 saddr . ip6 daddr . ip saddr @m": `before "@m"`,
		"fib daddr type local":                                        `before "fib daddr type local"`,
		"add full { ip saddr }":                                       `before "{ ip saddr }"`,
		"add @full { ip saddr":                                        `before ""`,
		"@th,3,16 0x0304 accept":                                      `before "@th,3,16 0x0304 accept"`,
		"@th,0,16 0x304 accept":                                       `before "accept"`,
		"tcp option maxseg size set large":                            `before ""`,
		"meta nfproto ipv4 ip saddr . ip hopcount @x accept":          `before "ip hopcount @x accept"`,
	} {
		_, err := compile(text)
		if err == nil || !strings.Contains(err.Error(), text) && !strings.Contains(err.Error(), place) {
			t.Errorf("%s: the error is %v, want one that names the place %s", text, err, place)
		}
		if err != nil && !strings.Contains(err.Error(), place) {
			t.Errorf("%s: the error is %v, want one that names the place %s", text, err, place)
		}
	}
	if _, err := compile("acept"); !errors.Is(err, errUnknown) {
		t.Errorf("an unknown word is the error %v", err)
	}
}

// Whatever the text is, it is refused with the place, or means the same however its words are spaced, and the kernel can be
// told of it.
func FuzzCompile(f *testing.F) {
	for _, text := range []string{
		"", "meta nfproto ipv4 iif . ip saddr != @peers ip daddr @d meta mark set 0x00200000 accept", "th dport 5555 meta l4proto udp notrack",
		"ct status ! confirmed goto x", "tcp flags syn / syn,rst meta l4proto tcp jump opened", "ip6 saddr fe80::/10 return",
		"numgen random mod 4 != 0", "add @s { ip saddr ct count over 5 } update @f { ip saddr }", "snat ip to ip saddr . ip daddr map @m fully-random",
		"tcp option maxseg size set rt mtu", "@th,0,16 0x0304 @th,192,32 @clients", "ip saddr vmap @v", `iifname "fou4_*"`, "fib saddr . iif oif missing",
		"fib daddr oif exists", "masquerade fully-random", "ip ttl set 1", "ip6 hoplimit set 64", "snat ip6 to ip6 saddr", "snat ip to ip saddr . ip daddr",
		"dnat ip addr . port to ip daddr . meta l4proto . th dport . numgen random mod 3 map @m", "reject", "meta l4proto tcp reject with tcp reset",
		"update @s { ip6 saddr . ip6 daddr . meta l4proto . th dport timeout 3h : meta priority }", "meta priority set ip6 daddr . th dport map @m",
		"ct mark set ct mark & 0xffefffff | 0x00100000", "@th,0,4294967288 0x", "meta mark set",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		exprs, err := compile(text)
		words := strings.Fields(text)
		if err != nil {
			if exprs != nil || len(words) == 0 || !strings.Contains(err.Error(), ", before ") {
				t.Errorf("%q: %v, %v", text, exprs, err)
			}
			return
		}
		if (len(exprs) == 0) != (len(words) == 0) {
			t.Errorf("%q has %d expressions", text, len(exprs))
		}
		again, err := compile(" " + strings.Join(words, "\t\n"))
		if err != nil || !reflect.DeepEqual(exprs, again) {
			t.Errorf("%q with other spaces: %v, %v, want %v", text, again, err, exprs)
		}
		for _, e := range exprs {
			if _, err := expr.Marshal(byte(nftables.TableFamilyINet), e); err != nil {
				t.Errorf("%q: %v", text, err)
			}
		}
	})
}
