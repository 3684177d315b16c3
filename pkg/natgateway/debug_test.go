package natgateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Missing of tunnels, of routes and of rules, and Differs of the filter, compare with what the kernel of the fixture has.
func (k tunnels) Missing(_ context.Context, want []dataplane.Tunnel) (map[netip.Addr]error, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	wrong := map[netip.Addr]error{}
	for _, t := range want {
		if _, ok := k.made[t.Remote]; !ok {
			wrong[t.Remote] = errors.New("the tunnel is missing")
		}
	}
	return wrong, k.fail["look"]
}

func (k routes) Missing(_ context.Context, want []dataplane.Route) ([]dataplane.Route, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(want), func(r dataplane.Route) bool { return slices.Contains(k.routes, r) }), nil
}

func (k rules) Missing(_ context.Context, want []dataplane.Rule) ([]dataplane.Rule, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(want), func(r dataplane.Rule) bool { return slices.Contains(k.rules, r) }), nil
}

func (k filter) Differs(_ context.Context, want ruleset.Gateway) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !slices.Equal(k.filter.Clients, want.Clients) {
		return errors.New("the set of clients has other elements")
	}
	return nil
}

func (k filter) Counters(context.Context) ([]nft.Counter, error) {
	return []nft.Counter{{Name: ruleset.Masqueraded, Packets: 7}, {Name: ruleset.NonClient, Packets: 3}, {Name: ruleset.Invalid}}, nil
}

// asks asks a router, and returns the answer.
func (f *fixture) asks(path string) inspection.RouterAnswer {
	f.t.Helper()
	code, text := f.get(path)
	var a inspection.RouterAnswer
	if code != http.StatusOK || json.Unmarshal([]byte(text), &a) != nil {
		f.t.Fatalf("%s: %d, %s", path, code, text)
	}
	return a
}

