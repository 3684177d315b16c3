package egress

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// pressure is what the router answers its controller.
func (top *topology) pressure() (p gateway.Pressure) {
	top.t.Helper()
	testkit.Check(top.t, json.Unmarshal([]byte(testkit.Must(top.get("8080", gateway.PressurePath))(top.t)), &p))
	return p
}

// lost counts, without asking the router, the connections that found no place in its table.
func (top *topology) lost() (dropped, evicted int) {
	top.t.Helper()
	text := testkit.Must(top.router.Run("conntrack", "-S"))(top.t)
	for field := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(field, "=")
		n, _ := strconv.Atoi(value) // 0 for what isn't a count
		switch name {
		case "drop":
			dropped += n
		case "early_drop":
			evicted += n
		}
	}
	return dropped, evicted
}

// beginFlows begins so many flows of UDP, from a port on.
func beginFlows(r *netlab.Raw, from, count int, dport uint16) error {
	for i := range count {
		b := binary.BigEndian.AppendUint16(nil, uint16(from+i))
		b = binary.BigEndian.AppendUint16(b, dport)
		b = append(b, 0, 8, 0, 0) // no payload
		if err := r.Send(b); err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
	}
	return nil
}

// leaks counts from now on what passes the fabric to a destination with a client's address:
// none is missed, however many there are.
func (top *topology) leaks(t *testing.T) (count func() int) {
	t.Helper()
	command(t, "nft", "add table inet leaks; add counter inet leaks found; add chain inet leaks c { type filter hook prerouting priority 0; }; "+
		fmt.Sprintf("add rule inet leaks c iifname %s ip daddr %s ip saddr != %s counter name found; ", bridge, destinations[0], router4)+
		fmt.Sprintf("add rule inet leaks c iifname %s ip6 daddr %s ip6 saddr != %s counter name found", bridge, destinations[1], router6))
	t.Cleanup(func() { command(t, "nft", "delete table inet leaks") })
	packets := regexp.MustCompile(`packets (\d+)`)
	return func() int {
		t.Helper()
		found := packets.FindStringSubmatch(command(t, "nft", "list", "counter", "inet", "leaks", "found"))
		if found == nil {
			t.Fatal("no counter of leaks")
		}
		return testkit.Must(strconv.Atoi(found[1]))(t)
	}
}

// tracking changes how many connections each namespace can track, and how long the router
// remembers one of UDP without an answer, until the end of the test.
func (top *topology) tracking(t *testing.T, most int) {
	t.Helper()
	before := strings.TrimSpace(command(t, "sysctl", "-n", "net.netfilter.nf_conntrack_max"))
	command(t, "sysctl", "-qw", fmt.Sprintf("net.netfilter.nf_conntrack_max=%d", most))
	testkit.Check(t, top.router.Lab().Sysctl("netfilter/nf_conntrack_udp_timeout=3600"))
	t.Cleanup(func() {
		command(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_max="+before)
		testkit.Check(t, top.router.Lab().Sysctl("netfilter/nf_conntrack_udp_timeout=30"))
		testkit.Must(top.router.Run("conntrack", "-F"))(t)
	})
}

// A router whose table of connections fills up says so before the first of them is lost, and
// goes on with those that it has.
func testPressure(t *testing.T, top *topology) {
	const most, step, begin = 1000, 50, 650
	c := top.a
	testkit.Must(top.router.Run("conntrack", "-F"))(t)
	top.tracking(t, most)
	leaks := top.leaks(t)
	conn := testkit.Must(c.dial(server4, testkit.Timeout(5*time.Second)))(t)
	defer conn.Close()
	r := c.raw(t, server4, unix.IPPROTO_UDP, 6)
	told := false
	dropped0, evicted0 := top.lost()
	testkit.Check(t, beginFlows(r, 1024, begin, 9))
	begun := begin
	if p := top.pressure(); p.Connections < begin || p.Connections*10 >= p.MaxConnections*8 {
		t.Fatalf("after %d flows it is %+v", begun, p)
	}
	for ; !told; begun += step {
		if begun > most {
			t.Fatal("nothing was told though the table is full")
		}
		testkit.Check(t, beginFlows(r, 1024+begun, step, 9))
		p := top.pressure()
		count, limit := top.metric("coil_egress_nf_conntrack_entries_count"), top.metric("coil_egress_nf_conntrack_entries_limit")
		told = count >= limit*0.8 && p.Connections*10 >= p.MaxConnections*8
		if limit != most || p.MaxConnections != most {
			t.Fatalf("the limit is %v, %+v; want %d", limit, p, most)
		}
		if dropped, evicted := top.lost(); dropped != dropped0 || evicted != evicted0 {
			t.Fatalf("%d connections were dropped and %d forgotten, of %v in %v", dropped-dropped0, evicted-evicted0, count, limit)
		}
	}
	t.Logf("told after %d flows of %d", begun, most)
	testkit.Eventually(t, 10*time.Second, "the table is full", func() error {
		if err := beginFlows(r, 1024+begun, step, 9); err != nil {
			return err
		}
		begun += step
		if dropped, evicted := top.lost(); dropped == dropped0 && evicted == evicted0 {
			return fmt.Errorf("nothing is lost of %d flows", begun)
		}
		return nil
	})
	// A router that is started again because kubelet gets no answer has no more room then.
	testkit.Must(top.get("8081", "/readyz"))(t)
	testkit.Check(t, conn.SetDeadline(time.Now().Add(testkit.Timeout(5*time.Second))))
	testkit.Must(conn.Write([]byte("alive")))(t)
	for buf := make([]byte, 100); ; {
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("the connection from before is dead: %v", err)
		}
		if strings.HasSuffix(string(buf[:n]), "alive") {
			break
		}
	}
	testkit.Must(top.router.Run("conntrack", "-D", "-p", "udp"))(t)
	if n := top.metric("coil_egress_nf_conntrack_dropped_total") + top.metric("coil_egress_nf_conntrack_early_drop_total"); n < 1 {
		t.Errorf("the metrics say that %v connections were lost", n)
	}
	if n := leaks(); n > 0 {
		t.Errorf("%d packets left with a client's address", n)
	}
	testkit.Check(t, c.transfer(server4, 1000), c.transfer(server6, 1000))
}

