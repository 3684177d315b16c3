package coild

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/testkit"
)

func nodeOf(machineID string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node"},
		Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{MachineID: machineID}},
	}
}

func TestReadMachine(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct{ text, want string }{
		"ID": {"0123\n", "0123"}, "empty": {"\n", ""}, "before the first boot": {"uninitialized\n", ""},
	} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(c.text), 0o444); err != nil {
			t.Fatal(err)
		}
		if m := testkit.Must(readMachine(t.Context(), file))(t); m.id != c.want {
			t.Errorf("%s: ID %q, want %q", name, m.id, c.want)
		}
	}
	for name, path := range map[string]string{"no file": filepath.Join(dir, "none"), "none named": ""} {
		if m := testkit.Must(readMachine(t.Context(), path))(t); m.id != "" {
			t.Errorf("%s: ID %q", name, m.id)
		}
	}
	if m, err := readMachine(t.Context(), dir); err == nil {
		t.Errorf("a folder has the ID %q", m.id)
	}
}

// A Node is this machine's unless both have an ID and these differ.
func TestMachineCheck(t *testing.T) {
	for _, c := range []struct {
		own, nodes string
		ok         bool
	}{
		{"a", "a", true}, {"", "a", true}, {"a", "", true}, {"", "", true}, {"a", "b", false},
	} {
		m := machine{id: c.own}
		_, err := m.check(nodeOf(c.nodes), time.Now())
		if (err == nil) != c.ok {
			t.Errorf("machine %q, Node of %q: %v", c.own, c.nodes, err)
		}
		if err != nil && (!errors.Is(err, node.ErrWithdrawn) || !strings.Contains(err.Error(), "--machine-id-file")) {
			t.Errorf("machine %q, Node of %q: %v", c.own, c.nodes, err)
		}
	}
}

// While two kubelets write their IDs into one Node by turns, neither machine serves; when one of
// them has ended, the other does.
func TestTwoMachinesOfOneName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := machine{id: "a"}
		check := func(id string, ok bool) time.Duration {
			t.Helper()
			left, err := m.check(nodeOf(id), time.Now())
			if (err == nil) != ok {
				t.Fatalf("Node of %s: %v", id, err)
			}
			return left
		}
		check("a", true)
		for range 5 {
			check("b", false)
			time.Sleep(10 * time.Second)
			check("a", false)
			time.Sleep(10 * time.Second)
		}
		left := check("a", false)
		time.Sleep(left - 1)
		check("a", false)
		time.Sleep(time.Nanosecond)
		check("a", true)
		check("a", true)
	})
}

// Etcd was restored from a backup, and the watches go on as if nothing had happened.
func TestAPIServerOfAnEarlierTime(t *testing.T) {
	var a apiTime
	for i, step := range []struct {
		version string
		back    bool
	}{
		{"5", false}, {"5", false}, {"900", false}, {"1000", false}, {"999", true}, {"1001", false}, {"not a number", false}, {"1000", true},
	} {
		n := nodeOf("this")
		n.ResourceVersion = step.version
		if err := a.check(n); (err != nil) != step.back {
			t.Errorf("step %d: %v", i, err)
		}
	}
}
