// Package scale stretches every timeout of the lab and of the tests that use it by one factor,
// so that a slow machine or an emulated one needs no other change. It knows nothing of what the
// timeouts are for.
package scale

import (
	"context"
	"os"
	"strconv"
	"time"
)

// Env names the environment variable that holds the factor: a positive decimal number, 1 when
// it is unset or not a number.
const Env = "COIL_TEST_TIMEOUT_SCALE"

// Timeout returns d stretched by the factor.
func Timeout(d time.Duration) time.Duration {
	return time.Duration(float64(d) * factor(os.Getenv(Env)))
}

// WithTimeout is context.WithTimeout with d stretched by the factor.
func WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, Timeout(d))
}

func factor(s string) float64 {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f <= 0 {
		return 1
	}
	return f
}
