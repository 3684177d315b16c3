package observe

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// Questions answers what people ask a program, some at once and each for a limited time. It is served at a socket, by ServeSocket.
type Questions struct {
	mux    *http.ServeMux
	turns  chan struct{}
	within time.Duration
}

// NewQuestions returns one that has no paths yet. Others than so many at once have to ask again, and an answer has to be found within a time.
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
		ctx, cancel := context.WithTimeout(r.Context(), q.within)
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
