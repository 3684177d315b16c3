package coilctl

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// With a longer --timeout each program is waited for longer, so that those that are asked after it are waited for, too.
func TestWithin(t *testing.T) {
	for timeout, want := range map[time.Duration]time.Duration{0: 4 * time.Second, 10 * time.Second: 4 * time.Second, time.Minute: 24 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			o, _ := newWhy()
			o.timeout = timeout
			e, err := o.examiner()
			if err != nil {
				t.Fatal(err)
			}
			e.AskRouter = func(ctx context.Context, _ *corev1.Pod, _ ...string) (*inspection.RouterAnswer, error) {
				<-ctx.Done()
				return nil, errors.New("it hangs")
			}
			began := time.Now()
			asked := e.askRouters(t.Context(), []diagnosis.AskedRouter{{Pod: &corev1.Pod{}}})
			if took := time.Since(began); took != want || asked[0].Unanswered != "it hangs" {
				t.Errorf("with --timeout=%s a router is waited for for %s, want %s: %+v", timeout, took, want, asked[0])
			}
		})
	}
}

// A program in a pod waits as long as coilctl does, less a second for its answer to come. Without a longer --timeout it waits as long as it does by itself.
func TestPatient(t *testing.T) {
	for within, want := range map[time.Duration][]string{4 * time.Second: {"/coild", "debug", "node"}, 24 * time.Second: {"/coild", "debug", "node", "--timeout=23s"}} {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		if got := patient(ctx, debugOf(coildProgram, []string{"node"})); !slices.Equal(got, want) {
			t.Errorf("within %s it runs %q, want %q", within, got, want)
		}
		cancel()
	}
	if got := patient(t.Context(), []string{"a"}); !slices.Equal(got, []string{"a"}) {
		t.Errorf("without a limit it runs %q", got)
	}
}
