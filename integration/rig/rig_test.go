package rig_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// A rig does the whole life of pods, and finds no difference.
func TestRig(t *testing.T) {
	r := rigtest.New(t)
	testkit.Check(t, r.AddPool(t.Context(), "default", 2, rig.Dual("10.1.0.0/24", "fd00:1::/120")))
	testkit.Check(t, r.AddPool(t.Context(), "v4", 0, rig.V4("10.2.0.0/29")), r.AddNamespace(t.Context(), "four", "v4"))
	n := testkit.Must(r.AddNode(t.Context(), rig.NodeOptions{}))(t)
	other := testkit.Must(r.AddNode(t.Context(), rig.NodeOptions{DiskBytes: 16 << 20}))(t)

	var all []*rig.Sandbox
	for i, node := range []*rig.Node{n, n, other, n} {
		o := rig.SandboxOptions{}
		if i == 3 {
			o.Namespace = "four"
		}
		s := testkit.Must(node.NewSandbox(t.Context(), o))(t)
		res := testkit.Must(s.Add(t.Context()))(t)
		if want := map[bool]int{true: 1, false: 2}[i == 3]; len(res.Addrs) != want {
			t.Errorf("%s has %v, want %d addresses", s, res.Addrs, want)
		}
		testkit.Check(t, s.Check(t.Context()))
		all = append(all, s)
	}
	direct := testkit.Must(n.NewSandbox(t.Context(), rig.SandboxOptions{}))(t)
	testkit.Must(direct.AddRPC(t.Context()))(t)
	testkit.Check(t, r.AwaitClean(t.Context(), 10*time.Second), n.Status(t.Context()))

	t.Run("pods reach each other on one node", func(t *testing.T) {
		for _, addr := range testkit.Must(all[1].Add(t.Context()))(t).Addrs {
			l := testkit.Must(all[1].Listen(t.Context(), "tcp", net.JoinHostPort(addr.String(), "80")))(t)
			defer l.Close()
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(5*time.Second))
			defer cancel()
			c := testkit.Must(all[0].Dial(ctx, "tcp", l.Addr().String()))(t)
			defer c.Close()
		}
	})
	t.Run("metrics", func(t *testing.T) {
		if body := testkit.Must(n.Get(t.Context(), "/metrics"))(t); !strings.Contains(body, "coil_cni_request") {
			t.Errorf("there is no coil_cni_request: %.200s", body)
		}
	})
	t.Run("without the API server", func(t *testing.T) {
		n.CutAPI(true)
		defer n.CutAPI(false)
		testkit.Must(all[0].Add(t.Context()))(t)
	})
	t.Run("killed", func(t *testing.T) {
		n.Coild.Kill()
		var e *cnitypes.Error
		if err := n.Status(t.Context()); !errors.As(err, &e) || e.Code != cnitypes.ErrPluginNotAvailable {
			t.Errorf("STATUS without coild: %v, want code 50", err)
		}
		testkit.Check(t, all[0].Del(t.Context()))
		if q := testkit.Must(os.ReadDir(n.DelQueueDir()))(t); len(q) != 1 {
			t.Errorf("%d queued DELs, want 1", len(q))
		}
		testkit.Check(t, n.Start(t.Context()), r.AwaitClean(t.Context(), 10*time.Second))
	})
	t.Run("power cut", func(t *testing.T) {
		answers(t, r, n)
		testkit.Check(t, n.PowerCut(t.Context()), n.PowerOn(t.Context()))
		answers(t, r, n)
		testkit.Check(t, n.Start(t.Context()))
		testkit.Check(t, r.AwaitClean(t.Context(), 10*time.Second))
		s := testkit.Must(n.NewSandbox(t.Context(), rig.SandboxOptions{}))(t)
		testkit.Must(s.Add(t.Context()))(t)
		testkit.Check(t, s.Del(t.Context()), s.Close(), r.AwaitClean(t.Context(), 10*time.Second))
	})
	testkit.Check(t, all[2].Del(t.Context()), all[2].RemoveNetns(), r.AwaitClean(t.Context(), 10*time.Second))
	testkit.Check(t, n.GC(t.Context(), nil, rig.ValidAttachments, rig.Attachments))
}

// answers waits until a node answers the router, for less long than the router believes, at least, in a MAC address that it knows: 15 s.
func answers(t *testing.T, r *rig.Rig, n *rig.Node) {
	t.Helper()
	for _, a := range []netip.Addr{n.Addr4, n.Addr6} {
		_, _, err := rigtest.Pings(t, func() (*netlab.Pinger, error) { return r.PingOutside(a) }).End()
		testkit.Check(t, err)
	}
}