func (f *fixture) get(path string) (int, string) {
	d := Debug{Gateway: f.Gateway, Version: "v3", NotReady: func() error { return nil }, Readers: Readers{
		Tunnels: tunnels{f.kernel}, Routes: routes{f.kernel}, Rules: rules{f.kernel}, Filter: filter{f.kernel},
		Way:     func(_ context.Context, p rtnl.Packet) (string, error) { return "to " + p.To.String(), nil },
		Traffic: func(_ context.Context, link string) (rtnl.Traffic, error) { return rtnl.Traffic{In: 7, Out: 5}, nil },
		Sent: func(_ context.Context, q inspection.Flows) ([]inspection.Flow, error) {
			return []inspection.Flow{{ID: q.IDs[0], Source: "10.0.0.1:1", Destination: q.To.String(), Answered: true}}, nil
		},
	}}
	w := httptest.NewRecorder()
	d.handler().ServeHTTP(w, httptest.NewRequestWithContext(f.t.Context(), http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

// A router tells of its clients what they have, and of all those that lack something.
func TestDebug(t *testing.T) {
	run(t, func(f *fixture) {
		if a := f.asks("/router"); len(a.Problems) != 1 || len(a.Clients) > 0 {
			t.Errorf("before the first sync: %+v", a)
		}
		f.list(map[string]string{"a": "10.1.0.1", "b": "10.1.0.2"})
		f.set(func(k *kernel) { k.tracked, k.flows = 100, map[netip.Addr]int{netip.MustParseAddr("10.1.0.1"): 95} })
		f.start()
		f.did(moment)

		a := f.asks("/router")
		r := a.Router
		if r.Clients != 2 || r.Tunnels != 2 || r.Egress != "nat" || r.Pod != "nat-0" || r.Uplink != "eth0" || !r.Conntrack.Nearly() || r.Conntrack.String() != "95 of 100 connections are tracked" ||
			!slices.Equal(r.Addresses, []string{"10.0.0.1"}) || !slices.Contains(r.Destinations, "200.0.0.0/5") || r.Version != "v3" {
			t.Errorf("the router: %+v", r)
		}
		if len(a.Clients) > 0 || len(inspection.Wrong(a.Shared)) > 0 || len(a.Shared) == 0 || a.Translated != 7 || len(a.Dropped) != 1 || len(a.Problems) > 0 {
			t.Errorf("nothing is wrong: %+v", a)
		}
		if c := f.asks("/pod/ns/b").Clients; len(c) != 1 || c[0].Address != "10.1.0.2" || len(inspection.Wrong(c[0].Objects)) > 0 || len(c[0].Objects) != 2 || c[0].Link == "" {
			t.Errorf("a pod: %+v", c)
		}
		if a := f.asks("/flows/10.1.0.1/udp/203.0.113.5/53/40001,40002"); len(a.Flows) != 1 || a.Flows[0].ID != 40001 || a.Flows[0].Destination != "203.0.113.5:53" ||
			len(a.Clients) != 1 || a.Clients[0].Traffic == nil || a.Clients[0].Traffic.Out != 7 || a.Clients[0].Traffic.Back != 5 || a.Question != "flows 10.1.0.1 udp 203.0.113.5 53 40001,40002" {
			t.Errorf("flows of a client: %+v", a)
		}
		if c := f.asks("/client/10.1.0.9").Clients; len(c) > 0 {
			t.Errorf("nobody's address: %+v", c)
		}

		// Others take things away.
		f.set(func(k *kernel) {
			delete(k.made, netip.MustParseAddr("10.1.0.1"))
			k.routes = slices.DeleteFunc(slices.Clone(k.routes), func(r dataplane.Route) bool { return r.Dst.Addr() == netip.MustParseAddr("10.1.0.2") })
			k.rules = nil
			k.filter.Clients = nil
		})
		a = f.asks("/router")
		var wrong []string
		for _, c := range a.Clients {
			for _, o := range c.Objects {
				wrong = append(wrong, o.Object)
			}
		}
		if !slices.Equal(wrong, []string{"tunnel to 10.1.0.1", "route to 10.1.0.2"}) || len(inspection.Wrong(a.Shared)) != len(a.Shared) {
			t.Errorf("wrong are %q, and %+v", wrong, a.Shared)
		}
		f.set(func(k *kernel) { k.fail["look"] = errors.New("no memory") })
		if a := f.asks("/client/10.1.0.1"); len(a.Problems) != 1 || !strings.Contains(a.Problems[0], "no memory") {
			t.Errorf("%+v", a)
		}
	})
}

// The way of a client's packets has the source that the destination sees.
func TestDebugWay(t *testing.T) {
	run(t, func(f *fixture) {
		e := f.egress().DeepCopy()
		e.Spec.Destinations = []string{"203.0.113.0/24"}
		f.check(f.egresses.Update(e))
		f.list(map[string]string{"a": "10.1.0.1"})
		f.start()
		f.did(moment)
		for _, c := range []struct{ from, to, source, why string }{
			{"10.1.0.1", "203.0.113.5", "10.0.0.1", ""},
			{"10.1.0.1", "198.51.100.5", "", "no destination"},
			{"10.1.0.2", "203.0.113.5", "", "no client"},
		} {
			w := f.asks("/way/" + c.from + "/" + c.to).Way
			if w == nil || w.Source != c.source || !strings.Contains(w.Why, c.why) || w.Route != "to "+c.to || w.Allowed != (c.to == "203.0.113.5") {
				t.Errorf("from %s to %s: %+v", c.from, c.to, w)
			}
		}
		// With addresses of its own a client leaves by one of these, or not at all.
		e = e.DeepCopy()
		e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfRouter}
		e.Status.Addresses = []v2.EgressAddressStatus{{EgressAddress: v2.EgressAddress{IPv4: "192.0.2.7"}, Router: "nat-0"}}
		f.check(f.egresses.Update(e))
		f.changed()
		f.did(moment)
		if a := f.asks("/way/10.1.0.1/203.0.113.5"); a.Way.Source != "192.0.2.7" || !slices.Equal(a.Router.Floating, []string{"192.0.2.7"}) {
			t.Errorf("%+v, %+v", a.Way, a.Router)
		}
		e = e.DeepCopy()
		e.Status.Addresses = nil
		f.check(f.egresses.Update(e))
		f.changed()
		f.did(moment)
		if w := f.asks("/way/10.1.0.1/203.0.113.5").Way; w.Source != "" || !strings.Contains(w.Why, "no address") {
			t.Errorf("%+v", w)
		}
	})
}

func TestDebugPath(t *testing.T) {
	for words, want := range map[string]string{
		"router": "/router", "client 10.0.0.1": "/client/10.0.0.1", "pod shop/a": "/pod/shop/a", "way 10.0.0.1 203.0.113.5": "/way/10.0.0.1/203.0.113.5",
		"flows 10.0.0.1 tcp 203.0.113.5 443 1,2": "/flows/10.0.0.1/tcp/203.0.113.5/443/1,2", "flows 10.0.0.1 tcp 203.0.113.5 443": "", "flows 10.0.0.1 tcp 203.0.113.5 0 1": "", "flows": "",
		"": "", "client": "", "client x": "", "pod a": "", "pod a/b/c": "", "pod a/b?c": "", "way 10.0.0.1": "", "way x y": "", "secrets": "",
	} {
		got, err := DebugPath(strings.Fields(words))
		if (err == nil) != (want != "") || err == nil && got != want {
			t.Errorf("%q: %s, %v; want %q", words, got, err, want)
		}
	}
	run(t, func(f *fixture) {
		f.start()
		for path, want := range map[string]int{"/client/x": http.StatusBadRequest, "/way/1.2.3.4/y": http.StatusBadRequest, "/flows/10.0.0.1/tcp/203.0.113.5/443/x": http.StatusBadRequest, "/secrets": http.StatusNotFound, "/pod/a": http.StatusNotFound} {
			if code, text := f.get(path); code != want {
				t.Errorf("%s: %d, %s", path, code, text)
			}
		}
	})
}
