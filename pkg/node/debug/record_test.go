package debug

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// closing counts how often a file is closed.
type closing struct {
	io.Reader
	closed *int
}

func (c closing) Close() error { *c.closed++; return nil }

// served serves at a socket until the test ends, and returns its path.
func served(t *testing.T, s *Server) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "coild-debug.sock")
	testkit.Background(t.Context(), t, func(ctx context.Context) error { return s.Serve(ctx, socket) })
	testkit.Eventually(t, 5*time.Second, "the socket is served", func() error { _, err := os.Stat(socket); return err })
	return socket
}

// A copy comes whole through the socket. One that ends too early is an error of the reader's, and of either kind nothing is left open.
func TestCopy(t *testing.T) {
	file := bytes.Repeat([]byte("0123456789abcdef"), 3*part/16+7)
	for name, c := range map[string]struct {
		size int64
		err  error
		says string
	}{
		"whole":          {int64(len(file)), nil, ""},
		"cut short":      {int64(len(file)) + 1, nil, "unexpected EOF"},
		"can't be made":  {0, errors.New("copy the record: record is damaged"), "record is damaged"},
		"empty, if ever": {0, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s, closed := newServer(record{}), 0
			s.Copy = func(_ context.Context, limit int64) (io.ReadCloser, int64, error) {
				if limit != inspection.CopyLimit {
					t.Errorf("the limit is %d", limit)
				}
				if c.err != nil {
					return nil, 0, c.err
				}
				return closing{bytes.NewReader(file[:min(c.size, int64(len(file)))]), &closed}, c.size, nil
			}
			var got bytes.Buffer
			n, err := observe.AskSocket(t.Context(), served(t, s), PathDB, inspection.CopyLimit, &got)
			switch {
			case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
				t.Errorf("%v, want %s", err, c.says)
			case c.says == "" && (err != nil || n != c.size || !bytes.Equal(got.Bytes(), file[:c.size])):
				t.Errorf("%d bytes of %d, %v", n, c.size, err)
			}
			if want := map[bool]int{true: 0, false: 1}[c.err != nil]; closed != want {
				t.Errorf("the file was closed %d times, want %d", closed, want)
			}
		})
	}
}

// All that is written in the record is told, of which a reader knows whose it is; what can't be read is an error that says why.
func TestRecord(t *testing.T) {
	s := newServer(record{contents: []inspection.DatabaseAddress{{IPv4: "10.0.0.1", State: string(store.Attached)}}})
	var text bytes.Buffer
	testkit.Must(observe.AskSocket(t.Context(), served(t, s), PathRecord, inspection.DatabaseLimit, &text))(t)
	d := testkit.Must(inspection.ParseDatabase(text.Bytes()))(t)
	if d.Node.Name != "n1" || d.Schema != 2 || len(d.Addresses) != 1 || d.Addresses[0].IPv4 != "10.0.0.1" {
		t.Errorf("%+v", d)
	}
	s = newServer(record{err: errors.New("disk I/O error")})
	if code, text := ask(t, s, PathRecord); code != http.StatusInternalServerError || text != "disk I/O error\n" {
		t.Errorf("of a record that can't be read: %d, %q", code, text)
	}
}

// The whole record is read for one at a time. Other questions are answered meanwhile.
func TestRecordForOne(t *testing.T) {
	s := newServer(record{})
	entered, leave := make(chan struct{}), make(chan struct{})
	s.Copy = func(context.Context, int64) (io.ReadCloser, int64, error) {
		close(entered)
		<-leave
		return nil, 0, errors.New("no copy")
	}
	h, first := s.handler(), make(chan int)
	get := func(path string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return w.Code
	}
	go func() { first <- get(PathDB) }()
	<-entered
	for path, want := range map[string]int{PathDB: http.StatusServiceUnavailable, PathRecord: http.StatusServiceUnavailable, "/node": http.StatusOK} {
		if code := get(path); code != want {
			t.Errorf("%s meanwhile: %d, want %d", path, code, want)
		}
	}
	close(leave)
	if code := <-first; code != http.StatusInternalServerError {
		t.Errorf("the first one: %d", code)
	}
	if code := get(PathRecord); code != http.StatusOK {
		t.Errorf("%s afterwards: %d", PathRecord, code)
	}
}
