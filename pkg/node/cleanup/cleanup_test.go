package cleanup

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// Only a socket at which nobody listens, or none, lets cleanup begin.
func TestUnserved(t *testing.T) {
	path := func(name string) string { return filepath.Join(t.TempDir(), name) }
	listen := func(left bool) string {
		p := path("s")
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: p, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		if left {
			l.Close()
		} else {
			t.Cleanup(func() { l.Close() })
		}
		return p
	}
	file := path("file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, socket    string
		allowed, served bool
	}{
		{"none", path("none"), true, false},
		{"left by a process that was killed", listen(true), true, false},
		{"served", listen(false), false, true},
		{"a file", file, false, false},
		{"a folder", t.TempDir(), false, false},
	} {
		err := unserved(t.Context(), tt.socket)
		if (err == nil) != tt.allowed || errors.Is(err, ErrInUse) != tt.served {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
