package coilctl_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// surplusBlock adds a block of node n1 that its coild doesn't know.
func surplusBlock(t *testing.T, w *world) {
	t.Helper()
	w.add(t, "addressblocks", object{
		"metadata": object{"name": "default-9", "labels": object{"coil.cybozu.com/pool": "default", "coil.cybozu.com/node": "n1"}, "finalizers": []string{"coil.cybozu.com", "example.com/other"}}, "index": 9, "ipv4": "10.0.0.36/30",
	})
}

// A block that nobody uses for sure is taken: its finalizer goes, and no other. Without --force, or without its name, nothing is changed.
func TestRelease(t *testing.T) {
	for _, tt := range []struct {
		name, input, args string
		do                func(w *world, d *inspection.Database)
		code              int
		out, errOut       string // parts
		left              string // finalizers of the block after that
	}{
		{"dry run", "", "default-9 --dry-run", nil, 0, "It may be taken: coild of the node answers, and neither has the block in its record nor an address of it\n", "", "coil.cybozu.com example.com/other"},
		{"without --force", "", "default-9", nil, 1, "It may be taken", "use --force to take the block", "coil.cybozu.com example.com/other"},
		{"another name", "default-8\n", "default-9 --force", nil, 1, "It may be taken", "answer with the name of the block", "coil.cybozu.com example.com/other"},
		{"its name", "default-9\n", "default-9 --force", nil, 0, "It may be taken", "AddressBlock default-9 is taken from node n1\n", "example.com/other"},
		{"--yes", "", "default-9 --force --yes", nil, 0, "It may be taken", "AddressBlock default-9 is taken from node n1\n", "example.com/other"},
		{"no such block", "", "default-8 --force --yes", nil, 1, "", "error: there is no AddressBlock default-8\n", "coil.cybozu.com example.com/other"},
		{"a block that coild has", "", "default-0 --force --yes", nil, 1, "and has the block in its record\nPod shop/cart-0 of node n1 has 10.0.0.0\nIt isn't taken: coild gives a block back by itself",
			"error: the block isn't taken\n", "coil.cybozu.com example.com/other"},
		{"Node is gone", "", "default-9 --force --yes", func(w *world, _ *inspection.Database) { w.objects["nodes"] = nil }, 0, "there is no Node n1\nIt may be taken: the Node doesn't exist\ncoil-ipam-controller frees it by itself",
			"is taken from node n1\n", "example.com/other"},
		{"machine may run", "", "default-9 --force --yes", func(w *world, _ *inspection.Database) { w.refused["pods/exec"] = true }, 1, "It isn't taken: turn the machine off and say so: kubectl taint node n1 ",
			"error: the block isn't taken\n", "coil.cybozu.com example.com/other"},
		{"changed by somebody else", "", "default-9 --force --yes", func(w *world, _ *inspection.Database) {
			w.write = func() { metaOf(w.find("addressblocks", "", "default-9"))["resourceVersion"] = "7" }
		}, 1, "It may be taken", "was changed meanwhile: look again", "coil.cybozu.com example.com/other"},
		{"made anew by somebody else", "", "default-9 --force --yes", func(w *world, _ *inspection.Database) {
			w.write = func() { metaOf(w.find("addressblocks", "", "default-9"))["uid"] = "new" }
		}, 1, "It may be taken", "was changed meanwhile: look again", "coil.cybozu.com example.com/other"},
		{"used by somebody meanwhile", "", "default-9 --force --yes", func(w *world, d *inspection.Database) {
			w.write = func() {
				d.Blocks = append(slices.Clone(d.Blocks), inspection.DatabaseBlock{ID: 2, Name: "default-9", Pool: "default", IPv4: "10.0.0.36/30"})
			}
		}, 1, "It isn't taken: coild gives a block back by itself", "it was used meanwhile. It is deleted, and locked", "coil.cybozu.com example.com/other"},
		{"no right to list pods", "", "default-9 --force --yes", func(w *world, _ *inspection.Database) { w.refused["pods"] = true }, 1, "", "list Pods: pods is forbidden", "coil.cybozu.com example.com/other"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, d := nodeWorld(t)
			surplusBlock(t, w)
			if tt.do != nil {
				tt.do(w, d)
			}
			code, out, errOut := w.coilctl(tt.input, append([]string{"blocks", "release"}, strings.Fields(tt.args)...)...)
			if code != tt.code || !strings.Contains(out, tt.out) || !strings.Contains(errOut, tt.errOut) {
				t.Errorf("exit code %d\n%s%s", code, out, errOut)
			}
			var left []string
			if b := w.get("addressblocks", "default-9"); b != nil {
				for _, f := range metaOf(b)["finalizers"].([]any) {
					left = append(left, f.(string))
				}
			}
			if strings.Join(left, " ") != tt.left {
				t.Errorf("finalizers: %q, want %s", left, tt.left)
			}
		})
	}
}

// It asks for what its help names.
func TestReleaseRights(t *testing.T) {
	w, _ := nodeWorld(t)
	surplusBlock(t, w)
	if _, help, _ := w.coilctl("", "blocks", "release", "--help"); !strings.Contains(help, "Rights: get nodes; get, delete, patch addressblocks of coil.cybozu.com; list pods; get and create pods/exec") {
		t.Errorf("the help doesn't name the rights:\n%s", help)
	}
	if code, _, errOut := w.coilctl("", "blocks", "release", "default-9", "--force", "--yes"); code != 0 {
		t.Fatal(errOut)
	}
	slices.Sort(w.asked)
	if got, want := slices.Compact(w.asked), []string{"delete addressblocks", "get addressblocks", "get nodes", "get pods/exec", "list pods", "patch addressblocks"}; !slices.Equal(got, want) {
		t.Errorf("it asks for %q, want %q", got, want)
	}
}
