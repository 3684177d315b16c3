package sysctl_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

const (
	forward4 = "net/ipv4/ip_forward"
	forward6 = "net/ipv6/conf/all/forwarding"
)

func get(t *testing.T, ns *netnstest.NS, key string) string {
	t.Helper()
	v, err := sysctl.Get(ns.NS, key)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestGetAndSet(t *testing.T) {
	ns, other := netnstest.New(t), netnstest.New(t)
	// Dots are part of names.
	ns.IP(t, "link", "add", "a.b", "type", "bridge")
	const key = "net/ipv4/conf/a.b/rp_filter"
	want := "2"
	if get(t, ns, key) == want {
		want = "1"
	}
	before := get(t, other, forward4)
	for i, wantChanged := range []bool{true, false} {
		changed, err := sysctl.Set(ns.NS, sysctl.Setting{Key: key, Value: want}, sysctl.Setting{Key: forward4, Value: "1"})
		if err != nil || changed != wantChanged {
			t.Errorf("Set %d: %t, %v", i, changed, err)
		}
	}
	if got := get(t, ns, key); got != want {
		t.Errorf("got %s", got)
	}
	if out, err := ns.Run("sysctl", "-n", "net.ipv4.ip_forward"); err != nil || out != "1" {
		t.Errorf("got %q, %v", out, err)
	}
	if get(t, other, forward4) != before {
		t.Error("another namespace was changed")
	}
}

func TestErrors(t *testing.T) {
	ns := netnstest.New(t)
	if _, err := sysctl.Get(ns.NS, "net/ipv4/conf/none/rp_filter"); !errors.Is(err, sysctl.ErrNotExist) {
		t.Errorf("Get: %v", err)
	}
	if _, err := sysctl.Set(ns.NS, sysctl.Setting{Key: "net/none", Value: "1"}); !errors.Is(err, sysctl.ErrNotExist) {
		t.Errorf("Set: %v", err)
	}
	if _, err := sysctl.Set(ns.NS, sysctl.Setting{Key: forward4, Value: "neither"}); err == nil {
		t.Error("a value that the kernel refuses was set")
	}
	for key, want := range map[string]bool{"net/ipv4": true, "net/none": false} {
		if got, err := sysctl.Exists(ns.NS, key); err != nil || got != want {
			t.Errorf("Exists(%s): %t, %v", key, got, err)
		}
	}
}

func TestRecord(t *testing.T) {
	ns := netnstest.New(t)
	path := filepath.Join(t.TempDir(), "new", "sysctls.json")
	for _, key := range []string{forward4, forward6} {
		if _, err := sysctl.Set(ns.NS, sysctl.Setting{Key: key, Value: "0"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := sysctl.Set(ns.NS, sysctl.Setting{Key: "net/ipv4/conf/all/log_martians", Value: "1"}); err != nil {
		t.Fatal(err)
	}
	wanted := []sysctl.Setting{{Key: forward4, Value: "1"}, {Key: forward6, Value: "1"}, {Key: "net/ipv4/conf/all/log_martians", Value: "1"}}
	for i, wantChanged := range []bool{true, false} {
		// A new process reads what the one before wrote.
		changed, err := sysctl.NewRecord(path).Set(ns.NS, wanted...)
		if err != nil || changed != wantChanged {
			t.Errorf("Set %d: %t, %v", i, changed, err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	// A parameter that had the value already isn't ours to restore.
	if got[forward4] != "0" || got[forward6] != "0" || got["net/ipv4/conf/all/log_martians"] != "" {
		t.Errorf("recorded %v", got)
	}
	restored, err := sysctl.NewRecord(path).Restore(ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]sysctl.Setting{{Key: forward4, Value: "0"}, {Key: forward6, Value: "0"}}, restored); diff != "" {
		t.Errorf("restored (-want +got):\n%s", diff)
	}
	for _, key := range []string{forward4, forward6} {
		if v := get(t, ns, key); v != "0" {
			t.Errorf("%s is %s", key, v)
		}
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
	if restored, err := sysctl.NewRecord(path).Restore(ns.NS); err != nil || len(restored) > 0 {
		t.Errorf("second Restore: %v, %v", restored, err)
	}
}

func TestRecordThatCannotBeKept(t *testing.T) {
	ns := netnstest.New(t)
	if _, err := sysctl.Set(ns.NS, sysctl.Setting{Key: forward4, Value: "0"}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := sysctl.NewRecord(filepath.Join(file, "sysctls.json")).Set(ns.NS, sysctl.Setting{Key: forward4, Value: "1"}); err == nil {
		t.Error("no error")
	}
	if v := get(t, ns, forward4); v != "0" {
		t.Error("changed without a record")
	}
}

func TestCorruptRecord(t *testing.T) {
	for _, c := range []struct {
		name, text string
		aside      bool
	}{{"cut off", `{"net`, true}, {"null", `null`, false}} {
		t.Run(c.name, func(t *testing.T) {
			ns := netnstest.New(t)
			path := filepath.Join(t.TempDir(), "sysctls.json")
			testkit.Check(t, os.WriteFile(path, []byte(c.text), 0o600))
			for _, value := range []string{"0", "1"} { // one of them differs
				if _, err := sysctl.NewRecord(path).Set(ns.NS, sysctl.Setting{Key: forward4, Value: value}); err != nil {
					t.Fatal(err)
				}
				if v := get(t, ns, forward4); v != value {
					t.Errorf("%s is %s", forward4, v)
				}
			}
			if _, err := os.Stat(path + ".corrupt"); (err == nil) != c.aside {
				t.Errorf("set aside: %v", err)
			}
		})
	}
}

// A link that is gone by the time of Restore doesn't keep the rest from being
// restored.
func TestRestoreWithoutLink(t *testing.T) {
	ns := netnstest.New(t)
	path := filepath.Join(t.TempDir(), "sysctls.json")
	ns.IP(t, "link", "add", "bridge0", "type", "bridge")
	r := sysctl.NewRecord(path)
	if _, err := sysctl.Set(ns.NS, sysctl.Setting{Key: forward4, Value: "0"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Set(ns.NS, sysctl.Setting{Key: "net/ipv6/conf/bridge0/accept_ra", Value: "2"}, sysctl.Setting{Key: forward4, Value: "1"}); err != nil {
		t.Fatal(err)
	}
	ns.IP(t, "link", "del", "bridge0")
	if _, err := r.Restore(ns.NS); err != nil {
		t.Fatal(err)
	}
	if v := get(t, ns, forward4); v != "0" {
		t.Errorf("%s is %s", forward4, v)
	}
}

// The kernel changes other parameters along with forwarding, and to other values on the way
// back than an admin gave them.
func TestRestoreWhatTheKernelChangedAlong(t *testing.T) {
	ns := netnstest.New(t)
	ns.IP(t, "link", "add", "bridge0", "type", "bridge")
	var before []sysctl.Setting
	for _, s := range []sysctl.Setting{
		{Key: forward4, Value: "0"}, {Key: forward6, Value: "0"},
		{Key: "net/ipv4/conf/all/accept_redirects", Value: "0"},
		{Key: "net/ipv4/conf/bridge0/forwarding", Value: "1"},
		{Key: "net/ipv6/conf/bridge0/forwarding", Value: "1"},
		{Key: "net/ipv4/conf/default/forwarding", Value: "0"},
		{Key: "net/ipv6/conf/default/forwarding", Value: "0"},
	} {
		if _, err := sysctl.Set(ns.NS, s); err != nil {
			t.Fatal(err)
		}
		before = append(before, s)
	}
	r := sysctl.NewRecord(filepath.Join(t.TempDir(), "sysctls.json"))
	if _, err := r.Set(ns.NS, sysctl.Setting{Key: forward4, Value: "1"}, sysctl.Setting{Key: forward6, Value: "1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restore(ns.NS); err != nil {
		t.Fatal(err)
	}
	for _, s := range before {
		if v := get(t, ns, s.Key); v != s.Value {
			t.Errorf("%s is %s, before it was %s", s.Key, v, s.Value)
		}
	}
}
