package coild

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// A sandbox lives while the namespace that was recorded is at its path, in this boot.
func TestLives(t *testing.T) {
	own := testkit.Must(inspectNetns("/proc/self/ns/net"))(t)
	file := filepath.Join(t.TempDir(), "unmounted")
	if err := os.WriteFile(file, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	d := &daemon{boot: "boot"}
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
		if got := d.lives(store.Allocation{Netns: c.netns, BootID: c.boot}); got != c.want {
			t.Errorf("%s: lives is %t", name, got)
		}
	}
}

// A Node may get its addresses after coild has started.
func TestSeen(t *testing.T) {
	first, second := ipam.Address{IPv4: netip.MustParseAddr("192.0.2.1")}, ipam.Address{}
	for _, c := range []struct {
		name string
		seen []ipam.Address
		want []bool
	}{
		{"an address from the start", []ipam.Address{first, first}, []bool{false, false}},
		{"none at the start", []ipam.Address{second, first}, []bool{false, true}},
		{"none any more", []ipam.Address{first, second, first}, []bool{false, true, true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s seen[ipam.Address]
			for i, a := range c.seen {
				if got := s.changed(a); got != c.want[i] {
					t.Errorf("step %d: changed is %t", i, got)
				}
			}
		})
	}
}
