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
