package reconcile

import (
	"fmt"
	"time"
)

type laterError struct {
	after time.Duration
	err   error
}

func (e *laterError) Error() string {
	if e.err != nil {
		return e.err.Error()
	}
	return fmt.Sprintf("to be done again after %s", e.after)
}

func (e *laterError) Unwrap() error { return e.err }

// Later ends a sync that went well but has to be done again after d.
func Later(d time.Duration) error { return &laterError{after: d} }

// Retry ends a sync that failed with err, which may be nil, and has to be done again after d, however often it fails. It counts as an error, and the
// loop doesn't log it.
func Retry(err error, d time.Duration) error { return &laterError{d, err} }
