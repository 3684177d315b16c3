package podnet_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Whatever is taken from a pod shows in what Look says, under its topic, and nothing else does.
func TestLook(t *testing.T) {
	n := newNode(t)
	for _, do := range []func() error{
		func() error { _, err := n.Forward(t.Context()); return err },
		func() error { _, err := n.Rules(t.Context()); return err },
		func() error { _, err := n.Guard(t.Context()); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	p, pod := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	w := podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex, HostMAC: a.HostMAC}
	if err := n.CheckGuard(t.Context(), p, a); err != nil {
		t.Fatal(err)
	}
	wrong := func() (topics []inspection.Topic, all []inspection.Comparison) {
		all = inspection.Wrong(append(n.Look(t.Context(), p, a), n.LookAtHost(t.Context())...))
		for _, c := range all {
			topics = append(topics, c.Topic)
		}
		slices.Sort(topics)
		return slices.Compact(topics), all
	}
	if topics, all := wrong(); len(topics) > 0 {
		t.Fatalf("right after the pod was attached: %v", all)
	}
	host := n.host
	link, four := a.HostIfName, p.Address.IPv4.String()
	topics := func(all ...inspection.Topic) []inspection.Topic { slices.Sort(all); return all }
	for _, c := range []struct {
		name  string
		spoil func()
		want  []inspection.Topic
	}{
		{"route", func() { host.IP(t, "route", "del", four, "table", "116") }, topics(inspection.Routes, inspection.Ways)},
		{"another route", func() {
			host.IP(t, "route", "replace", four, "dev", "lo", "proto", "30", "scope", "link", "table", "116")
		},
			topics(inspection.Routes, inspection.Ways)},
		{"rule", func() { host.IP(t, "rule", "del", "priority", "2000") }, topics(inspection.Rules, inspection.Ways)},
		{"rule before Coil's", func() { host.IP(t, "rule", "add", "priority", "5", "to", four, "blackhole") }, topics(inspection.Ways)},
		{"alias", func() { host.IP(t, "link", "set", link, "alias", "mine") }, topics(inspection.Veth)},
		{"MTU", func() { host.IP(t, "link", "set", link, "mtu", "1400") }, topics(inspection.Veth)},
		{"group", func() { host.IP(t, "link", "set", link, "group", "7") }, topics(inspection.Veth, inspection.Guard)},
		{"gateway", func() { host.IP(t, "addr", "del", "169.254.1.1/32", "dev", link) }, topics(inspection.Veth, inspection.Routes, inspection.Ways)}, // the kernel's doing
		{"rp_filter", func() { setSysctl(t, host, "ipv4/conf/"+link+"/rp_filter", "1") }, topics(inspection.Sysctls)},
		{"forwarding of the link", func() { setSysctl(t, host, "ipv4/conf/"+link+"/forwarding", "0") }, topics(inspection.Sysctls)},
		{"accept_ra", func() { setSysctl(t, host, "ipv6/conf/"+link+"/accept_ra", "1") }, topics(inspection.Sysctls)},
		{"table of nftables", func() { run(t, host, "nft", "delete", "table", "inet", "coil") }, topics(inspection.Guard)},
		{"rule of nftables", func() { run(t, host, "nft", "flush", "chain", "inet", "coil", "forged") }, topics(inspection.Guard)},
		{"address in the pod", func() { pod.IP(t, "addr", "del", four+"/32", "dev", p.IfName) }, topics(inspection.Inside)},
		{"default route in the pod", func() { pod.IP(t, "route", "del", "default") }, topics(inspection.Inside)},
		{"link", func() { host.IP(t, "link", "set", link, "down") }, topics(inspection.Veth, inspection.Routes, inspection.Ways)},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.spoil()
			got, all := wrong()
			if !slices.Equal(got, c.want) {
				t.Errorf("wrong are %v, want %v:\n%v", got, c.want, all)
			}
			for _, one := range all {
				if one.Unknown != "" || one.String() == "" {
					t.Errorf("%+v isn't known", one)
				}
			}
			// Repairs bring all of it back but what is in the pod, and the rule of somebody else.
			_, _ = host.Run("ip", "rule", "del", "priority", "5")
			if _, err := n.Rules(t.Context()); err != nil {
				t.Fatal(err)
			}
			mustMend(t, n, w)
			if _, err := n.Network.Sync(t.Context(), wired(w)); err != nil {
				t.Fatal(err)
			}
			if _, err := n.Guard(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(c.want, inspection.Inside) {
				if topics, all := wrong(); len(topics) > 0 {
					t.Errorf("after the repair: %v", all)
				}
				return
			}
			if err := n.Remove(t.Context(), p.ID, a.HostIfIndex); err != nil {
				t.Fatal(err)
			}
			a = n.mustAttach(t, p)
			w.HostIfIndex, w.HostMAC, link = a.HostIfIndex, a.HostMAC, a.HostIfName
		})
	}
	if err := n.Remove(t.Context(), p.ID, a.HostIfIndex); err != nil {
		t.Fatal(err)
	}
	_, all := wrong()
	if i := slices.IndexFunc(all, func(c inspection.Comparison) bool {
		return c.String() == fmt.Sprintf("link %s is missing: it should be index %d", link, a.HostIfIndex)
	}); i < 0 {
		t.Errorf("nothing says that the link is gone: %v", all)
	}
}

// run runs a program in a namespace.
func run(t *testing.T, ns *netnstest.NS, name string, args ...string) {
	t.Helper()
	if _, err := ns.Run(name, args...); err != nil {
		t.Fatal(err)
	}
}
