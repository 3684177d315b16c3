package openstack

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	lab "github.com/coil-net/coil/integration/lab/openstack"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/testkit"
)

func prefixes(addrs ...netip.Addr) (all []netip.Prefix) {
	for _, a := range addrs {
		all = append(all, netip.PrefixFrom(a, a.BitLen()))
	}
	return all
}

// gateway makes the port of a machine with address pairs.
func (sc *scene) gateway(pairs ...map[string]any) string {
	sc.t.Helper()
	return testkit.Must(sc.Create(sc.t.Context(), "port", map[string]any{
		"network_id": sc.NetworkID, "device_owner": "compute:nova", "allowed_address_pairs": append([]map[string]any{}, pairs...)}))(sc.t)
}

// pairs are those of a port, sorted.
func (sc *scene) pairs(id string) (all []string) {
	sc.t.Helper()
	p := sc.raw("ports", "id="+id)[0]
	for _, pair := range p.Pairs {
		text := pair.IP
		if pair.MAC != p.MAC {
			text += " " + pair.MAC
		}
		all = append(all, text)
	}
	slices.Sort(all)
	return all
}

func (sc *scene) wantsPairs(when, id string, want ...string) {
	sc.t.Helper()
	slices.Sort(want)
	if got := sc.pairs(id); !slices.Equal(got, want) {
		sc.t.Errorf("%s: the pairs are %q, want %q", when, got, want)
	}
}

func pair(ip string) map[string]any { return map[string]any{"ip_address": ip} }

// Test35Pairs has gateways with pairs of their own.
func Test35Pairs(t *testing.T) {
	sc := newScene(t)
	web, db := sc.ensure("web", both), sc.ensure("db", both)
	virtual := map[string]any{"ip_address": web.Fixed[0].String(), "mac_address": "00:00:5e:00:01:01"} // VRRP's own MAC address
	theirs := []string{"10.1.0.200", "10.1.0.128/26", "192.0.2.1/24", web.Fixed[0].String() + " 00:00:5e:00:01:01"}
	first := sc.gateway(virtual, pair("10.1.0.200"), pair("10.1.0.128/26"), pair("192.0.2.1/24"))
	second := sc.gateway(pair(db.Fixed[0].String()+"/32"), pair(strings.ToUpper(db.Fixed[1].StringExpanded())))
	gateways, seen := []string{first, second}, []openstack.Address{web, db}
	wants := prefixes(slices.Concat(web.Fixed, db.Fixed)...)
	texts := func(of ...openstack.Address) (all []string) {
		for _, a := range of {
			all = append(all, a.Fixed[0].String(), a.Fixed[1].String())
		}
		return all
	}

	sc.calls()
	testkit.Check(t, sc.EnsurePairs(t.Context(), gateways, wants, seen))
	if n := len(sc.calls()); n != 3 {
		t.Errorf("%d calls, want one for reading and one for each gateway", n)
	}
	sc.wantsPairs("added", first, append(texts(web, db), theirs...)...)
	sc.wantsPairs("added", second, texts(web, db)...)

	testkit.Check(t, sc.EnsurePairs(t.Context(), gateways, wants, seen))
	if calls := sc.calls(); len(calls) != 1 {
		t.Errorf("the calls are %q, want one for reading", calls)
	}

	// The pairs of an address go before it does.
	testkit.Check(t, sc.EnsurePairs(t.Context(), gateways, prefixes(db.Fixed...), seen))
	sc.wantsPairs("taken away", first, append(texts(db), theirs...)...)
	sc.wantsPairs("taken away", second, texts(db)...)

	t.Run("12 pairs changed", func(t *testing.T) {
		sc.update("ports/"+first, "port", map[string]any{"allowed_address_pairs": []any{pair("10.1.0.200")}})
		sc.update("ports/"+second, "port", map[string]any{"allowed_address_pairs": []any{}})
		testkit.Check(t, sc.EnsurePairs(t.Context(), gateways, prefixes(db.Fixed...), seen))
		sc.wantsPairs("repaired", first, append(texts(db), "10.1.0.200")...)
		sc.wantsPairs("repaired", second, texts(db)...)
	})
	t.Run("no gateway", func(t *testing.T) {
		none := "00000000-0000-0000-0000-000000000000"
		err := sc.EnsurePairs(t.Context(), []string{none, second}, nil, seen)
		refused(t, err, openstack.NotFound, none)
		sc.wantsPairs("the other one", second)
	})
	t.Run("without port security", func(t *testing.T) {
		id := testkit.Must(sc.Create(t.Context(), "port", map[string]any{"network_id": sc.NetworkID, "port_security_enabled": false}))(t)
		testkit.Check(t, sc.EnsurePairs(t.Context(), []string{id}, wants, seen))
		sc.wantsPairs("unchanged", id)
	})
}

