package build

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

const (
	progressInterval = 10 * time.Second
	keptMessages     = 40
)

// progress is the stderr of `go build -v`: it counts the package names, one per line, and keeps
// everything else as the compiler's messages.
type progress struct {
	w     io.Writer
	what  string
	start time.Time
	stop  chan struct{}
	done  chan struct{}

	mu       sync.Mutex // guards the fields below
	partial  []byte
	packages int
	fetched  int
	failing  bool // a "# package" line came: messages follow
	other    []string
}

// newProgress announces the build and reports every ten seconds until finish.
func newProgress(w io.Writer, what string) *progress {
	p := &progress{w: w, what: what, start: time.Now(), stop: make(chan struct{}), done: make(chan struct{})}
	fmt.Fprintf(w, "building %s (once; minutes on a slow machine)\n", what)
	go func() {
		defer close(p.done)
		t := time.NewTicker(progressInterval)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				p.mu.Lock()
				packages, fetched := p.packages, p.fetched
				p.mu.Unlock()
				fmt.Fprintf(w, "building %s: %d modules fetched, %d packages compiled, %s\n",
					what, fetched, packages, time.Since(p.start).Round(time.Second))
			case <-p.stop:
				return
			}
		}
	}()
	return p
}

// Write implements io.Writer.
func (p *progress) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.partial = append(p.partial, b...)
	for {
		line, rest, ok := bytes.Cut(p.partial, []byte("\n"))
		if !ok {
			return len(b), nil
		}
		p.line(string(line))
		p.partial = rest
	}
}

func (p *progress) line(s string) {
	switch {
	case strings.HasPrefix(s, "go: downloading "):
		p.fetched++
		return
	case strings.HasPrefix(s, "# "):
		p.failing = true
	case !p.failing && s != "" && !strings.ContainsAny(s, " \t:"):
		p.packages++
		return
	}
	if p.other = append(p.other, s); len(p.other) > keptMessages {
		p.other = p.other[1:]
	}
}

// finish ends the reports and waits for the reporter.
func (p *progress) finish(ok bool) {
	close(p.stop)
	<-p.done
	if ok {
		fmt.Fprintf(p.w, "built %s in %s\n", p.what, time.Since(p.start).Round(time.Second))
	}
}

// messages returns the last lines that were not package names.
func (p *progress) messages() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(append(p.other, string(p.partial)), "\n")
}
