package inspection

import (
	"encoding/json"
	"fmt"
)

// write returns an answer as one line of JSON of at most limit bytes. shorten leaves something out of a longer one; it says false if there is nothing more to leave out.
func write(answer any, limit int, shorten func() bool) ([]byte, error) {
	for {
		text, err := json.Marshal(answer)
		if err != nil || len(text) < limit {
			return append(text, '\n'), err
		}
		if !shorten() {
			return nil, fmt.Errorf("an answer of %d bytes can't be made shorter than %d", len(text), limit)
		}
	}
}

// read reads an answer; what names it.
func read[T any](text []byte, what string) (*T, error) {
	var a T
	if err := json.Unmarshal(text, &a); err != nil {
		return nil, fmt.Errorf("understand %s: %w", what, err)
	}
	return &a, nil
}
