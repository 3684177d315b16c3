package keepalived

import (
	"bytes"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/coil-net/coil/pkg/testkit"
)

// TestParseDump reads what keepalived 2.2.7 of Debian 12 has written.
func TestParseDump(t *testing.T) {
	assigned := func(link string, yes bool, texts ...string) (all []AddressState) {
		for _, a := range addrs(texts...) {
			all = append(all, AddressState{a, link, yes})
		}
		return all
	}
	want := []InstanceState{
		{
			Name: "coil4", Interface: "eth0", State: Master, RouterID: 10, Priority: 100, Effective: 100,
			AdvertInterval: 300 * time.Millisecond, Source: netip.MustParseAddr("10.0.0.1"), Peers: addrs("10.0.0.2"),
			// The operator's own address that adverts have is one as others are.
			Addresses: append(assigned("eth0", true, "10.1.0.0", "10.1.0.1", "10.1.0.2"), assigned("lo", true, "169.254.112.10")...),
		},
		{
			Name: "coil6", Interface: "eth0", State: Master, RouterID: 10, Priority: 100, Effective: 100,
			AdvertInterval: 300 * time.Millisecond, Source: netip.MustParseAddr("fd00::1"), Peers: addrs("fd00::2"),
			Addresses: assigned("eth0", true, "fd01::", "fd01::1"),
		},
		{
			Name: "foo4", Interface: "eth0", State: Fault, RouterID: 20, Priority: 50, Effective: 50,
			AdvertInterval: 300 * time.Millisecond, PreemptDelay: 4500 * time.Millisecond, Source: netip.MustParseAddr("10.0.0.77"), Peers: addrs("10.0.0.2"),
			Addresses: append(assigned("eth0", false, "10.7.0.0", "10.7.0.1", "10.7.0.2"), assigned("lo", false, "169.254.112.20")...),
		},
		{
			Name: "foo6", Interface: "eth0", State: Master, RouterID: 20, Priority: 50, Effective: 50,
			AdvertInterval: 300 * time.Millisecond, PreemptDelay: 4500 * time.Millisecond, Source: netip.MustParseAddr("fd00::1"), Peers: addrs("fd00::2"),
			Addresses: assigned("eth0", true, "fd07::", "fd07::1"),
		},
		{
			Name: "op", Interface: "eth0", State: Master, RouterID: 30, Priority: 100, Effective: 100,
			AdvertInterval: 300 * time.Millisecond, NoPreempt: true, Source: netip.MustParseAddr("10.0.0.1"),
			Addresses: append(assigned("eth0", true, "10.8.0.0", "10.8.0.1", "10.8.0.2"), assigned("lo", true, "169.254.112.30")...),
		},
	}
	text := testkit.Must(os.ReadFile("testdata/some.data"))(t)
	got, complete := parseDump(text)
	if d := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); d != "" || !complete {
		t.Errorf("complete %t (-want +got):\n%s", complete, d)
	}
	// The reader may be faster than the writer.
	end := bytes.Index(text, []byte(topologyEnd)) + len(topologyEnd)
	for n := end - 1; n >= 0; n -= 17 {
		if _, complete := parseDump(text[:n]); complete {
			t.Fatalf("the first %d bytes of %d are taken for all", n, end)
		}
	}
	if got, complete := parseDump(testkit.Must(os.ReadFile("testdata/none.data"))(t)); len(got) > 0 || !complete {
		t.Errorf("without instances: %v, complete %t", got, complete)
	}
}

// What the daemon has is wanted, or the error names what isn't.
func TestDiffers(t *testing.T) {
	states, _ := parseDump(testkit.Must(os.ReadFile("testdata/some.data"))(t))
	have := states[1]
	for _, tt := range []struct {
		name   string
		change func(*InstanceState)
		want   string
	}{
		{"nothing", func(*InstanceState) {}, ""},
		{"the state", func(s *InstanceState) { s.State = Fault }, ""},
		{"interface", func(s *InstanceState) { s.Interface = "eth1" }, "instance coil6 has interface eth1, not eth0"},
		{"router ID", func(s *InstanceState) { s.RouterID = 1 }, "instance coil6 has virtual router ID 1, not 10"},
		{"priority", func(s *InstanceState) { s.Priority = 1 }, "instance coil6 has priority 1, not 100"},
		{"adverts", func(s *InstanceState) { s.AdvertInterval = time.Second }, "instance coil6 has advert interval 1s, not 300ms"},
		{"preemption", func(s *InstanceState) { s.NoPreempt = true }, "instance coil6 has nopreempt true, not false"},
		{"delay", func(s *InstanceState) { s.PreemptDelay = time.Second }, "instance coil6 has preempt delay 1s, not 0s"},
		{"source", func(s *InstanceState) { s.Source = netip.MustParseAddr("fd00::9") }, "instance coil6 has source fd00::9, not fd00::1"},
		{"peers", func(s *InstanceState) { s.Peers = nil }, "instance coil6 has peers [], not [fd00::2]"},
		{"an address less", func(s *InstanceState) { s.Addresses = s.Addresses[1:] }, "instance coil6 lacks fd01:: on eth0"},
		{"addresses elsewhere", func(s *InstanceState) { s.Addresses[0].Interface = "eth1" }, "instance coil6 lacks fd01:: on eth0"},
		{"addresses more", func(s *InstanceState) {
			s.Addresses = append(s.Addresses, AddressState{Address: netip.MustParseAddr("fd01::7")})
		}, "instance coil6 has 1 addresses too many, for example fd01::7"},
		{"an address that the kernel refuses", func(s *InstanceState) { s.Addresses[1].Assigned = false },
			"instance coil6 is the master, but link eth0 doesn't get fd01::1: see keepalived's log for what the kernel says, for example when net.ipv6.conf.eth0.disable_ipv6 is 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			changed := have
			changed.Addresses = append([]AddressState{}, have.Addresses...)
			tt.change(&changed)
			got := ""
			if err := changed.differs(have.instance()); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("error is %q, want %q", got, tt.want)
			}
		})
	}
}
