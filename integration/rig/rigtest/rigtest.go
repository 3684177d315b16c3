// Package rigtest gives a test a rig of its own.
//
// It owns what each such test needs and what it must leave behind: nothing. It must not
// know what is tested.
package rigtest

import (
	"errors"
	"os"
	"testing"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// New starts a rig, which ends with the test. Skipped unless the tiers that a rig needs
// were asked for.
func New(t *testing.T) *rig.Rig {
	t.Helper()
	testkit.Need(t, testkit.Netns)
	testkit.Need(t, testkit.APIServer)
	r, err := rig.New(t.Context(), rig.Options{Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(r.Dir()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the rig left %s: %v", r.Dir(), err)
		}
	})
	return r
}
