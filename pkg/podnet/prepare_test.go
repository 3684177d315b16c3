package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
)

// unaddressed is a pod whose address isn't known yet.
func unaddressed(p podnet.Pod) podnet.Pod {
	p.Address, p.Pool = ipam.Address{}, ""
	return p
}

// mustPrepare makes the link of a pod before its address is known.
func (n node) mustPrepare(tb testing.TB, p podnet.Pod) *podnet.Link {
	tb.Helper()
	l, err := n.Prepare(ctxOf(tb), unaddressed(p))
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

// A prepared link is attached as any other, also when it lacks what Attach needs, or
// when it has gone.
func TestAttachPrepared(t *testing.T) {
	spoil := []struct {
		name string
		do   func(t *testing.T, n node, p podnet.Pod)
	}{
		{"at once", func(*testing.T, node, podnet.Pod) {}},
		{"without IPv6 on the host", func(t *testing.T, n node, _ podnet.Pod) {
			if out, err := n.host.Run("sh", "-c", "sysctl -qw net.ipv6.conf.all.disable_ipv6=1"); err != nil {
				t.Fatal(err, out)
			}
		}},
		{"gone", func(t *testing.T, n node, p podnet.Pod) {
			if err := n.Remove(t.Context(), p.ID, 0); err != nil {
				t.Fatal(err)
			}
		}},
	}
	for _, f := range families {
		for _, s := range spoil {
			t.Run(f.name+" "+s.name, func(t *testing.T) {
				n := newNode(t)
				p, pod := newPod(t, 1, f.ipv4, f.ipv6)
				l := n.mustPrepare(t, p)
				s.do(t, n, p)
				before := len(state(t, pod))
				a, err := n.Attach(t.Context(), p, l)
				if err != nil {
					t.Fatal(err)
				}
				if err := n.Check(t.Context(), p, a); err != nil {
					t.Error(err)
				}
				if got := len(state(t, pod)); got <= before {
					t.Errorf("the pod's namespace has nothing more: %d bytes, %d before", got, before)
				}
				settle(t, n.host, a.HostIfName, podnet.Gateways.IPv6, p)
				for _, to := range p.Address.Addrs() {
					mustPing(t, n.host, to)
				}
			})
		}
	}
}

// A step that fails once is mended; nothing but the attachment is left.
func TestAttachPreparedMends(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t)
			p, pod := newPod(t, 1, f.ipv4, f.ipv6)
			hostBefore, podBefore := state(t, n.host), state(t, pod)
			for step, last := 1, false; !last; step++ {
				l := n.mustPrepare(t, p)
				r := recorder{fail: func(n int, _ string) error {
					if n == step {
						return errInjected
					}
					return nil
				}}
				a, err := n.Attach(r.context(t.Context()), p, l)
				if err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
				if err := n.Check(t.Context(), p, a); err != nil {
					t.Fatalf("after step %d: %v", step, err)
				}
				last = r.count() < step
				if last && step < 8 {
					t.Fatalf("only %d steps", step)
				}
				if err := n.Remove(t.Context(), p.ID, 0); err != nil {
					t.Fatal(err)
				}
				mustBeAsBefore(t, fmt.Sprint("after step ", step), hostBefore, state(t, n.host))
				mustBeAsBefore(t, fmt.Sprint("after step ", step, ", in the pod"), podBefore, state(t, pod))
			}
		})
	}
}

func mustBeAsBefore(t *testing.T, when, before, after string) {
	t.Helper()
	if diff := cmp.Diff(before, after); diff != "" {
		t.Fatalf("%s (-before +after):\n%s", when, diff)
	}
}

func TestPreparedLinkLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		name string
		use  func(t *testing.T, n node, p podnet.Pod, l *podnet.Link) error
		want error
	}{
		{"discarded", func(t *testing.T, n node, _ podnet.Pod, l *podnet.Link) error {
			return n.Discard(t.Context(), l)
		}, nil},
		{"discarded when it has gone", func(t *testing.T, n node, p podnet.Pod, l *podnet.Link) error {
			return errors.Join(n.Remove(t.Context(), p.ID, 0), n.Discard(t.Context(), l))
		}, nil},
		{"cancelled", func(t *testing.T, n node, p podnet.Pod, l *podnet.Link) error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_, err := n.Attach(ctx, p, l)
			return err
		}, context.Canceled},
		{"invalid", func(t *testing.T, n node, p podnet.Pod, l *podnet.Link) error {
			if _, err := n.Attach(t.Context(), unaddressed(p), l); err == nil {
				t.Error("attached without an address")
			}
			return nil
		}, nil},
		{"refused", func(t *testing.T, n node, p podnet.Pod, l *podnet.Link) error {
			n.host.IP(t, "route", "add", "10.64.0.1", "dev", "uplink", "table", "116", "proto", "99")
			_, err := n.Attach(t.Context(), p, l)
			n.host.IP(t, "route", "del", "10.64.0.1", "dev", "uplink", "table", "116", "proto", "99")
			return err
		}, rtnl.ErrExist},
		{"killed, then removed", func(t *testing.T, n node, p podnet.Pod, _ *podnet.Link) error {
			return n.Remove(t.Context(), p.ID, 0)
		}, nil},
		{"killed, then attached and removed", func(t *testing.T, n node, p podnet.Pod, _ *podnet.Link) error {
			_, err := n.Attach(t.Context(), p, nil)
			return errors.Join(err, n.Remove(t.Context(), p.ID, 0))
		}, nil},
		{"killed, then prepared, attached and removed", func(t *testing.T, n node, p podnet.Pod, _ *podnet.Link) error {
			if _, err := n.Prepare(t.Context(), unaddressed(p)); !errors.Is(err, rtnl.ErrExist) {
				t.Errorf("preparing it again: %v", err)
			}
			_, err := n.Attach(t.Context(), p, nil)
			return errors.Join(err, n.Remove(t.Context(), p.ID, 0))
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			p, pod := newPod(t, 1, true, true)
			hostBefore, podBefore := state(t, n.host), state(t, pod)
			if err := c.use(t, n, p, n.mustPrepare(t, p)); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			mustBeAsBefore(t, "on the host", hostBefore, state(t, n.host))
			mustBeAsBefore(t, "in the pod", podBefore, state(t, pod))
		})
	}
}

// Links that a killed process prepared for pods that nobody asks for again are removed at the
// next start, and nothing else.
func TestRecover(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	// Another program took the labels of a pod that runs.
	stripped, _ := newPod(t, 9, true, true)
	s := n.mustAttach(t, stripped)
	n.host.IP(t, "link", "set", s.HostIfName, "alias", "")
	n.host.IP(t, "link", "property", "del", "dev", s.HostIfName, "altname", "coil-"+stripped.ContainerID+"-eth0")
	n.host.IP(t, "link", "add", "foreign", "type", "veth", "peer", "foreign-peer")
	n.host.IP(t, "link", "set", "foreign", "group", fmt.Sprint(0x636f696c))
	for _, name := range []string{"vethother", "vethalias"} {
		n.host.IP(t, "link", "add", name, "type", "veth", "peer", name+"-peer")
	}
	n.host.IP(t, "link", "set", "vethalias", "group", fmt.Sprint(0x636f696c), "alias", "somebody's")
	// A route to a range is no pod's, and is named all the same.
	n.host.IP(t, "route", "add", "10.9.0.0/26", "dev", s.HostIfName, "table", "116", "proto", "30")
	before := state(t, n.host)
	for i := range 3 {
		other, _ := newPod(t, 2+i, true, true)
		n.mustPrepare(t, other)
	}
	for _, want := range []int{3, 0} {
		r, err := n.Recover(t.Context())
		if err != nil || r.Unfinished != want {
			t.Errorf("removed %d, %v; want %d", r.Unfinished, err, want)
		}
		if len(r.Strays) != 3 || !strings.HasPrefix(r.Strays[0], s.HostIfName+" with the route to ") {
			t.Errorf("stray routes: %q, want those of %s", r.Strays, s.HostIfName)
		}
		if text := strings.Join(r.Strays, "\n"); !strings.Contains(text, "the route to 10.9.0.0/26:") || strings.Contains(text, "/32") {
			t.Errorf("stray routes: %q, want a range with its length, and addresses without", r.Strays)
		}
	}
	mustBeAsBefore(t, "on the host", before, state(t, n.host))
	if err := n.Check(t.Context(), p, a); err != nil {
		t.Error(err)
	}
}
