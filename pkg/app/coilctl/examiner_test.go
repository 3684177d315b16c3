package coilctl

import (
	"context"
	"errors"
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
