package debug

import (
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// The paths of questions about the whole record.
const (
	// PathRecord has what is written in the record, as an inspection.Database.
	PathRecord = "/record"
	// PathDB is a copy of the file.
	PathDB = "/db"
)

const (
	// readWithin is how long the whole record may be read.
	readWithin = 30 * time.Second
	// copyWithin is how long who gets a copy may take for all of it, and stalled for a part.
	copyWithin = 2 * time.Minute
	stalled    = 10 * time.Second
	// part is how much of a copy is written at once.
	part = 256 << 10
)

// handleRecord serves the questions about the whole record, one at a time: each reads all of it.
func (s *Server) handleRecord(mux *http.ServeMux) {
	turn := make(chan struct{}, 1)
	for path, h := range map[string]http.HandlerFunc{PathRecord: s.writeContents, PathDB: s.writeCopy} {
		mux.HandleFunc("GET "+path, alone(turn, "the record is read", h))
	}
}

// alone serves one at a time, of all that have the turn in common. Others are told what is done for somebody else.
func alone(turn chan struct{}, what string, h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case turn <- struct{}{}:
			defer func() { <-turn }()
			h(w, r)
		default:
			http.Error(w, what+" for somebody else: ask again", http.StatusServiceUnavailable)
		}
	}
}

// allow lets an answer take longer than others. A connection that has no deadline needs none.
func allow(w http.ResponseWriter, until time.Time) {
	_ = http.NewResponseController(w).SetWriteDeadline(until)
}

// writeContents answers with what is written in the record.
func (s *Server) writeContents(w http.ResponseWriter, r *http.Request) {
	allow(w, time.Now().Add(readWithin))
	d, err := s.Record.Contents(r.Context())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	d.Node = s.Node()
	text, err := d.Write(inspection.DatabaseLimit, func(state string) bool { return state == string(store.Cooling) })
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text) // to somebody who may have gone
}

// writeCopy answers with a copy of the file. One that is cut short misses bytes of the Content-Length.
func (s *Server) writeCopy(w http.ResponseWriter, r *http.Request) {
	end := time.Now().Add(copyWithin)
	allow(w, end)
	f, size, err := s.Copy(r.Context(), inspection.CopyLimit)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer f.Close()
	w.Header().Set("Content-Type", "application/vnd.sqlite3")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	for size > 0 {
		// Somebody who reads nothing keeps the room of the copy.
		allow(w, earlier(end, time.Now().Add(stalled)))
		n, err := io.CopyN(w, f, min(size, part))
		if size -= n; err != nil {
			return // the server closes the connection, since bytes are missing
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
