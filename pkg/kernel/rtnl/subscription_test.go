package rtnl_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// listener collects what a subscription tells.
type listener struct {
	mu      sync.Mutex
	changes []rtnl.Change
	wakes   int
}

func listen(t *testing.T, h *rtnl.Handle, i rtnl.Interest, settle time.Duration) *listener {
	t.Helper()
	s, err := h.Subscribe(i)
	if err != nil {
		t.Fatal(err)
	}
	return follow(t, s, settle)
}

// follow begins to read a subscription.
func follow(t *testing.T, s *rtnl.Subscription, settle time.Duration) *listener {
	l := &listener{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- s.Run(ctx, settle, func(changes []rtnl.Change) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.wakes++
			l.changes = append(l.changes, changes...)
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// take returns what was told since the last call.
func (l *listener) take() (all []rtnl.Change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all, l.changes = l.changes, nil
	return all
}

// await waits for a change whose text has all of the parts.
func (l *listener) await(t *testing.T, parts ...string) rtnl.Change {
	t.Helper()
	var found rtnl.Change
	testkit.Eventually(t, 5*time.Second, fmt.Sprintf("change %q", parts), func() error {
		var seen []string
	changes:
		for _, c := range l.take() {
			seen = append(seen, c.String())
			for _, p := range parts {
				if !strings.Contains(c.String(), p) {
					continue changes
				}
			}
			found = c
			return nil
		}
		return fmt.Errorf("only %q", seen)
	})
	return found
}

var coildsInterest = rtnl.Interest{Protocol: 30, Tables: []int{116, 1000}, Rules: true, Links: true}

// newLinks returns a namespace with a veth v, vp and its handle.
func newLinks(t *testing.T) (h *rtnl.Handle, ns *netnstest.NS, index int) {
	t.Helper()
	h, ns = newHandle(t)
	ns.IP(t, "link", "add", "v", "type", "veth", "peer", "vp")
	ns.IP(t, "link", "set", "v", "up")
	ns.IP(t, "link", "set", "vp", "up")
	index, err := h.IndexByName("v")
	if err != nil {
		t.Fatal(err)
	}
	return h, ns, index
}

func TestSubscriptionTellsWhatOthersDo(t *testing.T) {
	h, ns, index := newLinks(t)
	ns.IP(t, "address", "add", "192.0.2.1/32", "dev", "v")
	for _, family := range []string{"-4", "-6"} {
		dst := map[string]string{"-4": "10.0.0.1", "-6": "fd00::1"}[family]
		ns.IP(t, family, "route", "add", dst, "dev", "v", "table", "116", "proto", "30")
		ns.IP(t, family, "route", "add", dst, "dev", "v", "table", "1000", "proto", "30")
		ns.IP(t, family, "rule", "add", "priority", "2000", "lookup", "116", "protocol", "30")
	}
	l := listen(t, h, coildsInterest, time.Millisecond)
	on := func(n int) string { return fmt.Sprintf("link %d", n) }
	for _, c := range []struct {
		do   string
		told []string
	}{
		{"-4 route del 10.0.0.1 table 116", []string{"route lost: 10.0.0.1/32", "proto 30", "table 116", "by netlink port"}},
		{"-6 route del fd00::1 table 116", []string{"route lost: fd00::1/128", "table 116", "by netlink port"}},
		{"-4 route replace 10.0.0.1 dev vp table 1000 proto 99", []string{"route lost: 10.0.0.1/32", "proto 99", "table 1000"}},
		{"-6 route replace fd00::1 dev vp table 1000 proto 99", []string{"route lost: fd00::1/128", "proto 99", "table 1000"}},
		{"-4 rule del priority 2000", []string{"rule lost: 2000: from all lookup 116 proto 30 (IPv4)", "by netlink port"}},
		{"-6 rule del priority 2000", []string{"rule lost: 2000: from all lookup 116 proto 30 (IPv6)", "by netlink port"}},
		{"link set v alias something", []string{on(index), "changed"}},
		{"link set v group 9", []string{on(index), "changed"}},
		{"link property add dev v altname other", []string{on(index), "changed"}},
		{"link property del dev v altname other", []string{on(index), "changed"}},
		{"address del 192.0.2.1/32 dev v", []string{"address 192.0.2.1", on(index), "lost"}},
		{"address add 2001:db8::1/64 dev v nodad", []string{"address 2001:db8::1 added", on(index)}},
		{"address del 2001:db8::1/64 dev v", []string{"address 2001:db8::1", on(index), "lost"}},
		{"link set v down", []string{on(index), "changed"}},
		{"link del v", []string{on(index), "link", "lost"}},
	} {
		l.take()
		ns.IP(t, strings.Fields(c.do)...)
		l.await(t, c.told...)
	}
}

// Routes that a router advertisement makes are told, those that others make and those of link-local
// addresses aren't.
func TestSubscriptionTellsLearnedRoutes(t *testing.T) {
	h, ns, index := newLinks(t)
	interest := coildsInterest
	interest.Learned = true
	l := listen(t, h, interest, time.Millisecond)
	learned := func() (dsts []string) {
		testkit.Eventually(t, 5*time.Second, "the last route", func() error {
			for _, c := range l.take() {
				if c.Kind == rtnl.RouteLearned {
					dsts = append(dsts, c.Route.Dst.String())
				}
				if c.Kind == rtnl.RouteLearned && c.Route.Link != index {
					t.Errorf("by link %d: %s", c.Route.Link, c)
				}
			}
			if len(dsts) == 0 || dsts[len(dsts)-1] != "2001:db8:9::/64" {
				return fmt.Errorf("told %q", dsts)
			}
			return nil
		})
		return dsts
	}
	for _, do := range []string{
		"-6 route add default via fe80::9 dev v proto ra", "-6 route add fd00::/64 dev v", "route add 10.0.0.0/24 dev v proto kernel",
		"address add fe80::5/64 dev v nodad", "-6 route add 2001:db8::53 dev v proto kernel", "-6 route add fd00:1::/64 dev v table 116 proto ra",
		"-6 route add 2001:db8:9::/64 dev v proto kernel",
	} {
		ns.IP(t, strings.Fields(do)...)
	}
	want := []string{"::/0", "2001:db8::53/128", "2001:db8:9::/64"}
	if got := learned(); !slices.Equal(got, want) {
		t.Errorf("told %q, not %q", got, want)
	}
}

// The parameters of links that the kernel tells about are those that let packets pass.
func TestSubscriptionTellsParameters(t *testing.T) {
	h, ns, index := newLinks(t)
	l := listen(t, h, coildsInterest, time.Millisecond)
	for _, key := range []string{"ipv4/conf/v/rp_filter", "ipv4/conf/v/forwarding", "ipv6/conf/v/forwarding"} {
		l.take()
		if _, err := ns.Run("sh", "-c", "echo $((! $(cat /proc/sys/net/"+key+"))) > /proc/sys/net/"+key); err != nil {
			t.Fatal(err)
		}
		l.await(t, fmt.Sprintf("link %d changed", index))
	}
}

// Neither what the handle does itself, nor what others do with their own objects,
// wakes anybody.
func TestSubscriptionIsSilentAboutOwnAndForeign(t *testing.T) {
	h, ns, index := newLinks(t)
	l := listen(t, h, coildsInterest, time.Millisecond)
	ctx := t.Context()
	for _, dst := range []string{"10.0.0.1/32", "fd00::1/128"} {
		r := dataplane.Route{Table: 116, Dst: netip.MustParsePrefix(dst), Link: index, Protocol: 30, Scope: dataplane.LinkScope}
		rule := dataplane.Rule{Family: dataplane.FamilyOf(r.Dst.Addr()), Priority: 2000, Table: 116, Protocol: 30}
		if err := h.Do(ctx, rtnl.AddRoute(r), rtnl.ReplaceRoute(r), rtnl.DelRoute(r), rtnl.AddRule(rule)); err != nil {
			t.Fatal(err)
		}
		rules, err := h.Rules(ctx, rule.Family)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range rules {
			if found.Rule == rule {
				err = h.Do(ctx, rtnl.DelFoundRule(found))
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Do(ctx, rtnl.AddAddr(index, netip.MustParsePrefix("169.254.1.1/32"), dataplane.LinkScope)); err != nil {
		t.Fatal(err)
	}
	for _, do := range []string{
		"route add 10.0.0.2 dev v", "route del 10.0.0.2 dev v",
		"route add 10.0.0.2 dev v table 116 proto 99", "route del 10.0.0.2 dev v table 116 proto 99",
		"rule add priority 3000 lookup 116",
	} {
		ns.IP(t, strings.Fields(do)...)
	}
	// The last change shows that everything before was told.
	ns.IP(t, "rule", "del", "priority", "3000")
	var all []rtnl.Change
	testkit.Eventually(t, 5*time.Second, "the last change", func() error {
		for _, c := range l.take() {
			if c.Kind != rtnl.LinkChanged { // the links still get their carriers
				all = append(all, c)
			}
		}
		if len(all) == 0 || all[len(all)-1].Rule.Priority != 3000 {
			return fmt.Errorf("only %v", all)
		}
		return nil
	})
	if len(all) != 1 {
		t.Errorf("told %v", all)
	}
}

// A program that needs less is not woken by the pods that come and go.
func TestSubscriptionWithoutLinks(t *testing.T) {
	h, ns, index := newLinks(t)
	l := listen(t, h, rtnl.Interest{Protocol: 31, Tables: []int{unix.RT_TABLE_MAIN}}, time.Millisecond)
	ns.IP(t, "link", "set", "v", "alias", "something")
	ns.IP(t, "rule", "add", "priority", "2000", "lookup", "116")
	ns.IP(t, "rule", "del", "priority", "2000")
	ns.IP(t, "route", "add", "10.0.0.0/24", "dev", "v", "proto", "31")
	ns.IP(t, "route", "del", "10.0.0.0/24", "dev", "v", "proto", "31")
	var all []rtnl.Change
	testkit.Eventually(t, 5*time.Second, "the last change", func() error {
		all = append(all, l.take()...)
		if len(all) == 0 {
			return fmt.Errorf("nothing yet")
		}
		return nil
	})
	if len(all) != 1 || all[0].Kind != rtnl.RouteLost {
		t.Errorf("told %v", all)
	}
	ns.IP(t, "link", "set", "v", "down")
	l.await(t, fmt.Sprintf("link %d changed", index))
}

// Notifications that don't fit into the buffer aren't lost without a word.
func TestSubscriptionOverrun(t *testing.T) {
	h, ns, _ := newLinks(t)
	s, err := h.Subscribe(coildsInterest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ns.Run("sh", "-c",
		"for i in $(seq 20000); do echo rule add priority 3000 lookup 116; echo rule del priority 3000; done | ip -batch -"); err != nil {
		t.Fatal(err)
	}
	l := follow(t, s, time.Millisecond) // only now: a reader on a slow machine keeps up with ip
	testkit.Eventually(t, 10*time.Second, "word of an overrun", func() error {
		for _, c := range l.take() {
			if c.Kind == rtnl.Unknown {
				return nil
			}
		}
		return fmt.Errorf("no word of an overrun")
	})
	// And it goes on.
	ns.IP(t, "link", "set", "v", "down")
	testkit.Eventually(t, 10*time.Second, "the next change", func() error {
		for _, c := range l.take() {
			if c.Kind == rtnl.LinkChanged {
				return nil
			}
		}
		return fmt.Errorf("nothing")
	})
}

// Objects that go together with a lost one are gone by the time the loss is told.
func TestSubscriptionWaitsForTheKernel(t *testing.T) {
	h, ns, index := newLinks(t)
	s, err := h.Subscribe(coildsInterest)
	if err != nil {
		t.Fatal(err)
	}
	left := make(chan int)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- s.Run(ctx, time.Millisecond, func(changes []rtnl.Change) {
			for _, c := range changes {
				if c.Kind == rtnl.AddrLost {
					routes, err := h.Routes(ctx, dataplane.IPv4, 116, 30)
					if err != nil {
						t.Error(err)
					}
					left <- len(routes)
				}
			}
		})
	}()
	addr := netip.MustParsePrefix("192.0.2.1/32")
	var routes []rtnl.Request
	for i := range 500 {
		routes = append(routes, rtnl.AddRoute(dataplane.Route{
			Table: 116, Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32),
			Link: index, Source: addr.Addr(), Protocol: 30, Scope: dataplane.LinkScope,
		}))
	}
	for range 50 {
		if err := h.Do(ctx, append([]rtnl.Request{rtnl.AddAddr(index, addr, dataplane.Universe)}, routes...)...); err != nil {
			t.Fatal(err)
		}
		ns.IP(t, "address", "del", addr.String(), "dev", "v")
		if n := <-left; n != 0 {
			t.Errorf("%d routes were there still", n)
		}
	}
	cancel()
	if err := errors.Join(<-done, s.Close()); err != nil {
		t.Error(err)
	}
}
