package egress

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// awaitTunnels waits until the router has so many tunnels.
func (top *topology) awaitTunnels(n int) {
	top.t.Helper()
	testkit.Eventually(top.t, 10*time.Second, fmt.Sprintf("%d tunnels", n), func() error {
		if got := strings.Count(top.router.IP(top.t, "-o", "link", "show"), ": fou"); got != n {
			return fmt.Errorf("there are %d", got)
		}
		return nil
	})
}

// An address goes from one pod to another: whoever has it now keeps the tunnel, in whatever
// order the router learns of it, and who leaves takes nothing along but its own connections.
func testReused(t *testing.T, top *topology) {
	c, other := top.a, top.b
	top.register(c, other)
	top.awaitTunnels(4)
	indexes := func() string {
		out := ""
		for _, m := range c.members {
			l := top.router.IP(t, "-o", "link", "show", dataplane.TunnelName(m.addr, 0))
			out += strings.Fields(l)[0]
		}
		return out
	}
	before := indexes()
	next := []member{{"next", c.addr4}, {"next", c.addr6}}
	last := []member{{"last", c.addr4}, {"last", c.addr6}}
	for _, step := range [][]member{
		append(append([]member{}, c.members...), next...), // the new pod is listed beside the old one
		next,
		last, // from one to the other at once
		append(append([]member{}, next...), last...), // the old one comes back late
		last,
	} {
		uids := map[string]bool{}
		for _, m := range step {
			uids[m.uid] = true
		}
		top.api.publish(namespace, append(step, other.members...)...)
		testkit.Eventually(t, 5*time.Second, "the router knows", func() error {
			if n := top.metric("coil_egress_client_pod_count"); int(n) != len(uids)+1 {
				return fmt.Errorf("%v clients, not %d", n, len(uids)+1)
			}
			for uid := range uids {
				if top.metric("coil_egress_client_pod_info", `pod="pod-`+uid+`"`) != 2 {
					return fmt.Errorf("no information about %s", uid)
				}
			}
			return nil
		})
		testkit.Check(t, c.transfer(server4, 1000), c.transfer(server6, 1000))
		if now := indexes(); now != before {
			t.Errorf("after %v links are %s, and were %s", step, now, before)
		}
	}
	top.register(other)
	top.awaitTunnels(2)
	c.fails(t, server4)
	testkit.Check(t, other.transfer(server4, 1000), other.transfer(server6, 1000))
}

// crowd are members without a pod.
func crowd(n int) []member {
	var all []member
	for i := range n {
		uid := fmt.Sprintf("crowd-%d", i)
		all = append(all,
			member{uid, netip.AddrFrom4([4]byte{10, 3, byte(i >> 8), byte(i)})},
			member{uid, netip.MustParseAddr(fmt.Sprintf("fd03::%x", i))})
	}
	return all
}

