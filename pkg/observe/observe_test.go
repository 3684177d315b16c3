package observe

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestProfilesAreForTheHostOnly(t *testing.T) {
	tests := []struct {
		remote string
		want   int
	}{
		{"127.0.0.1:4711", http.StatusOK},
		{"[::1]:4711", http.StatusOK},
		{"[::ffff:127.0.0.1]:4711", http.StatusOK},
		{"10.0.0.7:4711", http.StatusForbidden},
		{"[fd00::7]:4711", http.StatusForbidden},
		{"garbage", http.StatusForbidden},
	}
	for _, tt := range tests {
		t.Run(tt.remote, func(t *testing.T) {
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/debug/pprof/", nil)
			r.RemoteAddr = tt.remote
			local(func(w http.ResponseWriter, _ *http.Request) {})(w, r)
			if w.Code != tt.want {
				t.Errorf("status %d, want %d", w.Code, tt.want)
			}
		})
	}
}

func TestReadiness(t *testing.T) {
	h := NewHealth("record", "disk")
	ready := func() (int, string) {
		w := httptest.NewRecorder()
		h.serveReady(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		return w.Code, w.Body.String()
	}
	if code, text := ready(); code != http.StatusServiceUnavailable || !strings.Contains(text, "disk: starting") || !strings.Contains(text, "record: starting") {
		t.Errorf("at start: %d %q, want both conditions named", code, text)
	}
	h.Set("record", nil)
	h.Set("disk", errors.New("it is full"))
	if code, text := ready(); code != http.StatusServiceUnavailable || strings.TrimSpace(text) != "disk: it is full" {
		t.Errorf("with a full disk: %d %q", code, text)
	}
	h.Set("disk", nil)
	if code, _ := ready(); code != http.StatusOK {
		t.Errorf("when all hold: %d", code)
	}
}

func TestServeSaysWhatCannotBeListenedOn(t *testing.T) {
	err := Serve(t.Context(), Options{MetricsAddr: "256.0.0.1:1"}, NewRegistry(), NewHealth())
	if err == nil || !strings.Contains(err.Error(), "256.0.0.1:1") {
		t.Errorf("error %v does not name the address", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Serve(ctx, Options{MetricsAddr: "127.0.0.1:0", HealthAddr: "127.0.0.1:0"}, NewRegistry(), NewHealth()); err != nil {
		t.Errorf("an orderly end: %v", err)
	}
}