// The rig names each kind of difference: one that finds nothing proves nothing.
func TestDifferences(t *testing.T) {
	r := rigtest.New(t)
	ctx := t.Context()
	testkit.Check(t, r.AddPool(ctx, "default", 2, rig.Dual("10.1.0.0/24", "fd00:1::/120")))
	n := testkit.Must(r.AddNode(ctx, rig.NodeOptions{}))(t)
	s := testkit.Must(n.NewSandbox(ctx, rig.SandboxOptions{}))(t)
	res := testkit.Must(s.Add(ctx))(t)
	testkit.Check(t, r.AwaitClean(ctx, 10*time.Second))
	n.Coild.Kill() // it would heal
	base := filepath.Join(n.StateDir(), "before")

	sqlite := func(sql string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := n.Run(ctx, "sqlite3", n.Database(), sql)
			return err
		}
	}
	ip := func(args ...string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := n.Run(ctx, "ip", args...)
			return err
		}
	}
	var links []struct{ IfName, IfAlias string }
	testkit.Check(t, json.Unmarshal([]byte(testkit.Must(n.Run(ctx, "ip", "-json", "link", "show", "group", "1668245868"))(t)), &links))
	// Values that the filter leaves out are shown as empty.
	links = slices.DeleteFunc(links, func(l struct{ IfName, IfAlias string }) bool { return l.IfName == "" })
	if len(links) != 1 {
		t.Fatalf("links of the group: %+v", links)
	}
	host := links[0].IfName
	v4 := res.Addrs[0].String()
	for _, tt := range []struct {
		name       string
		break_     func(context.Context) error
		mend       func(context.Context) error
		want       []string
		unmendable bool
	}{
		{name: "row in another state", break_: sqlite(`UPDATE addresses SET state = 'pending'`), want: []string{"is pending, not attached"}},
		{name: "row with another address", break_: sqlite(`UPDATE addresses SET ipv4 = '10.1.0.77'`), want: []string{"but ADD answered", "in block"}},
		{name: "row of nobody", break_: sqlite(`UPDATE addresses SET container_id = 'x'`), want: []string{"no live sandbox", "the record lacks"}},
		{name: "block that nobody has", break_: sqlite(`INSERT INTO blocks (name, pool, ipv4, since) VALUES ('b', 'default', '10.9.0.0/30', '2026-01-01T00:00:00.000Z')`),
			want: []string{"the record has blocks"}},
		{name: "route missing", break_: ip("route", "del", v4, "table", "116"), mend: ip("route", "add", v4, "dev", host, "table", "116", "proto", "30"),
			want: []string{"table 116 has no route to " + v4}},
		{name: "route too many", break_: ip("route", "add", "10.1.0.99", "dev", host, "table", "116", "proto", "30"),
			mend: ip("route", "del", "10.1.0.99", "table", "116"), want: []string{"table 116 leads 10.1.0.99"}},
		{name: "block route too many", break_: ip("route", "add", "10.1.9.0/24", "dev", "lo", "table", "119", "proto", "30"),
			mend: ip("route", "del", "10.1.9.0/24", "table", "119"), want: []string{"table 119 has the route"}},
		{name: "rule missing", break_: ip("rule", "del", "prio", "2001"), mend: ip("rule", "add", "prio", "2001", "table", "120", "protocol", "30"),
			want: []string{`1 of 2 families have the rule "2001:`}},
		{name: "alias of nobody", break_: ip("link", "set", host, "alias", "COIL:default:x:eth0"), mend: ip("link", "set", host, "alias", "COIL:default:"+s.ContainerID+":eth0"),
			want: []string{"is of x, which is no live sandbox", "the kernel lacks the link"}},
		{name: "queued", break_: func(ctx context.Context) error {
			return errors.Join(os.MkdirAll(n.DelQueueDir(), 0o700), os.WriteFile(filepath.Join(n.DelQueueDir(), "x"), nil, 0o600))
		}, mend: func(context.Context) error { return os.RemoveAll(n.DelQueueDir()) }, want: []string{"the queue of deletions has x"}},
		{name: "Node made again", break_: func(ctx context.Context) error { return errors.Join(n.DeleteObject(ctx), n.CreateObject(ctx)) },
			want: []string{"has node UID"}, unmendable: true},
		{name: "sandbox lost", break_: func(ctx context.Context) error { r.Ledger.Lose(s); return nil }, want: []string{"no live sandbox"}, unmendable: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.mend == nil {
				testkit.Check(t, sqlite(".backup "+base)(ctx))
				tt.mend = sqlite(".restore " + base)
			}
			testkit.Check(t, tt.break_(ctx))
			wrongs := testkit.Must(r.Differences(ctx))(t)
			for _, want := range tt.want {
				if !slices.ContainsFunc(wrongs, func(w string) bool { return strings.Contains(w, want) }) {
					t.Errorf("the rig says %q, nothing with %q", wrongs, want)
				}
			}
			if tt.unmendable {
				return
			}
			testkit.Check(t, tt.mend(ctx))
			if wrongs := testkit.Must(r.Differences(ctx))(t); len(wrongs) > 0 {
				t.Fatalf("after it was mended the rig says %q", wrongs)
			}
		})
	}
}
