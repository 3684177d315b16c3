package observe

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

func ask(t *testing.T, socket, path string, limit int64) (string, error) {
	var b strings.Builder
	_, err := AskSocket(t.Context(), socket, path, limit, &b)
	return b.String(), err
}

// A socket is for root only; one of a dead process is replaced, one of a living process is not; an answer has a limit, and what isn't OK is an error.
func TestServeSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "coild-debug.sock")
	testkit.Check(t, os.WriteFile(socket, nil, 0o644)) // left by a dead process
	mux := http.NewServeMux()
	mux.HandleFunc("GET /long", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Repeat("x", 100)) })
	mux.HandleFunc("GET /busy", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "ask again", http.StatusServiceUnavailable)
	})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- ServeSocket(ctx, socket, time.Second, mux) }()
	testkit.Eventually(t, 5*time.Second, "the socket is served", func() error {
		_, err := ask(t, socket, "/long", 100)
		return err
	})
	if fi, err := os.Stat(socket); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("socket: %v, %v; want mode 0600", fi.Mode(), err)
	}
	if text, err := ask(t, socket, "/long", 100); err != nil || len(text) != 100 {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := ask(t, socket, "/long", 99); err == nil {
		t.Error("an answer that is too long is taken")
	}
	if _, err := ask(t, socket, "/busy", 99); err == nil || err.Error() != "ask again" {
		t.Errorf("an error is %v", err)
	}
	if err := ServeSocket(t.Context(), socket, time.Second, mux); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("second server at the socket: %v", err)
	}
	cancel()
	testkit.Check(t, <-served)
	if _, err := ask(t, socket, "/long", 100); err == nil {
		t.Error("it answers after its end")
	}
}

// An asker who is more patient than others gets answers that take longer.
func TestPatientAskers(t *testing.T) {
	const within, takes = 50 * time.Millisecond, 1500 * time.Millisecond
	all := NewQuestions(4, within)
	all.Answer("/slow", func(*http.Request) (func(context.Context) ([]byte, error), error) {
		return func(ctx context.Context) ([]byte, error) {
			select {
			case <-time.After(takes):
				return []byte(`"all"`), nil
			case <-ctx.Done():
				return []byte(`"what was found by then"`), nil
			}
		}, nil
	})
	socket := filepath.Join(t.TempDir(), "socket")
	stop := testkit.Background(t.Context(), t, func(ctx context.Context) error { return ServeSocket(ctx, socket, within, all) })
	defer stop()
	testkit.Eventually(t, 5*time.Second, "it serves", func() error { _, err := os.Stat(socket); return err })
	for timeout, want := range map[time.Duration]string{0: `"what was found by then"`, 2 * time.Second: `"what was found by then"`, 20 * time.Second: `"all"`} {
		ctx, cancel := context.WithCancel(t.Context())
		if timeout > 0 {
			ctx, cancel = context.WithTimeout(t.Context(), timeout)
		}
		var got strings.Builder
		_, err := AskSocket(ctx, socket, "/slow", 100, &got)
		cancel()
		if err != nil || got.String() != want {
			t.Errorf("with a timeout of %s the answer is %s, %v; want %s", timeout, got.String(), err, want)
		}
	}
}
