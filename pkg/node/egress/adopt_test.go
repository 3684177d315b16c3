package egress

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestAdopt(t *testing.T) {
	// A pod that has given itself the address of another one comes first.
	liar, p, other := clientnettest.NewPod(t), clientnettest.NewPod(t), clientnettest.NewPod(t)
	machine := p.Outside()
	host := testkit.Must(podnet.New(podnet.Options{PodTable: 116, RulePriority: 2000, Protocol: dataplane.ProtocolNode, Netns: machine.Path}))(t)
	defer func() { testkit.Check(t, host.Close()) }()
	liar.NS.IP(t, "link", "set", "outside", "netns", machine.Path, "name", "liar")
	machine.IP(t, "link", "set", "liar", "up")
	other.NS.IP(t, "addr", "flush", "dev", "eth0")
	dir := t.TempDir()
	for name, target := range map[string]string{"cni-0": liar.NS.Path, "cni-1": p.NS.Path, "cni-2": other.NS.Path} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "cni-3"), nil, 0o600); err != nil { // a runtime has unmounted it
		t.Fatal(err)
	}
	web := store.Pod{Namespace: "ns", Name: "web", UID: "u1"}
	pods := map[netip.Addr]store.Pod{p.Client.Address.IPv4: web, p.Client.Address.IPv6: web, netip.MustParseAddr("10.9.9.9"): {Namespace: "ns", Name: "elsewhere"}}
	at := store.Netns{Path: filepath.Join(dir, "cni-1"), Inode: p.NS.Inode()}
	record := attachment.ID{ContainerID: "c1", IfName: "eth0"}
	found := node.Sandbox{ID: attachment.ID{ContainerID: "netns-cni-1", IfName: "eth0"}, Pod: web, Netns: at, Address: p.Client.Address}
	complete := found
	complete.ID = record
	stranger := node.Sandbox{ID: attachment.ID{ContainerID: "c2", IfName: "eth0"}, Address: ipam.Address{IPv4: netip.MustParseAddr("10.9.9.9")}}
	for _, c := range []struct {
		name        string
		known, want []node.Sandbox
	}{
		{"nothing is known", nil, []node.Sandbox{found}},
		{"only the address is known", []node.Sandbox{stranger, {ID: record, Address: p.Client.Address}}, []node.Sandbox{stranger, complete}},
		{"all is known", []node.Sandbox{complete}, []node.Sandbox{complete}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Adoption{Dir: dir, Pods: pods, Host: host}.Adopt(t.Context(), c.known)
			if err != nil || len(got) != len(c.want) {
				t.Fatalf("%+v, %v", got, err)
			}
			for i := range got {
				if got[i] != c.want[i] {
					t.Errorf("%+v, want %+v", got[i], c.want[i])
				}
			}
		})
	}
	if got, err := (Adoption{Dir: filepath.Join(dir, "none"), Pods: pods, Host: host}).Adopt(t.Context(), nil); err != nil || len(got) != 0 {
		t.Errorf("without the folder: %v, %v", got, err)
	}
}
