package sqlite_test

import (
	"testing"

	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

func TestIdentity(t *testing.T) {
	all := testNode
	for _, tc := range []struct {
		name       string
		made, open store.Identity
		other      bool
	}{
		{"the same", all, all, false},
		{"UID isn't known yet", all, store.Identity{NodeName: all.NodeName, MachineID: all.MachineID}, false},
		{"UID wasn't known", store.Identity{NodeName: all.NodeName, MachineID: all.MachineID}, all, false},
		{"nothing was known", store.Identity{}, all, false},
		{"other name", all, store.Identity{NodeName: "other", NodeUID: all.NodeUID, MachineID: all.MachineID}, true},
		{"other Node of the name, on this machine", all, store.Identity{NodeName: all.NodeName, NodeUID: "other", MachineID: all.MachineID}, false},
		{"other Node of the name, machine isn't known", all, store.Identity{NodeName: all.NodeName, NodeUID: "other"}, true},
		{"other machine", all, store.Identity{NodeName: all.NodeName, NodeUID: all.NodeUID, MachineID: "other"}, true},
		{"copy of another node's disk", all, store.Identity{NodeName: "other"}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := options(t)
			o.Identity = tc.made
			s, _ := mustOpen(t, o)
			b := mustBlock(t, "default-0", "10.0.0.0/30", "")
			fill(t, s, b, 2)
			mustClose(t, s)

			o.Identity = tc.open
			s, res := mustOpen(t, o)
			if !tc.other {
				var want sqlite.OpenResult
				if tc.open.NodeUID != "" && tc.open.NodeUID != tc.made.NodeUID {
					want.EarlierNode = tc.made.NodeUID
				}
				if res != want || len(mustList(t, s)) != 2 {
					t.Fatalf("%+v, want %+v", res, want)
				}
				if err := s.Writable(t.Context()); err != nil {
					t.Errorf("the record can't be written: %v", err)
				}
				// A process that ends before it has taken the record over leaves that to the next one.
				mustClose(t, s)
				if s, res = mustOpen(t, o); res != want {
					t.Errorf("opened again: %+v, want %+v", res, want)
				}
				if err := s.Rebuilt(t.Context()); err != nil {
					t.Fatal(err)
				}
				mustClose(t, s)
				if s, res = mustOpen(t, o); res != (sqlite.OpenResult{}) {
					t.Errorf("opened when it was taken over: %+v", res)
				}
				// The new identity is remembered.
				mustClose(t, s)
				o.Identity = store.Identity{NodeName: "third", NodeUID: "third", MachineID: "third"}
				if _, res = mustOpen(t, o); res.Reason != sqlite.OtherNode {
					t.Errorf("%+v", res)
				}
				return
			}
			if !res.Fresh || res.Reason != sqlite.OtherNode || len(mustList(t, s)) != 0 {
				t.Fatalf("%+v", res)
			}
			if want := o.Path + ".20260301T120000Z-" + string(sqlite.OtherNode); res.SetAside != want {
				t.Errorf("set aside as %s, want %s", res.SetAside, want)
			}
			if n := 0; rawDB(t, res.SetAside).QueryRow(`SELECT count(*) FROM pods`).Scan(&n) != nil || n != 2 {
				t.Errorf("the file that was set aside has %d pods", n)
			}
		})
	}
}