// More flows to one destination than a router has ports for: it says so, none leaves as it
// is, and other destinations are reached as before.
func testExhausted(t *testing.T, top *topology) {
	const flows = 70000
	top.program.Kill() // what it knows of ports is as old as the last look
	top.register(top.a, top.b)
	top.start()
	top.awaitTunnels(4)
	top.tracking(t, 200000)
	testkit.Must(top.router.Run("conntrack", "-F"))(t)
	leaks := top.leaks(t)
	sink := udp(t, top.server, server4, "9") // nobody is told that there is no such port
	defer sink.Close()
	failed := top.metric("coil_egress_nf_conntrack_insert_failed_total")
	begin := time.Now()
	var sending errgroup.Group
	for _, c := range []*sender{top.a, top.b} { // one has fewer ports itself
		r := c.raw(t, server4, unix.IPPROTO_UDP, 6)
		sending.Go(func() error { return beginFlows(r, 1024, flows/2, 9) })
	}
	testkit.Check(t, sending.Wait())
	t.Logf("%d flows begun in %s", flows, time.Since(begin).Round(time.Millisecond))
	testkit.Eventually(t, 60*time.Second, "the router tells of its ports", func() error {
		p := top.pressure()
		used := top.metric("coil_egress_snat_ports_used", `protocol="udp"`, `destination="192.0.2.2"`, `port="9"`)
		if p.Ports*10 < p.MaxPorts*9 || p.Destination != "udp 192.0.2.2:9" || used < 0.9*gateway.SourcePorts {
			return fmt.Errorf("%+v, and %v ports by the metric", p, used)
		}
		return nil
	})
	used := top.metric("coil_egress_snat_ports_used", `protocol="udp"`, `destination="192.0.2.2"`, `port="9"`)
	if used > gateway.SourcePorts {
		t.Errorf("%v ports are used of %d", used, gateway.SourcePorts)
	}
	lost := top.metric("coil_egress_nf_conntrack_insert_failed_total") - failed
	t.Logf("%v ports are used, %v packets found none", used, lost)
	if lost < 1 {
		t.Error("no packet was lost, by the metric")
	}
	if n := leaks(); n > 0 {
		t.Errorf("%d packets left with a client's address", n)
	}
	for _, c := range []*sender{top.a, top.b} {
		for _, f := range both {
			testkit.Check(t, c.transfer(of(f, server4, server6), 1000))
		}
		// The same address, another port.
		other := udp(t, top.server, server4, "10")
		from := udp(t, c.NS, c.addr4, "0")
		testkit.Must(from.WriteTo([]byte("x"), other.LocalAddr()))(t)
		testkit.Check(t, other.SetReadDeadline(time.Now().Add(testkit.Timeout(5*time.Second))))
		if _, who, err := other.ReadFrom(make([]byte, 10)); err != nil || !strings.HasPrefix(who.String(), router4.String()+":") {
			t.Errorf("another port is reached from %v, %v", who, err)
		}
		testkit.Check(t, from.Close(), other.Close())
	}
}
