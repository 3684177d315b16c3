package lbgateway

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	plan "github.com/coil-net/coil/pkg/plan/lbgateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// Whatever comes, changes and goes, and whatever others do to the table, in the end the kernel has what a gateway would make that sees everything for the first time.
func TestChangesInAnyOrder(t *testing.T) {
	for seed := range uint64(testkit.LBForm.Times(3, 60)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			sc, r := newScene(t), rand.New(rand.NewPCG(seed, 3))
			name := func() string { return []string{"", "a", "b", "c", "d"}[r.IntN(5)] }
			for i := range 120 {
				switch n := name(); r.IntN(12) {
				case 0:
					sc.node(r.IntN(4), r.IntN(3) > 0)
				case 1:
					sc.spec(func(s *v2.LoadBalancerGatewaySpec) {
						s.Endpoints = []v2.GatewayEndpoints{v2.EndpointsNodePort, v2.EndpointsClusterIP, v2.EndpointsPod}[r.IntN(3)]
						s.Masquerade = []v2.GatewayMasquerade{v2.MasqueradeAlways, v2.MasqueradeNever}[r.IntN(2)]
						s.Pools = [][]string{{"dmz"}, {"other", "dmz"}, {"other"}}[r.IntN(3)]
					})
				case 2:
					if n != "" {
						sc.s.Drop(serviceResource, "shop/"+n)
					}
				case 3:
					sc.s.Drop(blockResource, fmt.Sprint("dmz-", r.IntN(4)))
				case 4:
					testkit.Must(sc.machine.Run("sh", "-c", "nft flush ruleset; nft add table inet other"))(t)
					sc.Touched()
				case 5, 6:
					if n != "" {
						sc.service(n, func(s *corev1.Service) {
							s.Spec.SessionAffinity = []corev1.ServiceAffinity{corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP}[r.IntN(2)]
							s.Spec.LoadBalancerSourceRanges = [][]string{nil, {"192.0.2.0/24"}, {"2001:db8::/32", "192.0.2.1/32"}, {"nonsense"}}[r.IntN(4)]
						})
					}
				case 7, 8:
					if n != "" {
						var all []string
						for range r.IntN(5) {
							all = append(all, []string{fmt.Sprint("10.1.0.", r.IntN(9)), fmt.Sprintf("fd01::%d", r.IntN(9))}[r.IntN(2)])
						}
						sc.endpoints(n, r.IntN(2), all...)
					}
				default:
					sc.block(r.IntN(4), n, name())
				}
				sc.Deliver(r.IntN(4))
				if i%30 == 29 {
					sc.settled(fmt.Sprint("after ", i, " changes"))
				}
			}
			for i := range 4 {
				sc.block(i, "a", "b")
			}
			sc.settled("in the end")
		})
	}
}

