package coilctl

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/plan/sysdump"
)

// failing takes so many bytes, and is full then.
type failing struct{ left int }

func (f *failing) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errors.New("no space left on device")
	}
	return len(p), nil
}

func quietly(int, int, string) {}

// Files are in the order in which they are given, however long each one takes, and few are read at once. One that is too long is cut, one with an error is kept as far as it came.
func TestArchive(t *testing.T) {
	var b bytes.Buffer
	a := newArchive(&b, time.Unix(0, 0), quietly)
	var now, most atomic.Int32
	var entries []entry
	began := make([]chan struct{}, 40)
	for i := range began {
		began[i] = make(chan struct{})
		entries = append(entries, entry{fmt.Sprintf("%02d", i), 10, func(_ context.Context, w io.Writer) error {
			n := now.Add(1)
			defer now.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			close(began[i])
			if i%2 == 0 {
				<-began[i+1] // which may end before this one
			}
			switch i {
			case 7:
				return errors.New("refused")
			case 8:
				_, err := io.WriteString(w, "0123456789abc")
				return notFull(err)
			case 9:
				_, err := io.WriteString(w, "half")
				return errors.Join(err, errors.New("connection reset"))
			}
			_, err := fmt.Fprintf(w, "file %d", i)
			return err
		}})
	}
	if err := errors.Join(a.add(t.Context(), entries), a.close()); err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(&b)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(h.Name, root)
		names, files[name] = append(names, name), string(text)
	}
	want := []string{}
	for i := range 40 {
		if i != 7 {
			want = append(want, fmt.Sprintf("%02d", i))
		}
	}
	if got := strings.Join(names, " "); got != strings.Join(want, " ")+" errors.txt index.txt" {
		t.Errorf("names: %s", got)
	}
	if files["08"] != "0123456789" || files["09"] != "half" || files["39"] != "file 39" {
		t.Errorf("%q", files)
	}
	if want := "07: refused\n08: it was cut after 10 bytes\n09: connection reset\n"; files["errors.txt"] != want {
		t.Errorf("errors.txt: %q", files["errors.txt"])
	}
	if m := most.Load(); m > readers {
		t.Errorf("%d files were read at once, want %d", m, readers)
	}
}

// A disk that is full ends the dump: nothing more is read.
func TestArchiveFull(t *testing.T) {
	a := newArchive(&failing{left: 2000}, time.Unix(0, 0), quietly)
	var read atomic.Int32
	entries := make([]entry, 100)
	for i := range entries {
		entries[i] = entry{fmt.Sprint(i), 1 << 20, func(_ context.Context, w io.Writer) error {
			read.Add(1)
			_, err := io.CopyN(w, rand.NewChaCha8([32]byte{byte(i)}), 1<<10)
			return err
		}}
	}
	if err := a.add(t.Context(), entries); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("%v", err)
	}
	if n := read.Load(); n > 20 {
		t.Errorf("%d files were read", n)
	}
}

// What looks like a token is hidden wherever a text is split.
func TestScrubbed(t *testing.T) {
	text := strings.Repeat("a line\nAuthorization: Bearer abcdefgh.ijklmnop-qrst\n", 3) + "password=hunter22"
	for size := 1; size < 60; size++ {
		var b strings.Builder
		s := &scrubbed{to: &b}
		for rest := text; rest != ""; {
			n := min(size, len(rest))
			if m, err := s.Write([]byte(rest[:n])); m != n || err != nil {
				t.Fatal(m, err)
			}
			rest = rest[n:]
		}
		if err := s.flush(); err != nil {
			t.Fatal(err)
		}
		if want := sysdump.Scrub(text); b.String() != want || strings.Contains(want, "hunter22") {
			t.Fatalf("in parts of %d: %q", size, b.String())
		}
	}
	var b strings.Builder
	if err := copyScrubbed(&b, strings.NewReader(strings.Repeat("x", 3*lineLimit))); err != nil || b.Len() != 3*lineLimit {
		t.Errorf("a long line: %d bytes, %v", b.Len(), err)
	}
}
