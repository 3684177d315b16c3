package sqlite_test

import (
	"errors"
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
		{"other Node of the name", all, store.Identity{NodeName: all.NodeName, NodeUID: "other", MachineID: all.MachineID}, true},
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
				if res != (sqlite.OpenResult{}) || len(mustList(t, s)) != 2 {
					t.Fatalf("%+v", res)
				}
				// What was told now is remembered.
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
			if want := o.Path + ".20260301T120000Z-OtherNode"; res.SetAside != want {
				t.Errorf("set aside as %s, want %s", res.SetAside, want)
			}
			if n := 0; rawDB(t, res.SetAside).QueryRow(`SELECT count(*) FROM pods`).Scan(&n) != nil || n != 2 {
				t.Errorf("the file that was set aside has %d pods", n)
			}
		})
	}
}

func TestSetIdentity(t *testing.T) {
	o := options(t)
	o.Identity = store.Identity{NodeName: "worker"}
	s, _ := mustOpen(t, o)
	fill(t, s, mustBlock(t, "default-0", "10.0.0.0/30", ""), 1)
	if err := s.SetIdentity(t.Context(), store.Identity{NodeUID: "uid-1", MachineID: "machine-1"}); err != nil {
		t.Fatal(err)
	}
	if err := s.SetIdentity(t.Context(), store.Identity{}); err != nil {
		t.Errorf("knowing nothing new: %v", err)
	}
	for _, bad := range []store.Identity{{NodeName: "other"}, {NodeUID: "uid-2"}, {MachineID: "machine-2"}} {
		if err := s.SetIdentity(t.Context(), bad); !errors.Is(err, sqlite.ErrForeign) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if err := s.SetIdentity(t.Context(), store.Identity{NodeUID: "uid-1"}); err != nil {
		t.Errorf("after a refusal: %v", err)
	}
	mustClose(t, s)
	// The Node was made anew under the same name: only the API knew.
	s, res := mustOpen(t, o)
	if res.Fresh {
		t.Fatalf("%+v", res)
	}
	o.Identity.NodeUID = "uid-2"
	if err := s.SetIdentity(t.Context(), o.Identity); !errors.Is(err, sqlite.ErrForeign) {
		t.Fatalf("%v", err)
	}
	mustClose(t, s)
	if _, res = mustOpen(t, o); res.Reason != sqlite.OtherNode || !res.Fresh {
		t.Errorf("%+v", res)
	}
}
