package keepalived

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// lines are all that a file of Coil may have.
var lines = regexp.MustCompile(`^(|# Coil writes this file\. Changes are lost\.|}|  }|` +
	`vrrp_instance [A-Za-z0-9][\w.-]* \{|` +
	`  (state BACKUP|version 3|strict_mode off|accept|nopreempt)|` +
	`  (interface [A-Za-z0-9][\w.-]{0,14}|virtual_router_id \d{1,3}|priority \d{1,3}|preempt_delay [\d.]+|advert_int [\d.]+|garp_\w+ \d+)|` +
	`  (mcast|unicast)_src_ip [\da-f.:]+|` +
	`  (unicast_peer|virtual_ipaddress|virtual_ipaddress_excluded) \{|` +
	`    [\da-f.:]+|` +
	`    [\da-f.:]+/(32|128) dev [A-Za-z0-9][\w.-]{0,14}( scope host)?)$`)

// FuzzScenario21Config: what is valid has only lines that Coil means. In the long form keepalived takes it, too.
func FuzzScenario21Config(f *testing.F) {
	f.Add("coil-4", "eth0", "", 1, 100, false, 0, 300, "192.0.2.1", "192.0.2.2", "198.51.100.1", "198.51.100.2")
	f.Add("coil.6", "bond0.7", "lo", 255, 254, true, 0, 0, "2001:db8::1", "", "2001:db8:1::1", "2001:db8:1::2")
	f.Add("a", "eth0", "eth1", 9, 1, false, 1500, 40950, "fe80::1", "fe80::2", "::1:2:3", "64:ff9b::1")
	f.Add("a}\nvrrp_instance b {", "eth0 {", "\"", 300, 0, true, -1, 5, "::ffff:192.0.2.1", "fe80::1%eth0", "224.0.0.1", "0.0.0.0")
	f.Fuzz(func(t *testing.T, name, link, addressLink string, id, priority int, stay bool, delay, advert int, source, peer, a, b string) {
		i := Instance{
			Name: name, Interface: link, AddressInterface: addressLink, RouterID: id, Priority: priority, NoPreempt: stay,
			PreemptDelay: time.Duration(delay) * time.Millisecond, AdvertInterval: time.Duration(advert) * time.Millisecond,
		}
		i.Source, _ = netip.ParseAddr(source)
		if p, err := netip.ParseAddr(peer); err == nil {
			i.Peers = []netip.Addr{p}
		}
		for _, text := range []string{a, b} {
			if x, err := netip.ParseAddr(text); err == nil {
				i.Addresses = append(i.Addresses, x)
			}
		}
		c := Config{[]Instance{i}}
		if c.Validate() != nil {
			return
		}
		text := c.Render()
		for line := range bytes.Lines(text) {
			if !lines.Match(bytes.TrimSuffix(line, []byte("\n"))) {
				t.Errorf("it has the line %q", line)
			}
		}
		if got := instancesIn(text); !slices.Equal(got, []string{name}) {
			t.Errorf("instances are %q, want %q", got, name)
		}
		if testkit.LBForm.Long() {
			// Its links aren't this machine's.
			i.Interface, i.AddressInterface = someLink(t), loopback
			file := filepath.Join(t.TempDir(), "keepalived.conf")
			testkit.Check(t, os.WriteFile(file, Config{[]Instance{i}}.Render(), 0o600))
			if out, err := exec.Command("keepalived", "-t", "-f", file).CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("keepalived -t: %v: %s\n%s", err, out, text)
			}
		}
	})
}

// someLink is a link of this machine that adverts could go by.
func someLink(t *testing.T) string {
	t.Helper()
	for _, link := range testkit.Must(net.Interfaces())(t) {
		if link.Flags&net.FlagMulticast != 0 {
			return link.Name
		}
	}
	t.Fatal("this machine has no link for multicast packets")
	return ""
}

// FuzzDump: whatever the daemon writes, it is read or not taken for complete.
func FuzzDump(f *testing.F) {
	f.Add([]byte(" VRRP Instance = a\n   State = MASTER\n   Interface = eth0\n   Virtual IP (1):\n     10.0.0.1/24 dev eth0 scope global set\n   Unicast Peer :\n     10.0.0.2 min_ttl 0\n" + topologyEnd + "\n"))
	f.Add([]byte("     10.0.0.1\n   Priority = \n VRRP Instance = \n     dev\n   Advert interval = x milli-sec\n" + topologyEnd + "\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, complete := parseDump(text)
		if complete != bytes.Contains(append([]byte("\n"), text...), []byte("\n"+topologyEnd+"\n")) {
			t.Errorf("complete is %t", complete)
		}
		if n := bytes.Count(append([]byte("\n"), text...), []byte("\n"+instanceMark)); len(all) > n {
			t.Errorf("there are %d instances, want up to %d", len(all), n)
		}
		for _, s := range all {
			_ = s.differs(s.instance().normal())
			if s.Assigned() > len(s.Addresses) {
				t.Errorf("%d addresses of %d are assigned", s.Assigned(), len(s.Addresses))
			}
		}
	})
}
