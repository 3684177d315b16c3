package blocks

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/store"
)

// hanging is a record on a disk that doesn't answer until end is closed.
type hanging struct {
	Record
	reads atomic.Int32
	end   chan struct{}
}

func (h *hanging) Usage(context.Context) ([]store.Usage, error) {
	h.reads.Add(1)
	<-h.end
	return nil, nil
}

func TestScrapesDontWaitForTheDisk(t *testing.T) {
	h := &hanging{end: make(chan struct{})}
	g := prometheus.NewRegistry()
	c := newCollector(t.Context(), h, 10*time.Millisecond)
	g.MustRegister(c)
	for range 3 {
		if _, err := g.Gather(); err == nil {
			t.Error("a scrape of a record that can't be read has no error")
		}
	}
	if n := h.reads.Load(); n != 1 {
		t.Errorf("%d scrapes read the record at once", n)
	}
	close(h.end)
	c.reading <- struct{}{} // the reading has ended
	<-c.reading
	if _, err := newCollector(t.Context(), h, time.Minute).usage(); err != nil {
		t.Errorf("after the disk answers: %v", err)
	}
}
