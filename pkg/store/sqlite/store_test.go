package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/store/storetest"
)

var testNode = store.Identity{NodeName: "worker", NodeUID: "5d9c1b4e", MachineID: "0f1e2d3c"}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t testing.TB, c storetest.Config) (store.Store, func()) { return openConfig(t, c) })
}

func TestConformanceOfClients(t *testing.T) {
	storetest.RunClients(t, func(t testing.TB, c storetest.Config) (store.Clients, func()) { return openConfig(t, c) })
}

// openConfig opens the record of a test, and returns a function that closes it.
func openConfig(t testing.TB, c storetest.Config) (*sqlite.Store, func()) {
	s, _, err := sqlite.Open(t.Context(), sqlite.Options{
		Path: filepath.Join(c.Dir, "coild.db"), Identity: testNode,
		BootID: c.BootID, CoolDown: c.CoolDown, Clock: c.Clock,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s, func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}
