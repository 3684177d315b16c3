package node

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// A sandbox lives while the namespace that was recorded is at its path, in this boot.
func TestLives(t *testing.T) {
	own := testkit.Must(InspectNetns("/proc/self/ns/net"))(t)
	file := filepath.Join(t.TempDir(), "unmounted")
	if err := os.WriteFile(file, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		boot  string
		netns store.Netns
		want  bool
	}{
		"there":                       {"boot", own, true},
		"of another boot":             {"before", own, false},
		"another one at the path":     {"boot", store.Netns{Path: own.Path, Inode: own.Inode + 1}, false},
		"nothing at the path":         {"boot", store.Netns{Path: file + "-none", Inode: own.Inode}, false},
		"an ordinary file":            {"boot", store.Netns{Path: file, Inode: own.Inode}, false},
		"found without its namespace": {"boot", store.Netns{}, false},
	} {
		if got := Lives(store.Allocation{Netns: c.netns, BootID: c.boot}, "boot"); got != c.want {
			t.Errorf("%s: lives is %t", name, got)
		}
	}
}