// TestManyPairs wants more pairs than a port may have.
func TestManyPairs(t *testing.T) {
	sc := newScene(t)
	id := sc.gateway(pair("192.0.2.1"))
	web := sc.ensure("web", both)
	joined := netip.MustParsePrefix("10.1.0.32/28")
	if slices.ContainsFunc(web.Fixed, joined.Contains) { // Neutron has chosen it, and it needs a pair of its own
		joined = netip.MustParsePrefix("10.1.0.48/28")
	}
	var row []netip.Addr
	for a := joined.Addr(); joined.Contains(a); a = a.Next() {
		row = append(row, a)
	}
	seen := []openstack.Address{web, {Key: "many", Fixed: row}}
	testkit.Check(t, sc.EnsurePairs(t.Context(), []string{id}, prefixes(append(row, web.Fixed...)...), seen))
	sc.wantsPairs("joined", id, "192.0.2.1", joined.String(), web.Fixed[0].String(), web.Fixed[1].String())
	// No prefix has these alone.
	var apart []netip.Addr
	for a := netip.MustParseAddr("10.1.0.101"); len(apart) < 10; a = a.Next().Next() {
		apart = append(apart, a)
	}
	err := sc.EnsurePairs(t.Context(), []string{id}, prefixes(apart...), seen)
	refused(t, err, openstack.TooManyPairs, "10 addresses need 10 address pairs, and there is room for 9")
	// An admin lets gateways use a range, which is one pair.
	testkit.Check(t, sc.EnsurePairs(t.Context(), []string{id}, []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")}, seen))
	sc.wantsPairs("a range", id, "192.0.2.1", "10.1.0.0/24")
	// A cloud that allows fewer than is configured.
	cfg := sc.cfg
	cfg.MaxPairs = 20
	err = sc.cluster(cfg).EnsurePairs(t.Context(), []string{id}, prefixes(apart...), seen)
	refused(t, err, openstack.TooManyPairs, "max_allowed_address_pair")
}

// TestPairsRace has four programs write the pairs of a gateway at the same time: nothing of anybody is lost.
func TestPairsRace(t *testing.T) {
	sc := newScene(t)
	a := sc.ensure("web", both)
	id := sc.gateway()
	var all sync.WaitGroup
	want := []string{a.Fixed[0].String(), a.Fixed[1].String()}
	for i := range 3 {
		ip := fmt.Sprintf("192.0.2.%d", i+1)
		want = append(want, ip)
		all.Go(func() {
			err := testkit.Within(t.Context(), time.Minute, func() error {
				p := sc.raw("ports", "id="+id)[0]
				pairs := []any{pair(ip)}
				for _, o := range p.Pairs {
					pairs = append(pairs, map[string]any{"ip_address": o.IP, "mac_address": o.MAC})
				}
				return sc.Network(t.Context(), http.MethodPut, "ports/"+id, map[string]any{"port": map[string]any{"allowed_address_pairs": pairs}}, nil,
					"If-Match", fmt.Sprint("revision_number=", p.Revision))
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	// The package's own first write is one of those that come too late.
	var late sync.Once
	sc.front.SetFault(func(c lab.Call) lab.Fault {
		if c.Method == http.MethodPut {
			late.Do(func() { sc.update("ports/"+id, "port", map[string]any{"name": "changed"}) })
		}
		return lab.Fault{}
	})
	sc.calls()
	testkit.Check(t, sc.EnsurePairs(t.Context(), []string{id}, prefixes(a.Fixed...), []openstack.Address{a}))
	if n := len(sc.calls()); n < 4 {
		t.Errorf("%d calls, want a port that is read and written twice at the least", n)
	}
	all.Wait()
	sc.wantsPairs("written by four", id, want...)
}