// Scenarios 11, 36: the status tells what the machine does; a Service that it can't serve is no reason to serve no other one.
func TestScenario36Status(t *testing.T) {
	sc := newScene(t)
	sc.service("a", nil)
	sc.service("b", func(s *corev1.Service) { s.Spec.Ports[1].NodePort = 0 })
	sc.block(1, "a", "b")
	sc.told("with a Service that has no NodePort", func(st v2.LoadBalancerGatewayStatus) error {
		want := v2.GatewayState{Generation: 1, Blocks: st.Applied.Blocks, Services: 1, Ports: 2, Endpoints: 4, Hash: st.Applied.Hash}
		if st.Applied != want || st.Applied.Hash == "" || condition(st) != v2.ReasonServiceErrors || len(st.Errors) != 1 || st.Errors[0].Service != "shop/b" || st.LastContact == nil {
			return fmt.Errorf("%+v, want %+v", st, want)
		}
		return nil
	})
	sc.service("b", func(s *corev1.Service) { s.Spec.Ports[1].NodePort = 30053 })
	sc.told("with its NodePort", func(st v2.LoadBalancerGatewayStatus) error {
		if st.Applied.Services != 2 || st.Applied.Ports != 4 || condition(st) != v2.ReasonAllServed || len(st.Errors) != 0 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

// Scenario 20: what the kernel refuses is told with the name of the Service, and tried again; the machine does what it did before, and keepalived isn't told anything else.
func TestScenario20KernelRefuses(t *testing.T) {
	sc, d := newElectedScene(t)
	sc.service("a", nil)
	sc.block(1, "a", "")
	sc.has(d, "at first", 1)
	before := testkit.Must(sc.machine.Run("nft", "list", "ruleset"))(t)
	sc.table.refuses.Store(new(errors.New("no buffer space available")))
	sc.block(2, "a", "a")
	sc.await("refused", func() error {
		if st := sc.own().Status; condition(st) != v2.ReasonKernelRefused || !strings.Contains(st.Conditions[0].Message, "shop/a") {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	if after := testkit.Must(sc.machine.Run("nft", "list", "ruleset"))(t); after != before {
		t.Errorf("the rules were\n%s\nand are\n%s", before, after)
	}
	sc.has(d, "while the kernel refuses", 1)
	sc.table.refuses.Store(nil)
	sc.has(d, "when it is over", 1, 2)
	sc.settled("when it is over")
	sc.told("when it is over", func(st v2.LoadBalancerGatewayStatus) error {
		if condition(st) != v2.ReasonAllServed {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

// Scenario 19: a machine that starts does what it did last before it reaches the API server. A file of another machine, or a broken one, is no reason not to start.
func TestScenario19StartsFromItsFile(t *testing.T) {
	sc := newScene(t)
	sc.service("a", func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
	sc.service("b", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"} })
	sc.block(1, "a", "b")
	sc.settled("at first")
	sc.end()
	before := sc.does.ruleset() // nobody writes it any more
	testkit.Must(sc.machine.Run("nft", "flush", "ruleset"))(t)
	sc.boot() // and nothing is delivered
	testkit.Check(t, sc.table.Check(t.Context(), before))
	sc.block(1, "", "b")
	sc.start()
	sc.settled("when it sees what changed meanwhile")
	sc.end()
	for name, text := range map[string]string{"broken": "{", "of another machine": `{"gateway": "gw2"}`} {
		testkit.Check(t, os.WriteFile(sc.file, []byte(text), 0o600))
		sc.start()
		sc.settled(name)
		sc.end()
	}
	sc.start()
}

// A machine without a LoadBalancerGateway serves nothing.
func TestWithoutItsObject(t *testing.T) {
	sc := newScene(t)
	sc.service("a", nil)
	sc.block(1, "a", "")
	sc.settled("at first")
	sc.s.Drop(gatewayResource, "gw1")
	sc.settled("without the object")
	sc.spec(func(*v2.LoadBalancerGatewaySpec) {})
	sc.settled("with the object again")
}

// Scenario 27: flows leave endpoints that are gone, and those of UDP endpoints that are ending, too.
func TestScenario27StaleFlows(t *testing.T) {
	at := func(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }
	s := state{addresses: map[netip.Addr]bool{netip.MustParseAddr("198.51.100.1"): true}, forwards: map[front]plan.Forward{}}
	for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		s.forwards[front{p, at("198.51.100.1:80")}] = plan.Forward{
			Frontend: ruleset.Frontend{Endpoints: []netip.AddrPort{at("10.1.0.1:80")}}, Draining: []netip.AddrPort{at("10.1.0.2:80")},
		}
	}
	gone := map[netip.Addr]bool{netip.MustParseAddr("198.51.100.2"): true}
	for _, c := range []struct {
		protocol     byte
		to, endpoint string
		want         bool
	}{
		{unix.IPPROTO_TCP, "198.51.100.1:80", "10.1.0.1:80", false},
		{unix.IPPROTO_TCP, "198.51.100.1:80", "10.1.0.1:81", true},
		{unix.IPPROTO_TCP, "198.51.100.1:80", "10.1.0.2:80", false},
		{unix.IPPROTO_TCP, "198.51.100.1:80", "10.1.0.3:80", true},
		{unix.IPPROTO_TCP, "198.51.100.1:81", "10.1.0.1:80", true},
		{unix.IPPROTO_UDP, "198.51.100.1:80", "10.1.0.1:80", false},
		{unix.IPPROTO_UDP, "198.51.100.1:80", "10.1.0.2:80", true},
		{unix.IPPROTO_UDP, "198.51.100.2:80", "10.1.0.1:80", true},
		{unix.IPPROTO_UDP, "198.51.100.3:80", "10.1.0.1:80", false},
	} {
		if got := s.stale(conntrack.Forwarded{Protocol: c.protocol, To: at(c.to), Endpoint: at(c.endpoint)}, gone); got != c.want {
			t.Errorf("a flow of protocol %d to %s at %s: %t, want %t", c.protocol, c.to, c.endpoint, got, c.want)
		}
	}
}

// The kernel forgets the flows of an endpoint that goes, and keeps those of others.
func TestScenario27FlowsAreForgotten(t *testing.T) {
	sc := newScene(t)
	sc.spec(func(s *v2.LoadBalancerGatewaySpec) { s.Endpoints = v2.EndpointsPod })
	sc.service("a", nil)
	sc.endpoints("a", 0, "10.1.0.1", "10.1.0.2")
	sc.block(1, "a", "a")
	sc.settled("at first")
	for i, endpoint := range []string{"10.1.0.1", "10.1.0.2"} {
		testkit.Must(sc.machine.Run("conntrack", "-I", "-p", "udp", "-t", "600", "-s", "192.0.2.1", "-d", "198.51.100.1", "-r", endpoint, "-q", "192.0.2.1",
			"--sport", fmt.Sprint(1000+i), "--dport", "53", "--reply-port-src", "5353", "--reply-port-dst", fmt.Sprint(1000+i)))(t)
	}
	left := func(want string) {
		t.Helper()
		sc.await("flows "+want, func() error {
			out, err := sc.machine.Run("sh", "-c", "conntrack -L 2>/dev/null | grep -o 'src=10.1.0.[0-9]' | sort | tr '\\n' ' '")
			if err != nil || strings.TrimSpace(out) != want {
				return fmt.Errorf("%q, %v, want %q", out, err, want)
			}
			return nil
		})
	}
	sc.endpoints("a", 0, "10.1.0.2")
	left("src=10.1.0.2")
	sc.block(1, "", "")
	left("")
	if fakeapi.Find[*v2.LoadBalancerGateway](sc.s, gatewayResource, "gw1") == nil {
		t.Error("the object is gone")
	}
}

// Scenario 27: connections to an endpoint that was ending are left alone, and forgotten when it is gone, though nothing changes for new ones.
func TestScenario27DrainedFlowsAreForgotten(t *testing.T) {
	sc := newScene(t)
	sc.spec(func(s *v2.LoadBalancerGatewaySpec) { s.Endpoints = v2.EndpointsPod })
	sc.service("a", nil)
	sc.endpoints("a", 0, "10.1.0.1", "10.1.0.2")
	sc.block(1, "a", "")
	sc.settled("at first")
	testkit.Must(sc.machine.Run("conntrack", "-I", "-p", "tcp", "-t", "600", "--state", "ESTABLISHED", "-u", "SEEN_REPLY,ASSURED", "-s", "192.0.2.1", "-d", "198.51.100.1", "-r", "10.1.0.1", "-q", "192.0.2.1",
		"--sport", "1000", "--dport", "80", "--reply-port-src", "8080", "--reply-port-dst", "1000"))(t)
	flows := func() string {
		return strings.TrimSpace(testkit.Must(sc.machine.Run("sh", "-c", "conntrack -L 2>/dev/null | grep -o 'src=10.1.0.[0-9]' | sort | tr '\n' ' '"))(t))
	}
	s := fakeapi.Find[*discoveryv1.EndpointSlice](sc.s, sliceResource, "shop/a-0")
	s.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
	sc.s.Put(sliceResource, s)
	sc.settled("while it ends")
	sc.await("flows are looked at", func() error {
		if sc.forgetting.Load() == 0 {
			return errors.New("they weren't")
		}
		return nil
	})
	if got := flows(); got != "src=10.1.0.1" {
		t.Errorf("while it ends, flows are %q", got)
	}
	s = fakeapi.Find[*discoveryv1.EndpointSlice](sc.s, sliceResource, "shop/a-0")
	s.Endpoints = s.Endpoints[1:]
	sc.s.Put(sliceResource, s)
	sc.await("when it is gone, its flow is forgotten", func() error {
		if got := flows(); got != "" {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
}

// An EndpointSlice that somebody has made may be given to another Service. The former Service has its endpoints no more.
func TestSliceOfAnotherService(t *testing.T) {
	sc := newScene(t)
	sc.spec(func(s *v2.LoadBalancerGatewaySpec) { s.Endpoints = v2.EndpointsPod })
	sc.service("a", nil)
	sc.service("b", nil)
	sc.endpoints("a", 0, "10.1.0.1")
	sc.block(1, "a", "b")
	sc.settled("at first")
	s := fakeapi.Find[*discoveryv1.EndpointSlice](sc.s, sliceResource, "shop/a-0")
	s.Labels[discoveryv1.LabelServiceName] = "b"
	sc.s.Put(sliceResource, s)
	sc.settled("as the other one's")
}
