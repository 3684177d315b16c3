package guide

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
)

// Numbers, addresses and the width of columns make no difference between lines.
func TestAlike(t *testing.T) {
	for text, want := range map[string]string{
		"default-0   coil-worker   10.100.0.32/27   fd00:100::20/123   4m12s": "default-N coil-worker N.N.N.N/N N:N::N/N N",
		"ok     routes     the table of pods":                                 "ok routes the table of pods",
	} {
		if got := alike(text); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The page of the package's example is read: its commands, where they run, and what they print.
func TestRead(t *testing.T) {
	file, steps := Read(t, "FIRST-HOUR.md", "\n## A way in\n", "\n## A way out\n")
	var places []string
	for _, s := range steps {
		places = append(places, s.Place)
	}
	if d := cmp.Diff([]string{"", "", "outside"}, places); d != "" || file != "" {
		t.Fatalf("file %q, places (-want +got):\n%s", file, d)
	}
	if d := cmp.Diff(Step{Place: "outside", Commands: "wget -q -O - -T 5 http://172.30.0.144/\n", Prints: []string{"hello from web-0"}}, steps[2]); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestRights(t *testing.T) {
	got := Rights(t, `Show nodes.

Rights: list nodes, pods; list addressblocks of coil.cybozu.com; with --watch, watch them, too; get leases of coordination.k8s.io in the namespace kube-system. Maps need more.

Usage:`)
	want := []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"nodes", "pods"}, Verbs: []string{"list", "watch"}},
		{APIGroups: []string{"coil.cybozu.com"}, Resources: []string{"addressblocks"}, Verbs: []string{"list", "watch"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
