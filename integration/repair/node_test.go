package repair

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// announced are Coil's routes of the tables of blocks, of both families.
func (f *fixture) announced() (export, unassigned int) {
	f.t.Helper()
	count := func(table string) int {
		return strings.Count(f.sh("ip route show table "+table+" proto 30; ip -6 route show table "+table+" proto 30"), "\n")
	}
	return count("119"), count("120")
}

func (f *fixture) awaitAnnounced(want int) {
	f.t.Helper()
	testkit.Eventually(f.t, 10*time.Second, "routes of blocks", func() error {
		if e, u := f.announced(); e != want || u != want {
			return fmt.Errorf("%d are exported, %d are unreachable, want %d", e, u, want)
		}
		return nil
	})
}

// A node whose Node is deleted announces nothing, however coild learns it, while its pods keep
// their network; an ordinary restart withdraws nothing at any moment.
func TestNodeDeleted(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(f *fixture)
	}{
		{"while coild runs", func(f *fixture) { f.check(f.DeleteObject(f.t.Context())) }},
		{"while coild is down", func(f *fixture) {
			f.Coild.Kill()
			f.check(f.DeleteObject(f.t.Context()))
			f.awaitAnnounced(2) // nobody is there to withdraw them
			f.check(f.Coild.Start())
		}},
		{"while the node is cut off", func(f *fixture) {
			f.CutAPI(true)
			f.check(f.DeleteObject(f.t.Context()))
			f.CutAPI(false)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, 2, rig.NodeOptions{})
			f.awaitAnnounced(2)
			c.do(f)
			f.awaitAnnounced(0)
			testkit.Eventually(t, 20*time.Second, "STATUS says that pods may have lost their network", func() error {
				want := cnitypes.ErrLimitedConnectivity
				if c.name == "while coild is down" {
					want = cnitypes.ErrPluginNotAvailable // it doesn't serve before it has read its Node
				}
				var e *cnitypes.Error
				if err := f.Status(t.Context()); !errors.As(err, &e) || e.Code != want {
					return fmt.Errorf("STATUS: %v, want code %d", err, want)
				}
				return nil
			})
			for _, a := range f.Ledger.Live()[f.pods[0]] {
				if out := f.sh("ip route get " + a.String()); !strings.Contains(out, "table 116") && !strings.Contains(out, f.hostEnd(f.pods[0])) {
					t.Errorf("the pod's route is gone: %s", out)
				}
			}
			// The Node that is made under the same name adopts the blocks, since pods use them.
			f.check(f.CreateObject(t.Context()))
			if c.name != "while coild is down" {
				select {
				case <-f.Coild.Ended(): // to start anew
				case <-time.After(testkit.Timeout(20 * time.Second)):
					t.Fatal("coild goes on though its Node is another one")
				}
				f.check(f.Coild.Start())
			}
			f.check(f.AwaitReady(t.Context(), 30*time.Second))
			f.awaitAnnounced(2)
			for _, p := range f.pods {
				f.check(p.Check(t.Context()))
			}
		})
	}
}

func TestRestartWithdrawsNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2, rig.NodeOptions{})
	f.awaitAnnounced(2)
	ctx, cancel := context.WithCancel(t.Context())
	changes := make(chan string, 1)
	go func() {
		out, _ := f.Run(ctx, "sh", "-c", fmt.Sprintf("timeout %d ip monitor route rule || true", int(testkit.Timeout(8*time.Second).Seconds())))
		changes <- out
	}()
	f.pause(time.Second) // ip monitor has no sign that it listens
	f.check(f.Restart(ctx))
	f.Coild.Kill()
	f.check(f.Start(ctx))
	f.sh("ip rule add priority 3000 lookup 99 protocol 99") // the last thing
	testkit.Eventually(t, 30*time.Second, "the monitor's end", func() error {
		select {
		case out := <-changes:
			for line := range strings.Lines(out) {
				if strings.Contains(line, "eleted") && strings.Contains(line, "proto 30") {
					t.Errorf("withdrawn: %s", line)
				}
			}
			if !strings.Contains(out, "3000:") {
				t.Errorf("the monitor saw nothing: %q", out)
			}
			return nil
		default:
			return fmt.Errorf("still running")
		}
	})
	cancel()
}

