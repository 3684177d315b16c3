package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// transits returns the addresses that the node translates for a router, as the router finds them.
func (l *lab) transits(s *rig.Sandbox) (all []netip.Addr, err error) {
	out, err := s.Run(l.Context(), "ip", "-o", "address", "show", "dev", "lo")
	for word := range strings.FieldsSeq(out) {
		if p, perr := netip.ParsePrefix(word); perr == nil {
			if _, is := dataplane.TransitNumber(p.Addr()); is {
				all = append(all, p.Addr())
			}
		}
	}
	return all, err
}

// translated are the node's objects by which it translates.
func (l *lab) translated() (string, error) {
	out, err := l.node.Run(l.Context(), "sh", "-c", `nft list tables | grep `+dataplane.NftTableMasquerade+`; for f in -4 -6; do ip $f route list table 116 proto 33; done`)
	return out, err
}

// awaitTransits waits until a router has an address of each family, and the node all that it needs for them.
func (l *lab) awaitTransits(what string, s *rig.Sandbox) (all []netip.Addr) {
	l.Helper()
	testkit.Eventually(l.T, within, what, func() (err error) {
		if all, err = l.transits(s); err != nil || len(all) != 2 {
			return errors.Join(err, fmt.Errorf("the router has %v", all))
		}
		objects, err := l.translated()
		for _, a := range all {
			if err == nil && !strings.Contains(objects, a.String()+" via ") {
				err = fmt.Errorf("of %s there is\n%s", a, objects)
			}
		}
		if err == nil && !strings.Contains(objects, dataplane.NftTableMasquerade) {
			err = fmt.Errorf("there is no table:\n%s", objects)
		}
		return err
	})
	return all
}

// coild translates for routers of an Egress with the addresses of nodes, from when it is one, or when the router comes, until the router goes: in
// another life of coild, after others have destroyed what it has made, and when the Egress has other addresses meanwhile.
func TestNodeAddress(t *testing.T) {
	l := newLab(t, rig.Options{})
	ctx := t.Context()
	labels := map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": "gw"}
	destinations := func(a *v2.EgressAddresses) func(*v2.Egress) {
		return func(e *v2.Egress) { e.Spec.Destinations, e.Spec.Addresses = []string{"0.0.0.0/0", "::/0"}, a }
	}
	l.egress("gw", destinations(nil))
	first := l.sandbox(rig.SandboxOptions{Name: "first", Labels: labels})
	testkit.Must(first.Add(ctx))(t)
	other := l.sandbox(rig.SandboxOptions{Name: "other"})
	testkit.Must(other.Add(ctx))(t)
	none := func(when string) {
		t.Helper()
		testkit.Eventually(t, within, when+" nothing is translated", func() error {
			if objects, err := l.translated(); err != nil || strings.TrimSpace(objects) != "" {
				return errors.Join(err, fmt.Errorf("there is\n%s", objects))
			}
			return nil
		})
	}
	none("without such an Egress")
	l.egress("gw", destinations(&v2.EgressAddresses{Use: v2.EgressAddressOfNode}))
	has := l.awaitTransits("the Egress has changed", first)
	second := l.sandbox(rig.SandboxOptions{Name: "second", Labels: labels})
	testkit.Must(second.Add(ctx))(t)
	if also := l.awaitTransits("another router has come", second); also[0] == has[0] || also[1] == has[1] {
		t.Errorf("two routers have %v and %v", has, also)
	}
	if all, err := l.transits(other); err != nil || len(all) > 0 {
		t.Errorf("a pod that is no router has %v, %v", all, err)
	}
	l.awaitMetric("coil_egress_node_address_routers", func(n string) bool { return n == "2" })

	const repairs = `coil_repairs_total{kind="egress_node_address"}`
	if n := l.metric(repairs); n != "0" {
		t.Errorf("%s repairs before anything was destroyed", n)
	}
	testkit.Must(l.node.Run(ctx, "sh", "-c", "nft flush ruleset; ip -6 route flush table 116 proto 33"))(t)
	testkit.Must(first.Run(ctx, "ip", "address", "flush", "dev", "lo", "scope", "link"))(t)
	l.awaitMetric(repairs, func(n string) bool { return n != "0" })
	if again := l.awaitTransits("others have destroyed it", first); again[0] != has[0] || again[1] != has[1] {
		t.Errorf("the router has %v, and had %v", again, has)
	}

	l.node.Coild.Kill()
	testkit.Must(l.node.Run(ctx, "nft", "flush", "ruleset"))(t)
	l.egress("gw", destinations(nil))
	l.must(l.node.Start(ctx))
	if again := l.awaitTransits("in another life the Egress has no addresses", first); again[0] != has[0] || again[1] != has[1] {
		t.Errorf("the router has %v, and had %v", again, has)
	}
	l.must(first.Del(ctx))
	l.awaitMetric("coil_egress_node_address_routers", func(n string) bool { return n == "1" })
	l.must(second.Del(ctx))
	none("without routers")

	l.egress("gw", destinations(&v2.EgressAddresses{Use: v2.EgressAddressOfNode}))
	third := l.sandbox(rig.SandboxOptions{Name: "third", Labels: labels})
	testkit.Must(third.Add(ctx))(t)
	l.awaitTransits("a router is added", third)
	l.node.Coild.Stop()
	out, err := l.node.Cleanup(ctx, "--force")
	if err != nil {
		t.Errorf("coild cleanup: %v\n%s", err, out)
	}
	if objects, err := l.translated(); err != nil || strings.TrimSpace(objects) != "" {
		t.Errorf("coild cleanup has left, %v:\n%s", err, objects)
	}
	if what := "table inet " + dataplane.NftTableMasquerade; !strings.Contains(out, what) {
		t.Errorf("coild cleanup doesn't tell of %s:\n%s", what, out)
	}
}
