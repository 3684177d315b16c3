// Package repair proves that coild and coil-router restore their kernel objects when other programs remove or
// change them, while they run and when they start, and leave objects of others alone.
//
// Each test has a node of its own in one rig; see package rig. Nothing here knows how a
// loss is noticed.
package repair

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// within is what users are promised.
const within = 5 * time.Second

// shared is the rig of all tests, which wait most of the time.
var shared = rigtest.Shared{Parallel: 8}

func TestMain(m *testing.M) { shared.Main(m) }

// fixture is a node with pods, and what is theirs in the kernel.
type fixture struct {
	*rig.Rig
	*rig.Node
	t    *testing.T
	pods []*rig.Sandbox
	pool string
}

var pools struct {
	sync.Mutex
	n int
}

// newFixture returns a node with some dual-stack pods of a pool of its own.
func newFixture(t *testing.T, pods int, o rig.NodeOptions) *fixture {
	t.Helper()
	r := shared.Rig(t)
	pools.Lock()
	pools.n++
	number := pools.n
	pools.Unlock()
	f := &fixture{Rig: r, t: t, pool: fmt.Sprintf("pool-%d", number)}
	ctx := t.Context()
	f.check(
		r.AddPool(ctx, f.pool, 3, rig.Dual(fmt.Sprintf("10.%d.0.0/20", number), fmt.Sprintf("fd00:%x::/116", number))),
		r.AddNamespace(ctx, f.pool, f.pool),
	)
	var err error
	f.Node, err = r.AddNode(ctx, o)
	f.check(err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", f.Name, f.Coild.Logs(80))
			out, err := f.Run(context.WithoutCancel(ctx), "sh", "-c", "date; ip rule; ip route show table all; ip -6 route show table all; ip address")
			t.Logf("its kernel:\n%s%v", out, err)
		}
		if err := f.Remove(context.WithoutCancel(ctx)); err != nil {
			t.Errorf("remove %s: %v", f.Name, err)
		}
	})
	for range pods {
		s, err := f.NewSandbox(ctx, rig.SandboxOptions{Namespace: f.pool})
		f.check(err)
		_, err = s.Add(ctx)
		f.check(err)
		f.pods = append(f.pods, s)
	}
	return f
}

// check ends the test if there is an error.
func (f *fixture) check(errs ...error) {
	f.t.Helper()
	testkit.Check(f.t, errs...)
}

// sh runs a script in the node's network namespace.
func (f *fixture) sh(script string) string {
	f.t.Helper()
	return rigtest.Sh(f.t, f.Node, script)
}

// uncertain parts of what iproute2 prints change by themselves.
var uncertain = regexp.MustCompile(`(valid|preferred)_lft \S+|expires \S+|pref \S+| linkdown| dead|qlen \d+|state \S+`)

// kernel is all that others could take, with what is others'.
func (f *fixture) kernel() []string {
	f.t.Helper()
	out := f.sh(`
		for family in -4 -6; do
			ip -N $family rule | sed "s/^/rule $family /"
			ip -N $family route show table all | sed "s/^/route $family /"
		done
		ip -N -o -d link show type veth
		ip -N -o address
		nft -s list ruleset
		cd /proc/sys/net
		grep -H . ipv4/ip_forward ipv6/conf/all/forwarding ipv[46]/conf/veth*/forwarding ipv4/conf/veth*/rp_filter ipv6/conf/veth*/disable_ipv6`)
	var all []string
	for line := range strings.Lines(out) {
		if strings.Contains(line, " eth0 ") || strings.Contains(line, " table 255 ") {
			continue // the kernel makes what follows from IPv6 addresses in the background
		}
		if line = strings.Join(strings.Fields(uncertain.ReplaceAllString(line, "")), " "); line != "" {
			all = append(all, line)
		}
	}
	slices.Sort(all)
	return all
}

// difference says what differs between two states of the kernel.
func difference(want, got []string) string {
	var b strings.Builder
	for _, l := range want {
		if !slices.Contains(got, l) {
			fmt.Fprintf(&b, "- %s\n", l)
		}
	}
	for _, l := range got {
		if !slices.Contains(want, l) {
			fmt.Fprintf(&b, "+ %s\n", l)
		}
	}
	return b.String()
}

// awaitKernel waits until the kernel has what it had, and returns how long that took.
func (f *fixture) awaitKernel(want []string, limit time.Duration) time.Duration {
	f.t.Helper()
	start := time.Now()
	for {
		d := difference(want, f.kernel())
		if d == "" {
			return time.Since(start)
		}
		if time.Since(start) > testkit.Timeout(limit) {
			f.t.Fatalf("not restored within %s (- missing, + too much):\n%s", limit, d)
		}
		f.pause(20 * time.Millisecond)
	}
}

// pause waits before the next look.
func (f *fixture) pause(d time.Duration) {
	f.t.Helper()
	select {
	case <-f.t.Context().Done():
		f.t.Fatal("the test ended")
	case <-time.After(d):
	}
}

// repairs is coil_repairs_total by kind.
func (f *fixture) repairs() map[string]float64 { return f.metric("coil_repairs_total", "kind") }

// awaitCounted waits until so many repairs of these kinds are counted, which is after they are
// made.
func (f *fixture) awaitCounted(want map[string]float64) {
	f.t.Helper()
	testkit.Eventually(f.t, 2*time.Second, "repairs are counted", func() error {
		got := f.repairs()
		for kind, n := range want {
			if got[kind] < n {
				return fmt.Errorf("%s: %v repairs, want at least %v", kind, got[kind], n)
			}
		}
		return nil
	})
}

// metric reads one metric of coild by the value of a label.
func (f *fixture) metric(name, label string) map[string]float64 {
	f.t.Helper()
	text, err := f.Get(f.t.Context(), "/metrics")
	f.check(err)
	line := regexp.MustCompile(`^` + name + `\{.*?` + label + `="([^"]*)".*\} (\S+)$`)
	values := map[string]float64{}
	for l := range strings.Lines(text) {
		if m := line.FindStringSubmatch(strings.TrimSpace(l)); m != nil {
			v, err := strconv.ParseFloat(m[2], 64)
			f.check(err)
			values[m[1]] += v
		}
	}
	return values
}

// hostEnd is the name of the host's end of a pod's link.
func (f *fixture) hostEnd(s *rig.Sandbox) string {
	f.t.Helper()
	out := f.sh("ip -o link show dev coil-" + s.ContainerID + "-eth0")
	name, _, _ := strings.Cut(strings.Fields(out)[1], "@")
	return strings.TrimSuffix(name, ":")
}
