package module

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
)

// fake is a kernel's folder, and what was inserted from it.
type fake struct {
	loader
	inserted []string
	refuse   map[string]error
}

func newFake(t *testing.T, files map[string]string) *fake {
	t.Helper()
	f := &fake{refuse: map[string]error{}}
	f.dir, f.proc = t.TempDir(), filepath.Join(t.TempDir(), "modules")
	for name, text := range files {
		path := filepath.Join(f.dir, name)
		if name == "/proc/modules" {
			path = f.proc
		}
		testkit.Check(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
	}
	f.insert = func(image []byte) error {
		f.inserted = append(f.inserted, string(image))
		return f.refuse[string(image)]
	}
	return f
}

// compressed returns a text compressed by a writer.
func compressed(t *testing.T, text string, wrap func(io.Writer) (io.WriteCloser, error)) string {
	t.Helper()
	var b bytes.Buffer
	w := testkit.Must(wrap(&b))(t)
	_, err := io.WriteString(w, text)
	testkit.Check(t, err, w.Close())
	return b.String()
}

func files(t *testing.T) map[string]string {
	return map[string]string{
		"/proc/modules":                    "udp_tunnel 16384 1 vxlan, Live 0x0\nip6-x 1 0 - Live 0x0\n",
		"modules.builtin":                  "kernel/net/ipv6/ipv6.ko\n",
		"modules.dep":                      "kernel/net/ipv4/fou.ko.xz: kernel/net/ipv4/ip_tunnel.ko.zst kernel/net/ipv4/udp_tunnel.ko kernel/lib/base.ko.gz\nkernel/net/ipv4/ip_tunnel.ko.zst: kernel/lib/base.ko.gz\nkernel/net/ipv4/udp_tunnel.ko:\nkernel/lib/base.ko.gz:\nkernel/drivers/some-thing.ko:\nkernel/odd.ko.lz:\n",
		"kernel/net/ipv4/fou.ko.xz":        compressed(t, "fou", func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) }),
		"kernel/net/ipv4/ip_tunnel.ko.zst": compressed(t, "ip_tunnel", func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) }),
		"kernel/lib/base.ko.gz":            compressed(t, "base", func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil }),
		"kernel/drivers/some-thing.ko":     "some-thing",
		"kernel/odd.ko.lz":                 "odd",
	}
}

func TestLoad(t *testing.T) {
	for _, c := range []struct {
		name  string
		names []string
		want  []string
		err   error
	}{
		{"in order of need, compressed in each way, without what is loaded", []string{"fou"}, []string{"base", "ip_tunnel", "fou"}, nil},
		{"each once", []string{"ip_tunnel", "fou"}, []string{"base", "ip_tunnel", "fou"}, nil},
		{"loaded already", []string{"udp_tunnel", "ip6_x"}, nil, nil},
		{"built in", []string{"ipv6"}, nil, nil},
		{"dash for underscore", []string{"some_thing"}, []string{"some-thing"}, nil},
		{"the others although one is missing", []string{"none", "some_thing"}, []string{"some-thing"}, ErrNotFound},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t, files(t))
			err := f.load(c.names)
			if !errors.Is(err, c.err) || !slices.Equal(f.inserted, c.want) {
				t.Errorf("got %q and %v, want %q and %v", f.inserted, err, c.want, c.err)
			}
		})
	}
}

func TestLoadFails(t *testing.T) {
	f := newFake(t, files(t))
	f.refuse["ip_tunnel"] = unix.EPERM
	if err := f.load([]string{"fou"}); !errors.Is(err, unix.EPERM) {
		t.Errorf("got %v", err)
	}
	f = newFake(t, files(t))
	f.refuse["ip_tunnel"] = unix.EEXIST // somebody else was faster
	if err := f.load([]string{"fou"}); err != nil {
		t.Errorf("got %v", err)
	}
	if err := f.load([]string{"odd"}); err == nil {
		t.Error("an unknown compression is no error")
	}
	testkit.Check(t, os.Remove(filepath.Join(f.dir, "modules.dep")))
	if err := f.load([]string{"some_thing"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without modules.dep: %v", err)
	}
}
