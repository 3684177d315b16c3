package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

var errInjected = errors.New("injected")

// Whichever step fails, nothing is left, and the next attempt succeeds.
func TestAttachIsAllOrNothing(t *testing.T) {
	for _, f := range families {
		for _, how := range []string{"refused", "cancelled"} {
			t.Run(f.name+" "+how, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				p, pod := newPod(t, 1, f.ipv4, f.ipv6)
				hostBefore, podBefore := state(t, n.host), state(t, pod)
				for step := 1; ; step++ {
					ctx, cancel := context.WithCancel(t.Context())
					r := recorder{fail: func(n int, request string) error {
						if n != step {
							return nil
						}
						if how == "cancelled" {
							cancel()
							return nil
						}
						return errInjected
					}}
					_, err := n.Attach(r.context(ctx), p, nil)
					cancel()
					if err == nil {
						// A cancellation during the last batch comes too late.
						if r.count() > step || step < 9 {
							t.Fatalf("attached although request %d of %d failed", step, r.count())
						}
						break
					}
					want := errInjected
					if how == "cancelled" {
						want = context.Canceled
					}
					if !errors.Is(err, want) {
						t.Fatalf("step %d: %v", step, err)
					}
					if diff := cmp.Diff(hostBefore, state(t, n.host)); diff != "" {
						t.Fatalf("after step %d (%v), on the host (-before +after):\n%s", step, err, diff)
					}
					if diff := cmp.Diff(podBefore, state(t, pod)); diff != "" {
						t.Fatalf("after step %d (%v), in the pod (-before +after):\n%s", step, err, diff)
					}
				}
				n.mustAttach(t, p)
				for _, to := range p.Address.Addrs() {
					mustPing(t, n.host, to)
				}
			})
		}
	}
}

// A process that is killed in the middle undoes nothing. Remove finds what is
// left, and so does the next Attach.
func TestAttachKilledInTheMiddle(t *testing.T) {
	for _, compat := range []bool{false, true} {
		for _, after := range []string{"remove", "attach"} {
			t.Run(fmt.Sprintf("compat %t, then %s", compat, after), func(t *testing.T) {
				t.Parallel()
				n := newNode(t, func(o *podnet.Options) { o.CompatCalico = compat })
				p, pod := newPod(t, 1, true, true)
				hostBefore, podBefore := state(t, n.host), state(t, pod)
				for step := 1; ; step++ {
					r := recorder{fail: func(n int, _ string) error {
						if n >= step {
							return errInjected
						}
						return nil
					}}
					_, err := n.Attach(r.context(t.Context()), p, nil)
					if err == nil {
						break
					}
					if after == "attach" {
						a, err := n.Attach(t.Context(), p, nil)
						if err == nil {
							err = n.Check(t.Context(), p, a)
						}
						if err != nil {
							t.Fatalf("after step %d: %v", step, err)
						}
					}
					if err := n.Remove(t.Context(), p.ID, 0); err != nil {
						t.Fatalf("after step %d: %v", step, err)
					}
					if diff := cmp.Diff(hostBefore, state(t, n.host)); diff != "" {
						t.Fatalf("after step %d, on the host (-before +after):\n%s", step, diff)
					}
					if diff := cmp.Diff(podBefore, state(t, pod)); diff != "" {
						t.Fatalf("after step %d, in the pod (-before +after):\n%s", step, diff)
					}
				}
			})
		}
	}
}

func TestAttachTwice(t *testing.T) {
	for _, compat := range []bool{false, true} {
		t.Run(fmt.Sprintf("compat %t", compat), func(t *testing.T) {
			n := newNode(t, func(o *podnet.Options) { o.CompatCalico = compat })
			p, _ := newPod(t, 1, true, true)
			n.mustAttach(t, p)
			second := n.mustAttach(t, p)
			if err := n.Check(t.Context(), p, second); err != nil {
				t.Error(err)
			}
			// The same path may be another namespace by now.
			_, other := newPod(t, 2, true, true)
			p.Netns = other.Path
			third := n.mustAttach(t, p)
			if err := n.Check(t.Context(), p, third); err != nil {
				t.Error(err)
			}
			found, err := n.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if len(found) != 1 || found[0].HostIfIndex != third.HostIfIndex {
				t.Errorf("found %v", found)
			}
			mustPing(t, n.host, p.Address.IPv6)
		})
	}
}

// An object of somebody else stays, and the error names it.
func TestForeignObjectsInTheWay(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(t *testing.T, n node, p podnet.Pod, pod *netnstest.NS)
		says []string
	}{
		{"interface in the pod", func(t *testing.T, n node, p podnet.Pod, pod *netnstest.NS) {
			pod.IP(t, "link", "add", "eth0", "type", "bridge")
		}, []string{"in the pod there is already eth0 (bridge"}},
		{"alternative name", func(t *testing.T, n node, p podnet.Pod, pod *netnstest.NS) {
			n.host.IP(t, "link", "property", "add", "dev", "uplink", "altname", "coil-"+p.ContainerID+"-eth0")
		}, []string{"on the host there is already uplink (veth"}},
		{"name on the host", func(t *testing.T, n node, p podnet.Pod, pod *netnstest.NS) {
			a := n.mustAttach(t, p)
			if err := n.Remove(t.Context(), p.ID, 0); err != nil {
				t.Fatal(err)
			}
			n.host.IP(t, "link", "add", a.HostIfName, "type", "bridge")
		}, []string{"on the host there is already veth", "(bridge"}},
		{"route in the pod table", func(t *testing.T, n node, p podnet.Pod, pod *netnstest.NS) {
			n.host.IP(t, "route", "add", "10.64.0.1", "dev", "uplink", "table", "116", "proto", "99")
		}, []string{"on the host there is already route 10.64.0.1/32", "proto 99"}},
		{"route of another pod", func(t *testing.T, n node, p podnet.Pod, pod *netnstest.NS) {
			other, _ := newPod(t, 2, true, true)
			other.Address = p.Address
			n.mustAttach(t, other)
		}, []string{"on the host there is already route 10.64.0.1/32"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			p, pod := newPod(t, 1, true, true)
			c.make(t, n, p, pod)
			hostBefore, podBefore := state(t, n.host), state(t, pod)
			_, err := n.Attach(t.Context(), p, nil)
			if !errors.Is(err, rtnl.ErrExist) {
				t.Fatalf("got %v", err)
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is missing: %v", want, err)
				}
			}
			if diff := cmp.Diff(hostBefore, state(t, n.host)); diff != "" {
				t.Errorf("on the host (-before +after):\n%s", diff)
			}
			if diff := cmp.Diff(podBefore, state(t, pod)); diff != "" {
				t.Errorf("in the pod (-before +after):\n%s", diff)
			}
		})
	}
}
