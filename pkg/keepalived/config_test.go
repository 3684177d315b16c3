package keepalived

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

var update = flag.Bool("update", false, "write the golden files anew")

func addrs(texts ...string) (all []netip.Addr) {
	for _, s := range texts {
		all = append(all, netip.MustParseAddr(s))
	}
	return all
}

// full has each field.
var full = Config{[]Instance{
	{
		Name: "coil-b", Interface: "eth0", RouterID: 12, Priority: 90, NoPreempt: true,
		Source: netip.MustParseAddr("2001:db8::1"), Addresses: addrs("2001:db8:1::2", "2001:db8:1::1"),
	},
	{
		Name: "coil-a", Interface: "eth0", AddressInterface: "bond0.7", RouterID: 11, Priority: 100, PreemptDelay: 2500 * time.Millisecond,
		AdvertInterval: 50 * time.Millisecond, Source: netip.MustParseAddr("192.0.2.1"), Peers: addrs("192.0.2.3", "192.0.2.2"),
		Addresses: addrs("198.51.100.10", "198.51.100.9"),
	},
	{Name: "empty", Interface: "eth0", RouterID: 13, Priority: 1, Source: netip.MustParseAddr("192.0.2.1")},
}}

func TestRender(t *testing.T) {
	testkit.Check(t, full.Validate())
	const golden = "testdata/coil.conf"
	if *update {
		testkit.Check(t, os.WriteFile(golden, full.Render(), 0o644))
	}
	want := string(testkit.Must(os.ReadFile(golden))(t))
	other := Config{slices.Clone(full.Instances)}
	slices.Reverse(other.Instances)
	for i := range other.Instances {
		in := &other.Instances[i]
		in.Peers, in.Addresses = slices.Clone(in.Peers), slices.Clone(in.Addresses)
		slices.Reverse(in.Peers)
		slices.Reverse(in.Addresses)
	}
	for name, c := range map[string]Config{"as written": full, "in another order": other} {
		if d := cmp.Diff(want, string(c.Render())); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
	if got, want := instancesIn(full.Render()), []string{"coil-a", "coil-b", "empty"}; !slices.Equal(got, want) {
		t.Errorf("instances are %q, want %q", got, want)
	}
	if got := instancesIn(Config{}.Render()); len(got) > 0 {
		t.Errorf("without instances there are %q", got)
	}
}

// The addresses that keepalived may have are those of both files, the present one and the one that may have to be gone back to.
func TestAddressesOfFiles(t *testing.T) {
	d := New(Options{Fragment: filepath.Join(t.TempDir(), "coil.conf")})
	has := func(when string, want ...string) {
		t.Helper()
		got := testkit.Must(d.Addresses())(t)
		slices.SortFunc(got, netip.Addr.Compare)
		if !slices.Equal(got, addrs(want...)) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	has("without a file")
	testkit.Check(t, os.WriteFile(d.o.Fragment, full.Render(), 0o644))
	has("with a file", "198.51.100.9", "198.51.100.10", "2001:db8:1::1", "2001:db8:1::2")
	former := Config{slices.Clone(full.Instances[:1])}
	former.Instances[0].Addresses = addrs("2001:db8:1::7")
	testkit.Check(t, os.WriteFile(d.formerPath(), former.Render(), 0o644))
	has("with both", "198.51.100.9", "198.51.100.10", "2001:db8:1::1", "2001:db8:1::2", "2001:db8:1::7")
	testkit.Check(t, os.Remove(d.o.Fragment), os.Mkdir(d.o.Fragment, 0o755))
	if all, err := d.Addresses(); err == nil {
		t.Errorf("of a folder there are %v", all)
	}
}

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Instance)
		want   string // in the error; "" is none
	}{
		{"as it is", func(*Instance) {}, ""},
		{"least values", func(i *Instance) { i.RouterID, i.Priority, i.AdvertInterval = 1, 1, 10*time.Millisecond }, ""},
		{"greatest values", func(i *Instance) {
			i.RouterID, i.Priority, i.AdvertInterval, i.PreemptDelay = 255, 254, 40950*time.Millisecond, 1000*time.Second
		}, ""},
		{"link-local source", func(i *Instance) {
			i.Source, i.Peers, i.Addresses = netip.MustParseAddr("fe80::1"), nil, addrs("2001:db8::7")
		}, ""},
		{"no name", func(i *Instance) { i.Name = "" }, `VRRP instance "": the name must be`},
		{"name with a line feed", func(i *Instance) { i.Name = "a\nb" }, "the name must be"},
		{"name with a blank", func(i *Instance) { i.Name = "a b" }, "the name must be"},
		{"name with a brace", func(i *Instance) { i.Name = "a}" }, "the name must be"},
		{"name that is a condition", func(i *Instance) { i.Name = "@a" }, "the name must be"},
		{"name that is a variable", func(i *Instance) { i.Name = "$A" }, "the name must be"},
		{"long name", func(i *Instance) { i.Name = strings.Repeat("x", 65) }, "the name must be"},
		{"no interface", func(i *Instance) { i.Interface = "" }, `VRRP instance "a": interface ""`},
		{"long interface", func(i *Instance) { i.Interface = "eth0123456789abc" }, "a link is needed"},
		{"interface with a comment", func(i *Instance) { i.Interface = "eth0#" }, "a link is needed"},
		{"loopback", func(i *Instance) { i.Interface = "lo" }, "interface lo"},
		{"addresses of the loopback", func(i *Instance) { i.AddressInterface = "lo" }, ""},
		{"address interface", func(i *Instance) { i.AddressInterface = "eth0 scope" }, "address interface"},
		{"router ID 0", func(i *Instance) { i.RouterID = 0 }, "virtual router ID 0 must be 1 to 255"},
		{"router ID 256", func(i *Instance) { i.RouterID = 256 }, "virtual router ID 256"},
		{"priority 0", func(i *Instance) { i.Priority = 0 }, "priority 0 must be 1 to 254"},
		{"priority of an owner", func(i *Instance) { i.Priority = 255 }, "priority 255"},
		{"fast adverts", func(i *Instance) { i.AdvertInterval = 5 * time.Millisecond }, "advert interval 5ms"},
		{"uneven adverts", func(i *Instance) { i.AdvertInterval = 15 * time.Millisecond }, "multiple of 10ms"},
		{"slow adverts", func(i *Instance) { i.AdvertInterval = 41 * time.Second }, "up to 40.95s"},
		{"negative adverts", func(i *Instance) { i.AdvertInterval = -time.Second }, "advert interval -1s"},
		{"long delay", func(i *Instance) { i.PreemptDelay = 1001 * time.Second }, "preempt delay"},
		{"delay of nothing", func(i *Instance) { i.PreemptDelay, i.NoPreempt = time.Second, true }, "no meaning"},
		{"no source", func(i *Instance) { i.Source = netip.Addr{} }, "source invalid IP"},
		{"source with a zone", func(i *Instance) { i.Source = netip.MustParseAddr("fe80::1%eth0") }, "without zone"},
		{"source of both families", func(i *Instance) { i.Source = netip.MustParseAddr("::ffff:192.0.2.1") }, "source"},
		{"peer of the other family", func(i *Instance) { i.Peers = addrs("2001:db8::2") }, "peer 2001:db8::2 must be"},
		{"peer is the source", func(i *Instance) { i.Peers = addrs("192.0.2.1") }, "peer 192.0.2.1 is the source"},
		{"peer twice", func(i *Instance) { i.Peers = addrs("192.0.2.2", "192.0.2.2") }, "named twice"},
		{"address of the other family", func(i *Instance) { i.Addresses = addrs("2001:db8::7") }, "make an instance for each family"},
		{"multicast address", func(i *Instance) { i.Addresses = addrs("224.0.0.7") }, "address 224.0.0.7"},
		{"all hosts", func(i *Instance) { i.Addresses = addrs("255.255.255.255") }, "address 255.255.255.255"},
		{"no host", func(i *Instance) { i.Addresses = addrs("0.0.0.0") }, "address 0.0.0.0"},
		{"own address", func(i *Instance) { i.Addresses = addrs("127.0.0.1") }, "address 127.0.0.1"},
		{"link-local address", func(i *Instance) { i.Addresses = addrs("169.254.0.1") }, "not link-local"},
		{"address twice", func(i *Instance) { i.Addresses = addrs("198.51.100.9", "198.51.100.9") }, `instance "a" has address 198.51.100.9, too`},
		{"address is the source", func(i *Instance) { i.Addresses = addrs("192.0.2.1") }, "is a gateway's own"},
		{"address is a peer", func(i *Instance) { i.Addresses = addrs("192.0.2.2") }, "is a gateway's own"},
		{"address of another instance", func(i *Instance) { i.Addresses = addrs("198.51.100.77") }, `instance "a" has address 198.51.100.77, too`},
		{"router ID of another instance", func(i *Instance) { i.RouterID = 77 }, "has virtual router ID 77, too"},
		{"router ID of the other family", func(i *Instance) { i.RouterID = 66 }, ""},
		{"name of another instance", func(i *Instance) { i.Name = "other" }, "there are two of this name"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := Instance{
				Name: "a", Interface: "eth0", RouterID: 1, Priority: 100, Source: netip.MustParseAddr("192.0.2.1"),
				Peers: addrs("192.0.2.2"), Addresses: addrs("198.51.100.9"),
			}
			tt.change(&i)
			err := Config{[]Instance{
				i,
				{Name: "other", Interface: "eth0", RouterID: 77, Priority: 1, Source: netip.MustParseAddr("192.0.2.1"), Addresses: addrs("198.51.100.77")},
				{Name: "sixth", Interface: "eth0", RouterID: 66, Priority: 1, Source: netip.MustParseAddr("2001:db8::1")},
			}}.Validate()
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("error is %v, want one with %q", err, tt.want)
			}
		})
	}
}

// All problems are told at once.
func TestValidateTellsAll(t *testing.T) {
	err := Config{[]Instance{{Name: "a"}, {Name: "b", Interface: "eth0", RouterID: 300, Priority: 300, Source: netip.MustParseAddr("192.0.2.1")}}}.Validate()
	for _, want := range []string{`"a": interface`, `"a": virtual router`, `"a": priority`, `"a": source`, `"b": virtual router`, `"b": priority`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want one with %q", err, want)
		}
	}
}
