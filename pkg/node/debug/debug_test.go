package debug

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// record is a record in memory.
type record struct {
	all     []store.Allocation
	clients []store.Client
	usage   []store.Usage
	err     error

	contents []inspection.DatabaseAddress
}

func (r record) List(context.Context) ([]store.Allocation, error)    { return slices.Clone(r.all), r.err }
func (r record) Usage(context.Context) ([]store.Usage, error)        { return r.usage, r.err }
func (r record) ListClients(context.Context) ([]store.Client, error) { return r.clients, r.err }

func (r record) Contents(context.Context) (inspection.Database, error) {
	return inspection.Database{Schema: 2, Addresses: r.contents}, r.err
}

var since = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func alloc(container, name, addr string) store.Allocation {
	return store.Allocation{
		ID: attachment.ID{ContainerID: container, IfName: "eth0"}, Pod: store.Pod{Namespace: "shop", Name: name, UID: "u-" + name},
		Netns: store.Netns{Path: "/run/netns/" + container}, Wiring: store.Wiring{HostIfName: "veth" + container, HostIfIndex: 7, Result: []byte(`{"secret":"no"}`)},
		State: store.Attached, Pool: "default", Block: "default-0", Address: ipam.Address{IPv4: netip.MustParseAddr(addr)}, Since: since,
	}
}

func block(name, prefix string) store.Usage {
	return store.Usage{Block: store.Block{Name: name, Pool: "default", Block: ipam.Block{IPv4: netip.MustParsePrefix(prefix)}}, Allocated: 2, Cooling: 1}
}

func newServer(r record) *Server {
	return &Server{
		Node:   func() inspection.Node { return inspection.Node{Name: "n1", Version: "v3", IPAM: true} },
		Record: r, Gone: func(a store.Allocation) bool { return a.ContainerID == "c2" },
		Look: func(_ context.Context, a store.Allocation, into *inspection.Attachment) {
			into.Objects = append(into.Objects,
				inspection.Comparison{Topic: inspection.Veth, Object: "MTU of " + a.HostIfName, Want: "1500", Have: "1500", OK: true},
				inspection.Comparison{Topic: inspection.Routes, Object: "route to " + a.Address.String(), Want: "dev 7"})
		},
		LookAtHost: func(context.Context) []inspection.Comparison {
			return []inspection.Comparison{{Topic: inspection.Rules, Object: "rule 2000", Have: "x", OK: true}}
		},
		LookAtAddress: func(_ context.Context, a netip.Addr) []inspection.Comparison {
			return []inspection.Comparison{{Topic: inspection.Floating, Object: "route to " + a.String()}}
		},
		Way: func(_ context.Context, a netip.Addr) (string, error) { return "by " + a.String(), nil },
		Follow: func(_ context.Context, alloc store.Allocation, to netip.Addr) ([]inspection.Hop, error) {
			if alloc.ContainerID == "c3" {
				return nil, errors.New("no netlink")
			}
			return []inspection.Hop{{InPod: true, To: to.String()}}, nil
		},
	}
}

