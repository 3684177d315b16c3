package testkit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// listener is a test that fails for what it says.
type listener struct {
	testing.TB
	said     []string
	cleanups []func()
}

func (l *listener) Helper() {}

func (l *listener) Cleanup(f func()) { l.cleanups = append(l.cleanups, f) }

func (l *listener) Errorf(format string, args ...any) {
	l.said = append(l.said, fmt.Sprintf(format, args...))
}

func TestBackground(t *testing.T) {
	for _, err := range []error{nil, errors.New("no buffer space")} {
		l, ended := &listener{TB: t}, false
		stop := Background(t.Context(), l, func(ctx context.Context) error {
			<-ctx.Done()
			ended = true
			return err
		})
		stop()
		if len(l.cleanups) != 1 || !ended {
			t.Fatalf("%d clean-ups, ended: %t", len(l.cleanups), ended)
		}
		l.cleanups[0]() // says nothing more
		if said := strings.Join(l.said, "; "); (err == nil) != (said == "") || err != nil && (len(l.said) != 1 || !strings.Contains(said, err.Error())) {
			t.Errorf("%v: %q", err, said)
		}
	}
}