// Clients that come while the router starts are all served when it says that it is ready, and
// it says so no sooner. With COIL_EGRESS=long these are 5,000 pods, and it takes no longer
// than the target.
func testStart(t *testing.T, top *topology) {
	c := top.a
	top.program.Kill()
	n := testkit.EgressForm.Times(150, 5000)
	members := append(crowd(n-1), c.members...)
	half := len(members) / 2
	top.api.publish(namespace, members[:half]...)
	start := time.Now()
	testkit.Check(t, top.program.Start())
	grown := make(chan bool)
	go func() {
		defer close(grown)
		for i := half; i < len(members); i += 50 {
			top.api.publish(namespace, members[:min(i+50, len(members))]...)
		}
	}()
	testkit.Eventually(t, 60*time.Second, "the router is ready", func() error {
		_, err := top.get("8081", "/readyz")
		return err
	})
	// Tunnels to clients that were listed before the start are there.
	if links := strings.Count(top.router.IP(t, "-o", "link", "show"), ": fou"); links < half {
		t.Fatalf("ready with %d of %d tunnels", links, half)
	}
	<-grown
	top.ready()
	// To read the metrics of so many again and again would keep the router from its work.
	testkit.Eventually(t, 60*time.Second, "all clients are served", func() error {
		if want := fmt.Sprintf("clients=%d", len(members)); top.program.CountLogs(want) == 0 {
			return fmt.Errorf("no %q in the log", want)
		}
		return nil
	})
	took := time.Since(start)
	t.Logf("%d pods of two addresses are served after %s", n, took.Round(time.Millisecond))
	if limit := testkit.Limit(20 * time.Second); took > limit {
		t.Errorf("it took longer than %s", limit)
	}
	testkit.Check(t, c.transfer(server4, 1000), c.transfer(server6, 1000))
	if got := top.metric("coil_egress_tunnels"); int(got) != len(members) {
		t.Errorf("%v tunnels of %d", got, len(members))
	}
	rss := top.metric("process_resident_memory_bytes") / (1 << 20)
	t.Logf("%.0f MiB resident", rss)
	if rss > 100 {
		t.Error("more than 100 MiB")
	}
	// The last of many changes is as fast as the first.
	var served []time.Duration
	for range testkit.EgressForm.Times(5, 100) {
		for _, gone := range []bool{true, false} {
			now, want := members, true
			if gone {
				now, want = members[:len(members)-2], false
			}
			start := top.api.publish(namespace, now...)
			for c.Ping(server4, testkit.Timeout(20*time.Millisecond)) == nil != want {
				if time.Since(start) > testkit.Timeout(10*time.Second) {
					t.Fatalf("gone: %t, and nothing changes", gone)
				}
			}
			if !gone { // the other one waits for a silence
				served = append(served, time.Since(start))
			}
		}
	}
	at := func(q float64) time.Duration { return figures.NearestRank(served, q).Round(time.Millisecond) }
	t.Logf("of %d times, a client that comes is served after %s (median), %s (p99), %s (longest)", len(served), at(0.5), at(0.99), at(1))
	// Beside other tests, who is last to get a processor says nothing about the router.
	if limit := testkit.Limit(500 * time.Millisecond); at(0.99) > limit && testkit.EgressForm.Long() {
		t.Errorf("p99 is longer than %s", limit)
	}
}

// A router that is killed at any moment comes back to exactly what it had, and leaves the
// tables of others alone.
func testKilled(t *testing.T, top *topology) {
	c := top.a
	members := append(crowd(20), c.members...)
	top.api.publish(namespace, members...)
	nft := func(args ...string) string {
		return testkit.Must(top.router.Run("nft", args...))(t)
	}
	nft("add table inet other; add chain inet other c { type filter hook forward priority 5; }; add rule inet other c counter; " +
		"add table ip mangle; add chain ip mangle FORWARD; add rule ip mangle FORWARD drop")
	defer nft("delete table inet other; delete table ip mangle")
	top.awaitTunnels(len(members))
	// Each table by itself: one that was deleted is listed last when it comes back.
	state := func() string {
		return nft("--stateless", "list", "table", "inet", "coil") + nft("--stateless", "list", "table", "inet", "other") +
			nft("--stateless", "list", "table", "ip", "mangle") + top.router.IP(t, "rule") + top.router.IP(t, "-6", "rule") +
			top.router.IP(t, "route", "show", "table", "118") + top.router.IP(t, "-6", "route", "show", "table", "118") + top.router.IP(t, "fou", "show")
	}
	want := state()
	if !strings.Contains(want, "table inet other") || !strings.Contains(want, "table ip mangle") {
		t.Fatalf("tables of others are gone:\n%s", want)
	}
	for i := range testkit.EgressForm.Times(3, 100) {
		if i%3 == 2 {
			// So that the next one has work to do; the one before may not have come to making it.
			nft("add table inet coil; delete table inet coil")
			top.router.IP(t, "link", "del", dataplane.TunnelName(members[0].addr, 0))
		}
		top.program.Kill()
		testkit.Check(t, top.program.Start())
		time.Sleep(time.Duration(rand.Int64N(int64(testkit.Timeout(100 * time.Millisecond)))))
	}
	top.program.Kill()
	top.start()
	testkit.Eventually(t, 10*time.Second, "the same state", func() error {
		if got := state(); got != want {
			return fmt.Errorf("(-want +got)\n%s", cmp.Diff(want, got))
		}
		return nil
	})
	testkit.Check(t, c.transfer(server4, 1000), c.transfer(server6, 1000))
}