// ask asks a server, and returns the status and the answer.
func ask(t *testing.T, s *Server, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

// mustAsk asks for an answer.
func mustAsk(t *testing.T, s *Server, path string) *inspection.Answer {
	t.Helper()
	code, text := ask(t, s, path)
	if code != http.StatusOK {
		t.Fatalf("%s: %d, %s", path, code, text)
	}
	if strings.Contains(text, "secret") {
		t.Errorf("%s: the answer has the result of ADD", path)
	}
	a, err := inspection.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// pods are those of an answer.
func pods(a *inspection.Answer) (names []string) {
	for _, p := range a.Attachments {
		names = append(names, p.Pod)
	}
	return names
}

func blocks(a *inspection.Answer) (names []string) {
	for _, b := range a.Blocks {
		names = append(names, b.Name)
	}
	return names
}

func TestQuestions(t *testing.T) {
	s := newServer(record{
		all: []store.Allocation{alloc("c1", "b", "10.0.0.1"), alloc("c2", "a", "10.0.0.2")},
		clients: []store.Client{
			{Sandbox: store.Sandbox{ID: attachment.ID{ContainerID: "c1", IfName: "eth0"}}},
			{Sandbox: store.Sandbox{ID: attachment.ID{ContainerID: "c3", IfName: "eth0"}, Pod: store.Pod{Namespace: "shop", Name: "chained"}, Address: ipam.Address{IPv4: netip.MustParseAddr("192.0.2.7")}}},
		},
		usage: []store.Usage{block("default-0", "10.0.0.0/27"), block("default-1", "10.0.0.32/27")},
	})
	for _, c := range []struct {
		path, question string
		pods, blocks   []string
		way            string
	}{
		{"/node", "node", []string{"a", "b", "chained"}, []string{"default-0", "default-1"}, ""},
		{"/pod/shop/a", "pod shop/a", []string{"a"}, []string{"default-0"}, ""},
		{"/pod/shop/chained", "pod shop/chained", []string{"chained"}, nil, ""},
		{"/pod/other/a", "pod other/a", nil, []string{"default-0", "default-1"}, ""}, // which may give it an address
		{"/address/10.0.0.1", "address 10.0.0.1", []string{"b"}, []string{"default-0"}, "by 10.0.0.1"},
		{"/address/10.0.0.40", "address 10.0.0.40", nil, []string{"default-1"}, "by 10.0.0.40"},
		{"/address/192.0.2.7", "address 192.0.2.7", []string{"chained"}, nil, "by 192.0.2.7"},
	} {
		t.Run(c.question, func(t *testing.T) {
			a := mustAsk(t, s, c.path)
			if a.Question != c.question || a.Way != c.way || a.Node.Name != "n1" || len(a.Problems) > 0 || len(a.Host) != 1 || len(a.Address) > 0 != (c.way != "") {
				t.Errorf("%+v", a)
			}
			if d := cmp.Diff(c.pods, pods(a)); d != "" {
				t.Errorf("pods (-want +got):\n%s", d)
			}
			if d := cmp.Diff(c.blocks, blocks(a)); d != "" {
				t.Errorf("blocks (-want +got):\n%s", d)
			}
		})
	}

	got := mustAsk(t, s, "/pod/shop/a").Attachments[0]
	want := inspection.Attachment{
		Record: inspection.Record{
			ContainerID: "c2", IfName: "eth0", Namespace: "shop", Pod: "a", PodUID: "u-a", State: "attached", Pool: "default", Block: "default-0",
			Addresses: []string{"10.0.0.2"}, Netns: "/run/netns/c2", NetnsGone: true, HostLink: "vethc2", HostIndex: 7, Since: since,
		},
		Objects: []inspection.Comparison{
			{Topic: inspection.Veth, Object: "MTU of vethc2", Want: "1500", Have: "1500", OK: true},
			{Topic: inspection.Routes, Object: "route to 10.0.0.2", Want: "dev 7"},
		},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if objects := mustAsk(t, s, "/node").Attachments[0].Objects; len(objects) != 1 || objects[0].OK {
		t.Errorf("of a node %v are told, want only what is wrong", objects)
	}
}

func TestPath(t *testing.T) {
	for words, want := range map[string]string{
		"node": "/node", "pod shop/a": "/pod/shop/a", "address 10.0.0.1": "/address/10.0.0.1", "address fe80::1%eth0": "/address/fe80::1",
		"record": "/record", "db": "/db", "db x": "", "record/x": "", "/db": "",
		"way shop/a 203.0.113.5": "/way/shop/a/203.0.113.5", "way shop/a": "", "way shop/a x": "", "way a 203.0.113.5": "",
		"": "", "pod": "", "pod a": "", "pod /a": "", "pod shop/": "", "pod shop/a/b": "", "pod shop/a?x": "", "address x": "", "node x": "", "secrets": "",
	} {
		got, err := Path(strings.Fields(words))
		if (err == nil) != (want != "") || err == nil && got != want {
			t.Errorf("%q: %q, %v; want %q", words, got, err, want)
		}
	}
}

func TestWhatCantBeRead(t *testing.T) {
	s := newServer(record{err: errors.New("disk I/O error")})
	a := mustAsk(t, s, "/node")
	want := []string{"read the record: disk I/O error", "read the blocks of the record: disk I/O error"}
	if d := cmp.Diff(want, a.Problems); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	s = newServer(record{})
	s.Way = func(context.Context, netip.Addr) (string, error) { return "", errors.New("no buffer space") }
	if a := mustAsk(t, s, "/address/10.0.0.1"); len(a.Problems) != 1 {
		t.Errorf("problems: %q", a.Problems)
	}
	for path, want := range map[string]int{"/address/x": http.StatusBadRequest, "/secrets": http.StatusNotFound, "/pod/a": http.StatusNotFound} {
		if code, _ := ask(t, s, path); code != want {
			t.Errorf("%s: %d, want %d", path, code, want)
		}
	}
}

// What takes too long is left out, and the answer says so.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(record{all: []store.Allocation{alloc("c1", "a", "10.0.0.1"), alloc("c2", "b", "10.0.0.2"), alloc("c3", "c", "10.0.0.3")}})
		look := s.Look
		s.Look = func(ctx context.Context, a store.Allocation, into *inspection.Attachment) {
			time.Sleep(time.Second)
			look(ctx, a, into)
		}
		a := mustAsk(t, s, "/node")
		if d := cmp.Diff([]string{"look at 1 of 3 attachments: not done within 1.5s"}, a.Problems); d != "" || len(a.Attachments) != 2 {
			t.Errorf("%d attachments; (-want +got):\n%s", len(a.Attachments), d)
		}
	})
}

// So many questions are answered at once, and no more.
func TestAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(record{})
		s.LookAtHost = func(context.Context) []inspection.Comparison { time.Sleep(time.Second); return nil }
		h := s.handler()
		codes := make(chan int)
		for range atOnce + 1 {
			go func() {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/node", nil))
				codes <- w.Code
			}()
		}
		got := map[int]int{}
		for range atOnce + 1 {
			got[<-codes]++
		}
		if d := cmp.Diff(map[int]int{http.StatusOK: atOnce, http.StatusServiceUnavailable: 1}, got); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}

// The way of a pod's packets is asked of a pod whose network is there.
func TestFollow(t *testing.T) {
	s := func(container, name string) *Server {
		return newServer(record{all: []store.Allocation{alloc(container, name, "10.0.0.1")}})
	}
	if a := mustAsk(t, s("c1", "here"), "/way/shop/here/203.0.113.5"); len(a.Hops) != 1 || a.Hops[0].To != "203.0.113.5" || a.Question != "way shop/here 203.0.113.5" || len(a.Attachments) != 1 {
		t.Errorf("%+v", a)
	}
	if a := mustAsk(t, s("c2", "gone"), "/way/shop/gone/203.0.113.5"); len(a.Hops) > 0 || len(a.Problems) > 0 {
		t.Errorf("of a network that is gone: %+v", a)
	}
	if a := mustAsk(t, s("c3", "broken"), "/way/shop/broken/203.0.113.5"); len(a.Hops) > 0 || len(a.Problems) != 1 {
		t.Errorf("of a kernel that refuses: %+v", a)
	}
	if code, _ := ask(t, s("c1", "here"), "/way/shop/here/x"); code != http.StatusBadRequest {
		t.Errorf("a destination that isn't an address: %d", code)
	}
}
