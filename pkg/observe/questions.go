package observe

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// withinHeader is a header of a question. Its value is the time that an asker leaves for the answer to be found, such as "5s". Nobody is left more than mostWithin.
const (
	withinHeader = "Coil-Within"
	mostWithin   = 30 * time.Second
)

// Questions answers what people ask a program, some at once and each for a limited time. It is served at a socket, by ServeSocket.
type Questions struct {
	mux    *http.ServeMux
	turns  chan struct{}
	within time.Duration
}

// NewQuestions returns one that has no paths yet. atOnce questions are answered at a time; further ones have to be asked again. An answer has to be found within a time; an
// asker may leave more, see AskSocket.
func NewQuestions(atOnce int, within time.Duration) *Questions {
	return &Questions{mux: http.NewServeMux(), turns: make(chan struct{}, atOnce), within: within}
}

// Answer has a path answered with JSON. find says what was asked; its error is the asker's fault. What it returns finds the answer.
func (q *Questions) Answer(path string, find func(*http.Request) (func(context.Context) ([]byte, error), error)) {
	q.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		select {
		case q.turns <- struct{}{}:
			defer func() { <-q.turns }()
		default:
			http.Error(w, fmt.Sprintf("%d questions are being answered: ask again", cap(q.turns)), http.StatusServiceUnavailable)
			return
		}
		answer, err := find(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		within := q.within
		if d, err := time.ParseDuration(r.Header.Get(withinHeader)); err == nil && d > within {
			within = min(d, mostWithin)
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(within + writeTime)) // no error at a socket
		}
		ctx, cancel := context.WithTimeout(r.Context(), within)
		defer cancel()
		text, err := answer(ctx)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(text) // to somebody who may have gone
	})
}

// ServeHTTP implements http.Handler.
func (q *Questions) ServeHTTP(w http.ResponseWriter, r *http.Request) { q.mux.ServeHTTP(w, r) }
