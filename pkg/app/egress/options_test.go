package egress

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func parse(t *testing.T, env map[string]string, args ...string) *Options {
	t.Helper()
	for _, name := range []string{"COIL_POD_ADDRESSES", "COIL_NODE_ADDRESSES", "COIL_POD_NAMESPACE", "COIL_POD_NAME", "COIL_EGRESS_NAME"} {
		t.Setenv(name, env[name])
	}
	o := &Options{}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return o
}

var inPod = map[string]string{
	"COIL_POD_ADDRESSES": "10.0.0.1,fd00::1", "COIL_POD_NAMESPACE": "internet", "COIL_POD_NAME": "nat-0", "COIL_EGRESS_NAME": "nat",
}

func TestDefaults(t *testing.T) {
	o := parse(t, inPod)
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
	// Fixed by manifests out there.
	if o.Port != 5555 || o.SourcePortAuto || o.Observe.MetricsAddr != ":8080" || o.Observe.HealthAddr != ":8081" {
		t.Errorf("defaults are %+v", o)
	}
	if o.Namespace != "internet" || o.Pod != "nat-0" || o.Egress != "nat" {
		t.Errorf("of the environment: %+v", o)
	}
	if o := parse(t, inPod, "--enable-sport-auto", "--fou-port=5556"); !o.SourcePortAuto || o.Port != 5556 {
		t.Errorf("of flags: %+v", o)
	}
}

func TestAddresses(t *testing.T) {
	a4, a6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	for text, want := range map[string][]netip.Addr{
		"10.0.0.1": {a4}, "fd00::1": {a6}, "10.0.0.1,fd00::1": {a4, a6}, " fd00::1, 10.0.0.1": {a6, a4}, "::ffff:10.0.0.1": {a4},
		"": nil, "10.0.0.1,": nil, "10.0.0.1,10.0.0.2": nil, "nonsense": nil,
	} {
		got, err := (&Options{PodAddresses: text}).addresses()
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

func TestProbers(t *testing.T) {
	o := parse(t, map[string]string{"COIL_NODE_ADDRESSES": "192.0.2.1,192.0.2.2,2001:db8::1"})
	want := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::1")}
	if got, err := parseAddresses(nodeAddresses, o.NodeAddresses); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := parse(t, inPod).config(); err != nil || len(got.Probers) != 0 {
		t.Errorf("without the variable: %v, %v", got.Probers, err)
	}
	for addr, want := range map[string]uint16{":8081": 8081, "[::1]:9": 9, "": 0} {
		if got, err := parse(t, inPod, "--health-addr="+addr).config(); err != nil || got.HealthPort != want {
			t.Errorf("%q: %d, %v", addr, got.HealthPort, err)
		}
	}
	for _, flag := range []string{"--health-addr", "--metrics-addr"} {
		for _, bad := range []string{"8081", ":http", ":70000"} {
			if err := parse(t, inPod, flag+"="+bad).Validate(); err == nil || !strings.Contains(err.Error(), flag) {
				t.Errorf("%s %q: %v", flag, bad, err)
			}
		}
	}
	if err := parse(t, map[string]string{"COIL_NODE_ADDRESSES": "x"}).Validate(); err == nil || !strings.Contains(err.Error(), "COIL_NODE_ADDRESSES") {
		t.Errorf("got %v", err)
	}
}

// The router answers questions about itself at two ports, or one, or none.
func TestPortsAndAskers(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []uint16
	}{
		{nil, []uint16{8080, 8081}},
		{[]string{"--metrics-addr=:9", "--health-addr=:9"}, []uint16{9}},
		{[]string{"--metrics-addr=", "--health-addr=[::1]:9"}, []uint16{9}},
		{[]string{"--metrics-addr=", "--health-addr="}, nil},
	} {
		if got, err := parse(t, inPod, c.args...).config(); err != nil || !slices.Equal(got.Ports, c.want) {
			t.Errorf("%q: %v, %v", c.args, got.Ports, err)
		}
	}
	want := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
	if got, err := parse(t, inPod, "--metrics-from=192.0.2.7/24,2001:db8::/32").config(); err != nil || !slices.Equal(got.AlsoAskers, want) {
		t.Errorf("got %v, %v", got.AlsoAskers, err)
	}
	if got, err := parse(t, inPod).config(); err != nil || len(got.AlsoAskers) != 0 {
		t.Errorf("without the flag: %v, %v", got.AlsoAskers, err)
	}
	if err := parse(t, inPod, "--metrics-from=192.0.2.7").Validate(); err == nil || !strings.Contains(err.Error(), "--metrics-from") {
		t.Errorf("got %v", err)
	}
}

// All that is wrong is said at once.
func TestValidate(t *testing.T) {
	err := parse(t, nil, "--fou-port=0", "--drain-period=-1s", "--resync-interval=0s").Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, what := range []string{
		"COIL_POD_ADDRESSES is not set", "COIL_POD_NAMESPACE is not set", "COIL_POD_NAME is not set", "COIL_EGRESS_NAME is not set", "--fou-port", "--drain-period", "--resync-interval",
	} {
		if !strings.Contains(err.Error(), what) {
			t.Errorf("nothing about %s in: %v", what, err)
		}
	}
}
