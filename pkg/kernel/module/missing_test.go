package module

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestMissing(t *testing.T) {
	all := []string{"fou", "udp_tunnel", "ipv6", "some_thing", "none"}
	for _, tt := range []struct {
		name   string
		remove []string
		want   []string
		err    error
	}{
		{"one has no file", nil, []string{"none"}, nil},
		{"built in ones aren't listed", []string{"modules.builtin"}, []string{"ipv6", "none"}, nil},
		{"only loaded ones are known", []string{"modules.builtin", "modules.dep"}, []string{"fou", "ipv6", "some_thing", "none"}, os.ErrNotExist},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake(t, files(t))
			for _, file := range tt.remove {
				testkit.Check(t, os.Remove(filepath.Join(f.dir, file)))
			}
			got, err := f.missing(all)
			if !slices.Equal(got, tt.want) || !errors.Is(err, tt.err) {
				t.Errorf("got %q and %v, want %q and %v", got, err, tt.want, tt.err)
			}
			if len(f.inserted) > 0 {
				t.Errorf("%q were loaded", f.inserted)
			}
		})
	}
	f := newFake(t, files(t))
	testkit.Check(t, os.Remove(filepath.Join(f.dir, "modules.dep")))
	if got, err := f.missing([]string{"udp_tunnel", "ipv6"}); got != nil || err != nil {
		t.Errorf("without need of a file: got %q and %v", got, err)
	}
}