// Connections live on while the router's container restarts, whether it is ended or killed.
func testRestart(t *testing.T, top *topology) {
	c := top.a
	conn := testkit.Must(c.dial(server4, testkit.Timeout(5*time.Second)))(t)
	defer conn.Close()
	echo := func() error {
		if err := conn.SetDeadline(time.Now().Add(testkit.Timeout(5 * time.Second))); err != nil {
			return err
		}
		_, err := conn.Write([]byte("x"))
		for b := []byte{0}; err == nil && b[0] != 'x'; { // before it is who asks
			_, err = conn.Read(b)
		}
		return err
	}
	testkit.Check(t, echo())
	top.program.Kill()
	testkit.Check(t, echo())
	top.start()
	testkit.Check(t, echo())
	t.Run("drain", func(t *testing.T) {
		stopped := make(chan struct{})
		go func() { defer close(stopped); top.program.Stop() }()
		for ended := false; !ended; {
			select {
			case <-stopped:
				ended = true
			default:
				// As long as it answers at all, it is ready: it serves, as EndpointSlices say.
				if _, err := top.get("8081", "/readyz"); err != nil && strings.Contains(err.Error(), " 503 ") {
					t.Error(err)
				}
			}
			testkit.Check(t, echo())
		}
	})
	top.start()
	testkit.Check(t, echo())
	top.uplink.sound()
}

// Kernel objects of the router that another program destroys come back.
func testRepair(t *testing.T, top *topology) {
	c := top.a
	for _, damage := range []string{
		"nft delete table inet coil",
		"nft flush chain inet coil nat",
		"ip link del " + dataplane.TunnelName(c.addr4, 0),
		"ip link set " + dataplane.TunnelName(c.addr4, 0) + " down",
		"ip route flush table 118",
		"ip rule del priority 2100",
		"ip rule del priority 2202",
		"nft flush ruleset; ip rule del priority 2202; ip -6 rule del priority 2202",
	} {
		testkit.Must(top.router.Run("sh", "-c", damage))(t)
		testkit.Eventually(t, 5*time.Second, "repaired after "+damage, func() error {
			table, err := top.router.Run("nft", "list", "table", "inet", "coil")
			if err == nil && !strings.Contains(table, "snat ") {
				err = errors.New("no source is translated")
			}
			return errors.Join(err, c.Ping(server4, testkit.Timeout(50*time.Millisecond)))
		})
	}
	testkit.Check(t, c.transfer(server4, 1000))
	if n := top.metric("coil_repairs_total"); n < 5 {
		t.Errorf("%v repairs were counted", n)
	}
	testkit.Check(t, c.transfer(server6, 1000))
}

// Without FoU in the kernel the router isn't ready and says why; the same with parameters of
// the kernel that don't let it forward.
func testUnavailable(t *testing.T, top *topology) {
	top.t, top.uplink.t = t, t
	expect := func(what string) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, "not ready because of "+what, func() error {
			switch _, err := top.get("8081", "/readyz"); {
			case err == nil:
				return errors.New("it is ready")
			case !strings.Contains(err.Error(), what):
				return err
			}
			return nil
		})
	}
	command(t, "rmmod", "fou6", "fou")
	loaded := false
	defer func() {
		if !loaded {
			command(t, "modprobe", "-a", "fou", "fou6")
		}
	}()
	testkit.Check(t, top.program.Start())
	expect("the module fou is not loaded")
	command(t, "modprobe", "-a", "fou", "fou6")
	loaded = true
	top.ready()
	for _, c := range [][2]string{
		{"ipv4/ip_forward=0", "ipv4/ip_forward=1"},
		{"ipv6/conf/all/forwarding=0", "ipv6/conf/all/forwarding=1"},
		{"ipv4/conf/eth0/rp_filter=1", "ipv4/conf/eth0/rp_filter=0"},
		{"ipv4/conf/all/rp_filter=2", "ipv4/conf/all/rp_filter=0"},
	} {
		testkit.Check(t, top.router.Lab().Sysctl(c[0]))
		expect(strings.ReplaceAll(c[0][:4], "ipv", "net/ipv"))
		testkit.Check(t, top.router.Lab().Sysctl(c[1]))
		top.ready()
	}
}