// probe connects to a pod from the node as kubelet does, and returns the address that the pod
// sees.
func (f *fixture) probe(p *rig.Sandbox, to netip.Addr) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(f.t.Context(), testkit.Timeout(3*time.Second))
	defer cancel()
	return p.Reach(ctx, to, f.Dial)
}

// awaitSources waits until the node's packets to its pods carry these addresses, or any other
// where one is invalid.
func (f *fixture) awaitSources(v4, v6 netip.Addr) time.Duration {
	f.t.Helper()
	start := time.Now()
	testkit.Eventually(f.t, within, "sources of probes", func() error {
		for _, p := range f.pods {
			for _, to := range f.Ledger.Live()[p] {
				want := v6
				if to.Is4() {
					want = v4
				}
				got, err := f.probe(p, to)
				if err != nil || want.IsValid() && got != want {
					return fmt.Errorf("%s sees %s, not %s: %v", to, got, want, err)
				}
			}
		}
		return nil
	})
	return time.Since(start)
}

// internalIPs changes the Node's addresses.
func (f *fixture) internalIPs(addrs ...netip.Addr) {
	f.t.Helper()
	nodes := f.Core.CoreV1().Nodes()
	n, err := nodes.Get(f.t.Context(), f.Name, metav1.GetOptions{})
	f.check(err)
	n.Status.Addresses = nil
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	_, err = nodes.UpdateStatus(f.t.Context(), n, metav1.UpdateOptions{})
	f.check(err)
}

// The node's packets to its pods carry its InternalIP in both families, with one uplink and
// with two, and follow it when Node and host change, in either order.
func TestSourceAddress(t *testing.T) {
	for _, uplinks := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d uplinks", uplinks), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, 2, rig.NodeOptions{})
			new4, new6 := netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")
			uplink := "eth0"
			if uplinks == 2 {
				// It has addresses that the kernel would rather use, and a default route.
				uplink = "eth1"
				f.sh(`ip link add eth1 type veth peer eth1p; ip link set eth1p up; ip link set eth1 up
					ip address add 10.0.0.1/8 dev eth1; ip address add fd00::1/64 dev eth1 nodad
					ip route add default dev eth1 src 10.0.0.1 metric 5`)
			}
			f.awaitSources(f.Addr4, f.Addr6)
			add := func(v4, v6 netip.Addr) {
				f.sh(fmt.Sprintf("ip address add %s/24 dev %s; ip address add %s/64 dev %s nodad", v4, uplink, v6, uplink))
			}
			del := func(v4, v6 netip.Addr) {
				f.sh(fmt.Sprintf("ip address del %s/24 dev %s; ip address del %s/64 dev %s", v4, uplink, v6, uplink))
			}
			// The host first, then the Node.
			add(new4, new6)
			f.awaitSources(f.Addr4, f.Addr6)
			f.internalIPs(new4, new6)
			t.Logf("after the Node: %s", f.awaitSources(new4, new6).Round(time.Millisecond))
			// The Node first, then the host. Until then any address of the host will do.
			next4, next6 := netip.MustParseAddr("192.0.2.20"), netip.MustParseAddr("2001:db8::20")
			f.internalIPs(next4, next6)
			f.awaitSources(netip.Addr{}, netip.Addr{})
			add(next4, next6)
			t.Logf("after the host: %s", f.awaitSources(next4, next6).Round(time.Millisecond))
			// The kernel deletes routes with the address that is their source; probes go on.
			del(next4, next6)
			f.awaitSources(netip.Addr{}, netip.Addr{})
			add(next4, next6)
			f.awaitSources(next4, next6)
			for _, p := range f.pods {
				f.check(p.Check(t.Context()))
			}
		})
	}
}
