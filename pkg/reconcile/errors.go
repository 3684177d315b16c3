package reconcile

import (
	"fmt"
	"time"
)

type laterError struct{ after time.Duration }

func (e *laterError) Error() string { return fmt.Sprintf("to be done again after %s", e.after) }

// Later ends a sync that went well but has to be done again after d.
func Later(d time.Duration) error { return &laterError{d} }
