// Package egress tests NAT gateways with kernels that have FoU, in virtual machines: the
// packages that make kernel objects, and routers with clients and servers around them. A
// machine takes time to boot, so that all tests of one kernel share one.
package egress

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// modules are those that coild loads, and what the tests need themselves.
var modules = []string{"fou", "fou6", "ipip", "ip6_tunnel", "veth", "bridge", "dummy", "nf_tables"}

// cases are the tests, each a subtest of TestEgress.
var cases = []struct {
	name string
	run  func(*testing.T)
	// smoke says that it runs with the older kernel, too, long that it runs in the long form only.
	smoke, long bool
}{
	{name: "fou", run: testFou, smoke: true},
	{name: "tunnels", run: testTunnels, smoke: true},
	{name: "tunnels/adopted", run: testTunnelsAdopted},
	{name: "tunnels/foreign", run: testTunnelsForeign},
	{name: "tunnels/colliding", run: testTunnelsColliding, smoke: true},
	{name: "tunnels/many", run: testTunnelsMany},
	{name: "receivers", run: testReceivers, smoke: true},
	{name: "client", run: testClient, smoke: true},
	{name: "client/connected", run: testClientConnected, smoke: true},
	{name: "client/transfer", run: testClientTransfer},
	{name: "client/originating", run: testClientOriginating, smoke: true},
	{name: "direct", run: testDirect, smoke: true},
	{name: "direct_single", run: testDirectSingle, long: true},
	{name: "direct_failover", run: testDirectFailover, long: true},
	{name: "router", run: testRouter, smoke: true},
}

// routerCase is a subtest of "router"; all share a router, a server and two clients.
type routerCase struct {
	name  string
	run   func(*testing.T, *topology)
	smoke bool
}

var routerCases = []routerCase{
	{"nat", testNAT, true},
	{"one family", testSingleFamily, false},
	{"forged", testForged, false},
	{"reused", testReused, false},
	{"invalid", testInvalid, false},
	{"ports", testPorts, false},
	{"underlay", testUnderlay, false},
	{"offload", testOffload, false},
	{"pressure", testPressure, false},
	{"restart", testRestart, false},
	{"repair", testRepair, false},
	{"killed", testKilled, false},
	{"start", testStart, false},
}

// longRouterCases take long, and in their short form say no more than others.
var longRouterCases = []routerCase{
	{"exhausted", testExhausted, false},
}

// smoking says that only a few tests are for the kernel that runs.
func smoking(t *testing.T) bool { return strings.Contains(t.Name(), "/6.1/") }

// brief says that a test leaves out those of its cases for which the other kernel is enough: the short form
// with the older one.
func brief(t *testing.T) bool { return smoking(t) && !testkit.EgressForm.Long() }

func testRouter(t *testing.T) {
	top := newTopology(t, both...)
	if !brief(t) {
		t.Run("unavailable", func(t *testing.T) { testUnavailable(t, top) })
	}
	top.t, top.uplink.t = t, t
	top.a, top.b = top.newClient("5555"), top.newClient("5555")
	cases := routerCases
	if testkit.EgressForm.Long() {
		cases = append(cases, longRouterCases...)
	}
	for _, c := range cases {
		if c.smoke || !smoking(t) {
			t.Run(c.name, func(t *testing.T) {
				top.reset(t)
				c.run(t, top)
			})
		}
	}
}

func TestEgress(t *testing.T) {
	testkit.Need(t, testkit.VM)
	var env []string
	if os.Getenv(programEnv) == "" {
		// To compile in the machine would take minutes.
		program := testkit.Must((&build.Builder{Log: os.Stderr}).Own(t.Context(), "cmd/coil-egress"))(t)
		env = append(env, programEnv+"="+program)
	}
	for _, kernel := range []string{"6.12", "6.1"} {
		t.Run(kernel, func(t *testing.T) {
			if !vmtest.Reexec(t, vm.Options{Kernel: kernel, Memory: 3072, Env: env}, modules...) {
				return
			}
			patch(t)
			for _, c := range cases {
				if (c.smoke || kernel != "6.1") && (!c.long || testkit.EgressForm.Long()) {
					t.Run(c.name, c.run)
				}
			}
		})
	}
}

// patch makes the kernel change its own code now, and not each time that the first or the last
// namespace uses hooks of netfilter or FoU: a processor that is emulated may run into code that
// another one is just changing.
func patch(t *testing.T) {
	ns := netnstest.New(t)
	table := "add table inet patch;"
	for _, hook := range []string{"prerouting", "input", "forward", "output", "postrouting"} {
		table += fmt.Sprintf(" add chain inet patch %s { type filter hook %s priority 0; };", hook, hook)
	}
	testkit.Must(ns.Run("nft", table))(t)
	ns.IP(t, "fou", "add", "port", "5555", "ipproto", "4")
	ns.IP(t, "-6", "fou", "add", "port", "5555", "ipproto", "41")
}
