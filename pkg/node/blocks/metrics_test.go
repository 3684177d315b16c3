package blocks

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

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
	synctest.Test(t, func(t *testing.T) {
		h := &hanging{end: make(chan struct{})}
		g := prometheus.NewRegistry()
		g.MustRegister(NewCollector(t.Context(), h))
		for range 3 {
			if _, err := g.Gather(); err == nil {
				t.Error("a scrape of a record that can't be read has no error")
			}
		}
		if n := h.reads.Load(); n != 1 {
			t.Errorf("%d scrapes read the record at once", n)
		}
		close(h.end)
		synctest.Wait() // the reading has ended
		if _, err := g.Gather(); err != nil {
			t.Errorf("after the disk answers: %v", err)
		}
	})
}
